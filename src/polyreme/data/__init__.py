"""Training data: packs text into token sequences, and gives each rank its share of each global batch of any
dataset.

Invariant: the samples of a run depend on the data, the config and the seed, never on the number of ranks. No
communication: each rank reads for itself, ranks of one host share the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polyreme.data.best_fit import DocumentDataset
from polyreme.data.loader import Loader
from polyreme.data.pack import PackedDataset, pack_texts
from polyreme.data.text import Corpus, Document, Subset, documents, split, whole
from polyreme.data.tokenizer import load_tokenizer, open_tokenizer, tokenizer_folder, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Corpus",
    "Document",
    "DocumentDataset",
    "Loader",
    "PackedDataset",
    "TextData",
    "TextSection",
    "documents",
    "load_tokenizer",
    "open_text",
    "open_tokenizer",
    "pack_texts",
    "split",
    "tokenizer_folder",
    "train_tokenizer",
    "whole",
]


class TextSection(Protocol):
    """The keys of the config's section `data` that `open_text` reads."""

    @property
    def path(self) -> str | None: ...
    @property
    def pattern(self) -> Sequence[str]: ...
    @property
    def field(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def pack(self) -> bool: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def validation(self) -> float | str: ...
    @property
    def cache(self) -> str: ...


@dataclass(frozen=True)
class TextData:
    """A corpus ready to train on. The tokenizer is there at once; the texts are tokenised in the
    background."""

    tokenizer: PreTrainedTokenizerBase
    _train: Future[PackedDataset]
    _validation: Future[PackedDataset] | None

    @property
    def train(self) -> PackedDataset:
        """The training sequences. Waits until they are packed, and raises the error if that failed."""
        return self._train.result()

    @property
    def validation(self) -> PackedDataset | None:
        """The validation sequences, as `train`; None where `data.validation` is 0."""
        return self._validation.result() if self._validation else None


def open_text(section: TextSection, seed: int, model: str | None = None) -> TextData:
    """Read, split, tokenise and pack the corpus that `section` names, or find it packed in its cache.

    model: the directory whose tokenizer is used where the section names none.

    All ranks may call it at the same time. Texts are packed in the background: a good time to build the model
    is between this call and the first use of `.train`.

    Raises:
        DataError: no corpus, no tokenizer, or (from `.train` and `.validation`) a text shorter than one
        sequence.
    """
    corpus = documents(section.path or "", pattern=section.pattern, field=section.field)
    validation: Subset | None
    if section.validation == 0:
        train, validation = whole(corpus), None
    elif isinstance(section.validation, str):
        train = whole(corpus)
        key = "data.validation"
        validation = whole(
            documents(section.validation, pattern=section.pattern, field=section.field, key=key)
        )
    else:
        train, validation = split(corpus, section.validation, seed)
    cache = Path(section.cache).expanduser()
    folder = tokenizer_folder(section.tokenizer, model)
    tokenizer = open_tokenizer(train, folder=folder, vocab_size=section.vocab_size, cache=cache)

    def packed(subset: Subset, name: str) -> PackedDataset:
        kind = DocumentDataset if section.pack else PackedDataset
        return kind(pack_texts(subset, tokenizer, cache), section.sequence, name)

    pool = ThreadPoolExecutor(1, thread_name_prefix="polyreme-pack")
    text = TextData(
        tokenizer,
        pool.submit(packed, train, "training text"),
        pool.submit(packed, validation, "validation text") if validation else None,
    )
    pool.shutdown(wait=False)  # its thread ends when both are packed
    return text
