"""The state of a tensor's gradient on the ranks of an axis: whole on each of them, or local to each. An
autograd function that communicates over the axis declares the states that it needs of its outputs' gradients,
and the states of the gradients that it returns for its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import NamedTuple


class State(IntFlag):
    """WHOLE: the gradient of the loss, the same on every rank. LOCAL: of a divided tensor, this rank's slice
    of the gradient; of any other, this rank's summand of it. Both: a sum of the two, which no communication
    can correct."""

    NONE = 0
    WHOLE = 1
    LOCAL = 2


WHOLE, LOCAL = State.WHOLE, State.LOCAL


class Passes(NamedTuple):
    """The result of an autograd function's static method `passes(ctx, output, state)`, for output number
    `output`, whose gradient has the state `state`.

    takes: the state that this gradient must have. gives: the state of each input's gradient then, by its
    position among the tensors. undoes: the function stops summing gradients, which are whole already."""

    takes: State
    gives: Mapping[int, State]
    undoes: bool = False
