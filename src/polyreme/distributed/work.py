"""Operations under way between ranks, and how they fail.

Communication: none of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

import torch.distributed as dist

from polyreme.distributed.watch import MessageError, Watch, WatchedGroup, within
from polyreme.distributed.world import current
from polyreme.errors import TransportError

T = TypeVar("T")


@contextmanager
def reporting(what: str, group: WatchedGroup | None = None, number: int | None = None) -> Iterator[None]:
    """Turn a backend's errors into TransportError, and name the operation in each TransportError. Where the
    ranks of a watched group took part, also say what is known of the cause, from their `number`th
    operation."""
    watch = current().of(Watch) if group is None else group.watch
    try:
        yield
    except (RuntimeError, TransportError) as error:
        why = watch.why(group, number, error)
        raise TransportError(f"{what}{within(watch.call)} failed, because {why}") from error


class Message:
    """A message that `begin` begins, to or from the rank `peer` of a group. Its errors name `peer`
    (`MessageError`)."""

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
    """An operation under way. `wait` returns when its output is complete; `settle` when its input may be
    overwritten, too: ranks of this host may still read the input where it lies. A second call does nothing,
    or raises the first call's error again, as the output is not complete then."""

    def __init__(
        self,
        pending: Sequence[dist.Work | Message | None] = (),
        finish: Callable[[], None] | None = None,
        what: str = "",
        settled: Callable[[bool], bool] | None = None,
        group: WatchedGroup | None = None,
        number: int | None = None,
    ) -> None:
        """`finish` is called when `pending` is complete. `settled` tells whether the input is free, and waits
        until then if called with True; without it the input is free once the output is complete."""
        self._group, self._number = group, number
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
        """Wait until the work is complete, or `settled`, or has failed. Returns whether it has not failed."""
        if self._failed is None:
            with suppress(TransportError):
                self.settle() if settled else self.wait()
        return self._failed is None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        watched: AbstractContextManager[None] = nullcontext()
        if self._group is not None:
            watched = self._group.watch.waiting(self._group, self._what, self._number)
        try:
            with reporting(self._what, self._group, self._number), watched:
                yield
        except BaseException as error:
            self._failed = error
            raise

    def is_settled(self) -> bool:
        """Return whether `settle` would return at once. It would not before the work was waited for."""
        ended = not self._pending and self._finish is None
        return ended and (self._settled is None or self._settled(False))


DONE = Work()


def following(works: Sequence[Work], finish: Callable[[], None], what: str) -> Work:
    """Return `finish`, which waits for `works` and may add others to them, as work of its own."""

    def settled(block: bool) -> bool:
        for work in works if block else ():
            work.settle()
        return all(work.is_settled() for work in works)

    return Work((), finish, what, settled)
