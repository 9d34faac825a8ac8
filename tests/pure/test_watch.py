"""What ranks say of a wait that failed, of what others reported in the store."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch.distributed as dist

from polyreme.distributed import watch
from polyreme.distributed.watch import MessageError, Watch
from polyreme.errors import TransportError


class Ranks:
    """The others of a group of four, in the place of a WatchedGroup; this rank is 0."""

    key, ranks, broken = "key", (0, 1, 2, 3), ""

    def others(self) -> list[int]:
        return [1, 2, 3]


@pytest.fixture
def known() -> Watch:
    """That rank 2 waits in operation 7, and nothing of others."""
    found = Watch()
    found._store = dist.HashStore()
    for rank in range(4):
        found._store.set(f"host/{rank}", f"n{rank // 2}")
    begun = '{"key": [[7, "all-gather", ""]]}'
    found._store.set("at/2", f'{{"call": "", "waits": [], "begun": {begun}, "report": 1}}')
    return found


def test_ranks_that_did_not_come_are_named_with_their_hosts(known: Watch) -> None:
    group: Any = Ranks()
    said = known.why(group, 7, RuntimeError("timed out"))
    assert said == "rank 1 on n0 and rank 3 on n1 did not come to it, ended or cannot be reached (timed out)"
    assert "ranks 2, 3 on n1" not in said


def test_without_a_store_a_backends_error_is_that_of_another_rank(known: Watch) -> None:
    group: Any = Ranks()
    known._store = None
    for each in (group, None):
        said = known.why(each, 7, RuntimeError("closed"))
        assert said == "another rank ended or cannot be reached: closed"
        assert known.why(each, 7, TransportError("rank 1 of axis dp ended")) == "rank 1 of axis dp ended"


def test_nobody_is_named_before_others_can_have_reported(known: Watch) -> None:
    group: Any = Ranks()
    known._lasted = 0.1
    assert known.why(group, 8, RuntimeError("closed")) == "another rank ended or cannot be reached (closed)"
    known._lasted = 2 * known.patience
    assert known.why(group, 8, RuntimeError("closed")).startswith(
        "rank 1 on n0 and ranks 2, 3 on n1 did not come"
    )


def test_whose_connection_broke_is_named_at_once(known: Watch) -> None:
    group: Any = Ranks()
    broke = MessageError(3, RuntimeError("closed by peer"))
    known._lasted = 0.1
    named = "rank 3 on n1 did not come to it, ended or cannot be reached (closed by peer)"
    assert known.why(group, 8, broke) == named
    known._lasted = 2 * known.patience  # the others are late, too, and nothing else
    assert known.why(group, 8, broke) == named
    known._lasted = known.deadline = 20  # at which connections are closed, whoever is late
    assert known.why(group, 7, broke).startswith("rank 1 on n0 and rank 3 on n1 did not")


def test_whose_connection_broke_is_named_without_a_store(known: Watch) -> None:
    group: Any = Ranks()
    known._store = None
    broke = MessageError(0, RuntimeError("closed by peer"))
    assert known.why(group, 8, broke) == "rank 0 ended or cannot be reached: closed by peer"
    known.hosts = ["a", "b", "c", "d"]
    assert known.why(group, 8, broke) == "rank 0 on a ended or cannot be reached: closed by peer"


def test_who_ends_after_a_failure_tells_of_it(known: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script has caught the error."""
    group: Any = Ranks()
    known._world = world = object()
    fake = types.SimpleNamespace(group=types.SimpleNamespace(WORLD=world), get_rank=lambda: 1)
    monkeypatch.setattr(watch, "dist", fake)
    known.why(group, 7, MessageError(3, RuntimeError("closed by peer")))
    known._end()
    assert known._heard(group).startswith("rank 1 ended, because rank 3 on n1 did not come to it, ended or")


def test_a_store_that_does_not_answer_holds_nobody_up(known: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER", 0.05)
    answers = threading.Event()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            return answers.wait(60) and False

    known._store = Silent()
    group: Any = Ranks()
    said = known.why(group, 7, RuntimeError("timed out"))
    answers.set()
    assert said == "the host of rank 0, which has the ranks' store, does not answer (timed out)"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("asking", [True, False])
def test_who_asks_while_another_thread_closes_the_world_hears_of_that(known: Watch, asking: bool) -> None:
    """As a save in the background does; `asking`: before the store is asked, else after it answered."""
    group: Any = Ranks()

    class Closes:
        def check(self, keys: list[str]) -> bool:
            known.close()
            return asking

    known._store = Closes()
    assert known.why(group, 7, RuntimeError("closed")) == watch.CLOSED == known.failure
    known._say("left", "why")
