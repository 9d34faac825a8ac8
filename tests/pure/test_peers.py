"""What launchers say of each other, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from polyreme.launch import peers
from polyreme.launch.peers import Peers

Made = Callable[[int], list[Peers]]


@pytest.fixture
def made() -> Iterator[Made]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield lambda count: [Peers(store, place, count, f"n{place + 1}", silence=1.0) for place in range(count)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HEARTBEAT", 0.1)


def test_a_launcher_that_is_silent_is_named(made: Made) -> None:
    first, second, third = made(3)
    second.close()
    for each in (first, third):
        word = each.failure(30)
        assert word is not None and word.place == 1 and word.status == 1
        assert word.text.startswith("host 1 of 3, n2, has said nothing for 1 s: its launcher hangs")
        each.close()


def test_nobody_lingers_for_a_host_that_is_lost(made: Made) -> None:
    first, second = made(2)
    second.close()
    assert first.failure(30) is not None
    began = time.monotonic()
    assert first.leave(60) is not None and first.left
    second, third = made(3)[1:]
    second._lose("hangs")
    second.fail("a rank has failed")
    assert second.leave(60) is not None and time.monotonic() - began < 30
    for each in (first, second, third):
        each.close()


def test_the_first_word_stands_and_becomes_what_the_same_host_says_last(made: Made) -> None:
    first, second, third = made(3)
    third.fail("a rank has failed")
    second.fail("lost the third")
    third.fail("rank 5 failed first", 7)
    told = [each.failure(30) for each in (third, first, second)]
    assert all(each is not None and each.place == 2 for each in told)
    leaving = [each.leave(0.1) for each in (third, second)]  # each waits for the first one
    assert all(each is not None and each.place == 2 for each in leaving)
    word = first.leave(30)
    assert third.elsewhere() is None and second.elsewhere() == word == first.elsewhere()
    assert word is not None and (word.text, word.status) == ("n3: rank 5 failed first", 7)


def test_launchers_leave_together(made: Made) -> None:
    first, second, third = made(3)
    for each in (first, second):
        each.leave(0.2)
        assert not each.left
    assert third.leave(30) is None and first.leave(30) is None
    assert first.left and third.left
