"""A scheduler that is given to `initialize` and stepped by the script's loop, too, as loops do: once a
training step, whoever does it, or an error that names the way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import polyreme
import threads
from polyreme.errors import ConfigError

STEPS = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=draw), torch.randn(8, 3, generator=draw)
    return x.double().chunk(world)[rank], y.double().chunk(world)[rank]


def chained(optimizer: torch.optim.Optimizer) -> Any:
    both = [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(both)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    both = [schedulers.LinearLR(optimizer, 0.1, 1.0, 3), schedulers.CosineAnnealingLR(optimizer, 5)]
    return schedulers.SequentialLR(optimizer, both, [3])


MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3, 0.1),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5], 0.1),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 1e-3, 0.05, 3),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "sequential": sequential,
    "chained": chained,
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


def metric(step: int) -> float:
    return 1.0 + step % 2


def plain(name: str) -> tuple[list[float], list[float]]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, losses, rates = MAKERS[name](optimizer), [], []
    for step in range(STEPS):
        x, y = batch(0, 1, step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*([metric(step)] if name == "plateau" else []))
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates


def stepped(rank: int, world: int, stage: int, way: str) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for name, make in MAKERS.items():
        model, made = network(), list[Any]()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = scheduler = make(optimizer) if way == "own" else None
        if way == "factory":
            scheduler = lambda optimizer, make=make, made=made: made.append(make(optimizer)) or made[0]  # noqa: E731
            optimizer = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
        config = {"batch": {"size": 8}, "zero": {"stage": stage}, "precision": {"compute": "fp64"}}
        config["optimizer"] = {"clip": None}
        engine = polyreme.initialize(
            model, config, optimizer=optimizer, lr_scheduler=scheduler, loss_fn=F.mse_loss
        )
        schedule, losses, rates = schedule or made[0], [], []
        assert isinstance(schedule, schedulers.LRScheduler) and "step" not in schedule.state_dict()
        for step in range(STEPS):
            losses.append(engine.train_step(batch(rank, world, step)).loss)
            if name == "plateau":
                schedule.step(metric(step) * (2 * (rank + 1) / 3 if world == 2 else 1))
            elif name != "ExponentialLR":  # which is left to the engine, as a loop may
                schedule.step()
            rates.append(engine.state.lr)
        found[name] = losses, rates
        engine.close()
        assert type(schedule).step is type(make(torch.optim.AdamW(network().parameters(), lr=0.01))).step
    return found


@pytest.mark.parametrize(("world", "stage", "way"), [(1, 2, "own"), (2, 3, "factory"), (2, 0, "own")])
def test_a_scheduler_is_stepped_once_a_step(world: int, stage: int, way: str) -> None:
    wanted = {name: plain(name) for name in MAKERS}
    assert len({*wanted["StepLR"][1]}) == 3
    for found in threads.run(world, stepped, stage, way):
        for name, (losses, rates) in found.items():
            assert losses == pytest.approx(wanted[name][0], rel=1e-10), name
            assert rates == pytest.approx(wanted[name][1], rel=1e-12), name


def begun(scheduler: Callable[[torch.optim.Optimizer], Any], **sections: Any) -> tuple[Any, Any]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, config = scheduler(optimizer), {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    return polyreme.initialize(
        model, config | sections, optimizer=optimizer, lr_scheduler=schedule, loss_fn=F.mse_loss
    ), schedule


def test_another_rhythm_is_an_error_at_once() -> None:
    """An epoch of several steps, a second call in one step, a call before any, an epoch said."""
    engine, schedule = begun(MAKERS["StepLR"])
    with pytest.raises(ConfigError, match=r"(?s)StepLR.*no training step since.*leave out scheduler"):
        schedule.step()
    engine.train_step(batch(0, 1, 0))
    schedule.step()
    with pytest.raises(ConfigError, match="no training step since"):
        schedule.step()
    for step in range(2):
        engine.train_step(batch(0, 1, step))
    with pytest.raises(ConfigError, match=r"(?s)after 2 training steps.*once an epoch.*engine\.optimizer"):
        schedule.step()
    engine.close()
    engine, schedule = begun(lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3))
    engine.train_step(batch(0, 1, 0))
    with pytest.raises(ConfigError, match=r"step\(epoch\)"):
        schedule.step(0.5)


def test_a_skipped_step_leaves_the_scheduler_where_it_is() -> None:
    """In fp16 the first steps overflow; a script may call the scheduler for them, or not."""
    for calls in ("always", "when applied", "never"):
        section = {"compute": "fp16", "initial_scale": 2.0**40, "backoff": 2.0**-30}
        engine, schedule = begun(lambda o: schedulers.StepLR(o, 1, 0.5), precision=section)
        skipped = []
        for step in range(4):
            result = engine.train_step(tuple(each.float() for each in batch(0, 1, step)))
            skipped.append(result.skipped)
            if calls == "always" or (calls == "when applied" and not result.skipped):
                schedule.step()
        assert skipped[0] and not skipped[-1]
        assert engine.state.lr == 0.01 * 0.5 ** skipped.count(False) and schedule.last_epoch == skipped.count(
            False
        )
        engine.close()


def test_copies_of_a_scheduler_are_plain() -> None:
    engine, schedule = begun(MAKERS["StepLR"])
    for each in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert type(each) is schedulers.StepLR
        each.optimizer.step()
        each.step()
        assert each.last_epoch == 1 and schedule.last_epoch == 0
    del engine
    config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    again = polyreme.initialize(network(), config, lr_scheduler=schedule, loss_fn=F.mse_loss)
    again.close()
    assert type(schedule) is schedulers.StepLR


def test_a_scheduler_of_the_scripts_own_rhythm_is_followed() -> None:
    """Once an epoch, on the optimizer that was given."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, rates = schedulers.StepLR(optimizer, 1, 0.1), []
    config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    with polyreme.initialize(model, config, optimizer=optimizer, loss_fn=F.mse_loss) as engine:
        for _epoch in range(2):
            rates += [engine.train_step(batch(0, 1, step)).lr for step in range(2)]
            schedule.step()
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_bound_step_that_was_taken_before_is_an_error_at_once(name: str) -> None:
    """It goes past the engine, and the learning rate would be that of two steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = MAKERS[name](optimizer)
    callback, given = schedule.step, [1.0] * (name == "plateau")
    config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    with polyreme.initialize(
        model, config, optimizer=optimizer, lr_scheduler=schedule, loss_fn=F.mse_loss
    ) as engine:
        engine.train_step(batch(0, 1, 0))
        with pytest.raises(ConfigError, match=r"(?s)took before initialize.*scheduler\.step\(\)"):
            callback(*given)
        schedule.step(*given)
    callback(*given)
