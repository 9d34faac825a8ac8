"""Steps whose end the caller decides, and whose gradient is the mean over ranks, beside plain torch."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
from polyreme.errors import BatchError

WIDTH, MICRO = 12, 3
WINDOWS = (1, 2, 3, 1, 5)
"""Micro-batches of each step."""


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).double()


def batch(rank: int, step: int, i: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i)
    x = torch.randn(MICRO, WIDTH, generator=draw, dtype=torch.float64)
    return x, torch.randn(MICRO, 2, generator=draw, dtype=torch.float64)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum() / 7  # the mean of nothing that could be counted


@functools.cache
def plain(world: int) -> Tensor:
    """Parameters after each step of one process: sums over a window, means over ranks."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    found = []
    for step, window in enumerate(WINDOWS):
        for rank in range(world):
            for i in range(window):
                x, y = batch(rank, step, i)
                (loss_of(model(x), y) / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(found)


def config(world: int, **more: Any) -> dict[str, Any]:
    return {
        "batch": {"size": 2 * MICRO * world, "micro": MICRO, "mean": "ranks"},
        "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.01, "weight_decay": 0.01, "no_decay": "none"},
        **more,
    }


CASES = [
    (0, {}),
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"states": "host"}),
    (3, {"states": "host", "params": "host"}),
]


def steps(rank: int, world: int, stage: int, memory: dict[str, Any], how: str) -> Tensor:
    """Parameters after each step of an engine."""
    settings = config(world, zero={"stage": stage, "min_bucket": 0}, memory=memory)
    if "room for one" in how:
        settings["batch"]["size"] = MICRO * world
    found = []
    with polyreme.initialize(network(), settings) as engine:
        for step, window in enumerate(WINDOWS):
            total = 0.0
            for i in range(window):
                x, y = batch(rank, step, i)
                if "extended" in how:  # each may be the last one
                    engine.set_boundary(step < 4 or i != 1, extend=True)
                    if i and step % 2:
                        assert engine.gradients().norms()
                elif how != "late":
                    engine.set_boundary(i == window - 1)
                else:
                    engine.set_boundary(False)  # nobody tells which is the last one before it came
                loss = loss_of(engine(x), y)
                total += loss.item()
                engine.backward(loss) if how != "own backward" else loss.backward()
            done = engine.step()
            assert done.step == step + 1
            assert world > 1 or done.loss == pytest.approx(total, rel=1e-12)
            whole = engine.state_dict()
            found.append(torch.cat([whole[name].flatten() for name, _ in engine.module.named_parameters()]))
    return torch.stack(found)


def all_steps(rank: int, world: int, how: str) -> list[Tensor]:
    some = (CASES[0], CASES[2], CASES[5]) if "extended" in how else CASES
    return [steps(rank, world, stage, memory, how) for stage, memory in some]


