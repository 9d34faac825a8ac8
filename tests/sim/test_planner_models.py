"""`polyreme.plan` of each kind of model, and what it says of one that cannot be planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import polyreme
from examples import whole
from polyreme.errors import ConfigError, ModelError, PolyremeError
from polyreme.planner.plan import Plan


def pair(samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, 8), torch.zeros(samples, 4)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def planned(model: Any, ranks: Any = 2, micro: Any = 4, **given: Any) -> Plan:
    config = given.pop("config", {"batch": {"size": 16, "micro": micro}})
    return polyreme.plan(
        model, config, ranks, **{"cluster": "cpu", "batch": pair, "loss_fn": mse_loss, **given}
    )


def test_a_module_is_planned_as_the_function_that_builds_it_and_stays_as_it_is() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ones = planned(model)
    others = planned(build)
    assert ones.fits and ones.details.worst.memory == others.details.worst.memory
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert repr(ones).startswith("<Plan: 2 ranks of CPU host") and repr(ones).endswith("a rank; fits>")


@whole
def test_layers_are_planned() -> None:
    assert planned([lambda: nn.Linear(8, 16), nn.Linear(16, 4)]).fits


def test_a_layout_whose_batch_the_model_refuses_does_not_hide_the_others() -> None:
    """BatchNorm takes no micro-batch of one sample."""
    made = planned(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), micro="auto")
    assert made.fits and "Expected more than 1 value per channel" in made.found.failed[-1].why


@pytest.mark.parametrize(
    ("model", "given", "kind", "words"),
    [
        (3, {}, ModelError, "the model is a int: give"),
        (lambda: None, {}, ModelError, "the model returned a NoneType: return a torch.nn.Module"),
        (build, {"batch": pair(4)}, ModelError, "batch is a tuple: give a function"),
        (build, {"batch": None}, ModelError, "it is not known what Sequential takes"),
        (build, {"loss_fn": None}, ModelError, "Sequential cannot be called with the batch"),
        (build, {"batch": lambda n: torch.zeros(n, 9)}, ModelError, "RuntimeError: a and b must have same"),
        (build, {"ranks": -1}, ConfigError, "world size = -1: must be an integer from 1"),
        (build, {"ranks": 1.5}, ConfigError, "world size = 1.5: must be an integer from 1"),
        (build, {"tries": 0}, ConfigError, "tries = 0: no layout would be run dry"),
        (build, {"ranks": "8"}, ConfigError, "world size = '8': must be an integer from 1"),
        (build, {"tries": "3"}, ConfigError, "tries = '3': no layout would be run dry"),
        (build, {"cluster": None}, ConfigError, "cluster = 'None': it is a NoneType"),
        (build, {"cluster": ["h100"]}, ConfigError, "it is a list"),
        (build, {"cluster": "h1000"}, ConfigError, "there is no preset of this name"),
        (build, {"cluster": "none.toml"}, ConfigError, "cluster = 'none.toml': there is no such file"),
        (build, {"cluster": {"device": 3}}, ConfigError, "device = 3: must be a table"),
        (build, {"cluster": {"device": {"flops": {"fp8": 1.0}}}}, ConfigError, "device.flops.fp8 = 'fp8'"),
        (build, {"config": [1]}, ConfigError, "config = '[1]': it is a list"),
        (build, {"config": None}, ConfigError, "config = 'None': it is a NoneType"),
        (build, {"config": "none.toml"}, ConfigError, "config = 'none.toml': there is no such file"),
        ("no/model", {}, ConfigError, "model.path = 'no/model': there is no such folder"),
        (None, {}, ConfigError, "the config names no model"),
        ([build, 3], {}, ModelError, "layer 1 of the list is a int"),
        (torch.zeros(2), {}, ModelError, "the model is a Tensor: give"),
        (build, {"loss_fn": "mse"}, ModelError, "loss_fn is 'mse': give a function"),
        (build, {"loss_fn": nn.MSELoss}, ModelError, "or an object like torch.nn.MSELoss()"),
        (build, {"loss_fn": lambda output, target: None}, ModelError, "the loss must be a scalar tensor"),
        (build, {"batch": lambda n: None}, ModelError, "this one has no tensor"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    model: Any, given: dict[str, Any], kind: type[PolyremeError], words: str
) -> None:
    with pytest.raises(kind) as refused:
        planned(model, **given)
    assert words in str(refused.value)


def large() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def wide(samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, 64), torch.zeros(samples, 64)


@pytest.mark.parametrize(
    ("memory", "tier"),
    [(8_000_000, {"memory.activations": "recompute"}), pytest.param(100, None, marks=whole)],
)
def test_what_does_not_fit_names_the_least_that_helps(memory: int, tier: dict[str, str] | None) -> None:
    """The activations of 1,024 samples take most of it: states and parameters may stay."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(*large()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    config = {"batch": {"size": 2048, "micro": 1024}, "zero": {"stage": 3}}
    cluster = {"base": "cpu", "device": {"memory": memory}}
    make: Callable[[], nn.Module] = Blocks
    made = polyreme.plan(make, config, 2, cluster, batch=wide, loss_fn=mse_loss)
    assert not made.fits and "does not fit: " in repr(made) and made.grown is None
    found = made.tier and {
        key: value
        for key, value in made.tier.layout.values.items()
        if made.details.config.value(key) != value
    }
    assert found == tier
