"""What a script that had a DistributedDataParallel asks of an engine by its names: as meant, or an error at
once that names the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyreme
import threads
from polyreme.errors import ModelError, PolyremeError

FP64: dict[str, Any] = {"dtype": torch.float64}


class Net(nn.Module):
    """Layers with a tied weight, batch statistics and dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 8, **FP64), nn.Linear(8, 6, **FP64)
        self.norm, self.drop = nn.BatchNorm1d(8, **FP64), nn.Dropout(0.5)
        self.again = nn.Linear(6, 8, bias=False, **FP64)
        self.again.weight = self.up.weight
        self.frozen = nn.Parameter(torch.rand(6, **FP64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.norm(self.up(x) + self.again(x)))) * self.frozen


def engine_of(stage: int = 0, seed: int = 0, **config: Any) -> Any:
    base = {
        "batch": {"size": 8},
        "optimizer": {"clip": None},
        "precision": {"compute": "fp64"},
        "zero": {"stage": stage, "persistence_threshold": 0},
        "batch_norm": "sync",
    }
    made = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    return polyreme.initialize(Net(seed), base | config, optimizer=made, loss_fn=nn.functional.mse_loss)


def share(rank: int, size: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), **FP64)
    return x.chunk(size)[rank], x.chunk(size)[rank].cos()


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(PolyremeError) as caught:
        call()
    return str(caught.value)


def loads(rank: int, size: int, stage: int, compute: str, memory: dict[str, str]) -> None:
    precision = {"compute": compute, "reduce": "fp32"} if compute == "bf16" else {"compute": compute}
    config = {"precision": precision, "memory": memory, "batch_norm": "sync"}
    source, engine = engine_of(stage, 1, **config), engine_of(stage, 2, **config)
    kind = torch.bfloat16 if compute == "bf16" else torch.float64
    data = [tuple(t.to(kind) for t in share(rank, size, step)) for step in range(4)]
    for each in source, engine:
        each.eval()  # without dropout
        each.train_step(data[0])
    keep = source.state_dict(rank0_only=True, master=True)
    assert engine.load_state_dict(keep) == ([], [])
    plain = Net(2)
    if rank == 0:
        plain.load_state_dict(keep)
    for name, tensor in engine.state_dict(master=True).items():
        assert rank > 0 or torch.equal(tensor, keep[name]), name
    for name, tensor in engine.state_dict().items():
        assert rank > 0 or torch.equal(tensor, keep[name].to(tensor.dtype)), name
    with engine.full_parameters() as whole:
        sent = {n: p.clone() for n, p in whole.named_parameters()}
    assert rank > 0 or all(torch.equal(sent[name], keep[name].to(sent[name].dtype)) for name in sent)
    engine.train_step(data[1])
    before = engine.state_dict(master=True)
    for wrong, way in (
        ({**before, "up.weight": torch.ones(2, 2)}, r"up.weight is of shape \[2, 2\], not"),
        ({**before, "other": torch.ones(2)}, "other not of this model"),
        ({name: before[name] for name in before if name != "down.bias"}, "down.bias missing"),
        ({f"module.{name}": before[name] for name in before}, re.escape("name.removeprefix('module.')")),
        ({"model": before}, "got a dict as 'model'"),
        (engine, "got a Engine"),
    ):
        assert re.search(way, error_of(lambda wrong=wrong: engine.load_state_dict(wrong)))
    after = engine.state_dict(master=True)
    assert all(torch.equal(after[name], before[name]) for name in before)
    part = {"down.bias": torch.full((6,), 0.25), "other": torch.ones(2)}
    left = engine.load_state_dict(part if rank == 0 else {}, strict=False)
    assert left.unexpected_keys == ["other"] and "down.bias" not in left.missing_keys
    assert (engine.state_dict()["down.bias"] == 0.25).all()
    engine.train_step(data[2])
    assert stage < 3 or "inside of engine.full_parameters()" in in_block(engine, before)


def in_block(engine: Any, tensors: Any) -> str:
    try:
        with engine.full_parameters():
            engine.load_state_dict(tensors)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size, stage, compute, memory", [
    (1, 0, "fp64", {}), (2, 0, "fp64", {}), (2, 2, "bf16", {}), (2, 3, "fp64", {}), (2, 3, "bf16", {}),
    (1, 3, "bf16", {"states": "host", "params": "host"}),
])  # fmt: skip
def test_load_state_dict_at_any_stage(size: int, stage: int, compute: str, memory: dict[str, str]) -> None:
    threads.run(size, loads, stage, compute, memory)


def counts(rank: int, size: int, stage: int) -> list[torch.Tensor]:
    engine = engine_of(stage, 5)
    engine.eval()
    engine.train_step(share(rank, size))
    engine.load_state_dict(Net(9).state_dict())
    engine.train_step(share(rank, size, 1))
    return [engine.state_dict()[name] for name in ("up.weight", "down.weight", "norm.running_mean", "frozen")]


