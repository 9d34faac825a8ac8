"""What batches and losses of real scripts become: exact targets, ragged and incomplete batches, short
windows, weights of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import training
from pool import Ranks


def line(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


class Regression(nn.Module):
    """Returns its loss, as a Hugging Face head does; notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = line(torch.float32)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen = {"x": x.dtype, "labels": labels}
        output = self.layers(x)
        return (
            {"output": output} if labels is None else {"loss": F.mse_loss(output, labels), "output": output}
        )


def exact_targets(rank: int, world: int) -> None:
    x = torch.randn(training.SAMPLES, 4)[rank::world]
    y, importance = torch.full((len(x), 1), 20001.0), torch.full((len(x), 1), 1.003)
    settings = training.config(world, precision={"compute": "bf16"}, optimizer={"clip": None})
    seen: list[tuple[float, float]] = []

    def weighted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append((batch["labels"].max().item(), batch["importance"].max().item()))
        return (F.huber_loss(output, batch["labels"], reduction="none") * batch["importance"]).mean()

    # what only a loss_fn sees, in a mapping and in a tuple; in training and in evaluation
    engine = polyreme.initialize(
        Regression(), settings, loss_fn=lambda output, batch: weighted(output["output"], batch)
    )
    results = [
        act({"x": x, "labels": y, "importance": importance}).loss
        for act in (engine.eval_step, engine.train_step)
    ]
    assert set(seen) == {(20001.0, importance.max().item())} and engine.module.seen["x"] == torch.bfloat16
    results += [
        act((x, y)).loss
        for e in [polyreme.initialize(line(torch.float32), settings, loss_fn=F.huber_loss)]
        for act in (e.eval_step, e.train_step)
    ]
    assert all(loss == pytest.approx(20001.0, rel=0.004) for loss in results)
    # a model's own labels; and the same number in the loop
    own = polyreme.initialize(Regression(), settings)
    result = own.train_step({"x": x, "labels": y})
    assert own.module.seen["labels"].dtype == torch.float32 and own.module.seen["x"] == torch.bfloat16
    loop = polyreme.initialize(line(torch.float32), settings)
    loop.backward(F.mse_loss(loop(x), y))
    stepped = loop.step()
    assert (stepped.loss, stepped.grad_norm) == (result.loss, result.grad_norm)
    handed = polyreme.initialize(line(torch.float32), settings, loss_fn=F.mse_loss)
    assert handed.train_step((x, y)).loss == result.loss
    # an output of an autoencoder is compared with the numbers that came, not with those that the model got
    coder = polyreme.initialize(
        nn.Linear(4, 4), settings, loss_fn=lambda output, target: (target - x).abs().sum() + 0 * output.sum()
    )
    assert coder.train_step(x).loss == 0


def test_targets_are_not_rounded(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, exact_targets)


# ---- batches that are not batch.size samples, all alike


class Bags(nn.Module):
    """Bags of unlike numbers of items, as recommenders have them: (items [N], offsets [B]) to B scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.head = nn.EmbeddingBag(20, 5, mode="sum"), nn.Linear(5, 1)
        self.double()

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.items(items, offsets))).squeeze(-1)


class Graph(nn.Module):
    """One layer of messages along edges: (nodes [N, 4], edges [2, E]) to N values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.message, self.head = nn.Linear(4, 6), nn.Linear(10, 1)
        self.double()

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        gathered = nodes.new_zeros(len(nodes), 6).index_add(
            0, edges[1], torch.tanh(self.message(nodes))[edges[0]]
        )
        return self.head(torch.cat([nodes, gathered], 1)).squeeze(-1)


