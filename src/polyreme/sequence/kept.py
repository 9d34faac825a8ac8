"""What a recomputed block needs of its forward where sequences are divided: where the tokens of its
micro-batch lie, and what attention has from other ranks, so that it is sent once.

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
"""Where the tokens lie (`Layout`) of a forward in the user's own loop, and of its recomputation, before which
there may be other forwards."""
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

    with setting(_how, keep):
        yield


@contextmanager
def giving(kept: Sequence[Result], where: Any) -> Iterator[None]:
    """Have `once` return what was kept, in the same order, in the recomputation of a block, whose tokens lie
    `where` they did."""
    left = iter(kept)
    with setting(_how, lambda run: tuple(each.detach() for each in next(left))), setting(place, where):
        yield


@contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a variable another value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
