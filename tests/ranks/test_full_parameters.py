"""The model in the user's hands: reading and writing parameters between steps works as it does in plain
PyTorch, or raises ModelError."""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
import polyreme
import probe
import threads
import training
from cover import ALL
from polyreme.errors import ModelError
from polyreme.step.precision import DTYPES
from pool import Ranks

CASE = "llama"
SIZES = (1, 2)


def make(world: int, compute: str = "fp64", case: str = CASE, **sections: Any) -> polyreme.Engine:
    config = training.config(world, precision={"compute": compute}, **sections)
    return polyreme.initialize(models.build(case, torch.float32), config, loss_fn=models.CASES[case][2])


def step(engine: polyreme.Engine, at: int = 0, case: str = CASE) -> polyreme.StepResult:
    dp = engine.mesh.dp
    return engine.train_step(
        models.share(models.batch_of(case, training.SAMPLES, at, torch.float32), dp.rank, dp.size)
    )


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
    "load_state_dict": lambda module, p: module.load_state_dict(
        {name: torch.zeros(q.shape) for name, q in module.named_parameters()}
    ),
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
                assert (
                    p.shape == torch.zeros_like(p).shape
                    and p.numel() == p.nelement()
                    and p.dtype == torch.float64
                    and len(p) == len(p)
                )
                assert p.requires_grad and p.grad is None and p.is_leaf and p in {p}
            assert sum(p.numel() for p in module.parameters()) == engine.parameter_count
            assert step(engine, number).loss > 0
        engine.close()


@pytest.mark.parametrize("world", SIZES)
def test_released_parameters_raise(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, touch_released, tmp_path)


