"""Operations under way between ranks, and how they fail.

Invariant: what others may still read is held until they have read it, even where nobody waits for the
operation. Communication: none of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch.distributed as dist

from polyreme.distributed.watch import WATCH, Meeting, MessageError, within
from polyreme.errors import TransportError

T = TypeVar("T")
ENOUGH = 64
"""Inputs held for others, from which on all of them are looked at."""


@contextmanager
def reporting(what: str, meeting: Meeting | None = None, number: int | None = None) -> Iterator[None]:
    """Turns a backend's errors into TransportError, and names the operation in its TransportError; and says
    what is known of the cause, where the ranks of `meeting` took part, in their `number`th operation."""
    try:
        yield
    except (RuntimeError, TransportError) as error:
        why = WATCH.why(meeting, number, error)
        raise TransportError(f"{what}{within(WATCH.call)} failed, because {why}") from error


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

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        watched: AbstractContextManager[None] = nullcontext()
        if self._meeting is not None:
            watched = WATCH.waiting(self._meeting, self._what, self._number)
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


class _Unsettled:
    """Keeps the inputs of operations that others of this host may still have to read, whatever becomes of who
    began them."""

    def __init__(self) -> None:
        self._alive: deque[tuple[Callable[[], bool], Sequence[object]]] = deque()
        self._enough = ENOUGH

    def keep_alive(self, was_read: Callable[[], bool], what: Sequence[object]) -> None:
        """Keep inputs alive, and where it is told that they are ready."""
        while self._alive and self._alive[0][0]():
            self._alive.popleft()
        self._alive.append((was_read, what))
        if len(self._alive) > self._enough:  # a peer may never read the first of them, having failed
            self.sweep()
            self._enough = 2 * len(self._alive) + ENOUGH

    def sweep(self) -> None:
        """Let go of all that was read."""
        self._alive = deque(each for each in self._alive if not each[0]())


UNSETTLED = _Unsettled()
