"""Packs whole documents into sequences by best fit, the longest first (arXiv:2404.10830).

A document that is longer than a sequence is cut into sequences and a rest; no other is cut. What is left of a
sequence is padding. Invariants: each token lies in one sequence; what is packed depends only on the lengths;
first fit, of documents as they come or the longest first, takes no fewer sequences. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from polyreme.data.cache import cached
from polyreme.data.pack import PackedDataset
from polyreme.errors import DataError
from polyreme.layout.intervals import round_up

IGNORED = -100
"""The label that a loss leaves out."""


class DocumentDataset(PackedDataset):
    """Sequences of whole documents of a packed token file.

    `dataset[i]` is `{"input_ids": ..., "labels": ..., "position_ids": ...}`, int64 of shape (sequence,).
    Positions begin anew at 0 with each document, and with the padding after the last. The first label of each
    document, which no token of its own predicts, is ignored, and so are those of padding.

    Args:
        folder: the folder that `pack_texts` returned.
        sequence: tokens in a sequence.
        name: the name of this text in errors.

    Raises:
        DataError: a folder that is not complete, or fewer tokens than one sequence.
    """

    def __init__(self, folder: Path, sequence: int, name: str = "text") -> None:
        super().__init__(folder, sequence, name)
        fitted = folder.with_name(f"fitted-{sequence}-{folder.name.removeprefix('packed-')}")
        cached(fitted, lambda unfinished: _write(unfinished, self._ends(), sequence))
        try:
            self._pieces, self._first = (
                np.load(fitted / f"{name}.npy", mmap_mode="r") for name in ("pieces", "first")
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"the packed text {str(fitted)!r} is damaged ({error}): delete this folder"
            ) from error

    def _ends(self) -> np.ndarray:
        return np.fromfile(self.folder / "ends.bin", dtype="<i8")

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        at = index % len(self)
        ids = np.full(self.sequence, self.tokens[-1], dtype=np.int64)  # padding by the end-of-document token
        labels = np.full(self.sequence, IGNORED, dtype=np.int64)
        positions, filled = np.empty(self.sequence, dtype=np.int64), 0
        for start, stop in self._pieces[self._first[at] : self._first[at + 1]]:
            here = slice(filled, filled := filled + int(stop - start))
            ids[here] = labels[here] = self.tokens[start:stop]
            labels[here.start] = IGNORED
            positions[here] = np.arange(stop - start)
        positions[filled:] = np.arange(self.sequence - filled)
        values = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(value) for name, value in values.items()}

    def __reduce__(self) -> tuple[object, ...]:
        return DocumentDataset, (self.folder, self.sequence, self.name)

    @property
    def bytes(self) -> int:
        """The UTF-8 bytes of text in the sequences: all."""
        return self.text_bytes


def _write(folder: Path, ends: np.ndarray, sequence: int) -> None:
    """Write the pieces of documents, (start, stop) in the token file, by sequence, and the first piece of
    each."""
    pieces = [
        (begin, min(begin + sequence, end))
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
        for begin in range(start, end, sequence)
    ]
    packed = pack([stop - start for start, stop in pieces], sequence)
    np.save(folder / "pieces.npy", np.array([pieces[i] for each in packed for i in each], dtype=np.int64))
    np.save(folder / "first.npy", np.cumsum([0, *map(len, packed)], dtype=np.int64))


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the items of each sequence of `room` tokens, by their lengths, of which none is longer. Items
    are in order, and sequences in that of their first."""
    longest_first = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    found = best_fit(lengths, longest_first, room)
    if len(found) > round_up(sum(lengths), room) // room:  # else none takes fewer
        others = (first_fit(lengths, order, room) for order in (longest_first, range(len(lengths))))
        found = min(found, *others, key=len)
    return sorted(sorted(each) for each in found)


def best_fit(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Put each item, in this order, where it leaves the least room."""
    packed: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # sequences, by how much is left of them
    rooms = 0  # bit n: some sequence has n tokens left
    for item in order:
        length = lengths[item]
        if fitting := rooms >> length:
            left = length + (fitting & -fitting).bit_length() - 1
            at = with_room[left].pop()
            rooms ^= (not with_room[left]) << left
        else:
            left, at = room, len(packed)
            packed.append([])
        packed[at].append(item)
        with_room[left - length].append(at)
        rooms |= 1 << left - length
    return packed


def first_fit(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Put each item, in this order, into the first sequence that has room for it."""
    packed: list[list[int]] = [[] for _ in lengths]
    leaves = 1 << (len(lengths) - 1).bit_length()
    left = [room] * (2 * leaves)  # of each sequence, and above, in a tree, of the emptiest of two
    for item in order:
        at = 1
        while at < leaves:
            at = 2 * at + (left[2 * at] < lengths[item])
        packed[at - leaves].append(item)
        left[at] -= lengths[item]
        while at > 1:
            at //= 2
            left[at] = max(left[2 * at], left[2 * at + 1])
    return [each for each in packed if each]
