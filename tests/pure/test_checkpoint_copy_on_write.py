"""Memory is read until its owner wants it back, and then copied at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polyreme.checkpoint import copy_on_write
from polyreme.checkpoint.copy_on_write import BLOCK, BackgroundAccess, Job, JobQueue
from polyreme.files.direct_io import ALIGNMENT, aligned

ROOM = 40 * BLOCK


class Written:
    """Jobs that write what `memory` has to a list, one number each; the events say when they may."""

    def __init__(self, count: int, pack: threading.Event, put: threading.Event) -> None:
        self.memory = torch.arange(count, dtype=torch.uint8)
        self.places: set[int] = set()  # of the memory that was packed into
        self.found: list[int] = []
        self.jobs = [
            Job(
                ALIGNMENT,
                self._pack(i, pack),
                lambda packed: (put.wait(30), self.found.append(int(packed)))[1],
            )
            for i in range(count)
        ]

    def _pack(self, i: int, event: threading.Event) -> Callable[[Tensor], Tensor]:
        def pack(memory: Tensor) -> Tensor:
            event.wait(30)
            self.places.add(memory.data_ptr())
            return memory[:1].copy_(self.memory[i])

        return pack


def at_once() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_nothing_is_copied_that_is_not_wanted() -> None:
    written, access = Written(20, at_once(), at_once()), BackgroundAccess()
    JobQueue(written.jobs, access, None, 3, ROOM).perform(2, 2)
    assert sorted(written.found) == list(range(20)) and len(written.places) <= 3
    access.take_back()  # it was given back


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_all_is_copied_that_is_wanted(count: int) -> None:
    put = threading.Event()
    written, access = Written(count, at_once(), put), BackgroundAccess()
    thread = threading.Thread(target=JobQueue(written.jobs, access, None, 3, ROOM).perform, args=(2, 2))
    thread.start()
    access.take_back()
    assert not written.found
    written.memory.fill_(99)
    put.set()
    thread.join()
    assert sorted(written.found) == list(range(count))


def test_it_comes_back_when_all_was_read() -> None:
    pack = threading.Event()
    written, access = Written(5, pack, at_once()), BackgroundAccess()
    thread = threading.Thread(target=JobQueue(written.jobs, access, None, 3, ROOM).perform, args=(2, 2))
    owner = threading.Thread(target=access.take_back)
    thread.start()
    owner.start()
    owner.join(0.05)
    assert owner.is_alive()
    pack.set()
    owner.join()
    thread.join()
    assert sorted(written.found) == list(range(5))


@pytest.mark.parametrize("room", [0, 4])
def test_no_more_is_copied_than_there_is_room_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner waits until the rest is written."""
    put, blocks = threading.Event(), []
    monkeypatch.setattr(copy_on_write, "aligned", lambda nbytes: blocks.append(nbytes) or aligned(nbytes))
    written, access = Written(40, at_once(), put), BackgroundAccess()
    queue = JobQueue(written.jobs, access, None, 3, room * BLOCK)
    thread = threading.Thread(target=queue.perform, args=(2, 2))
    owner = threading.Thread(target=access.take_back)
    thread.start()
    owner.start()
    owner.join(0.2)
    assert owner.is_alive(), "there is no room for the rest"
    put.set()
    owner.join()
    written.memory.fill_(99)
    thread.join()
    assert sorted(written.found) == list(range(40))
    assert len(written.places) <= 3 + room
    assert sum(blocks) <= (3 + room) * BLOCK


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("where", ["pack", "put", "beside"])
def test_an_error_is_told_and_the_memory_comes_back(where: str, wanted: bool) -> None:
    written, access = Written(20, at_once(), at_once()), BackgroundAccess()

    def fail(*_: Tensor) -> Tensor:
        raise OSError("no")

    if where != "beside":
        written.jobs[17] = written.jobs[17]._replace(**{where: fail})
    if wanted:
        threading.Thread(target=access.take_back).start()
    with pytest.raises(OSError, match="no"):
        JobQueue(written.jobs, access, None, 3, ROOM).perform(2, 2, fail if where == "beside" else None)  # type: ignore[arg-type]
    access.take_back()