def test_what_is_loaded_trains_on_as_in_plain_torch() -> None:
    model = Net(5).eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        x, y = share(0, 1, step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            model.load_state_dict(Net(9).state_dict())
    expected = model.state_dict()
    for size, stage in (1, 0), (2, 2), (2, 3):
        for found in threads.run(size, counts, stage):
            names = ("up.weight", "down.weight", "norm.running_mean", "frozen")
            for name, tensor in zip(names, found, strict=True):
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


def divided(rank: int, size: int, mesh: dict[str, int]) -> None:
    layers = lambda seed: [torch.manual_seed(seed), nn.Sequential(  # noqa: E731
        nn.Linear(6, 8, **FP64), nn.Tanh(), nn.Linear(8, 6, **FP64))][1]  # fmt: skip
    plan = {"0": "colwise", "2": "rowwise"} if "tp" in mesh else {}
    mesh = {**mesh, "tp_plan": plan} if plan else mesh
    config = {"batch": {"size": 4}, "mesh": mesh, "precision": {"compute": "fp64"}}
    model = list(layers(0)) if "pp" in mesh else layers(0)
    engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
    given = layers(1).state_dict()
    engine.load_state_dict(given if rank == 0 else {})
    assert all(torch.equal(tensor, given[name]) for name, tensor in engine.state_dict().items())
    engine.train_step((torch.ones(4, 6, **FP64), torch.zeros(4, 6, **FP64)))
    del given["2.bias"]
    assert "2.bias missing" in error_of(lambda: engine.load_state_dict(given))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
def test_load_state_dict_of_a_divided_model(mesh: dict[str, int]) -> None:
    threads.run(2, divided, mesh)


WAYS = {
    "register_comm_hook": "by its config",
    "model": "engine.module",
    "clip_grad_norm_": "optimizer.clip",
    "register_forward_hook": r"engine\.module\.register_forward_hook",
}
SET = {
    "clip": "optimizer.clip",
    "scheduler": "initialize",
    "train_step": "cannot be replaced",
    "parameter_count": "cannot be replaced",
    "up": r"engine\.module\.up = ",
    "epoch": "keep in a variable",
}


def test_other_names_say_the_way() -> None:
    with engine_of() as engine:
        for name, way in WAYS.items():
            assert not hasattr(engine, name)
            assert re.search(rf"engine\.{name}: .*{way}", error_of(lambda name=name: getattr(engine, name)))
        for name, way in SET.items():
            error = error_of(lambda name=name: setattr(engine, name, 1.0))
            assert re.search(rf"engine\.{name} = \.\.\. would have no effect: .*{way}", error)


def foreign(rank: int, size: int, stage: int) -> None:
    engine = engine_of(stage)
    own = nn.Linear(2, 2)
    others = torch.optim.SGD(own.parameters(), lr=0.5)
    late = torch.optim.AdamW([*engine.parameters()])
    for _ in range(2):
        engine.train_step(share(rank, size))
        assert re.search(r"AdamW.step\(\) over .* optimizer=", error_of(late.step))
    x, y = share(rank, size)
    nn.functional.mse_loss(engine(x), y).backward()
    clip = lambda: nn.utils.clip_grad_norm_(engine.parameters(), 1.0)  # noqa: E731
    assert "set optimizer.clip" in error_of(clip)
    assert "engine.step()" in error_of(late.step)
    own(torch.ones(1, 2)).sum().backward()
    before = own.weight.detach().clone()
    nn.utils.clip_grad_norm_(own.parameters(), 1.0)
    others.step()
    assert not torch.equal(before, own.weight)
    engine.optimizer.step()
    assert engine.state.step == 3
    engine.close(gather=True)
    engine.module(x).sum().backward()
    late.step()  # the model is its own again


@pytest.mark.parametrize("size, stage", [(1, 0), (2, 2), (2, 3)])
def test_other_optimizers_are_refused(size: int, stage: int) -> None:
    threads.run(size, foreign, stage)


def test_a_table_that_comes_later_is_refused_too() -> None:
    with engine_of(batch={"size": 8, "micro": 4}) as engine:
        engine.module.words = nn.Embedding(4, 4, scale_grad_by_freq=True, **FP64)
        assert "words has scale_grad_by_freq" in error_of(engine.refresh)


def test_a_second_initialize_names_close() -> None:
    model, config = Net(0), {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
    error = error_of(lambda: polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss))
    assert re.search(r"frozen belongs to another engine.*engine.close\(gather=True\).*notebook", error)
    engine.close(gather=True)
    polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss).close()
