"""Gradients that a script has turned off around what it calls of an engine; and lookups whose gradients
depend on how a batch is cut."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
from cover import some
from examples import always


@contextmanager
def left_off() -> Any:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "left off": left_off,
}
MESHES = {
    "one": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2, "tp_plan": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}},
}
MESHES["pp"] = {"pp": 2}


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(4, 4, dtype=torch.float64, generator=draw),
            torch.randn(4, 4, dtype=torch.float64, generator=draw),
        )
        for _ in range(count)
    ]


def expected() -> list[float]:
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, size: int, mode: str, mesh: str, stage: int, loop: bool) -> list[float]:
    config = {
        "mesh": MESHES[mesh], "zero": {"stage": stage}, "precision": {"compute": "fp64"},
        "batch": {"size": 4, "micro": 2}, "optimizer": {"lr": 0.1, "weight_decay": 0.0, "clip": "none"},
    }  # fmt: skip
    off = MODES[mode]
    with off():
        engine = polyreme.initialize(
            lambda: Model().double(), config, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD
        )
    dp, losses = engine.mesh.dp, []
    for x, y in batches():
        with off():
            whole = (x.clone(), y.clone())  # in inference mode tensors of it
            share = tuple(t[4 // dp.size * dp.rank :][: 4 // dp.size] for t in whole)
            engine.eval_step(share)
            if not loop:
                result = engine.train_step(share)
        if loop:
            for part in range(engine.config.accumulation):
                inputs, target = (t[2 * part : 2 * part + 2].clone() for t in share)
                with off():
                    engine(inputs)  # between, for a look
                loss = nn.functional.mse_loss(engine(inputs), target)
                with off():
                    engine.backward(loss)
            with off():
                engine.gradients().norms()
                result = engine.step()
        assert result.grad_norm > 0
        losses.append(result.loss)
    with off():
        engine.state_dict()
    return losses


@pytest.mark.parametrize(
    ("mode", "mesh", "stage", "loop"),
    [
        each
        for each in some(2, [*MODES], [*MESHES], [0, 2, 3], [False, True])
        if each[1] != "pp" or not each[3]
    ],
)
def test_what_a_script_turned_off_is_on_where_an_engine_trains(
    mode: str, mesh: str, stage: int, loop: bool
) -> None:
    for found in threads.run(1 if mesh == "one" else 2, trained, mode, mesh, stage, loop):
        assert found == pytest.approx(expected(), abs=1e-10)


def test_a_loss_without_a_graph_is_refused() -> None:
    engine = polyreme.initialize(nn.Linear(4, 4), {"batch": {"size": 2}, "precision": {"compute": "fp32"}})
    x = torch.ones(2, 4)
    with torch.no_grad():
        loss = engine(x).mean()
        gc.unfreeze()  # engines of other tests, which may be garbage since conftest's `settled`
        gc.collect()
        with pytest.raises(
            polyreme.BatchError, match=r"without a forward of(?s:.*)set_grad_enabled\(False\)"
        ):
            engine.backward(loss)
    output = engine(x)
    with torch.no_grad():
        loss = output.mean()
    with pytest.raises(polyreme.BatchError, match=r"any trainable parameter.*set_grad_enabled\(False\)"):
        engine.backward(loss)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(polyreme.ModelError, match=r"weight was made inside torch\.inference_mode"):
        polyreme.initialize(model, {"batch": {"size": 2}})


class Tables(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        counts = {"scale_grad_by_freq": kind != "functional"}
        self.kind = kind
        self.table = (nn.EmbeddingBag if kind == "bag" else nn.Embedding)(10, 4, **counts)

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "functional":
            return nn.functional.embedding(ids, self.table.weight, scale_grad_by_freq=True).mean()
        return self.table(ids).mean()


@pytest.mark.parametrize("kind", always(["table", "bag", "functional"], "functional"))
def test_gradients_by_frequency_are_refused_where_the_batch_is_cut(kind: str) -> None:
    def step(rank: int, size: int, micro: int) -> Any:
        config = {"batch": {"size": 4, "micro": micro}, "precision": {"compute": "fp32"}}
        engine = polyreme.initialize(Tables(kind), config)
        return engine.train_step(torch.ones(4 // size, 3, dtype=torch.int64)).grad_norm

    for ranks, micro in ((1, 2), (2, 2)):
        with pytest.raises(Exception, match=r"scale_grad_by_freq.*depend on how the batch is cut"):
            threads.run(ranks, step, micro)
    assert threads.run(1, step, 4)[0] > 0
