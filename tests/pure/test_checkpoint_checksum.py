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


@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.binary(max_size=9),
    st.binary(max_size=9),
    st.randoms(),
)
def test_columns_of_a_table_in_a_file(
    rows: int, widths: list[int], head: bytes, tail: bytes, source: random.Random
) -> None:
    """As tensor parallelism cuts a matrix along its last dimension: each rank has a run of every row."""
    stride = sum(widths)
    table = source.randbytes(rows * stride)
    data = head + table + tail
    found = [checksum.contribution(tail, 0), checksum.contribution(head, len(data) - len(head))]
    at = 0
    for width in widths:
        runs = b"".join(table[row * stride + at : row * stride + at + width] for row in range(rows))
        behind = stride - at - width + len(tail)
        found.append(checksum.strided(runs, width, stride - width, behind))
        middle = source.randrange(rows + 1)  # the same in two pieces
        pieces = [
            checksum.strided(
                runs[: middle * width], width, stride - width, behind + (rows - middle) * stride
            ),
            checksum.strided(memoryview(runs)[middle * width :], width, stride - width, behind),
        ]
        assert found[-1] == pieces[0] ^ pieces[1]
        at += width
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
