"""What scripts do between a forward, its backward and the next step: copies, writes, forwards for a look,
models that two engines want."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import polyreme
import training
from cover import some
from polyreme.distributed.work import Work
from polyreme.errors import ConfigError, ModelError
from polyreme.zero.bucket import Bucket
from pool import Ranks

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": None}


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def engine_of(
    model: nn.Module, world: int, stage: int, accumulation: int = 1, compute: str = "fp64", **sections: Any
) -> polyreme.Engine:
    settings = {"zero": {"stage": stage}, "precision": {"compute": compute}, "optimizer": SGD, **sections}
    return polyreme.initialize(model, training.config(world, accumulation, **settings), loss_fn=F.mse_loss)


def share(x: Tensor, rank: int, world: int, micro: int = 0, accumulation: int = 1) -> Tensor:
    return x.chunk(world)[rank].chunk(accumulation)[micro]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(training.SAMPLES, 6, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def looks(rank: int, world: int) -> None:
    """Forwards without gradients between a forward and its backward, of another size."""
    x, y = data()
    for stage in (0, 2, 3):
        engine, plain = engine_of(net(), world, stage, 2), net()
        for micro in range(2):
            loss = F.mse_loss(engine(share(x, rank, world, micro, 2)), share(y, rank, world, micro, 2))
            with torch.no_grad():
                engine(torch.ones(5 * training.SAMPLES, 6, dtype=torch.float64))
            loss.backward() if micro else engine.backward(loss)
        result = engine.step()
        F.mse_loss(plain(x), y).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
        assert (result.samples, result.grad_norm) == (training.SAMPLES, pytest.approx(norm, rel=1e-10))


class Output:
    """What a model returns that knows no dataclass."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.scale = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Output:
        return Output(self.net(x) * self.scale)


def objects(rank: int, world: int) -> None:
    """Tensors in the attributes of a plain object are found: at stage 3 parameters would not be there in the
    backward."""
    x, y = data()
    plain = Plain()
    F.mse_loss(plain(x).y, y).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for stage in (0, 3):
        for release in ("auto", "always"):
            engine = engine_of(
                Plain(), world, stage, zero={"stage": stage, "release": release, "min_bucket": 0}
            )
            loss = F.mse_loss(engine(share(x, rank, world)).y, share(y, rank, world))
            with torch.no_grad():
                engine(x)
            engine.backward(loss)
            assert engine.step().grad_norm == pytest.approx(norm, rel=1e-10)


def copies(rank: int, world: int) -> None:
    """A frozen copy of a model whose blocks are recomputed stays what it was, and can be pickled."""
    x, y = data()
    for activations in ("recompute", "host"):
        engine = engine_of(net(), world, 0, memory={"activations": activations})
        with engine.full_parameters() as module:
            frozen = copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(frozen, file)
        before = frozen(x).detach()
        engine.train_step((share(x, rank, world), share(y, rank, world)))
        assert torch.equal(frozen(x), before) and not torch.equal(engine.module(x), before)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), before)


def writes(rank: int, world: int, folder: Path) -> None:
    """A parameter that was given other numbers between steps, in place or as other memory, has them wherever
    it is asked for."""
    x, y = (share(t, rank, world) for t in data())
    for stage, compute, way in some(min(world, 2), (0, 1, 2), ("fp64", "bf16"), ("other memory", "in place")):
        case = f"{stage}-{compute}-{way}"

        def fresh(
            frozen: bool = False, way: str = way, compute: str = compute, stage: int = stage
        ) -> polyreme.Engine:
            model = net()
            model[0].weight.requires_grad_(not frozen)
            engine = engine_of(model, world, stage, compute=compute)
            engine.train_step((x, y))
            with torch.no_grad():
                if way == "in place":
                    model[0].weight.fill_(7.0)
                else:
                    model[0].weight.data = torch.full_like(model[0].weight.data, 7.0)
            return engine

        engine = fresh()
        engine.save(folder / case)
        saved = load_file(folder / case / "model.safetensors")["0.weight"]
        again = engine_of(net(), world, stage, compute=compute)
        again.load(folder / case)
        engine.load(folder / case)
        for found in (
            saved,
            again.state_dict()["0.weight"],
            engine.state_dict(master=True)["0.weight"],
            engine.module[0].weight,
        ):
            assert (found == 7).all(), case
        assert (fresh().state_dict()["0.weight"] == 7).all(), case
        with fresh().full_parameters(write=True) as module:
            assert (module[0].weight == 7).all(), case
        engine = fresh()
        engine.module[2].requires_grad_(False)
        engine.refresh()
        assert (engine.module[0].weight == 7).all() and (engine.state_dict()["0.weight"] == 7).all(), case
        engine = fresh(frozen=True)
        engine.train_step((x, y))
        engine.save(folder / case)
        assert (load_file(folder / case / "model.safetensors")["0.weight"] == 7).all(), case