def bags(sizes: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    lengths = torch.tensor(sizes)
    return (
        torch.randint(0, 20, (int(lengths.sum()),)),
        lengths.cumsum(0) - lengths,
        torch.randn(len(sizes), dtype=torch.float64),
    )


def graph(nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return (
        torch.randn(nodes, 4, dtype=torch.float64),
        torch.randint(0, nodes, (2, 3 * nodes)),
        torch.randn(nodes, dtype=torch.float64),
    )


RAGGED: dict[str, tuple[Callable[[], nn.Module], list[list[tuple[Tensor, ...]]]]] = {
    "bags": (
        Bags,
        [
            [bags([3, 1, 2], 0), bags([1], 1), bags([4, 0], 2), bags([2, 2], 3)],
            [bags([5, 1], 4 + i) for i in range(4)],
            [bags([3], 8), bags([1, 1, 1], 9)],
        ],
    ),
    "graphs": (
        Graph,
        [
            [graph(n, n) for n in (5, 3, 8, 2)],
            [graph(n, n) for n in (4, 9, 1, 6)],
            [graph(7, 7), graph(3, 3)],
        ],
    ),
}
"""By name: a model, and the micro-batches of three steps; the last has fewer."""


def plain(
    model: nn.Module, steps: list[list[tuple[Tensor, ...]]], loss: Callable[..., Tensor] = F.mse_loss
) -> training.Run:
    """Plain PyTorch: the mean over what all micro-batches of a step have together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for parts in steps:
        optimizer.zero_grad()
        total = sum(loss(model(*inputs), target, reduction="sum") for *inputs, target in parts) / sum(
            len(part[-1]) for part in parts
        )
        total.backward()
        records.append(
            (total.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        )
        optimizer.step()
    return records, {name: p.detach().clone() for name, p in model.named_parameters()}


def sgd(world: int, accumulation: int, stage: int, **sections: Any) -> dict[str, Any]:
    return training.config(
        world,
        accumulation,
        zero={"stage": stage},
        precision={"compute": "fp64"},
        optimizer={"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": None},
        **sections,
    )


def ragged(rank: int, world: int) -> list[tuple[str, training.Run]]:
    runs = []
    for name, (build, steps) in RAGGED.items():
        for stage in (0, 2, 3):
            for style in ("list", "loop"):
                engine = polyreme.initialize(build(), sgd(world, 4 // world, stage), loss_fn=F.mse_loss)
                records, counted = [], 0
                for parts in steps:
                    mine = parts[rank::world]
                    if style == "list":
                        result = engine.train_step(mine)
                    else:
                        for *inputs, target in mine:
                            engine.backward(F.mse_loss(engine(*inputs), target), weight=len(target))
                        result = engine.step(last=len(parts) < 4)
                    records.append((result.loss, result.grad_norm))
                    counted += result.samples
                assert counted == engine.state.samples
                runs.append((f"{name} {stage} {style}", (records, engine.state_dict())))
    return runs


def close(got: training.Run, wanted: training.Run, what: str) -> None:
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")


def test_ragged_micro_batches_and_a_short_last_window(ranks: Ranks) -> None:
    expected = {name: plain(build(), steps) for name, (build, steps) in RAGGED.items()}
    for world in (1, 2):
        for runs in ranks(world, ragged):
            for what, run in runs:
                close(run, expected[what.split()[0]], f"{what}, world {world}")


def data(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(samples, 4, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


SIZES = (17, 19, 22)  # of data sets: 1, 3 or 6 samples are left after two batches of 8


def incomplete(rank: int, world: int) -> list[tuple[str, training.Run]]:
    """Epochs with their last batch, from the engine's loader."""
    runs = []
    for size in SIZES:
        for stage in (0, 2, 3):
            for accumulation in (1, 4):
                engine = polyreme.initialize(line(), sgd(world, accumulation, stage), loss_fn=F.mse_loss)
                loader = engine.loader(
                    torch.utils.data.TensorDataset(*data(size)), shuffle=False, drop_last=False, epochs=2
                )
                results = [engine.train_step(batch) for batch in loader]
                assert [r.samples for r in results] == [
                    8,
                    8,
                    size - 16,
                ] * 2 and engine.state.samples == 2 * size
                rest = [t[16 + rank :: world] for t in data(size)]
                assert engine.eval_step(tuple(rest)).weight == size - 16
                runs.append(
                    (
                        f"{size} {stage} {accumulation}",
                        ([(r.loss, r.grad_norm) for r in results], engine.state_dict()),
                    )
                )
    return runs


def test_the_last_incomplete_batch(ranks: Ranks) -> None:
    expected = {}
    for size in SIZES:
        x, y = data(size)
        expected[str(size)] = plain(line(), [[(x[at : at + 8], y[at : at + 8])] for at in (0, 8, 16)] * 2)
    for world in (1, 2):
        for runs in ranks(world, incomplete):
            for what, run in runs:
                close(run, expected[what.split()[0]], f"{what}, world {world}")


def piped(rank: int, world: int) -> list[training.Run]:
    """The same through two pipeline stages: batches cut by the engine, and lists of micro-batches of unlike
    shapes."""
    runs = []
    x, y = data(19)
    for lists in (False, True):
        engine = polyreme.initialize(line(), sgd(1, 4, 2, mesh={"pp": 2}), loss_fn=F.mse_loss)
        results = []
        for at in (0, 8, 16):
            step = x[at : at + 8], y[at : at + 8]
            parts = [*zip(*(t.tensor_split([1, 3, 6] if at < 16 else [2]) for t in step), strict=True)]
            results.append(engine.train_step(parts if lists else step))
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))
    return runs


def test_incomplete_batches_in_a_pipeline(ranks: Ranks) -> None:
    x, y = data(19)
    expected = plain(line(), [[(x[at : at + 8], y[at : at + 8])] for at in (0, 8, 16)])
    for runs in ranks(2, piped):
        for run in runs:
            close(run, expected, "pipeline")
