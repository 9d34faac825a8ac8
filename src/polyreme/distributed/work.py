"""Operations under way between ranks, and how they fail.

Communication: none of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

import torch.distributed as dist

from polyreme.distributed.watch import Meeting, MessageError, Watch, within
from polyreme.distributed.world import current
from polyreme.errors import TransportError

T = TypeVar("T")


@contextmanager
def reporting(what: str, meeting: Meeting | None = None, number: int | None = None) -> Iterator[None]:
    """Turns a backend's errors into TransportError, and names the operation in its TransportError; and says
    what is known of the cause, where the ranks of `meeting` took part, in their `number`th operation."""
    watch = current().of(Watch) if meeting is None else meeting.watch
    try:
        yield
    except (RuntimeError, TransportError) as error:
        why = watch.why(meeting, number, error)
        raise TransportError(f"{what}{within(watch.call)} failed, because {why}") from error


class Message:
    """One that `begin` begins, to or from the rank `peer` of a group: its errors say so."""

    def __init__(self, peer: int, begin: Callable[[], dist.Work | None]) -> None:
        self._peer = peer
        self._work = self._naming(begin)

    def wait(self) -> None:
        if self._work is not None:
            self._naming(self._work.wait)

    def _naming(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except RuntimeError as error:
            raise MessageError(self._peer, error) from None


class Work:
    """An operation under way. `wait` returns when its output is complete, and `settle` when its input may be
    overwritten, too: ranks of this host may still read it where it lies. A second call does nothing, or
    raises again what the first one raised: what it left is no complete output."""

    def __init__(
        self,
        pending: Sequence[dist.Work | Message | None] = (),
        finish: Callable[[], None] | None = None,
        what: str = "",
        settled: Callable[[bool], bool] | None = None,
        meeting: Meeting | None = None,
        number: int | None = None,
    ) -> None:
        """`finish` is called when `pending` is complete. `settled` tells whether the input is free; given
        True, it waits till then; without it that is when the output is complete. `meeting` are the ranks that
        take part, and `number` tells which of their operations it is."""
        self._meeting, self._number = meeting, number
        self._failed: BaseException | None = None
        self._pending, self._finish, self._what, self._settled = deque(pending), finish, what, settled

    def wait(self) -> None:
        if not self._pending and self._finish is None and self._failed is None:
            return
        with self._waiting():
            while self._pending:
                if (work := self._pending.popleft()) is not None:
                    work.wait()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()

    def settle(self) -> None:
        self.wait()
        if self._settled is not None:
            with self._waiting():
                self._settled(True)

    def join(self, settled: bool = False) -> bool:
        """Return when it is complete, or `settled`, or has failed: whether it has not."""
        if self._failed is None:
            with suppress(TransportError):
                self.settle() if settled else self.wait()
        return self._failed is None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        watched: AbstractContextManager[None] = nullcontext()
        if self._meeting is not None:
            watched = self._meeting.watch.waiting(self._meeting, self._what, self._number)
        try:
            with reporting(self._what, self._meeting, self._number), watched:
                yield
        except BaseException as error:
            self._failed = error
            raise

    def is_settled(self) -> bool:
        """Whether `settle` would return at once; that of an operation nobody has waited for would not."""
        ended = not self._pending and self._finish is None
        return ended and (self._settled is None or self._settled(False))


DONE = Work()


def following(works: Sequence[Work], finish: Callable[[], None], what: str) -> Work:
    """`finish`, which waits for `works` and may add others to them, as work of its own."""

    def settled(block: bool) -> bool:
        for work in works if block else ():
            work.settle()
        return all(work.is_settled() for work in works)

    return Work((), finish, what, settled)
