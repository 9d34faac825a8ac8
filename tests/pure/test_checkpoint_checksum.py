"""The checksum of a file from contributions of its parts is zlib's of the whole."""

from __future__ import annotations

import random
from itertools import pairwise
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from polyreme.checkpoint import checksum

STATES = st.integers(0, 2**32 - 1)


@given(st.binary(max_size=300), st.sets(st.integers(0, 300)), st.randoms(use_true_random=False))
def test_any_partition_in_any_order(data: bytes, cuts: set[int], order: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = list(pairwise(edges))
    order.shuffle(parts)
    found = [checksum.contribution(data[a:b], len(data) - b) for a, b in parts]
    assert checksum.total(len(data), found) == crc32(data)


@given(STATES, st.integers(0, 2**50), st.integers(0, 2**50))
def test_shifts_add_up(state: int, a: int, b: int) -> None:
    assert checksum.shift(checksum.shift(state, a), b) == checksum.shift(state, a + b)


@given(st.binary(max_size=50), st.integers(0, 3000))
def test_zeros_need_not_be_made(data: bytes, nbytes: int) -> None:
    assert checksum.zeros(nbytes) == crc32(bytes(nbytes))
    assert checksum.shift(checksum.linear(data), nbytes) == checksum.linear(data + bytes(nbytes))
    assert checksum.linear(bytes(nbytes)) == 0


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_states_are_carried_on(first: bytes, second: bytes) -> None:
    assert checksum.linear(second, checksum.linear(first)) == checksum.linear(first + second)
