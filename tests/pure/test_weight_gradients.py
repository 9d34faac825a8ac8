"""Both halves of a backward together give what one gives, and the products for the weights are in the
second."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from polyreme.pipeline.weight_gradients import WeightGradients, current, expect
from polyreme.tensor.layers import put_off_weights


@pytest.fixture(autouse=True)
def in_halves() -> Iterator[None]:
    expect(halves=True)
    yield
    expect(halves=False)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


class Own(nn.Linear):
    """With a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """An embedding tied to the head, a layer that is called twice, a transposed one, a computed weight, a
    frozen one, norms."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.transposed = Conv1D(4, 4)
        self.own = Own(4, 4)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def inner(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x)).tanh()
        return self.norm(self.own(self.computed(self.frozen(self.transposed(self.twice(x)).tanh()))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).logsumexp(-1).sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_two_halves_are_one_backward(recompute: bool) -> None:
    torch.manual_seed(0)
    plain = Model(recompute).double()
    split = copy.deepcopy(plain)
    put_off_weights(split)
    ids = torch.tensor([[0, 1, 1], [5, 2, 6]])
    loss = loss_of(plain, ids)
    with Products() as whole:
        loss.backward()

    complete: list[str] = []
    held: set[str] = set()
    hooked: list[Tensor] = []
    weights = WeightGradients()

    def watch(name: str, parameter: Tensor) -> None:
        def arrived(parameter: Tensor) -> None:
            if (later := current()) is not None:
                held.update({name} if parameter.grad is not None else ())
                later.defer(parameter, arrived)
            else:
                complete.append(name)

        parameter.register_post_accumulate_grad_hook(arrived)

    trained = {name: parameter for name, parameter in split.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        watch(name, parameter)
    # the user's, who expects a gradient
    split.transposed.weight.register_hook(lambda gradient: hooked.append(gradient.clone()))
    loss = loss_of(split, ids)
    with Products() as first, weights.put_off():
        loss.backward()
    assert current() is None and complete == []
    assert all(parameter.grad is None for parameter in trained.values())
    with Products() as second:
        weights.accumulate()

    expected = dict(plain.named_parameters())
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-14, msg=name)
    assert sorted(complete) == sorted(trained)
    layers = ("first", "twice", "transposed")
    put_off = {"computed.bias", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))} - {
        "transposed.weight"
    }
    assert held == {*trained} - put_off  # the embedding's as an embedding; as the head it was put off
    torch.testing.assert_close(hooked, [expected["transposed.weight"].grad], rtol=1e-12, atol=1e-14)
    assert second.count == 4  # head, first, and twice, which is called twice
    assert first.count + second.count == whole.count


class Sums:
    """Places for the parameters of `places`; notes whose gradient is there."""

    def __init__(self, places: dict[Tensor, Tensor]) -> None:
        self.places = places
        self.complete: list[Tensor] = []

    def gradient_buffer(self, parameter: Tensor) -> Tensor | None:
        return self.places.get(parameter)

    def added(self, parameter: Tensor) -> None:
        self.complete.append(parameter)


def test_products_are_added_to_what_is_summed_already() -> None:
    """Each once, of layers called twice and of both kinds; not those of a weight that has another gradient as
    well."""
    torch.manual_seed(0)
    plain = Model(recompute=False).double()
    split = copy.deepcopy(plain)
    put_off_weights(split)
    ids = torch.tensor([[0, 1, 1], [5, 2, 6]])
    loss_of(plain, ids).backward()
    places = {
        parameter: torch.full_like(parameter, 3.0)
        for parameter in split.parameters()
        if parameter.requires_grad
    }
    for parameter in places:
        parameter.register_post_accumulate_grad_hook(
            lambda p: late.defer(p, lambda _: None) if (late := current()) is not None else None
        )
    weights, sums = WeightGradients(), Sums(places)
    loss = loss_of(split, ids)
    with weights.put_off():
        loss.backward()
    weights.accumulate(sums)
    layers = ("first", "twice", "transposed")
    added = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")} | {"computed.bias"}
    assert {
        name
        for name, parameter in split.named_parameters()
        if any(parameter is each for each in sums.complete)
    } == added
    assert len(sums.complete) == len(added)
    for (name, parameter), expected in zip(split.named_parameters(), plain.parameters(), strict=True):
        if expected.requires_grad:
            gradient = places[parameter] - 3 if name in added else parameter.grad
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_nothing_is_put_off_outside() -> None:
    """A layer whose weights can be put off works like any other, also after a backward in two halves that
    failed."""
    layer = nn.Linear(3, 2)
    expected = copy.deepcopy(layer)
    put_off_weights(layer)
    x = torch.randn(4, 3, requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ValueError("no")

    x.register_hook(fail)
    with pytest.raises(ValueError), WeightGradients().put_off():
        layer(x).sum().backward()
    assert layer.weight.grad is None and current() is None
    layer(x.detach()).sum().backward()
    expected(x.detach()).sum().backward()
    for mine, theirs in zip(layer.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