def at_once(rank: int, world: int) -> None:
    """What is written right after a step counts alike on all ranks, also where another one has not yet read
    what the step gave it."""
    x, y = (share(t, rank, world) for t in data())
    publish = Bucket.publish

    def late(bucket: Bucket) -> Work:
        work = publish(bucket)
        time.sleep(0.05 * rank)
        return work

    with patch.object(Bucket, "publish", late):
        for stage in (1, 2):
            wide = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 1)).double()
            engine = engine_of(wide, world, stage)
            for _ in range(2):  # of which the second one would tell that ranks differ
                engine.train_step((x, y))
                with torch.no_grad():
                    for parameter in engine.module.parameters():
                        parameter.mul_(0.5)


def swapped(rank: int, world: int) -> None:
    """Units that change places through `.data` are a write, too."""
    x, y = (share(t, rank, world) * 0 for t in data())  # whose gradient is zero
    engine = engine_of(net(), world, 0, compute="bf16")
    weight = engine.module[0].weight.data
    weight[[0, 1]] = weight[[1, 0]]
    new = weight.clone()
    engine.train_step((x, y))
    torch.testing.assert_close(engine.state_dict()["0.weight"], new, rtol=0, atol=0)


def apart(rank: int, world: int) -> None:
    """What one rank alone writes to its replica, in a way that autograd does not count, is said within a few
    steps."""
    x, y = (share(t, rank, world) for t in data())
    for compute in ("fp64", "bf16"):
        engine = engine_of(net(), world, 0, compute=compute)
        for _ in range(3):
            engine.train_step((x, y))
        if rank == world - 1:
            engine.module[2].weight.data[0, 3] += 1e-2
        with pytest.raises(ModelError, match=r"has not the same numbers .*: 2\.weight \(over dp: rank"):
            for _ in range(10):
                engine.train_step((x, y))


def shared(rank: int, world: int) -> None:
    trunk = net()
    for stage in (0, 3):
        engine = engine_of(nn.Sequential(trunk, nn.Linear(1, 1).double()), world, stage)
        with pytest.raises(ModelError, match=r"0\.0\.weight belongs to another engine"):
            engine_of(nn.Sequential(trunk, nn.Linear(1, 2).double()), world, stage)
        del engine
        trunk = net()
    engine = engine_of(trunk, world, 0)
    del engine
    assert engine_of(trunk, world, 0).state.step == 0  # the first one is gone

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)

    model = net()
    with pytest.raises(ConfigError, match="momentum of the optimizer that it was made with"):
        polyreme.initialize(
            model, training.config(world), lr_scheduler=make(torch.optim.AdamW(model.parameters()))
        )
    polyreme.initialize(net(), training.config(world), lr_scheduler=make)


def all_of_it(rank: int, world: int, folder: Path) -> None:
    looks(rank, world)
    objects(rank, world)
    copies(rank, world)
    writes(rank, world, folder)
    at_once(rank, world)
    swapped(rank, world)
    if world > 1:
        apart(rank, world)
    shared(rank, world)


