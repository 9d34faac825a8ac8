"""The gradient of an embedding's table, by rows where the engine asks for it and as ever where anybody else
does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import polyreme
from polyreme.models.patches import Patches
from polyreme.optim.sparse_rows import gradients_by_rows, look_up_by_rows

ROWS, WIDTH, PADDING = 23, 4, 3
IDS = torch.randint(0, ROWS, (5, 40), generator=torch.Generator().manual_seed(0))


class Table(nn.Module):
    def __init__(self, padding: int | None = None, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding, **options)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        return (x.sin() * torch.arange(x.numel()).view(x.shape)).sum()


def both(**options: object) -> tuple[Table, Table]:
    """A model as it is, and the same with its gradient by rows."""
    torch.manual_seed(0)
    plain = Table(**options)  # type: ignore[arg-type]
    ours = copy.deepcopy(plain)
    look_up_by_rows(ours, Patches())
    return plain, ours


@pytest.mark.parametrize("padding", [None, PADDING, -1])
@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[0, 0], IDS[:0]])
def test_the_rows_are_the_gradient(padding: int | None, ids: Tensor) -> None:
    plain, ours = both(padding=padding)
    expected = plain(ids)
    expected.backward()
    with gradients_by_rows():
        loss = ours(ids)
        loss.backward()
    assert torch.equal(loss, expected)
    gradient = ours.table.weight.grad
    assert gradient is not None and gradient.layout == torch.sparse_coo
    sum_in_place = torch.zeros(ROWS, WIDTH).add_(gradient)
    assert torch.equal(sum_in_place, plain.table.weight.grad)


def test_rows_are_added_to_a_sum_where_it_lies() -> None:
    plain, ours = both()
    flat = torch.zeros(ROWS * WIDTH)
    ours.table.weight.grad = flat.view(ROWS, WIDTH)
    for ids in IDS:
        plain(ids).backward()
        with gradients_by_rows():
            ours(ids).backward()
    assert ours.table.weight.grad.data_ptr() == flat.data_ptr()
    torch.testing.assert_close(flat.view(ROWS, WIDTH), plain.table.weight.grad)


def outside(model: Table) -> list[Tensor]:
    model(IDS).backward()
    return [model.table.weight.grad]  # type: ignore[list-item]


def asked_for(model: Table) -> list[Tensor]:
    return [*torch.autograd.grad(model(IDS), model.table.weight)]


def hook(model: Table) -> list[Tensor]:
    seen: list[Tensor] = []
    model.table.weight.register_hook(lambda gradient: seen.append(gradient))
    with gradients_by_rows():
        model(IDS).backward()
    return seen


def twice(model: Table) -> list[Tensor]:
    with gradients_by_rows():
        (first,) = torch.autograd.grad(model(IDS), model.table.weight, create_graph=True)
        first.square().sum().backward()
    assert model.table.weight.grad is not None
    return [first, model.table.weight.grad.to_dense()]  # the second one is the engine's own


def special(model: Table) -> list[Tensor]:
    model.table.scale_grad_by_freq = True
    with gradients_by_rows():
        model(IDS).backward()
    return [model.table.weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("look", [outside, asked_for, hook, twice, special])
def test_whoever_looks_gets_a_table(look: Callable[[Table], list[Tensor]]) -> None:
    plain, ours = both()
    found, expected = look(ours), look(plain)
    assert len(found) == len(expected)
    for tensor, other in zip(found, expected, strict=True):
        assert tensor.layout == torch.strided and torch.equal(tensor, other)


def test_classes_with_a_forward_of_their_own_are_left_alone() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(Scaled(ROWS, WIDTH), nn.Linear(WIDTH, 1))
    look_up_by_rows(model, Patches())
    with gradients_by_rows():
        model(IDS).sum().backward()
    assert model[0].weight.grad.layout == torch.strided


def test_gradients_of_several_micro_batches_add_up_as_torch_adds_them() -> None:
    """Each one's rows first to each other, then to those of the others."""
    plain, _ = both()
    engine = polyreme.initialize(
        copy.deepcopy(plain),
        {
            "batch": {"size": 4, "micro": 1},
            "optimizer": {"name": "sgd", "lr": 1.0, "clip": "none", "weight_decay": 0.0},
        },
        loss_fn=lambda output, batch: (output, 1),
    )
    batch = torch.randint(0, ROWS, (4, 200), generator=torch.Generator().manual_seed(1))
    for each in batch:
        (plain(each[None]) / 4).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    engine.train_step({"ids": batch})
    assert torch.equal(engine.state_dict()["table.weight"], plain.table.weight)
