"""Packs documents into token sequences without padding.

A subset of the corpus becomes one file of tokens: its documents end to end, each followed by the tokenizer's
end-of-document token. Sequence i is tokens [i * sequence, (i + 1) * sequence); the rest, shorter than one, is
not used. Invariant: the file depends only on the texts and the tokenizer, so every rank and every run has the
same sequences, and any sequence length reads the same file."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from polyreme.data.cache import cached
from polyreme.data.pieces import pieces
from polyreme.data.text import Subset
from polyreme.data.tokenizer import end_of_document, fingerprint
from polyreme.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BATCH = 1 << 22  # characters given to the tokenizer's threads at once: bounds the memory


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a packed token file, mapped into memory.

    `dataset[i]` is `{"input_ids": ..., "labels": ...}`, both int64 of shape (sequence,) and equal: causal
    language models of Hugging Face shift the labels themselves.

    Args:
        folder: the folder that `pack_texts` returned.
        sequence: tokens in a sequence.
        name: the name of this text in errors.

    Raises:
        DataError: a folder that is not complete, or fewer tokens than one sequence.
    """

    def __init__(self, folder: Path, sequence: int, name: str = "text") -> None:
        self.folder, self.sequence, self.name = folder, sequence, name
        try:
            header = json.loads((folder / "header.json").read_text("utf-8"))
            self.text_bytes, count = int(header["bytes"]), int(header["tokens"])
            self.tokens = np.memmap(
                folder / "tokens.bin", dtype=np.dtype(header["dtype"]), mode="r", shape=(count,)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the packed text {str(folder)!r} is damaged ({error}): delete this folder"
            ) from error
        if sequence < 1 or count < sequence:
            raise DataError(
                f"data.sequence = {sequence}: the {name} has {count} "
                f"tokens ({self.text_bytes} bytes), which is less "
                f"than one sequence. Use more text or a data.sequence from 1 to {count}"
                + (", or a larger data.validation" if name.startswith("validation") else "")
            )

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index % len(self) * self.sequence
        ids = torch.from_numpy(self.tokens[start : start + self.sequence].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def __reduce__(self) -> tuple[object, ...]:
        # a copied memory map would be the whole file
        return PackedDataset, (self.folder, self.sequence, self.name)

    @property
    def bytes_per_token(self) -> float:
        """The mean number of UTF-8 bytes of text per token; end-of-document tokens count as tokens without
        bytes.

        A loss in nats per token is `loss / math.log(2) / bytes_per_token` bits per byte, which compares
        across tokenizers."""
        return self.text_bytes / len(self.tokens)

    @property
    def bytes(self) -> int:
        """The UTF-8 bytes of text in the sequences, without those of the unused rest (in proportion to its
        tokens)."""
        return round(len(self) * self.sequence * self.bytes_per_token)


def pack_texts(subset: Subset, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Path:
    """Tokenise the documents of `subset` on the tokenizer's own threads. Returns the folder of the token
    file.

    The folder has `tokens.bin` (little-endian uint16, or uint32 for a vocabulary above 65,536), `ends.bin`
    (where each document ends in it, little-endian int64) and `header.json` (dtype, number of tokens, UTF-8
    bytes of the text). No text can make a special token:
    `<|endoftext|>` in it becomes several ordinary tokens.

    Raises:
        DataError: the cache cannot be written, or the tokenizer has no end-of-document token.
    """
    # a call sets options on it, while another thread may be using the original
    tokenizer = copy.deepcopy(tokenizer)
    end = end_of_document(tokenizer)
    dtype = np.dtype("<u2" if max(len(tokenizer), end + 1) <= 1 << 16 else "<u4")

    def build(unfinished: Path) -> None:
        tokens = text_bytes = 0
        ends = []
        with (unfinished / "tokens.bin").open("xb") as file:
            for batch in _batches(subset):
                texts = [piece for piece, _ in batch]
                text_bytes += sum(len(piece.encode()) for piece in texts)
                encoded = tokenizer(
                    texts,
                    add_special_tokens=False,
                    split_special_tokens=True,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )["input_ids"]
                for ids, (_, last) in zip(encoded, batch, strict=True):
                    file.write(np.asarray([*ids, end] if last else ids, dtype=dtype).tobytes())
                    tokens += len(ids) + last
                    ends += [tokens] * last
        np.array(ends, dtype="<i8").tofile(unfinished / "ends.bin")
        header = {"dtype": dtype.str, "tokens": tokens, "bytes": text_bytes}
        (unfinished / "header.json").write_text(json.dumps(header), "utf-8")
        log.info("packed %d bytes of text into %d tokens", text_bytes, tokens)

    key = blake2b(
        f"packed-2 {end} {fingerprint(tokenizer)} {subset.digest}".encode(), digest_size=10
    ).hexdigest()
    return cached(cache / f"packed-{key}", build)


def _batches(subset: Subset) -> Iterator[list[tuple[str, bool]]]:
    """Yield the text of all documents in batches to tokenise at once: pieces of documents, each with whether
    it is the last of its document."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for chunks in subset.in_chunks():
        for piece in pieces(chunks):
            batch.append(piece)
            size += len(piece[0])
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
