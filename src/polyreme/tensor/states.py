"""What the gradient of a tensor is on the ranks of an axis: the whole one on each of them, or this rank's
part. A function of autograd that communicates over the axis declares which its outputs' gradients have to be,
and which it makes of them for its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import Any, NamedTuple, Protocol


class State(IntFlag):
    """`WHOLE`: the same on every rank, the gradient of the loss. `PART`: of what is divided, this rank's
    part; of what is not, a summand. Both: a sum of the two, which no communication makes right."""

    NONE = 0
    WHOLE = 1
    PART = 2


WHOLE, PART = State.WHOLE, State.PART


class Passes(NamedTuple):
    """What one output's gradient has to be, and by the position of each input among the tensors what its
    gradient then is. undoes: a sum that would be of whole gradients is left out."""

    takes: State
    gives: Mapping[int, State]
    undoes: bool = False


class Declared(Protocol):
    """The class of such a function. `passes(ctx, output, state)`: for output number `output`, to which
    gradients come that are `state`."""

    @staticmethod
    def passes(ctx: Any, output: int, state: State) -> Passes: ...
