"""DeepSpeed's optimizers: that they step as torch's do, alone and made again from their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from polyreme.compat.deepspeed import ops
from polyreme.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from polyreme.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from polyreme.compat.deepspeed.ops.lamb import FusedLamb
from polyreme.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from polyreme.compat.deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from polyreme.config.schema import OptimizerSection
from polyreme.errors import PolyremeError
from polyreme.optim.groups import Lion, recipe


def trained(make: Callable[[Any], Optimizer], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The parameters of a small model after five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).to(dtype)
    optimizer = make(model.parameters())
    for _ in range(5):
        model(torch.randn(6, 4).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


PAIRS: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer]]] = {
    "cpu adamw": (
        lambda p: DeepSpeedCPUAdam(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
    "cpu adam": (
        lambda p: DeepSpeedCPUAdam(p, lr=0.05, weight_decay=0.1, adamw_mode=False),
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    ),
    "fused adamw": (
        lambda p: FusedAdam(p, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    "fused adam": (
        lambda p: FusedAdam(p, lr=0.05, weight_decay=0.1, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    ),
    "adagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    ),
    "cpu lion": (
        lambda p: DeepSpeedCPULion(p, lr=0.01, weight_decay=0.1),
        lambda p: Lion(p, lr=0.01, betas=(0.9, 0.999), weight_decay=0.1),
    ),
    "fused lion": (lambda p: FusedLion(p, lr=0.01), lambda p: Lion(p, lr=0.01, betas=(0.9, 0.999))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_alone_it_is_torchs(name: str) -> None:
    for ours, theirs in zip(trained(PAIRS[name][0]), trained(PAIRS[name][1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


MAKES: dict[str, Callable[..., Optimizer]] = {
    "adam": DeepSpeedCPUAdam,
    "adagrad": DeepSpeedCPUAdagrad,
    "lion": DeepSpeedCPULion,
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("wide", [True, False])
def test_states_of_half_precision_parameters_are_fp32_unless_told(name: str, wide: bool) -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MAKES[name]([parameter], lr=0.1, fp32_optimizer_states=wide)
    parameter.grad = torch.linspace(-1, 1, 8).to(torch.bfloat16)
    before = parameter.grad
    optimizer.step()
    dtypes = {v.dtype for k, v in optimizer.state[parameter].items() if k != "step"}
    assert dtypes == {torch.float32 if wide else torch.bfloat16}
    assert parameter.dtype == torch.bfloat16 and parameter.grad is before
    assert not torch.equal(parameter.detach(), torch.ones(8, dtype=torch.bfloat16))
    reference = nn.Parameter(torch.ones(8))
    reference.grad = before.float()
    MAKES[name]([reference], lr=0.1).step()
    if wide:
        assert torch.equal(parameter.detach(), reference.detach().to(torch.bfloat16))


def test_a_closure_is_called_once_with_gradients_on() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = DeepSpeedCPUAdam([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) == 2.0
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("name", PAIRS)
def test_an_engine_makes_it_again_from_its_class_and_groups(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    made = PAIRS[name][0](model.parameters())
    options = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    plan = recipe(model, OptimizerSection(), lambda params: type(made)([{**options, "params": params}]))
    assert plan.boundary(0) == "element"  # shards may cut tensors
    tensor, whole = torch.ones(6), nn.Parameter(torch.ones(6))
    again, first = plan.groups[0].optimizer([tensor]), PAIRS[name][0]([whole])
    assert type(again) is type(made)
    tensor.grad = torch.linspace(-1, 1, 6)
    whole.grad = tensor.grad.clone()
    again.step()
    first.step()
    assert torch.equal(tensor, whole.detach())


def test_gradients_are_kept_where_that_is_asked_for() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    FusedAdam([parameter], set_grad_none=False).zero_grad()
    assert parameter.grad is not None and parameter.grad.sum() == 0
    FusedLion([parameter]).zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda p: DeepSpeedCPUAdam(p, amsgrad=True),
        lambda p: FusedAdam(p, bias_correction=False),
        lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True),
        lambda p: FusedLamb(p, amsgrad=True),
        lambda p: FusedLamb(p, max_grad_norm=1.0),
        lambda p: ops.DeepSpeedTransformerLayer(),
        lambda p: CPUAdamBuilder().load(),
        lambda p: AsyncIOBuilder().load(),
    ],
)
def test_what_is_not_there_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(PolyremeError, match="fix:"):
        make([torch.zeros(1)])


def test_operations_are_compatible_where_something_does_their_work() -> None:
    assert ops.__compatible_ops__["cpu_adam"] and ops.__compatible_ops__["fused_lion"]
    assert not ops.__compatible_ops__["async_io"] and not ops.__compatible_ops__["fused_lamb"]