@pytest.mark.parametrize(
    "how", ["engine.backward", "own backward", "late", "room for one", "extended", "extended, room for one"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_windows_of_any_length_are_those_of_plain_torch(world: int, how: str) -> None:
    for each in threads.run(world, all_steps, how):
        for case, found in enumerate(each):
            assert torch.allclose(found, plain(world), rtol=0, atol=1e-12), case


def one_step(rank: int, world: int, stage: int, counted: int) -> Tensor:
    """Parameters after a step of four micro-batches, of which so many are those that the config counts."""
    settings = config(world, zero={"stage": stage, "min_bucket": 0})
    with polyreme.initialize(network(), settings) as engine:
        for i in range(4):
            if i >= counted:
                engine.set_boundary(i == 3, extend=True)
            x, y = batch(rank, 0, i)
            engine.backward(loss_of(engine(x), y))
        engine.step()
        whole = engine.state_dict()
        return torch.cat([whole[name].flatten() for name, _ in engine.module.named_parameters()])


def announced_or_not(rank: int, world: int) -> None:
    for stage in (0, 2):
        found = [one_step(rank, world, stage, counted) for counted in (0, 2)]
        assert torch.allclose(*found, rtol=0, atol=1e-12), stage


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_ended_by_count_is_extended(world: int) -> None:
    threads.run(world, announced_or_not)


def rounded(rank: int, world: int, stage: int, memory: dict[str, Any], count: int) -> list[Any]:
    """Weights, gradients so far and memory of bf16 windows, of an engine made for `count` micro-batches."""
    more = {"precision": {"compute": "bf16"}, "zero": {"stage": stage, "min_bucket": 0}, "memory": memory}
    settings = config(world, **more)
    settings["batch"]["size"] = count * MICRO * world
    with polyreme.initialize(network(), settings) as engine:
        sums = []
        for step, window in enumerate(WINDOWS):
            for i in range(window):
                engine.set_boundary(i == window - 1)
                engine.backward(loss_of(engine(*batch(rank, step, i)[:1]), batch(rank, step, i)[1]))
                each = [engine.numbers(p).so_far() for p in engine.module.parameters()]
                sums.append([None if found is None else found.tolist() for found in each])
            engine.step()
        weights = {name: tensor.tolist() for name, tensor in engine.state_dict().items()}
        return [weights, sums[1:], engine.memory()]


def all_rounded(rank: int, world: int) -> None:
    for stage, memory in CASES[1:]:
        one, several = (rounded(rank, world, stage, memory, count) for count in (1, 2))
        assert one == several, stage
        told = [found is not None for found in one[1][0]]
        kept = stage < 2 or (world == 1 and "params" not in memory)
        assert all(told) if kept else not any(told)


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_of_one_becomes_one_of_several(world: int) -> None:
    threads.run(world, all_rounded)


def train_steps(rank: int, world: int) -> list[float]:
    """train_step takes the mean over its micro-batches, whatever their labels are."""
    engine = polyreme.initialize(network(), config(world), loss_fn=loss_of)
    parts = [batch(rank, 0, i) for i in range(2)]
    result = engine.train_step(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
    model = network()
    every = [loss_of(model(x), y) for r in range(world) for x, y in (batch(r, 0, i) for i in range(2))]
    return [result.loss, (sum(every) / len(every)).item()]


@pytest.mark.parametrize("world", [1, 2])
def test_train_step_means_over_micro_batches(world: int) -> None:
    for loss, wanted in threads.run(world, train_steps):
        assert loss == pytest.approx(wanted, rel=1e-12)


def scaled(rank: int, world: int, own: bool) -> list[Any]:
    """Losses and weights of fp16 training, by the user's backward of a scaled loss or by the engine's."""
    more = {"precision": {"compute": "fp16", "initial_scale": 64.0}}
    engine = polyreme.initialize(network(), config(world, **more))
    losses = []
    for step in range(3):
        for i in range(2):
            x, y = batch(rank, step, i)
            loss = loss_of(engine(x.float()), y.float())
            engine.scale(loss).backward() if own else engine.backward(loss)
        losses.append(engine.step().loss)
    return [losses, {name: tensor.tolist() for name, tensor in engine.state_dict().items()}]


def test_scaled_losses() -> None:
    own, engines = (threads.run(2, scaled, each) for each in (True, False))
    for (losses, weights), (wanted, same) in zip(own, engines, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-3) and weights == same


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    engine = polyreme.initialize(copy.deepcopy(network()), config(1))
    x, y = batch(0, 0, 0)
    engine.set_boundary(True)
    engine.backward(loss_of(engine(x), y))
    with pytest.raises(BatchError, match="is the last of its step"):
        engine.backward(loss_of(engine(x), y))
    with pytest.raises(BatchError, match="is the last of its step"):
        engine.set_boundary(False)
    counting = polyreme.initialize(network(), config(1) | {"batch": {"size": MICRO, "mean": "ranks"}})
    counting.backward(loss_of(counting(x), y))
    with pytest.raises(BatchError, match=r"batch\.size of one micro-batch, said .* the last of its step"):
        counting.set_boundary(False)
    engine.zero_grad()
    engine.set_boundary(False)
    with pytest.raises(BatchError, match=r"step\(\) after 0 backward\(\) calls"):
        engine.step()
    settings = config(1, memory={"states": str(tmp_path), "params": str(tmp_path)}, zero={"stage": 3})
    one = polyreme.initialize(network(), settings | {"batch": {"size": MICRO, "mean": "ranks"}})
    with pytest.raises(BatchError, match="laid out for one micro-batch"):
        one.set_boundary(False)
    one.backward(loss_of(one(x), y))
    one.step()


def test_a_backward_that_is_refused_leaves_the_step_as_it_was(tmp_path: Path) -> None:
    """One more, where gradients are in files and cannot be added to."""
    files = {"states": str(tmp_path / "one"), "gradients": str(tmp_path / "one")}
    found = []
    for refused in (False, True):
        settings = config(1, memory=files) | {"batch": {"size": MICRO, "mean": "ranks"}}
        with polyreme.initialize(copy.deepcopy(network()), settings) as engine:
            x, y = batch(0, 0, 0)
            engine.set_boundary(True, extend=True)
            engine.backward(loss_of(engine(x), y))
            if refused:
                with pytest.raises(BatchError, match="a backward after the last one of a step"):
                    engine.backward(loss_of(engine(x), y))
            result = engine.step()
            found.append((result.grad_norm, engine.state_dict()["0.0.weight"].tolist()))
    assert found[0] == found[1]


def norm_on_one_rank(rank: int, world: int) -> None:
    engine = polyreme.initialize(network(), config(world))
    for i in range(2):
        x, y = batch(rank, 0, i)
        engine.backward(loss_of(engine(x), y))
    gradients = engine.gradients()
    gradients.scale_({"0.0.weight": 0.5})
    if rank == 0:
        assert gradients.norm > 0
    assert len(gradients.norms()) == len([*engine.module.parameters()])
    engine.step()


def test_gradients_that_are_scaled_are_measured_by_all() -> None:
    threads.run(2, norm_on_one_rank)


def test_a_loss_is_scaled_once() -> None:
    engine = polyreme.initialize(network(), config(1, precision={"compute": "fp16", "initial_scale": 64.0}))
    x, y = batch(0, 0, 0)
    loss = loss_of(engine(x.float()), y.float())
    with pytest.raises(BatchError, match="a second time"):
        engine.backward(engine.scale(loss))


def test_train_step_counts_its_own_micro_batches() -> None:
    """Whatever a loop said before of where its steps end."""
    found = []
    for said in (None, True, False):
        engine = polyreme.initialize(network(), config(1), loss_fn=loss_of)
        if said is not None:
            engine.set_boundary(said)
        parts = [batch(0, 0, i) for i in range(2)]
        result = engine.train_step(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        found.append((result.loss, result.grad_norm, engine.state_dict()["0.0.weight"].tolist()))
    assert found[0] == found[1] == found[2]