def write_all(module: nn.Module, how: str) -> None:
    """Change weights as scripts do; `how` names the call."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, dtype=torch.float64).to(p.dtype)
            if how == "copy_":
                p.copy_(noise)
            elif how == "data":
                p.data.clamp_(-0.01, 0.01)
            elif how == "numpy":
                p.detach().view(torch.int16 if p.dtype == torch.bfloat16 else p.dtype).numpy().fill(0)
            elif how == "given":
                p.data = noise
            elif how == "init":
                nn.init.uniform_(p)
        if how == "foreach":
            torch._foreach_mul_(list(module.parameters()), 0.5)
        elif how == "load":
            module.load_state_dict({name: p * 0.5 for name, p in module.state_dict().items()})
        elif how == "one":
            next(iter(module.parameters())).data.view(-1)[5] = 0.25


HOWS = ("copy_", "data", "numpy", "given", "init", "foreach", "load", "one")


def write(rank: int, world: int, folder: Path) -> None:
    """Each way of writing in each home, on one rank or on two."""
    file = str(folder / "tier")
    homes = (
        *(("fp64", 2, "device"), ("bf16", 0, "device"), ("bf16", 1, file)),
        *(("fp64", 3, "device"), ("bf16", 3, "host"), ("bf16", 3, file)),
    )
    for at, (compute, stage, home) in enumerate(homes):
        memory = {"states": home, **({"params": home} if stage == 3 else {})}
        engine = make(world, compute, zero={"stage": stage}, memory=memory)
        step(engine)
        plain = models.build(CASE, torch.float32).to(DTYPES[compute])  # in which the same is done
        for number, how in enumerate(HOWS):
            if (at + number + world) % 2 and ALL not in os.environ:
                continue
            whole, before = engine.state_dict(), engine.state_dict(master=True)
            plain.load_state_dict(whole)
            write_all(plain, how)
            expected = plain.state_dict()
            if number % 2 or stage == 3 or (world > 1 and home != "device"):
                with engine.full_parameters(write=True) as module:
                    write_all(module, how)
                    kept = module.state_dict()
                after = engine.state_dict()
                assert all(torch.equal(t, after[name]) for name, t in kept.items())
            else:
                write_all(engine.module, how)
                probe.take_in_writes(engine)
                after = engine.state_dict()
            masters = engine.state_dict(master=True)
            for name, tensor in expected.items():
                assert torch.equal(after[name], tensor), (compute, stage, home, how, name)
                same = tensor == whole[name]
                assert torch.equal(masters[name][~same], tensor[~same].to(masters[name].dtype)), (
                    compute,
                    stage,
                    home,
                    how,
                    name,
                )
                assert torch.equal(masters[name][same], before[name][same]), (compute, stage, home, how, name)
        assert step(engine, 1).loss > 0
        engine.close()


@pytest.mark.parametrize("world", SIZES)
def test_written_weights_reach_masters(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, write, tmp_path)


def write_outside(rank: int, world: int, folder: Path) -> None:
    """What is written between steps counts in the next one as if it had been there from the start."""
    for compute, stage, home, hows in (
        ("fp64", 2, "device", ["data"]),
        ("bf16", 0, "device", ["copy_", "one"]),
        ("bf16", 1, "device", ["given"]),
        ("fp32", 2, str(folder / "tier"), ["load", "data"]),
    ):
        for how in hows:
            one, other = (
                make(world, compute, zero={"stage": stage}, memory={"states": home if e else "device"})
                for e in (1, 0)
            )
            for engine in (one, other):
                step(engine)
            with torch.no_grad():
                write_all(one.module, how)
            with other.full_parameters(write=True) as module:
                write_all(module, how)
            for number in (1, 2):
                assert step(one, number).loss == step(other, number).loss, (compute, stage, home, how)
            found, expected = one.state_dict(master=True), other.state_dict(master=True)
            assert all(torch.equal(t, found[name]) for name, t in expected.items()), (
                compute,
                stage,
                home,
                how,
            )
            one.close()


@pytest.mark.parametrize("world", SIZES)
def test_writes_between_steps_count(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, write_outside, tmp_path)


def misuse(rank: int, world: int) -> None:
    for stage in (0, 3):
        engine = make(world, "bf16", zero={"stage": stage})
        before = engine.state_dict(master=True)
        with pytest.raises(KeyError), engine.full_parameters(write=True) as module:
            write_all(module, "init")
            raise KeyError
        with engine.full_parameters(write=True) as module:
            with pytest.raises(ModelError, match="inside of another"), engine.full_parameters(write=True):
                pass
            with pytest.raises(ModelError, match="after the with block"):
                step(engine)
        assert all(torch.equal(t, before[name]) for name, t in engine.state_dict(master=True).items())
        with (
            pytest.raises(ModelError, match=r"precision\.compute"),
            engine.full_parameters(write=True) as module,
        ):
            module.double()
        with engine.full_parameters(write=True) as module, torch.no_grad():
            for p in module.parameters():
                p.fill_(rank)
            twin = copy.deepcopy(module)
        assert all(
            not p.any() for name, p in engine.state_dict().items() if name in dict(module.named_parameters())
        ), "rank 0's count"
        twin(**models.tokens(2))
        assert step(engine).loss > 0
    if world > 1:
        engine = make(world, "fp32", zero={"stage": 2})
        step(engine)
        with torch.no_grad():
            engine.module.lm_head.weight.mul_(1.0 + rank)
        with pytest.raises(ModelError, match=r"lm_head\.weight has not the same numbers"):
            step(engine)


def write_to_what_is_read(rank: int, world: int) -> None:
    """At every stage the first of the parameters is named, however it was written to."""
    for stage, compute, memory in (
        (0, "bf16", {}),
        (2, "fp64", {}),
        (3, "bf16", {}),
        (3, "fp32", {"params": "host"}),
    ):
        engine = make(world, compute, zero={"stage": stage}, memory=memory)
        name = "model.layers.1.mlp.up_proj.weight"
        for how in ("add_", "data", "numpy", "given"):
            with (
                pytest.raises(ModelError, match=rf"parameter {re.escape(name)} changed .*write=True"),
                engine.full_parameters() as module,
            ):
                weight = module.get_parameter(name)
                if how == "add_":
                    with torch.no_grad():
                        weight[0, 0].add_(1)
                elif how == "data":
                    weight.data[-1, -1] += 1
                elif how == "numpy":
                    weight.detach().view(torch.uint8).numpy()[0, 0] ^= 1
                else:
                    weight.data = weight.data + 1
        with engine.full_parameters() as module:  # what is put back has not changed
            weight = module.get_parameter(name).data
            before = weight.clone()
            weight.zero_()
            weight.copy_(before)
        assert step(engine).loss > 0
        engine.close()


@pytest.mark.parametrize("world", SIZES)
def test_writes_to_what_is_read_raise(ranks: Ranks, world: int) -> None:
    ranks(world, write_to_what_is_read)


@pytest.mark.parametrize("world", SIZES)
def test_writes_that_cannot_be_meant_raise(ranks: Ranks, world: int) -> None:
    ranks(world, misuse)


def call_a_stage(rank: int, world: int) -> None:
    for stage, tied in ((0, False), (3, True)):
        case = "gpt2" if tied else CASE
        engine = make(world, case=case, mesh={"pp": 2}, zero={"stage": stage})
        step(engine, 0, case)
        ids = models.tokens(2)["input_ids"]
        inner = engine.module.transformer if tied else engine.module.model
        with engine.full_parameters() as whole:
            for call in (
                lambda: whole(ids),
                lambda: whole.generate(ids, max_new_tokens=2),
                lambda: inner(ids),
            ):
                with pytest.raises(ModelError, match=r"engine\.eval_step"), torch.no_grad():
                    call()
        absent = next(
            value
            for module in engine.module.modules()
            for value in vars(module).values()
            if isinstance(value, Tensor)
        )
        for touch in (
            absent.norm,
            absent.detach,
            absent.zero_,
            lambda: torch.save(absent, io.BytesIO()),
            lambda: copy.deepcopy(absent),
        ):
            with pytest.raises(ModelError, match="which another pipeline stage has"):
                touch()
        for whole_of in (
            engine.module.state_dict,
            lambda: torch.save(engine.module, io.BytesIO()),
            lambda: copy.deepcopy(engine.module),
        ):
            with pytest.raises(ModelError, match=r"only its pipeline stage|another pipeline stage has"):
                whole_of()
        assert engine.eval_step(models.batch_of(case, training.SAMPLES, 0)).loss > 0
        with engine.full_parameters(write=True) as module, torch.no_grad():
            for p in module.parameters():
                p.mul_(0.5)
        assert step(engine, 1, case).loss > 0


def test_a_stage_is_not_called_as_the_model(ranks: Ranks) -> None:
    ranks(2, call_a_stage)


class Penalised(nn.Module):
    """A model that returns a penalty over its weights beside its output, where it is `own`."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.net = own, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = sum((p.pow(2).sum() for p in self.parameters()), x.new_zeros(())) if self.own else x.sum()
        return self.net(x), penalty


