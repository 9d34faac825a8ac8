"""A heap gives out ranges that another process reads where they lie, and takes them back; a board's words
last beyond its ring."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyreme.distributed import shared_memory
from polyreme.distributed.shared_memory import NUMBERS, RING, SEGMENT, Board, Heap, PeerHeap, heap, open_peer
from polyreme.errors import TransportError

pytestmark = pytest.mark.skipif(
    heap() is None, reason="this system has no memory to share, or orders writes too weakly"
)


def opened(home: Heap) -> PeerHeap:
    found = PeerHeap.open(*home.address)
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_is_written_shows_at_the_peer() -> None:
    home = Heap()
    other = opened(home)
    # the second one spans two segments
    small, large = (home.empty(1000, torch.float64), home.empty(SEGMENT // 4 + 7, torch.float32))
    for tensor in (small, large):
        assert not tensor[:5].any() and not tensor[-5:].any()
        tensor[-3:] = torch.tensor([1, 2, 3], dtype=tensor.dtype)
        part = tensor[-4:-1]
        seen = torch.frombuffer(other.read(home.offset(part), part.nbytes), dtype=part.dtype)
        assert seen.tolist() == [0, 1, 2]
        part.fill_(5)
        assert seen.tolist() == [5, 5, 5]
    assert home.offset(torch.ones(3)) == -1 and home.empty(0, torch.int8).numel() == 0


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_closed_heap_stays_as_it_is_for_its_readers() -> None:
    home = Heap()
    other, tensor = opened(home), home.empty(1000, torch.float64).fill_(7)
    where, nbytes = home.offset(tensor), tensor.nbytes
    home.close()
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    seen = torch.frombuffer(other.read(where, nbytes), dtype=torch.float64)
    other.close()
    assert seen.eq(7).all()
    for use in (lambda: home.empty(1, torch.int8), lambda: other.read(where, nbytes)):
        with pytest.raises(TransportError, match="has closed the world"):
            use()


def test_a_forked_child_gives_nothing_of_its_parents_back() -> None:
    home = Heap()
    tensor, board = home.empty(1000, torch.float64).fill_(7), Board(home, "dp", 0, 2, 1.0)
    other = Board(home, "dp", 1, 2, 1.0)
    other.connect(0, opened(home), board.offset)
    if (child := os.fork()) == 0:
        del tensor, board
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(7).all() and not other.is_posted(0, 0, 0)
    del board
    with pytest.raises(TransportError, match="has no engine any more"):
        other.is_posted(0, 0, 0)


def test_freed_ranges_go_back_and_are_used_again() -> None:
    home = Heap()
    blocks = os.fstat(home._file).st_blocks
    tensor = home.empty(1 << 20, torch.uint8).fill_(7)
    offset, view = home.offset(tensor), tensor[5:]
    del tensor
    gc.collect()
    # a view holds it
    assert home.offset(view) == offset + 5 and os.fstat(home._file).st_blocks >= blocks + (1 << 20) // 512
    del view
    gc.collect()
    assert os.fstat(home._file).st_blocks <= blocks + 16
    again = home.empty(1 << 18, torch.float32)
    assert home.offset(again) == offset and not again.any()


def test_a_heap_is_told_from_anything_else() -> None:
    home, impostor = Heap(), Heap()
    pid, file, token = home.address
    assert PeerHeap.open(pid, impostor.address[1], token) is None
    assert PeerHeap.open(pid, 10**6, token) is None
    assert PeerHeap.open(2**22 + 1, file, token) is None
    reader, writer = os.pipe()
    try:
        assert PeerHeap.open(pid, reader, token) is None  # and it does not wait for a writer
    finally:
        os.close(reader)
        os.close(writer)
    assert open_peer(pid, file, token) is open_peer(pid, file, token)


def boards() -> tuple[Board, Board]:
    homes = Heap(), Heap()
    made = [Board(home, "dp", rank, 2, 0.3) for rank, home in enumerate(homes)]
    for rank in (0, 1):
        made[rank].connect(1 - rank, opened(homes[1 - rank]), made[1 - rank].offset)
    return made[0], made[1]


def test_notices_and_acknowledgements() -> None:
    ours, theirs = boards()
    buffer = ours.heap.empty(10, torch.float32).fill_(4)
    for exchange in range(3 * RING):
        ours.post(1, exchange, buffer)
        assert theirs.await_post(0, exchange, 10, torch.float32).tolist() == [4.0] * 10
        was_read = ours.reading(exchange)
        assert not was_read()
        theirs.acknowledge(0, exchange)
        assert was_read()
        ours.await_read(1, max(exchange - RING // 2, 0))  # earlier ones stay read


def test_waiting_ends_with_an_error() -> None:
    ours, theirs = boards()
    with pytest.raises(TransportError, match=r"rank 1 of axis dp did not come within 0\.3 s"):
        ours.await_post(1, 0, 1, torch.float32)
    os.close(theirs.heap._file)  # as the end of its process would
    with pytest.raises(TransportError, match="rank 1 of axis dp ended"):
        ours.await_post(1, 0, 1, torch.float32)


def test_nobody_waits_for_a_board_that_is_gone() -> None:
    ours, theirs = boards()
    place, was_read = theirs.offset, ours.reading(0)
    ours.post(1, 0, ours.heap.empty(10, torch.float32))
    home = theirs.heap
    del theirs
    gc.collect()
    assert was_read()
    ours.await_read(1, 0)
    with pytest.raises(TransportError, match="rank 1 of axis dp has no engine any more"):
        ours.await_post(1, 0, 1, torch.float32)
    assert Board(home, "dp", 1, 2, 0.3).offset != place


@given(st.integers(0, 10 * NUMBERS), st.integers(0, 1 << 43), st.integers(-RING, RING))
def test_words(exchange: int, offset: int, later: int) -> None:
    word = shared_memory._word(exchange, offset)
    assert 0 < word < 1 << 63 and not shared_memory._is_about(0, exchange)
    if exchange + later >= 0:
        assert shared_memory._is_about(word, exchange + later) == (later <= 0)


@pytest.mark.parametrize(
    ("limit", "room", "option"),
    [("RLIMIT_FSIZE", 1 << 20, "f"), ("RLIMIT_AS", 1 << 20, "v"), ("RLIMIT_NOFILE", 0, "n")],
)
def test_a_limit_of_the_process_is_named(limit: str, room: int, option: str) -> None:
    home, kind = Heap(), getattr(resource, limit)
    taken = {"RLIMIT_AS": resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])}.get(
        limit, 0
    )
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (taken + room, before[1]))
    try:
        with pytest.raises(TransportError) as refused:
            home.empty(SEGMENT, torch.uint8) if room else Heap()
    finally:
        resource.setrlimit(kind, before)
    assert f"`ulimit -{option}` of {taken + room:,} is too low" in str(
        refused.value
    ) and "mesh.shared_memory" in str(refused.value)
    assert not home.empty(SEGMENT, torch.uint8)[-1:].any()  # what failed took nothing
