"""A GradScaler of torch's in a loop over an engine: refused, as its scale would go into the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import polyreme
import threads
from polyreme.errors import ModelError
from polyreme.step.user import backward as user_backward


def begun(world: int = 1, stage: int = 2, own: bool = False, compute: str = "fp32") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if own else None
    config = {"batch": {"size": 4 * world}, "zero": {"stage": stage}, "precision": {"compute": compute}}
    return polyreme.initialize(model, config, optimizer=optimizer), optimizer


def loss_of(engine: Any) -> Tensor:
    return F.mse_loss(engine(torch.ones(4, 4)).float(), torch.zeros(4, 1))


WAYS: dict[str, Callable[[Any, GradScaler, Tensor], object]] = {
    "backward": lambda engine, scaler, loss: scaler.scale(loss).backward(),
    "a part": lambda engine, scaler, loss: (scaler.scale(loss) / 2 + 0.0).backward(),
    "several": lambda engine, scaler, loss: torch.autograd.backward(scaler.scale([loss, loss])),
    "the engine's": lambda engine, scaler, loss: engine.backward(scaler.scale(loss)),
}


def refused(rank: int, world: int, stage: int) -> None:
    for way, call in WAYS.items():
        for compute in ("fp32", "fp16") if way == "backward" else ("fp32",):
            engine, _ = begun(world, stage, compute=compute)
            scaler = GradScaler("cpu")
            with pytest.raises(ModelError, match=r'scale\(loss\).*precision.compute = "fp16".*enabled=False'):
                call(engine, scaler, loss_of(engine))
            engine.zero_grad()
            if compute == "fp32":  # without it the script goes on
                loss_of(engine).backward()
                assert 0 < engine.step().grad_norm < 10
            engine.close()


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0), (2, 3)])
def test_a_scaled_loss_is_refused(world: int, stage: int) -> None:
    threads.run(world, refused, stage)


@pytest.mark.parametrize("own", [False, True])
def test_a_scalers_step_is_refused(own: bool) -> None:
    engine, optimizer = begun(own=own)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    loss_of(engine).backward()
    for given in (engine.optimizer, *([optimizer] if own else [])):
        with pytest.raises(ModelError, match=r"scaler\.unscale_\(optimizer\)"):
            scaler.unscale_(given)
        with pytest.raises(ModelError, match=r"scaler\.step\(optimizer\).*engine\.step\(\)"):
            scaler.step(given)
    engine.close()
    if not user_backward.listeners():  # no engine that another test has left
        methods = (GradScaler.scale, GradScaler.unscale_, GradScaler.step)
        assert not any(hasattr(method, "__wrapped__") for method in methods)


def test_scalers_of_others_go_on() -> None:
    """One that is not enabled, and one of a plain model beside an engine."""
    engine, _ = begun()
    scaler = GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(engine)).backward()
    scaler.unscale_(engine.optimizer)
    scaler.step(engine.optimizer)
    assert engine.state.step == 1
    plain = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(plain.parameters(), lr=0.1), GradScaler("cpu")
    before = plain.weight.detach().clone()
    loss = loss_of(engine)
    scaler.scale(plain(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    loss.backward()
    engine.step()
    assert torch.allclose(before - plain.weight, torch.full((1, 2), 0.1))
    engine.close()
