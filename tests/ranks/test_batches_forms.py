"""Batches that are no dictionaries or tuples of tensors alone: arrays, names, tokenizers' mappings,
dataclasses, what only has `to`, nested and sparse tensors. Each trains as in plain torch, or is refused."""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import training
from polyreme.errors import BatchError
from polyreme.step.batch.batches import digest, split
from polyreme.step.precision import cast_floating
from pool import Ranks

NAMES = ["long", "s", "medium", "of", "eight", "a", "wordy", "b"]


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor
    note: str | None = None


class Data:
    """As PyG's: tensors as attributes, and `to`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.moved = x, y, None

    def to(self, device: torch.device) -> Data:
        made = Data(self.x.to(device), self.y.to(device))
        made.moved = device
        return made


class Net(nn.Module):
    """A weighted regression: weights are the lengths of names, offsets an array's numbers; a Data's or Pair's
    own tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1).double()

    def forward(
        self, x: Any, y: Any = None, names: Any = None, array: Any = None, none: Any = None, scale: Any = 1.0
    ) -> dict[str, Tensor]:
        if isinstance(x, Data | Pair):
            assert not isinstance(x, Data) or x.moved is not None
            x, y = x.x, x.y
        if x.is_nested:
            x = torch.stack(x.unbind())
        x = x.to_dense() if x.is_sparse else x
        weight = (
            torch.tensor([len(name) for name in names], dtype=x.dtype)
            if names is not None
            else torch.ones(len(x), dtype=x.dtype)
        )
        more = torch.as_tensor(array) if array is not None else 0.0
        assert none is None and (names is None or len(names) == len(x))
        return {
            "loss": (F.mse_loss(self.line(x) * scale + more, y, reduction="none").squeeze(-1) * weight).mean()
        }


def rows() -> dict[str, Any]:
    torch.manual_seed(2)
    x = torch.randn(training.SAMPLES, 3, dtype=torch.float64)
    return {"x": x, "y": x.sin().sum(1, keepdim=True)}


def mixed(at: slice = slice(None)) -> dict[str, Any]:
    """Tensors, an array, names, None and a 0-d tensor."""
    array = np.arange(training.SAMPLES, dtype=np.float64)[:, None]
    found = {**rows(), "names": NAMES, "array": array}
    return {
        **{key: value[at] for key, value in found.items()},
        "none": None,
        "scale": torch.tensor(2.0, dtype=torch.float64),
    }


def plain(batch: dict[str, Any]) -> tuple[float, Tensor]:
    model = Net()
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.item(), model.line.weight.detach() - 0.1 * model.line.weight.grad  # type: ignore[operator]


def forms(at: slice) -> dict[str, list[Any]]:
    """This rank's two micro-batches, by form."""
    x, y = rows()["x"][at], rows()["y"][at]
    pairs = [*zip(x.tensor_split(2), y.tensor_split(2), strict=True)]
    return {
        "userdict": [UserDict(x=a, y=b) for a, b in pairs],
        "dataclass": [Pair(a, b) for a, b in pairs],
        "data": [Data(a, b) for a, b in pairs],
        "nested": [{"x": torch.nested.nested_tensor([*a], layout=torch.jagged), "y": b} for a, b in pairs],
        "sparse": [{"x": a.to_sparse(), "y": b} for a, b in pairs],
    }


