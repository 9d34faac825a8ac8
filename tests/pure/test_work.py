"""Operations under way: what one that failed says from then on."""

from __future__ import annotations

import pytest

from polyreme.distributed.work import Work
from polyreme.errors import TransportError


class Broken:
    """What torch gives for an operation whose other side is gone."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("again", ["wait", "settle"])
def test_what_failed_stays_failed(again: str) -> None:
    """Also where only one of its parts failed, and nobody finishes what it left."""
    finished: list[str] = []
    work = Work([None, Broken()], lambda: finished.append("copied"), "all-gather of 'weights'")  # type: ignore[list-item]
    for call in (work.wait, getattr(work, again), work.wait):
        with pytest.raises(
            TransportError, match=r"all-gather of 'weights' failed, because .*Connection closed by peer"
        ):
            call()
    assert not finished


def test_what_could_not_be_finished_stays_failed() -> None:
    def finish() -> None:
        raise RuntimeError("no space left")

    work = Work(finish=finish, what="sum")
    for _ in range(2):
        with pytest.raises(TransportError, match="no space left"):
            work.wait()


def test_what_is_complete_is_not_done_again() -> None:
    finished: list[int] = []
    work = Work(finish=lambda: finished.append(1))
    work.wait()
    work.settle()
    work.wait()
    assert finished == [1] and work.is_settled()


@pytest.mark.parametrize("settled", [False, True])
def test_what_ends_is_waited_for_without_its_failure(settled: bool) -> None:
    asked: list[bool] = []

    def settle(block: bool) -> bool:
        asked.append(block)
        return True

    work = Work(settled=settle)
    assert work.join(settled) and asked == [True] * settled
    broken = Work([Broken()], what="all-gather")  # type: ignore[list-item]
    assert not broken.join(settled) and not broken.join()
    with pytest.raises(TransportError, match="Connection closed by peer"):
        broken.wait()
