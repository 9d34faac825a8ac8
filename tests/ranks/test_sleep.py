"""An engine that sleeps between steps: what leaves the device, what still works, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from polyreme.errors import BatchError, ModelError
from polyreme.zero.bucket import MemoryKind
from pool import Ranks

WIDTH, STEPS = 64, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    model[1].requires_grad_(False)
    return model


def batch(rank: int, world: int, step: int) -> Tensor:
    return torch.randn(4 // world, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def engine_of(stage: int, compute: str) -> polyreme.Engine:
    config = {"zero": {"stage": stage, "min_bucket": 0}, "batch": {"size": 4}, "optimizer": {"lr": 0.01}}
    config["precision"] = {"compute": compute}
    return polyreme.initialize(network(), config, loss_fn=nn.functional.mse_loss)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(ModelError, match=r"engine\.wake\(\)"):
        call()


def asleep(engine: polyreme.Engine, x: Tensor, kinds: tuple[MemoryKind, ...], folder: Path) -> None:
    """Sleep, see what is gone and what is refused, and wake."""
    before = engine.memory()
    engine.sleep(*kinds)
    after = engine.memory()
    if not kinds or "states" in kinds:
        assert after["states"] < before["states"]
        refused(lambda: dict(engine.optimizer.state))
        refused(lambda: engine.numbers(engine.module[0][0].weight).whole("exp_avg"))
    if not kinds or "params" in kinds:
        assert engine.mesh.world_size > 1 or not after["parameters"]  # ranks that share memory keep it
        refused(lambda: engine(x))
        refused(lambda: engine.module[0][0].weight.sum())
        refused(engine.state_dict)
    else:
        assert not engine(x).isnan().any() and len(engine.state_dict()) == 6
    refused(lambda: engine.train_step((x, x)))
    refused(lambda: engine.save(folder))
    refused(lambda: engine.load(folder))
    refused(engine.refresh)
    engine.sleep(*kinds)  # again is harmless
    assert set(engine.wake()) >= set(kinds) and engine.wake() == ()
    assert {**engine.memory(), "gradients": 0} == {**before, "gradients": 0}


def trained(rank: int, world: int, stage: int, compute: str, folder: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for kinds in (None, (), ("states",), ("params", "gradients")):
        engine = engine_of(stage, compute)
        for step in range(STEPS):
            x = batch(rank, world, step)
            if kinds is not None and step:
                asleep(engine, x, kinds, folder)
            engine.train_step((x, x))
        found.append(engine.state_dict(master=True))
        engine.sleep()
        engine.close()
        if stage < 3:
            assert torch.equal(
                engine.module[0][0].weight, found[-1]["0.0.weight"].to(engine.module[0][0].weight.dtype)
            )
    for weights in found[1:]:
        assert all(torch.equal(weights[name], found[0][name]) for name in weights)


def test_sleep_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for world, stage, compute in (1, 1, "bf16"), (2, 2, "fp32"), (2, 3, "bf16"):
        ranks(world, trained, stage, compute, tmp_path / str(stage))


def written(rank: int, world: int) -> None:
    """What a script writes to weights while states are away counts, and the middle of a step is no time."""
    engine = engine_of(2, "bf16")
    x = batch(rank, world, 0)
    engine.train_step((x, x))
    engine.sleep("states", "masters")
    with torch.no_grad():
        engine.module[0][0].weight.fill_(0.5)
    engine.wake()
    assert (engine.state_dict(master=True)["0.0.weight"] == 0.5).all()
    engine.backward(engine(x).square().mean())
    with pytest.raises(BatchError, match="middle of a step"):
        engine.sleep()


def test_writes_while_asleep(ranks: Ranks) -> None:
    ranks(2, written)


def offloaded(rank: int, world: int, stage: int, move: bool, folder: Path) -> Tensor:
    """Weights after steps with DeepSpeed's calls between them, and a checkpoint meanwhile."""
    section: dict[str, Any] = {"train_batch_size": 2, "bf16": {"enabled": True}}
    section |= {"zero_optimization": {"stage": stage}, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    engine, optimizer, *_ = deepspeed.initialize(model=network(), config=section)
    for step in range(STEPS):
        x = batch(rank, 4, step)
        engine.backward(engine(x).square().mean())
        engine.step()
        if not move:
            continue
        if step == 0:
            engine.offload_states()
        elif step == 1:
            states = {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}
            optimizer.offload_states(
                include=states, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True
            )
            engine(x)
            engine.save_checkpoint(folder)
        if step < 2:
            refused(lambda: dict(optimizer.state))
            engine.reload_states(non_blocking=True)
    if move:
        engine.offload_states()
        engine.load_checkpoint(folder)
        engine.backward(engine(batch(rank, 4, 2)).square().mean())
        engine.step()
        with pytest.raises(ArgumentError, match="states go to host memory"):
            engine.offload_states(device="nvme")
        engine.offload_states(include=[])
        engine.offload_states(device="none")
    found = engine.module_state_dict()["0.0.weight"]
    engine.destroy()
    return found


def test_deepspeeds_calls(ranks: Ranks, tmp_path: Path) -> None:
    for stage in (1, 3):
        wanted, found = (ranks(2, offloaded, stage, move, tmp_path / str(stage)) for move in (False, True))
        for weights in (*wanted, *found):
            assert torch.equal(weights, wanted[0])


def not_offloaded(rank: int, world: int) -> None:
    cpu = {"stage": 3, "offload_param": {"device": "cpu"}}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(
        model=network(), config={"train_batch_size": 2, "zero_optimization": cpu, **adam}
    )
    with pytest.raises(OrderError, match="offload_param"):
        engine.offload_states()
    engine.destroy()


def test_what_cannot_leave(ranks: Ranks) -> None:
    ranks(2, not_offloaded)
