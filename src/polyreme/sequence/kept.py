"""What a recomputed block needs of its forward under a divided sequence: where the tokens of its micro-batch
lie, and what attention has from other ranks, so that it is sent once.

Communication: none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

Result = tuple[Tensor, ...]
Run = Callable[[], Result]

place: ContextVar[Any] = ContextVar("place", default=None)
"""Where the tokens lie (`Layout`) of the forward in a user's own loop that is under way or is recomputed; a
backward may come after other forwards."""
_how: ContextVar[Callable[[Run], Result]] = ContextVar("_how", default=lambda run: run())


def once(run: Run) -> Result:
    """Return what `run` returns, which communicates; in a recomputation, what it returned in the forward.
    Call without gradients."""
    return _how.get()(run)


@contextmanager
def keeping(into: list[Result]) -> Iterator[None]:
    """Keep what `once` returns inside, in the forward of a block."""

    def keep(run: Run) -> Result:
        found = run()
        # not the tensors themselves, which get a graph that holds what is kept
        into.append(tuple(each.detach() for each in found))
        return found

    with _set(keep):
        yield


@contextmanager
def giving(kept: Sequence[Result], where: Any) -> Iterator[None]:
    """Have `once` return what was kept, in the same order, in the recomputation of a block, whose forward had
    its tokens `where`."""
    left = iter(kept)
    with _set(lambda run: tuple(each.detach() for each in next(left))), at(where):
        yield


@contextmanager
def at(where: Any) -> Iterator[None]:
    """Set `place` inside."""
    token = place.set(where)
    try:
        yield
    finally:
        place.reset(token)


@contextmanager
def _set(how: Callable[[Run], Result]) -> Iterator[None]:
    token = _how.set(how)
    try:
        yield
    finally:
        _how.reset(token)
