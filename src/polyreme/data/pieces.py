"""Cuts long texts into pieces and slices, with only one chunk in memory at a time.

Invariant: the pieces of a text, joined, are the text, however it is cut into chunks; a piece ends where no
tokenizer of words would join the characters before and after, unless there is no such place for LONGEST
characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PIECE = 1 << 18
"""Characters of a piece: few enough that one big text uses all threads of a tokenizer."""
LONGEST = 1 << 20
"""The most characters more that a piece has where there is no place to cut it."""
# One space between two words. Byte-level BPEs never merge across it, so cutting there does not change the
# tokens.
BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")
# One line break between two words, which can be the end of a word before it.
BETWEEN_LINES = re.compile(r"(?<=\S)\n(?=\S)")


def pieces(
    chunks: Iterable[str], size: int | None = None, longest: int | None = None
) -> Iterator[tuple[str, bool]]:
    """Cut a text, given in chunks, into pieces of about `size` characters (default PIECE), at most `longest`
    (LONGEST) more: between words, else between lines, else anywhere. Yields each with whether it is the
    last."""
    size, longest = size or PIECE, longest or LONGEST
    held, start = "", 0
    for chunk in chunks:
        held, start = held[start:] + chunk, 0
        while (end := _place(held, start + size, longest)) is not None:
            yield held[start:end], False
            start = end
    yield held[start:], True


def _place(held: str, at: int, longest: int) -> int | None:
    """The place to cut, at `at` or after it; None where more text is needed to tell."""
    if found := BETWEEN_WORDS.search(held, at, at + longest + 1):
        return found.start()
    if len(held) <= at + longest:
        return None
    found = BETWEEN_LINES.search(held, at, at + longest + 1)
    return found.end() if found else at + longest


@dataclass(frozen=True)
class Slice:
    """The characters [start, stop) of a text in chunks, read again by each iteration."""

    chunks: Iterable[str]
    start: int
    stop: int

    def __iter__(self) -> Iterator[str]:
        at = 0
        for chunk in self.chunks:
            if at >= self.stop:
                return
            if inside := chunk[max(0, self.start - at) : self.stop - at]:
                yield inside
            at += len(chunk)


def length(chunks: Iterable[str]) -> int:
    """Return the number of characters of a text in chunks, without white space at its end."""
    at = found = 0
    for chunk in chunks:
        if stripped := chunk.rstrip():
            found = at + len(stripped)
        at += len(chunk)
    return found


def last_space(chunks: Iterable[str]) -> int:
    """Return the index of the last white space of a text in chunks; 0 where there is none."""
    at = found = 0
    for chunk in chunks:
        if chunk[-1:].isspace():
            found = at + len(chunk) - 1
        elif (before := len(chunk) - len(chunk.rsplit(None, 1)[-1])) > 0:
            found = at + before - 1
        at += len(chunk)
    return found
