"""Memory that runs out in a run with a plan: what was there beside the plan, and the smallest change that
fits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads
from polyreme.config import Config
from polyreme.planner import shortage
from polyreme.planner.choice import Subject
from polyreme.planner.dry_run import dry_run
from polyreme.planner.shortage import smallest_change

MSE = nn.functional.mse_loss


class Fills(nn.Module):
    """Asks for too much where it computes with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and x.device.type == "cpu":
            torch.empty(2**50)
        return self.inner(x)


def pair(samples: int) -> tuple[Tensor, Tensor]:
    return torch.ones(samples, 8), torch.ones(samples, 4)


def config(world: int = 1, micro: int = 256, **sections: Any) -> Config:
    given = {"batch": {"size": 512 * world, "micro": micro}, "zero": {"stage": 1}, **sections}
    return Config.load(given).resolve(world)


class Taken(NamedTuple):
    """A trace of a rank, as far as it is read."""

    memory: Any


def taken(model: object, tried: Config, **given: object) -> dict[str, Taken]:
    """In place of a dry run: 10 bytes for each sample, of which recomputation keeps half, and 100 for the
    states, which files take away."""
    kept = 10 if tried.memory.activations == "keep" else 5
    peak = kept * int(tried.batch.micro) + 100 * (tried.memory.states == "device")
    return {"each": Taken(SimpleNamespace(peak=peak, host=0))}


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (2660, "a step takes 2.6 KiB of 2.6 KiB by a dry run: what ran out is not in it"),
        (2600, "the smallest change that fits 2.5 KiB: batch.micro = 128 (now 256) takes 1.3 KiB"),
        (1379, "the smallest change that fits 1.3 KiB: batch.micro = 64 (now 256) takes 740 B"),
        (60, "the smallest change that fits 60 B: batch.micro = 1, memory.activations = "),
        (4, "a step takes 2.6 KiB of 4 B, and with what takes less 5 B"),
    ],
)
def test_the_smallest_change_that_fits(room: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone where one change is enough, several together otherwise, and what is least where none is."""
    monkeypatch.setattr(shortage, "run_kinds", taken)
    alone = smallest_change(Subject(Fills, pair, {}), config(micro=1), 100, "cpu", None, math.inf)
    assert 'memory.activations = "recompute" (now "keep") takes 105 B' not in alone
    assert 'memory.states = "./offload" (now "device") takes 10 B' in alone
    subject = Subject(Fills, pair, {})
    found = smallest_change(subject, config(), room, "cpu", None, math.inf)
    assert found.startswith(words), found
    if room < 2660:  # no time is left
        late = smallest_change(subject, config(), room, "cpu", None, 0.0)
        assert late.endswith("and with what takes less 2.6 KiB")


def runs_out(rank: int, world: int) -> str:
    plan = {"ranks": world, "seconds": 1.0, "memory": {"activations": 4096}}
    given = config(world, plan=plan)
    engine = polyreme.initialize(Fills(), given, loss_fn=MSE, batch=pair)
    with engine, pytest.raises(polyreme.OutOfMemoryError) as caught:
        engine.train_step(pair(512))
    return str(caught.value)


def test_the_first_rank_says_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "SECONDS", 0.01)
    least = dry_run(lambda: Fills().inner, config(micro=128), 0, batch=pair, loss_fn=MSE).memory.peak
    monkeypatch.setattr(shortage, "room_of", lambda mesh, own: least / shortage.USED + 100)
    monkeypatch.setattr(shortage.time, "monotonic", lambda: 0.0)
    first, second = threads.run(2, runs_out)
    for each in (first, second):
        assert "this rank has parameters" in each and "what takes less: batch.micro = 128 (now 256)" in each
        assert "the plan has activations 4.0 KiB at the peak of a step" in each
    assert "the smallest change that fits" in first and "batch.micro = 128 (now 256) takes" in first
    assert "the first rank of this stage says what would fit" in second


def test_an_error_of_its_own_does_not_hide_the_shortage() -> None:
    def fail(*_: object) -> Any:
        raise ValueError("no such model")

    broken = Subject(fail, pair, {"loss_fn": MSE, "optimizer": None})
    with polyreme.initialize(Fills(), config(), loss_fn=MSE) as engine:
        engine.advise = shortage.advice_on(broken)
        with pytest.raises(polyreme.OutOfMemoryError, match=r"4\.0 PiB were asked for") as caught:
            engine.train_step(pair(512))
    assert "what would fit is not known (ValueError: no such model)" in str(caught.value)
