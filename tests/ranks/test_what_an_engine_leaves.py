"""An engine that nobody has any more leaves neither its model nor its threads behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyreme
from polyreme.distributed.work import UNSETTLED
from pool import Ranks

WIDTH, TIMEOUT = 16, 60


def settings(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        f"stage {stage}": {"zero": {"stage": stage, "min_bucket": 0}} for stage in (0, 2, 3)
    }
    cases["states in files"] = {**cases["stage 2"], "memory": {"states": str(folder / "states")}}
    cases["all in files"] = {
        **cases["stage 3"],
        "memory": {"states": str(folder / "all"), "params": str(folder / "all")},
    }
    cases["activations in files"] = {
        **cases["stage 3"],
        "memory": {"activations": str(folder / "activations")},
    }
    cases["recomputation"] = {**cases["stage 3"], "memory": {"activations": "recompute"}}
    cases["accumulation"] = {**cases["stage 2"], "batch": {"size": 4, "micro": 1}}
    if world > 1:
        cases["stages of a pipeline"] = {"mesh": {"pp": world}}
    return cases


def left(rank: int, world: int, folder: Path) -> list[str]:
    """What is left of engines that have trained, by case."""
    found = []
    for name, case in settings(folder, world).items():
        before, held = set(threading.enumerate()), [*UNSETTLED._held]
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        engine = polyreme.initialize(model, {"batch": {"size": 4}, **case}, loss_fn=nn.functional.mse_loss)
        x = torch.ones(4 // engine.mesh.dp.size, WIDTH)
        engine.train_step((x, x))
        engine.wait()
        if "pipeline" not in name:
            engine(x[:1])  # whose backward does not come
        watched = {"engine": weakref.ref(engine), "model": weakref.ref(model)}
        threads = [
            each
            for each in threading.enumerate()
            if each not in before and each.name.startswith(("tier", "offload"))
        ]
        del engine, model
        gc.collect()
        for each in threads:
            each.join(TIMEOUT)
        until = time.monotonic() + TIMEOUT
        while (
            own := len([each for each in UNSETTLED._held if all(each is not other for other in held)])
        ) and time.monotonic() < until:
            time.sleep(1e-3)  # the others drop their engines, too
            UNSETTLED.sweep()
        found += [f"{name}: {own} inputs of exchanges"] * bool(own)
        found += [f"{name}: {what}" for what, known in watched.items() if known() is not None]
        found += [f"{name}: thread {each.name}" for each in threads if each.is_alive()]
        found += [] if threads or "files" not in name else [f"{name}: no threads to look at"]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_is_gone_leaves_nothing(ranks: Ranks, tmp_path: Path, world: int) -> None:
    assert ranks(world, left, tmp_path) == [[]] * world