def penalised(rank: int, world: int, way: str) -> Any:
    """The losses with a penalty in the model's forward, or the error of one in the loss."""
    model, engines = Penalised(way == "forward"), list[Any]()

    def loss_fn(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        penalty = output[1]
        if way == "loss":
            penalty = sum((p.pow(2).sum() for p in model.parameters()), y.new_zeros(()))
        elif way == "full_parameters":
            with engines[0].full_parameters() as whole:
                penalty = sum((p.pow(2).sum() for p in whole.parameters()), y.new_zeros(()))
        return nn.functional.mse_loss(output[0], y) + 0.01 * penalty

    config = {
        "batch": {"size": 8},
        "precision": {"compute": "fp64"},
        "zero": {"stage": 3, "min_bucket": 0, "persistence_threshold": 0},
    }
    engines.append(polyreme.initialize(model, config, loss_fn=loss_fn))
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, n, generator=draw).double().chunk(world)[rank] for n in (6, 4))
    try:
        return [engines[0].train_step((x, y)).loss for _ in range(3)]
    except ModelError as error:
        return str(error)


def test_a_penalty_over_sharded_weights_names_what_works() -> None:
    """The memory of whole parameters is gone in the backward, which read it."""
    assert threads.run(2, penalised, "forward")[0] == pytest.approx(
        threads.run(1, penalised, "forward")[0], abs=1e-10
    )
    for way in ("loss", "full_parameters"):
        for told in threads.run(2, penalised, way):
            assert "optimizer.weight_decay" in told and "model's own forward" in told, told
            assert "between steps" in told