def in_inference_mode(rank: int, world: int, stage: int, memory: dict[str, str]) -> None:
    """A first forward under torch.inference_mode makes memory that steps write to later."""
    (x, y), plain = data(), net()
    engine = engine_of(net(), world, stage, memory=memory, mesh={"shared_memory": stage != 2})
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with torch.inference_mode():
        assert torch.allclose(engine(x), plain(x))
        with engine.full_parameters() as whole:
            assert torch.allclose(whole(x), plain(x))
    for _ in range(2):
        engine.train_step((share(x, rank, world), share(y, rank, world)))
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
    with torch.inference_mode():
        assert torch.allclose(engine(x), plain(x), rtol=1e-10)


def transforms(rank: int, world: int, memory: dict[str, str]) -> None:
    """torch.func: what maps over samples works, and what differentiates says where it does."""
    (x, _), plain = data(), net()
    engine = engine_of(net(), world, 3, memory=memory)

    def output(weight: Tensor, model: nn.Module) -> Tensor:
        return torch.func.functional_call(model, {"0.weight": weight}, (x,)).sum()

    weight = plain[0].weight.detach().clone()
    if world > 1 or memory:  # else nothing is gathered
        with pytest.raises(ModelError, match=r"torch\.func.*full_parameters"):
            torch.func.grad(output)(weight, engine.module)
    with engine.full_parameters() as whole:
        found = torch.func.grad(output)(weight, whole)
    assert torch.allclose(found, torch.func.grad(output)(weight, plain))
    assert torch.allclose(torch.func.vmap(engine.module)(x[None]), plain(x)[None])


def again(rank: int, world: int) -> None:
    """A parameter is made a parameter once more, as parametrizations do it."""
    for stage in (0, 3):
        engine = engine_of(net(), world, stage)
        for make in (nn.Parameter, lambda p: nn.Parameter(p, requires_grad=False)):
            with pytest.raises(ModelError, match=r"0\.weight"):
                make(engine.module[0].weight)
        with pytest.raises(ModelError, match=r"0\.weight"):
            nn.utils.parametrizations.weight_norm(engine.module[0])


MEMORY = [{}, {"params": "host"}, {"params": "host", "states": "host"}]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "memory"), [(0, {}), (2, {}), *((3, memory) for memory in MEMORY)])
def test_training_goes_on_after_inference_mode(
    ranks: Ranks, world: int, stage: int, memory: dict[str, str]
) -> None:
    ranks(world, in_inference_mode, stage, memory)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("memory", MEMORY[:2])
def test_transforms_of_functions(ranks: Ranks, world: int, memory: dict[str, str]) -> None:
    ranks(world, transforms, memory)


def test_a_parameter_is_not_made_one_again(ranks: Ranks) -> None:
    ranks(2, again)


@pytest.mark.parametrize("world", [1, 2])
def test_what_scripts_do_between_steps_counts_or_is_refused(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, all_of_it, tmp_path)


def generates(rank: int, world: int) -> list[Any]:
    """A model of encoder and decoder at stage 3, whose generation calls the encoder by itself."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    plain = copy.deepcopy(model).eval()
    engine = polyreme.initialize(model, {"batch": {"size": 2 * world}, "zero": {"stage": 3, "min_bucket": 0}})
    ids = torch.randint(2, 32, (2, 6), generator=torch.Generator().manual_seed(rank))
    engine.module.eval()
    with torch.no_grad():  # before any forward of the model
        states = engine.module.encoder(input_ids=ids).last_hidden_state
        assert torch.equal(states, plain.encoder(input_ids=ids).last_hidden_state)
    if world > 1:  # with gradients it has no step
        with pytest.raises(ModelError, match="whose numbers are not in memory"):
            engine.module.encoder(input_ids=ids)
    options = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "synced_gpus": True}
    found = engine.module.generate(input_ids=ids, **options)
    assert torch.equal(found, plain.generate(input_ids=ids, **options | {"synced_gpus": False}))
    engine.module.train()
    result = engine.train_step({"input_ids": ids, "labels": ids.clone()})
    released = [p.untyped_storage().nbytes() == 0 for p in engine.module.encoder.block.parameters()]
    return [result.loss, any(released)]


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_a_model_are_called_without_gradients(ranks: Ranks, world: int) -> None:
    found = ranks(world, generates)
    assert all(each == found[0] for each in found)
