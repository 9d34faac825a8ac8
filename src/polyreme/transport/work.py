"""Operations under way between ranks, and how they fail.

Invariant: what others may still read is held until they have read it, even where nobody waits for the operation. Communication: none of
its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from polyreme.errors import TransportError


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Turns a backend's errors into TransportError, and names the operation in those of `transport`."""
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{what} failed, because {error}") from error
    except RuntimeError as error:
        raise TransportError(f"{what} failed, because another rank ended or cannot be reached: {error}") from error


class Work:
    """An operation under way. `wait` returns when its output is complete, and `settle` when its input may be overwritten, too: ranks of
    this host may still read it where it lies. A second call does nothing."""

    def __init__(
        self,
        pending: Sequence[dist.Work | None] = (),
        finish: Callable[[], None] | None = None,
        what: str = "",
        settled: Callable[[bool], bool] = lambda block: True,
    ) -> None:
        """`finish` is called when `pending` is complete. `settled` tells whether the input is free; given True, it waits till then."""
        self._pending, self._finish, self._what, self._settled = deque(pending), finish, what, settled

    def wait(self) -> None:
        with reporting(self._what):
            while self._pending:
                if (work := self._pending.popleft()) is not None:
                    work.wait()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()

    def settle(self) -> None:
        self.wait()
        with reporting(self._what):
            self._settled(True)

    def is_settled(self) -> bool:
        """Whether `settle` would return at once; that of an operation nobody has waited for would not."""
        return not self._pending and self._finish is None and self._settled(False)


DONE = Work()


class _Unsettled:
    """Keeps the inputs of operations that others of this host may still have to read, whatever becomes of who began them."""

    def __init__(self) -> None:
        self._held: deque[tuple[Work, Sequence[Tensor]]] = deque()

    def hold(self, work: Work, inputs: Sequence[Tensor]) -> None:
        while self._held and self._held[0][0].is_settled():
            self._held.popleft()
        self._held.append((work, inputs))


UNSETTLED = _Unsettled()
