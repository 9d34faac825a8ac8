"""Tokenizers: trained on the training text, or loaded from a directory.

Invariants: the same texts and size give the same tokenizer; a trained tokenizer loses nothing,
`decode(encode(text)) == text` for every text; no code that comes with a tokenizer is run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from polyreme.data.cache import cached
from polyreme.data.pieces import pieces
from polyreme.data.text import Subset, optional
from polyreme.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

END = "<|endoftext|>"
BYTES = 256
LONGEST_WORD = 1024
"""The most bytes in a word of the trained tokenizer; longer words are split. Encoding takes time that grows
with the square of a word's length."""
SAMPLE = 1 << 25
"""About the most characters that a tokenizer is trained on, spread evenly over longer texts."""
PIECE = 1 << 16  # characters of a piece for the trainer, which holds some hundred pieces at once


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like GPT-2's (Radford et al. 2019): every byte is a token, so none is ever
    unknown.

    `<|endoftext|>` (id 0) is its only special token, for the start and end of a document and for padding.
    Words of more than LONGEST_WORD bytes are split, in training and in encoding.

    Args:
        vocab_size: number of tokens, with the 256 bytes and the special one; a small corpus can give fewer.

    Raises:
        DataError: `vocab_size` below 257.
    """
    if vocab_size <= BYTES:
        raise DataError(
            f"data.vocab_size = {vocab_size}: a byte-level "
            f"vocabulary has {BYTES} bytes and a special token, so it "
            f"needs at least {BYTES + 1}"
        )
    tokenizers, transformers = optional("tokenizers"), optional("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    long_words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f".{{{LONGEST_WORD}}}"), "isolated")
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([byte_level, long_words])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def tokenizer_folder(chosen: str | None, model: str | None) -> str | None:
    """Return the folder of the tokenizer: `chosen`, else the directory of the `model`; None where one is to
    be trained.

    Raises:
        DataError: the directory of a model has no tokenizer, and none was chosen.
    """
    if chosen is not None or model is None:
        return chosen
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((Path(model) / name).is_file() for name in files):
        raise DataError(
            f"model.path = {model!r} has no tokenizer in it, and its "
            "weights know no other's tokens: set data.tokenizer to the "
            "directory of the one that the model was made with"
        )
    return model


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory that `save_pretrained` wrote; nothing is downloaded.

    Raises:
        DataError: no such directory, no tokenizer in it, or one without a token that ends a document.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(
            f"data.tokenizer = {str(folder)!r}: no such directory. Correct it, or remove it to train one"
        )
    load = optional("transformers").AutoTokenizer.from_pretrained
    try:
        tokenizer: PreTrainedTokenizerBase = load(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each family's loader raises types of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{str(folder)!r}: no tokenizer can be loaded from it: "
            f"{reason:.300}. Set data.tokenizer to the directory of another one"
        ) from error
    end_of_document(tokenizer)
    return tokenizer


def open_tokenizer(
    subset: Subset, *, folder: str | None, vocab_size: int, cache: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`; without a folder, the one trained on `subset`, from the cache if it was
    trained before."""
    if folder is not None:
        return load_tokenizer(folder)

    def build(unfinished: Path) -> None:
        log.info("training a tokenizer of %d tokens", vocab_size)
        train_tokenizer(_sample(subset), vocab_size).save_pretrained(str(unfinished))

    key = blake2b(f"byte-level-bpe-2 {vocab_size} {subset.digest}".encode(), digest_size=10).hexdigest()
    return load_tokenizer(cached(cache / f"tokenizer-{key}", build))


def _sample(subset: Subset) -> Iterator[str]:
    """Yield the texts in pieces; if they have more than SAMPLE characters, only every n-th piece."""
    total = sum(len(chunk) for chunks in subset.in_chunks() for chunk in chunks)
    found = (piece for chunks in subset.in_chunks() for piece, _ in pieces(chunks, PIECE, PIECE))
    return islice(found, 0, None, max(1, ceil(total / SAMPLE)))


def end_of_document(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that ends a document: the tokenizer's `eos`, or its `sep` (BERT's family).
    Raises DataError where it has neither."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if isinstance(token, int):
            return token
    raise DataError(
        f"the tokenizer {tokenizer.name_or_path!r} has neither "
        "an eos nor a sep token to put between documents: "
        "add one with tokenizer.add_special_tokens({'eos_token': ...}) and save it again"
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokenizer: of its whole backend, or of all files that a slow one saves."""
    digest = blake2b(digest_size=16)
    if tokenizer.is_fast:  # without a temporary folder, which a killed rank would leave behind
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
        return digest.hexdigest()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
