"""What is known of parameters: for how long, and what a state in a record has their class look at."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.distributed import world
from polyreme.errors import ModelError
from polyreme.zero.parameter import (
    IN_MEMORY,
    RELEASED,
    ParameterRecords,
    Presence,
    Restriction,
    TrainedParameter,
    record_of,
    state_of,
)
from polyreme.zero.released import GATHERED, AfterForward, ParameterView


def parameters(count: int = 2) -> list[Any]:
    return [nn.Parameter(torch.ones(2, 3)) for _ in range(count)]


def test_a_record_goes_with_its_parameter() -> None:
    first, second = parameters()
    Presence([(first, "first"), (second, "second")])
    known = len(world.current().of(ParameterRecords))
    del second
    assert len(world.current().of(ParameterRecords)) == known - 1
    assert record_of(first).name == "first"


def test_records_outlive_their_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_current", world.World())
    [parameter] = parameters(1)
    Presence([(parameter, "weight")]).become(RELEASED, [parameter])
    world.current().close()
    with pytest.raises(ModelError, match="sum of parameter weight, whose numbers are not in memory"):
        parameter.sum()


def test_parameters_of_a_bucket_share_a_state() -> None:
    first, second = both = parameters()
    presence, told = Presence([(first, "first"), (second, "second")]), []
    presence.become(GATHERED, both)
    assert type(first.t()) is ParameterView is type(second.data)
    with pytest.raises(ModelError, match="data = writes to parameter second"):
        second.data = first
    presence.become(AfterForward(lambda: lambda: told.append(1)), both)
    assert (first + second).requires_grad and told
    presence.become(RELEASED, both)
    for touch in (lambda: first + 1, lambda: 1 + second, lambda: copy.deepcopy(first)):
        with pytest.raises(ModelError, match="not in memory between its uses"):
            touch()
    assert first.shape == (2, 3) and "released" in f"{second}"
    presence.become(IN_MEMORY, both)
    assert type(first) is TrainedParameter and (first + second).sum() == 12


def test_a_copy_has_no_state_of_its_own() -> None:
    [parameter] = both = parameters(1)
    Presence([(parameter, "weight")]).become(GATHERED, both)
    copied = copy.deepcopy(parameter)
    copied.data = torch.zeros(2, 3)
    assert state_of(copied) is IN_MEMORY and type(copied.t()) is torch.Tensor and parameter.sum() == 6


def test_a_restriction_leaves_classes_as_they_were() -> None:
    frozen, trained, released = three = parameters(3)
    trained.__class__ = TrainedParameter
    presence, asked = Presence([(released, "released")]), []
    restriction = Restriction(three, lambda name, args, kwargs, of: asked.append((name, of)))
    with restriction:
        restriction.refuse()
        frozen.sum(), trained.sum(), released.numel()
        presence.become(RELEASED, [released])
    assert asked == [("sum", "?"), ("sum", "?")]
    assert type(frozen) is nn.Parameter and type(trained) is TrainedParameter
    with pytest.raises(ModelError, match="sum of parameter released"):
        released.sum()
