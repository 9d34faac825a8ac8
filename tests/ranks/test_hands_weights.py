"""The model in the user's hands: reading and writing parameters between steps works as it does in plain PyTorch, or raises ModelError."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import models
import polyreme
import training
from polyreme.errors import ModelError
from pool import Ranks

CASE = "llama"
SIZES = (1, 2)


def make(world: int, compute: str = "fp64", case: str = CASE, **sections: Any) -> polyreme.Engine:
    config = training.config(world, precision={"compute": compute}, **sections)
    return polyreme.initialize(models.build(case, torch.float32), config, loss_fn=models.CASES[case][2])


def step(engine: polyreme.Engine, at: int = 0, case: str = CASE) -> polyreme.StepResult:
    dp = engine.mesh.dp
    return engine.train_step(models.share(models.batch_of(case, training.SAMPLES, at, torch.float32), dp.rank, dp.size))


RELEASED: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "norm": lambda module, p: p.norm(),
    "clone": lambda module, p: p.clone(),
    "detach": lambda module, p: p.detach().numpy(),
    "data": lambda module, p: p.data,
    "assignment to data": lambda module, p: setattr(p, "data", torch.zeros(p.shape)),
    "numpy": lambda module, p: np.asarray(p),
    "dlpack": lambda module, p: np.from_dlpack(p),
    "to": lambda module, p: p.to(torch.float16),
    "item": lambda module, p: p[0, 0],
    "comparison": lambda module, p: p == 0,
    "iteration": lambda module, p: list(p),
    "operator": lambda module, p: torch.ops.aten.add(p, 1),
    "linear": lambda module, p: nn.functional.linear(torch.zeros(1, p.shape[1]), p),
    "foreach": lambda module, p: torch._foreach_lerp_([p], [torch.zeros(p.shape)], 0.5),
    "init": lambda module, p: nn.init.normal_(p),
    "clip_by_value": lambda module, p: p.clamp_(-1, 1),
    "vector": lambda module, p: nn.utils.parameters_to_vector([p]),
    "vector_to": lambda module, p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "deepcopy of it": lambda module, p: copy.deepcopy(p),
    "deepcopy": lambda module, p: copy.deepcopy(module),
    "copy": lambda module, p: copy.copy(p),
    "save": lambda module, p: torch.save(p, io.BytesIO()),
    "save of the module": lambda module, p: torch.save(module, io.BytesIO()),
    "state_dict": lambda module, p: module.state_dict(),
    "save of the variables": lambda module, p: torch.save(module.state_dict(keep_vars=True), io.BytesIO()),
    "load_state_dict": lambda module, p: module.load_state_dict({name: torch.zeros(q.shape) for name, q in module.named_parameters()}),
    "half": lambda module, p: module.half(),
    "share_memory": lambda module, p: module.share_memory(),
    "resize": lambda module, p: module.resize_token_embeddings(100),  # type: ignore[operator]
}


def touch_released(rank: int, world: int, folder: Path) -> None:
    for home in ("device", "host", str(folder / "tier")):
        if world == 1 and home == "device":
            continue  # the shard of one rank is the whole
        engine = make(world, zero={"stage": 3}, memory={"params": home, "states": home})
        for number in range(2):
            module = engine.module
            for p in (module.model.embed_tokens.weight, module.model.layers[1].mlp.up_proj.weight):
                with torch.no_grad():
                    for what, touch in RELEASED.items():
                        with pytest.raises(ModelError, match=r"full_parameters\(\)") as caught:
                            touch(module, p)
                        assert "weight" in str(caught.value), what
                assert isinstance(p, nn.Parameter) and "released" in repr(p) and "released" in f"{p}"
                assert p.shape == torch.zeros_like(p).shape and p.numel() == p.nelement() and p.dtype == torch.float64 and len(p) == len(p)
                assert p.requires_grad and p.grad is None and p.is_leaf and p in {p}
            assert sum(p.numel() for p in module.parameters()) == engine.parameters
            assert step(engine, number).loss > 0
        engine.close()


@pytest.mark.parametrize("world", SIZES)
def test_released_parameters_raise(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, touch_released, tmp_path)
