"""Memory by size, each piece free after an event."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from polyreme.files.memory_pool import MemoryPool

LONG = 30
"""Seconds after which something hangs."""


class Made:
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def __call__(self, size: int, dtype: torch.dtype) -> Tensor:
        self.pieces.append(torch.zeros(size, dtype=dtype))
        return self.pieces[-1]


def test_a_piece_is_used_again_with_its_event_by_size_and_dtype() -> None:
    pool, made, event = MemoryPool(), Made(), object()
    first, at = pool.lend(8, torch.float32, made)
    assert first.shape == (8,) and first.dtype == torch.float32 and at is None and pool.waiting == 0
    pool.give(first, event)
    assert pool.waiting == 32
    others = [pool.lend(8, torch.int32, made), pool.lend(4, torch.float32, made), pool.lend(32, new=made)]
    assert [(each is first, at) for each, at in others] == [(False, None)] * 3
    again, at = pool.lend(8, torch.float32, made)
    assert again is first and at is event and pool.waiting == 0


def test_the_oldest_comes_first_and_no_more_are_kept_than_asked_for() -> None:
    pool = MemoryPool(keep=2)
    for event in range(3):
        pool.give(torch.zeros(4), event)
    assert pool.waiting == 2 * 16
    assert [pool.lend(4, torch.float32, Made())[1] for _ in range(3)] == [0, 1, None]
    nothing = MemoryPool(keep=0)
    nothing.give(torch.zeros(4))
    assert nothing.waiting == 0


def test_other_sizes_are_dropped_with_their_events() -> None:
    pool = MemoryPool()
    for size in (4, 8, 8, 16):
        pool.give(torch.zeros(size), size)
    assert [(piece.numel(), event) for piece, event in pool.drop(but={4, 16})] == [(8, 8), (8, 8)]
    assert pool.waiting == (4 + 16) * 4 and pool.drop(but={4, 16}) == []


def test_where_none_is_made_one_waits_for_its_size() -> None:
    pool, event, memory = MemoryPool(), object(), torch.arange(8, dtype=torch.uint8)
    pool.add(memory, 4)
    pieces = [pool.lend(4) for _ in range(2)]
    assert [(piece.tolist(), at) for piece, at in pieces] == [([0, 1, 2, 3], None), ([4, 5, 6, 7], None)]
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(pool.lend, 4)
        pool.give(memory)  # of another size
        assert not taking.done()
        pool.give(pieces[1][0], event)
        assert taking.result(LONG) == (pieces[1][0], event)
    pool.add(memory[:0], 4)
    assert pool.waiting == 8


def test_a_user_is_called_as_soon_as_one_is_free_and_in_order() -> None:
    pool = MemoryPool()
    found: list[tuple[str, Tensor, Any]] = []
    for name in ("first", "second"):
        pool.when_free(lambda *piece, name=name: found.append((name, *piece)), 4)
    assert not found, "none is made for them"
    pieces = [torch.zeros(4, dtype=torch.uint8) for _ in range(3)]
    pool.give(torch.zeros(8, dtype=torch.uint8))
    for i, piece in enumerate(pieces):
        pool.give(piece, i)
    assert found == [("first", pieces[0], 0), ("second", pieces[1], 1)]
    pool.when_free(lambda *piece: found.append(("third", *piece)), 4)
    assert found[2:] == [("third", pieces[2], 2)]


def test_a_user_that_is_called_may_use_the_pool() -> None:
    pool, found = MemoryPool(), []
    pool.when_free(lambda memory, event: pool.give(memory, "again"), 4)
    pool.when_free(lambda memory, event: found.append(event), 4)
    pool.give(torch.zeros(4, dtype=torch.uint8))
    assert found == ["again"]


def test_threads_never_have_one_piece_at_once() -> None:
    pool, lock, lent = MemoryPool(), threading.Lock(), Counter[int]()
    pool.add(torch.zeros(3 * 4, dtype=torch.uint8), 4)

    def use(seed: int) -> None:
        for _ in range(random.Random(seed).randrange(100, 200)):
            memory, _ = pool.lend(4)
            with lock:
                lent[memory.data_ptr()] += 1
                assert lent[memory.data_ptr()] == 1
            with lock:
                lent[memory.data_ptr()] -= 1
            pool.give(memory)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(use, seed) for seed in range(8)]:
            done.result(LONG)
    assert len(lent) == 3 and pool.waiting == 3 * 4
