"""The DeepSpeed door on a GPU, beside plain torch there; every test has its twin on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed.accelerator import real_accelerator

WIDTH, MICRO, STEPS = 64, 8, 4


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the engine of this test lives; the process group that the door opens ends with the test."""
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield torch.device(request.param)
    if dist.is_initialized():
        dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def batch(i: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(i)
    x, y = torch.randn(MICRO, WIDTH, generator=draw), torch.randint(4, (MICRO,), generator=draw)
    return x.to(device), y.to(device)


def plain(device: torch.device) -> list[float]:
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for i in (2 * step, 2 * step + 1):
            x, y = batch(i, device)
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            losses.append(2 * loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def rest(engine: Any, device: torch.device) -> None:
    """Have all of an engine leave the device, and come back."""
    here = engine.polyreme.memory()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    engine.offload_states()
    if device.type == "cuda":
        assert before - torch.cuda.memory_allocated() >= here["states"] + here["parameters"]
    engine.reload_states()


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, {}), (3, {}), (3, OFFLOAD)])
def test_a_script_trains(
    device: torch.device, stage: int, more: dict[str, Any], compute: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, **more},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
    }
    if compute != "fp32":
        config[compute] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=network(), config=config)
    assert engine.device.type == device.type
    losses = []
    for i in range(2 * STEPS):
        x, y = batch(i, device)
        loss = nn.functional.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if i == STEPS - 1 and not more:
            rest(engine, device)
    wanted = plain(device)
    assert losses == pytest.approx(wanted, rel=1e-4 if compute == "fp32" else 5e-2)
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / f"global_step{STEPS}")
    engine.destroy()
