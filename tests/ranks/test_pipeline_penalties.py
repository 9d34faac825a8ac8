"""Pipelines of models whose forward or loss reads weights: what one process computes, in float64 to 1e-10, or
an error at once, also where autograd has no record of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import threads
from examples import whole
from polyreme.errors import ModelError
from pool import RanksFailed

SAMPLES, STEPS = 8, 2


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh()  # type: ignore[no-any-return]


class Net(nn.Module):
    """Its forward adds `term(self)` to its loss, and `early(self)`, which it computes before its blocks;
    nothing by default."""

    term: Callable[[Net], Any] | None = None
    early: Callable[[Net], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)
        self.captured: dict[str, list[Any]] = {"all": list(self.parameters())}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        early = self.early(self) if self.early else 0
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        output = self.head(self.norm(x))
        if y is None:
            return output  # type: ignore[no-any-return]
        return F.mse_loss(output, y) + early + (self.term(self) if self.term else 0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number.exp()


class Scaled(Net):
    """Multiplies its output by a learned number, which is its own or held by a module."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.scale = Scale() if held else nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        output = super().forward(x)
        return self.scale(output) if isinstance(self.scale, Scale) else output * self.scale.exp()


def squares(parameters: Any) -> Any:
    return 0.1 * sum(p.pow(2).sum() for p in parameters)


def without_gradients(parameters: Any) -> Any:
    with torch.no_grad():
        return squares(parameters)


def sizes(net: Net) -> float:
    """What a model may ask of all its parameters."""
    first = next(net.parameters())
    assert first.dtype == torch.float64 and first.device.type == "cpu" and first.requires_grad
    assert len(list(net.parameters())) == len(net.captured["all"])
    return 1e-3 * sum(p.numel() for p in net.parameters())


TERMS: dict[str, Callable[[Net], Any]] = {
    "all": lambda net: squares(net.parameters()),
    "blocks": lambda net: squares(net.layers.parameters()),
    "by name": lambda net: squares(p for name, p in net.named_parameters() if "layers.0.up.w" in name),
    "block": lambda net: squares(net.layers[0].parameters()),
    "weight": lambda net: squares([net.layers[0].up.weight]),
    "part of a block": lambda net: squares([net.layers[0][0].weight]),
    "detached": lambda net: squares(p.detach() for p in net.parameters()),
    "data": lambda net: squares(p.data for p in net.layers.parameters()),
    "no_grad": lambda net: without_gradients(net.parameters()),
    "detached weight": lambda net: squares([net.layers[0].up.weight.detach()]),
    "first": lambda net: squares(net.enter.parameters()),
    "detached first": lambda net: squares([net.enter.weight.detach()]),
    "no_grad first": lambda net: without_gradients(net.enter.parameters()),
    "captured": lambda net: squares(net.captured["all"]),
    "captured weight": lambda net: squares(net.captured["all"][2:3]),
    "captured detached": lambda net: squares(p.detach() for p in net.captured["all"]),
}
"""Terms of a loss that read what another stage has."""
LATER: dict[str, Callable[[Any], Any]] = {
    "detached": lambda own: squares(p.detach() for p in own),
    "data": lambda own: squares(p.data for p in own),
    "no_grad": lambda own: without_gradients(own),
    "item": lambda own: squares(own).item(),
    "each item": lambda own: sum(0.1 * p.pow(2).sum().item() for p in own),
    "weight": lambda own: squares(own),
    "block": lambda own: squares(p.detach() for p in own[:2]),
}
"""Terms of parameters that were taken after `initialize`: those that this rank has."""
RIGHT: dict[str, Callable[[Net], Any]] = {
    "head": lambda net: squares(net.head.parameters()),
    "norm": lambda net: squares([net.norm.weight]),
    "head detached": lambda net: squares([net.head.weight.detach()]),
    "head no_grad": lambda net: without_gradients(net.head.parameters()),
    "sizes": sizes,
    "forms": lambda net: 0.0 * torch.ones(1).to(net.enter.weight).type_as(net.layers[0].up.weight).sum(),
    "parts": lambda net: 0.0 * sum(p.in_features + len(each) for each in net.layers for p in each),
}
"""Terms of a loss that the last stage has all of."""
USUAL = {"blocks", "part of a block", "no_grad", "first", "detached first", "captured detached"}
PENALTY = r"use optimizer\.weight_decay, or set mesh\.pp = 1"


def build(term: Callable[[Net], Any] | None, where: str) -> tuple[Net, Any]:
    """The model, and its loss_fn; `term` is a summand of the loss, or its factor ("scale")."""
    torch.manual_seed(0)
    if where in ("own", "held"):
        return Scaled(where == "held").double(), F.mse_loss
    net = Net().double()
    if where == "forward":
        net.term = term  # type: ignore[method-assign]
        return net, None
    if where == "before":
        net.early = term  # type: ignore[method-assign]
        return net, None
    if where == "scale":
        return net, lambda output, y: F.mse_loss(output, y) * (1 + term(net))  # type: ignore[misc]
    return net, lambda output, y: F.mse_loss(output, y) + term(net)  # type: ignore[misc]


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SAMPLES, n, dtype=torch.float64, generator=generator) for n in (6, 4)]


