"""What ranks say of a wait that failed, of what others told in the store."""

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
    """The others of a meeting of four, in the place of a Meeting; this rank is 0."""

    key, ranks, broken = "key", (0, 1, 2, 3), ""

    def others(self) -> list[int]:
        return [1, 2, 3]


@pytest.fixture
def told() -> Watch:
    """That rank 2 waits in operation 7, and nothing of others."""
    found = Watch()
    found._store = dist.HashStore()
    for rank in range(4):
        found._store.set(f"host/{rank}", f"n{rank // 2}")
    begun = '{"key": [[7, "all-gather", ""]]}'
    found._store.set("at/2", f'{{"call": "", "waits": [], "begun": {begun}, "told": 1}}')
    return found


def test_ranks_that_did_not_come_are_named_with_their_hosts(told: Watch) -> None:
    meeting: Any = Ranks()
    said = told.why(meeting, 7, RuntimeError("timed out"))
    assert said == "rank 1 on n0 and rank 3 on n1 did not come to it, ended or cannot be reached (timed out)"
    assert "ranks 2, 3 on n1" not in said


def test_without_a_store_a_backends_error_is_that_of_another_rank(told: Watch) -> None:
    meeting: Any = Ranks()
    told._store = None
    for each in (meeting, None):
        said = told.why(each, 7, RuntimeError("closed"))
        assert said == "another rank ended or cannot be reached: closed"
        assert told.why(each, 7, TransportError("rank 1 of axis dp ended")) == "rank 1 of axis dp ended"


def test_nobody_is_named_before_others_can_have_told(told: Watch) -> None:
    meeting: Any = Ranks()
    told._lasted = 0.1
    assert told.why(meeting, 8, RuntimeError("closed")) == "another rank ended or cannot be reached (closed)"
    told._lasted = 2 * told.patience
    assert told.why(meeting, 8, RuntimeError("closed")).startswith(
        "rank 1 on n0 and ranks 2, 3 on n1 did not come"
    )


def test_whose_connection_broke_is_named_at_once(told: Watch) -> None:
    meeting: Any = Ranks()
    broke = MessageError(3, RuntimeError("closed by peer"))
    told._lasted = 0.1
    named = "rank 3 on n1 did not come to it, ended or cannot be reached (closed by peer)"
    assert told.why(meeting, 8, broke) == named
    told._lasted = 2 * told.patience  # the others are late, too, and nothing else
    assert told.why(meeting, 8, broke) == named
    told._lasted = told.deadline = 20  # at which connections are closed, whoever is late
    assert told.why(meeting, 7, broke).startswith("rank 1 on n0 and rank 3 on n1 did not")


def test_whose_connection_broke_is_named_without_a_store(told: Watch) -> None:
    meeting: Any = Ranks()
    told._store = None
    broke = MessageError(0, RuntimeError("closed by peer"))
    assert told.why(meeting, 8, broke) == "rank 0 ended or cannot be reached: closed by peer"
    told.hosts = ["a", "b", "c", "d"]
    assert told.why(meeting, 8, broke) == "rank 0 on a ended or cannot be reached: closed by peer"


def test_who_ends_after_a_failure_tells_of_it(told: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script has caught the error."""
    meeting: Any = Ranks()
    told._world = world = object()
    group = types.SimpleNamespace(WORLD=world)
    monkeypatch.setattr(watch, "dist", types.SimpleNamespace(group=group, get_rank=lambda: 1))
    told.why(meeting, 7, MessageError(3, RuntimeError("closed by peer")))
    told._end()
    assert told._heard(meeting).startswith("rank 1 ended, because rank 3 on n1 did not come to it, ended or")


def test_a_store_that_does_not_answer_holds_nobody_up(told: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER", 0.05)
    answers = threading.Event()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            return answers.wait(60) and False

    told._store = Silent()
    meeting: Any = Ranks()
    said = told.why(meeting, 7, RuntimeError("timed out"))
    answers.set()
    assert said == "the host of rank 0, which has the ranks' store, does not answer (timed out)"
