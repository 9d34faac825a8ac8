"""The seconds of each block, and the copy of a model on which they are measured."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import models
from cuttable import batch_for, family
from polyreme.deferred_init.replay import record
from polyreme.models.huggingface import sample_batch
from polyreme.pipeline.partition import partition_model
from polyreme.pipeline.profile import block_seconds, copy_to, measure

CPU = torch.device("cpu")


class Ticks(nn.Module):
    """Takes `seconds` of a clock of its own for forward, and twice that for backward."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.weight, self.seconds, self.clock = nn.Parameter(torch.ones(3)), seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds
        x = x * self.weight
        x.register_hook(lambda _: self.clock.__setitem__(0, self.clock[0] + 2 * self.seconds))
        return x


def test_balance_by_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    model = nn.Sequential(*(Ticks(seconds, clock) for seconds in (1, 1, 1, 5, 2)))
    x = torch.randn(2, 3)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    state = torch.get_rng_state()
    costs = measure(model, lambda: model(x))
    assert costs == [3, 3, 3, 15, 6]
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)
    assert partition_model(model, 2, costs=costs).bounds == (0, 3, 5)


def test_a_real_model_is_measured() -> None:
    model, batch = family("gpt2"), batch_for("gpt2")
    costs = measure(model, lambda: model(**batch), repeats=1)
    assert len(costs) == 5 and min(costs) > 0 and all(p.grad is None for p in model.parameters())


def test_the_models_own_loss_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that calls its loss at a time of 7 makes the last block cost that much."""
    clock, model = [0.0], models.llama(num_hidden_layers=2)
    batch = sample_batch(model, samples=2, sequence=8)
    assert batch is not None
    own = model.loss_function

    def slow(*args: object, **kwargs: object) -> Tensor:
        clock[0] += 7
        return own(*args, **kwargs)

    model.loss_function = slow
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert block_seconds(model, batch) == [0, 7]


def build() -> nn.Module:
    """Two tied parameters, a frozen one and a buffer, which a forward changes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.second(self.first(x))

    return Model()


def test_a_copy_computes_like_the_model_and_leaves_it_alone() -> None:
    torch.manual_seed(0)
    model = build()
    trial = copy_to(CPU, torch.float32, model)
    assert trial.first.weight is trial.second.weight and not trial.second.bias.requires_grad
    x = torch.randn(2, 3)
    assert torch.equal(trial(x), model(x)) and trial(x).requires_grad
    assert (trial.calls, model.calls) == (2, 1)
    half = copy_to(CPU, torch.bfloat16, model)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half.calls.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_recorded_model_is_built_for_it() -> None:
    torch.manual_seed(3)
    model, recording = build(), record(build, seed=3)
    trial = copy_to(CPU, torch.float32, recording.module, recording.replay)
    assert all(
        torch.equal(there, here) for there, here in zip(trial.parameters(), model.parameters(), strict=True)
    )
    assert all(p.is_meta for p in recording.module.parameters()) and trial.first.weight is trial.second.weight


@pytest.mark.parametrize(
    ("name", "sequence", "shapes"),
    [
        ("llama", 16, {"input_ids": (3, 16), "labels": (3, 16)}),
        ("gpt2", 100, {"input_ids": (3, 32), "labels": (3, 32)}),  # it takes no more
        ("bert-classes", 16, {"input_ids": (3, 16)}),
        ("vit", 16, {"pixel_values": (3, 3, 8, 8)}),
    ],
)
def test_a_batch_like_those_of_training(name: str, sequence: int, shapes: dict[str, tuple[int, ...]]) -> None:
    batch = sample_batch(family(name), samples=3, sequence=sequence)
    assert batch is not None and {key: tuple(value.shape) for key, value in batch.items()} == shapes


def test_no_batch_for_a_model_of_ones_own() -> None:
    assert sample_batch(models.ConvNet(), samples=3, sequence=16) is None