def run(rank: int, world: int, term: Callable[[Net], Any], where: str, sections: dict[str, Any]) -> None:
    net, loss_fn = build(term, where)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(STEPS):
        x, y = batch(step)
        loss = net(x, y) if loss_fn is None else loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = {name: p.detach() for name, p in net.named_parameters()}
    config = {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": 4},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": "none"},
        "mesh": {"pp": world},
        **sections,
    }
    net, loss_fn = build(term, where)
    engine = polyreme.initialize(net, config, loss_fn=loss_fn)
    net.captured["own"] = list(net.parameters())
    for step in range(STEPS):
        x, y = batch(step)
        found = engine.train_step({"x": x, "y": y} if loss_fn is None else (x, y)).loss
        assert found == pytest.approx(losses[step], rel=1e-10)
    state = engine.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["forward", "loss_fn", "before", pytest.param("scale", marks=whole)])
@pytest.mark.parametrize("term", [pytest.param(t, marks=() if t in USUAL else whole) for t in TERMS])  # type: ignore[arg-type]
def test_a_loss_that_reads_what_another_stage_has_is_refused(term: str, where: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        threads.run(2, run, TERMS[term], where, {})
    errors = [error for error in failed.value.exceptions.values() if isinstance(error, ModelError)]
    assert errors, failed.value
    for error in errors:
        assert re.search(PENALTY, str(error))


@pytest.mark.parametrize("begins", [pytest.param(0, marks=whole), 1])
@pytest.mark.parametrize("term", [pytest.param(t, marks=() if t == "item" else whole) for t in LATER])  # type: ignore[arg-type]
def test_parameters_taken_after_initialize_are_refused_whenever_they_are_read(term: str, begins: int) -> None:
    def penalty(net: Net) -> Any:
        calls = net.captured.setdefault("calls", [])
        calls.append(None)
        return LATER[term](net.captured["own"]) if len(calls) > 2 * begins and "own" in net.captured else 0

    with pytest.raises(RanksFailed, match=PENALTY):
        threads.run(2, run, penalty, "loss_fn", {})


class Averaging(Net):
    """Keeps a running mean, in a buffer of `owner`, of what it computes before its blocks."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.get_submodule(owner).register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        owner = self.get_submodule(self.owner)
        owner.mean = 0.9 * owner.mean + self.enter(x).detach().mean(0)  # type: ignore[operator, assignment]
        return super().forward(x, y)


def average(rank: int, world: int, owner: str) -> None:
    torch.manual_seed(0)
    net = Averaging(owner).double()
    plain = copy.deepcopy(net)
    config = {"precision": {"compute": "fp64"}, "batch": {"size": SAMPLES, "micro": 4}, "mesh": {"pp": world}}
    engine = polyreme.initialize(net, config)
    x, y = batch(0)
    engine.train_step({"x": x, "y": y})
    for i in range(0, SAMPLES, 4):
        plain(x[i : i + 4])
    name = f"{owner}.mean".lstrip(".")
    expected = dict(plain.named_buffers())[name]
    torch.testing.assert_close(engine.state_dict()[name], expected, rtol=1e-10, atol=1e-10)


def test_a_buffer_that_is_computed_before_the_blocks_is_right_or_refused() -> None:
    threads.run(2, average, "enter")
    said = r"stage 1 has the buffer mean, but computes it with enter\.weight.*register it in the module"
    with pytest.raises(RanksFailed, match=said):
        threads.run(2, average, "")


class Differential(Block):
    """Scales by what it computes of its own parameters alone, as DiffLlama's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.linspace(-0.5, 0.4, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.a * self.b).sum().exp()
        return x - scale * super().forward(x) / (1 + self.a.norm())


def test_a_block_may_scale_by_a_number_that_its_parameters_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Block", Differential)
    threads.run(2, run, None, "forward", {})
    threads.run(2, run, None, "forward", INTERLEAVED)


INTERLEAVED: dict[str, Any] = {"pipeline": {"schedule": "zb-v"}}
HALVED: dict[str, Any] = {"pipeline": {"schedule": "zb-h1"}, "zero": {"stage": 0}}


def several(rank: int, world: int, where: str) -> None:
    for name, term in RIGHT.items():
        run(rank, world, term, where, {})
        if name == "head":
            run(rank, world, term, where, HALVED)
        if name in ("sizes", "head no_grad"):
            run(rank, world, term, where, INTERLEAVED)


@pytest.mark.parametrize("where", ["forward", "loss_fn", "before"])
def test_what_the_last_stage_has_all_of_is_right(where: str) -> None:
    threads.run(2, several, where)


@pytest.mark.parametrize(
    ("term", "where"),
    [("blocks", "forward"), ("detached", "forward"), ("no_grad", "loss_fn"), ("first", "loss_fn")],
)
def test_a_rank_with_several_stages_refuses_it_too(term: str, where: str) -> None:
    with pytest.raises(RanksFailed, match=PENALTY):
        threads.run(2, run, TERMS[term], where, INTERLEAVED)


def test_a_number_used_behind_the_blocks_is_held_by_a_module() -> None:
    with pytest.raises(RanksFailed, match=r"logit_scale\) in a small nn\.Module of its own, made after"):
        threads.run(2, run, None, "own", {})
    threads.run(2, run, None, "held", {})
