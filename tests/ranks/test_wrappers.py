"""Models that others have wrapped: taken out, so that a checkpoint has the plain model's names, or
refused."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import models
import polyreme
import training
from examples import ALL
from polyreme.errors import ModelError
from pool import Ranks

Wrap = Callable[[nn.Module], nn.Module]


def compiled_blocks(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    return model


def recomputed_blocks(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model


WRAPS: dict[str, Wrap] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DDP": DistributedDataParallel,
    "DDP of a compiled model": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "a compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DataParallel": nn.DataParallel,
    "compiled blocks": compiled_blocks,
    "recomputed blocks": recomputed_blocks,
    "compiled in place": compiled_in_place,
}


def some(stage: int, world: int) -> list[str]:
    """What is tried: all wrappers over ranks at stage 3, and each with one rank and at stage 2."""
    names = list(WRAPS)
    if stage == 0:
        return names[:2]
    return names if ALL in os.environ or (stage, world) == (3, 2) else names[(stage + world) % 2 :: 2]


def wrapped(rank: int, world: int, folder: Path) -> None:
    """Trains each wrapped model beside the plain one, and reads its checkpoint with transformers."""
    batch = models.share(models.tokens(training.SAMPLES), rank, world)
    for stage, dtype in ((0, "fp64"), (3, "fp64"), (2, "bf16")):
        config = training.config(world, zero={"stage": stage}, precision={"compute": dtype})
        plain = polyreme.initialize(models.build("llama"), config)
        expected = [plain.train_step(batch).loss for _ in range(2)]
        for name in some(stage, world):
            wrap = WRAPS[name]
            model = wrap(models.build("llama"))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                engine = polyreme.initialize(model, config)
            assert any("the model was taken out of" in str(w.message) for w in said) == (rank == 0)
            assert [engine.train_step(batch).loss for _ in range(2)] == expected, (name, stage, dtype)
            assert engine.state_dict().keys() == plain.state_dict().keys(), name
            if dtype != "bf16":
                sent = engine.traffic()
                with engine.full_parameters():
                    # the wrapper is the plain module now
                    assert torch.equal(model(**batch).loss, engine.module(**batch).loss), name
                assert stage or engine.traffic() == sent
        path = engine.save(folder / f"{stage}-{dtype}")
        loaded, info = models.read_back(path)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert all(
            torch.equal(whole, loaded[name]) for name, whole in engine.state_dict(master=False).items()
        )


@pytest.mark.parametrize("world", [1, 2])
def test_wrapped_models_train_and_save_as_the_plain_one(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, wrapped, tmp_path)


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def with_a_part(model: nn.Module) -> nn.Module:
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.data, mesh))
        return model

    def hooked(model: nn.Module) -> nn.Module:
        made = torch.compile(model, backend="eager")
        made.register_forward_hook(lambda *_: None)
        return made

    cases: dict[str, tuple[Wrap, str]] = {
        "FSDP": (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            "zero.stage = 3",
        ),
        "fully_shard": (lambda model: fully_shard(model, mesh=mesh), "zero.stage = 3"),
        "a block of fully_shard": (
            lambda model: (fully_shard(model.model.layers[0], mesh=mesh), model)[1],
            "model.layers.0 was given to",
        ),
        "a parameter that is cut": (with_a_part, "parameter lm_head.weight is a DTensor"),
        "hooks": (hooked, "hooks are registered on a OptimizedModule"),
    }
    for name, (wrap, says) in cases.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = wrap(models.build("llama", torch.float32))
        with pytest.raises(ModelError) as raised:
            polyreme.initialize(model, training.config(world))
        assert says in str(raised.value), name
    dist.barrier()


def test_divided_models_are_refused(ranks: Ranks) -> None:
    ranks(2, refused)


def test_a_function_may_build_a_compiled_model() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    config = {"batch": {"size": 2}, "precision": {"compute": "fp64"}}
    models_given: list[Any] = [
        lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend="eager"),
        [torch.compile(copy.deepcopy(layer), backend="eager") for layer in layers],
        [torch.compile(copy.deepcopy(layers[0]), backend="eager"), lambda: nn.Linear(4, 1)],
    ]
    for given in models_given:
        with pytest.warns(UserWarning, match="compile = true"):
            engine = polyreme.initialize(given, config, loss_fn=nn.functional.mse_loss)
        assert sorted(engine.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        engine.train_step((torch.ones(2, 4), torch.ones(2, 1)))