def trained(rank: int, world: int) -> list[tuple[str, float, Tensor]]:
    found = []
    each = training.SAMPLES // world
    at = slice(rank * each, (rank + 1) * each)
    for stage in (0, 2, 3):
        settings = training.config(
            world,
            2,
            zero={"stage": stage},
            precision={"compute": "fp64"},
            optimizer={"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": None},
        )
        batches: dict[str, Any] = {"mixed": mixed(at), "whole userdict": UserDict(mixed(at)), **forms(at)}
        for name, batch in batches.items():
            opaque = name in ("dataclass", "data")  # of which the engine does not know the samples
            if opaque:
                with pytest.raises(
                    BatchError,
                    match=r"what the loss is the mean of cannot be seen.*return \(sum of losses, weight\)",
                ):
                    polyreme.initialize(Net(), settings).train_step(batch)
            engine = polyreme.initialize(
                Net(),
                settings,
                loss_fn=(lambda out, _: (out["loss"] * each / 2, each / 2)) if opaque else None,
            )
            result = engine.train_step(batch)
            found.append((f"{name} {stage}", result.loss, engine.state_dict()["line.weight"]))
            if isinstance(batch, list):
                loop = polyreme.initialize(Net(), settings)
                for part in batch:
                    out = loop(**part) if hasattr(part, "keys") else loop(part)
                    loop.backward(out["loss"], weight=each / 2)
                found.append((f"{name} {stage} loop", loop.step().loss, loop.state_dict()["line.weight"]))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_batches_of_every_form_are_plain_torch(ranks: Ranks, world: int) -> None:
    expected = {True: plain(mixed()), False: plain(rows())}
    for runs in ranks(world, trained):
        for name, loss, weight in runs:
            wanted = expected[name.startswith(("mixed", "whole"))]
            torch.testing.assert_close(
                (loss, weight), wanted, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_what_cannot_be_cut_is_refused() -> None:
    ragged = [torch.ones(2), torch.ones(3)]
    with pytest.raises(BatchError, match=r"make it with layout=torch\.jagged"):
        split({"x": torch.nested.nested_tensor(ragged)}, 2)
    for x in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        with pytest.raises(BatchError, match=r"cannot be cut into micro-batches: give train_step a list"):
            split({"x": x, "y": torch.ones(2)}, 2)


def test_a_frozen_dataclass_is_cast_in_a_copy() -> None:
    pair = Pair(torch.ones(2), torch.ones(1, dtype=torch.int64), "kept")
    made = cast_floating(pair, torch.bfloat16)
    assert isinstance(made, Pair) and (made.x.dtype, made.y.dtype, made.note) == (
        torch.bfloat16,
        torch.int64,
        "kept",
    )
    assert pair.x.dtype == torch.float32


def equal(rank: int, world: int) -> dict[str, list[str]]:
    """What is warned of, where ranks have the same batch and where they do not, in both loops; and the
    refusal of a global batch."""
    found: dict[str, list[str]] = {}
    for name, x in {"same": torch.ones(2, 3), "own": torch.full((2, 3), float(rank))}.items():
        for own in (False, True):
            engine = polyreme.initialize(
                nn.Linear(3, 1), {"batch": {"size": 2 * world}}, loss_fn=lambda output, _: output.mean()
            )
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(2):
                    if own:
                        engine.backward(engine(x).mean())
                        engine.step()
                    else:
                        engine.train_step((x, x))
            found[f"{name} {own}"] = [
                str(warning.message) for warning in said if "same batch" in str(warning.message)
            ]
    for own in (False, True):
        whole = engine(torch.ones(2 * world + 1, 3)).mean()
        with pytest.raises(
            BatchError,
            match=rf"given {2 * world + 1} samples, but batch.size = {2 * world} .* makes batch.micro = 2",
        ):
            whole.backward() if own else engine.backward(whole)
        engine.zero_grad()
    engine.backward(engine(torch.ones(2 * world + 1, 3)).mean(), weight=1)
    return found


def test_batches_of_other_layouts_have_digests() -> None:
    one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for made in (lambda: torch.eye(2).to_sparse(), lambda: torch.eye(2).to_sparse_csr(), lambda: one):
        assert digest(made()) == digest(made()) != digest([])


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_with_the_same_batch_are_told(ranks: Ranks, world: int) -> None:
    for rank, found in enumerate(ranks(world, equal)):
        for name, said in found.items():
            assert len(said) == (world > 1 and rank == 0 and not name.startswith("own")), (name, said)
            assert all("DistributedSampler" in text for text in said)
