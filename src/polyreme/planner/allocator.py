"""The memory that torch's allocator takes of a GPU for tensors that come and go in a known order.

It rounds sizes, takes memory of the driver in segments, which it keeps, and cuts blocks out of them: small
tensors and large ones from different segments, each from the smallest free block that holds it.

Invariant: one stream, and no segment is given back, as in a step that does not run out of memory. Left out
are options of PYTORCH_ALLOC_CONF, the CUDA context, and what libraries take by themselves. No
communication."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from polyreme.layout.intervals import round_up

LEAST = 512
"""Bytes of which every block is a multiple."""
SMALL = 1 << 20
"""The most bytes of a tensor that lies in a segment for small ones, and of a rest that is not cut off a large
block."""
SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = 2 << 20, 20 << 20, 10 << 20
"""Bytes of a segment for small tensors, and for large ones; from the last on a tensor has its own, of a
multiple of the first."""


@dataclass(eq=False)
class _Piece:
    """A block of a segment, with its neighbours."""

    size: int
    place: int
    small: bool
    before: _Piece | None = None
    after: _Piece | None = None
    free: bool = True


@dataclass
class Allocator:
    """reserved: bytes of all segments."""

    reserved: int = 0
    _used: dict[Hashable, _Piece] = field(default_factory=dict)
    _free: dict[bool, list[tuple[int, int, _Piece]]] = field(default_factory=lambda: {True: [], False: []})

    def change(self, owner: Hashable, nbytes: int) -> None:
        """Give `owner` memory of so many bytes, in place of what it has."""
        before = self._used.pop(owner, None)
        if nbytes:
            self._used[owner] = self._take(nbytes)
        if before is not None:
            self._give(before)

    def _take(self, nbytes: int) -> _Piece:
        size = round_up(nbytes, LEAST)
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, size, key=lambda each: each[0])
        piece = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        rest = piece.size - size
        if rest >= LEAST if small else rest > SMALL:
            other = _Piece(rest, piece.place + size, small, piece, piece.after)
            if piece.after is not None:
                piece.after.before = other
            piece.size, piece.after = size, other
            insort(free, (other.size, other.place, other), key=lambda each: each[:2])
        piece.free = False
        return piece

    def _segment(self, size: int, small: bool) -> _Piece:
        if small:
            whole = SMALL_SEGMENT
        else:
            whole = LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, SMALL_SEGMENT)
        piece = _Piece(whole, self.reserved, small)
        self.reserved += whole
        return piece

    def _give(self, piece: _Piece) -> None:
        free, piece.free = self._free[piece.small], True
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                free.remove((other.size, other.place, other))
                first, second = (other, piece) if other is piece.before else (piece, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                piece = first
        insort(free, (piece.size, piece.place, piece), key=lambda each: each[:2])


def taken(changes: Iterable[tuple[Hashable, int]]) -> Allocator:
    """Return the allocator after changes to storages: the owner of each, and by how many bytes it grows, or
    shrinks."""
    found, sizes = Allocator(), dict[Hashable, int]()
    for owner, by in changes:
        sizes[owner] = sizes.get(owner, 0) + by
        found.change(owner, sizes[owner])
    return found
