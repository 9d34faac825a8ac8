"""What others wrote is loaded into an engine of any layout, and what an engine saved is given to others."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import polyreme
from polyreme.checkpoint.formats.dcp import write_dcp
from polyreme.checkpoint.open import open_source
from pool import Ranks

DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def made(config: dict[str, Any]) -> polyreme.Engine:
    model = runpy.run_path(str(DATA / "make.py"))["Tiny"]()
    settings = {"batch": {"size": 4}, "optimizer": {"name": "adamw"}, **config}
    return polyreme.initialize(model, settings, loss_fn=lambda output, _: output)


def go_over(rank: int, world_size: int, case: str, config: dict[str, Any], folder: Path) -> None:
    """DeepSpeed's checkpoint, loaded, saved, and written for torch.distributed.checkpoint, which is loaded
    again."""
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(DATA / f"{case}.safetensors").items():
        kind, _, name = key.partition("/")
        expected.setdefault(kind, {})[name] = tensor
    expected["master"] = {
        **{name: tensor.float() for name, tensor in expected["model"].items()},
        **expected["master"],
    }

    def holds(engine: polyreme.Engine, path: Path) -> None:
        weights = engine.state_dict(master=True)
        for name, tensor in expected["master"].items():
            assert torch.equal(weights[name].float(), tensor), name
        saved = open_source(engine.save(path))
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, tensor in expected[kind].items():
                assert torch.equal(saved.read(kind, name, 0, tensor.numel()).view(tensor.shape), tensor), name
                assert saved.read("step", name, 0, 1) == 3

    engine = made(config)
    engine.load(DATA / case)
    holds(engine, folder / "ours")
    if rank == 0:
        write_dcp(open_source(folder / "ours"), folder / "dcp")
    engine.mesh.dp.gather_objects(None)
    other = made({**config, "zero": {"stage": 1}})
    other.load(folder / "dcp")
    holds(other, folder / "again")
    words = torch.arange(20 // world_size).view(-1, 5) % 13
    assert engine.train_step({"words": words}).loss == other.train_step({"words": words}).loss


def test_deepspeed_to_ours_to_dcp_to_ours(ranks: Ranks, tmp_path: Path) -> None:
    cases = {
        "stage3-bf16": {"zero": {"stage": 2}, "precision": {"compute": "bf16"}},
        "stage2-fp32-elastic": {"zero": {"stage": 3}},
    }
    for case, config in cases.items():
        ranks(2, go_over, case, config, tmp_path / case)
