"""What a dry run shows of the engine's step: when messages go, and how long their memory is kept."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch.nn.functional as F

import planned
from cover import ALL
from polyreme.config import Config
from polyreme.planner.allocator import SMALL_SEGMENT
from polyreme.planner.dry_run import dry_run, recorded_step
from polyreme.planner.plan import plan
from polyreme.planner.trace import Collective, RankTrace, Wait
from polyreme.simulation import META, simulated
from polyreme.step.memory import fit

SCHEDULES = ("1f1b", "1f1b-w", "interleaved", "zb-h1", "zb-v")


def config_of(count: int, dp: int = 1, **given: Any) -> Config:
    """A pipeline of two ranks."""
    sections = {"batch": {"size": 4 * count * dp, "micro": 4}, "zero": {"min_bucket": 0}, **given}
    return Config.load({"mesh": {"pp": 2}, **sections}).resolve(2 * dp)


def step(config: Config, rank: int) -> RankTrace:
    """A whole step, with all of its micro-batches."""
    with simulated(planned.perceptron, config, rank, META, loss_fn=F.cross_entropy) as engine:
        batch = planned.vectors(config.share)
        engine.train_step(batch)
        return recorded_step(engine, batch)


@pytest.mark.parametrize("schedule", SCHEDULES if ALL in os.environ else SCHEDULES[:1])
def test_memory_does_not_grow_with_the_messages_of_a_step(schedule: str) -> None:
    for rank in range(2):
        few, many = (step(config_of(count, pipeline={"schedule": schedule}), rank) for count in (6, 9))
        own = [each.memory.peak - each.memory.by_category["batch"] for each in (few, many)]
        assert own[0] == own[1], rank


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_gradient_goes_on_before_the_last_reduction_is_waited_for(schedule: str) -> None:
    config = config_of(4, dp=2, pipeline={"schedule": schedule})
    trace = dry_run(planned.perceptron, config, 3, batch=planned.vectors, loss_fn=F.cross_entropy)
    events = [event for segment in trace.segments for event in segment.events]
    begun = [(at, e) for at, e in enumerate(events) if isinstance(e, Collective)]
    sent = max(at for at, e in begun if e.verb == "send")
    waited = {e.number: at for at, e in enumerate(events) if isinstance(e, Wait)}
    reduced = [waited[e.number] for at, e in begun if e.verb == "reduce_scatter" and at < sent]
    assert len(reduced) > 1 and [at for at in reduced if at > sent] == reduced[-1:]


def test_a_loss_of_ones_own_takes_no_memory_in_the_update() -> None:
    case = planned.Case("mlp", (), 0, "device", "keep", "fp32", 1)
    (real, traffic) = planned.measured(0, 1, case, "")
    said = planned.predicted(case, 0, "")
    assert abs(said.memory.peak / real.memory.peak - 1) < 0.001
    assert said.traffic == traffic == {}


def test_a_gpu_takes_segments_for_the_same_states() -> None:
    case = planned.Case("mlp", (), 0, "device", "keep", "fp32", 1)
    config = case.config("")
    given: dict[str, Any] = {"batch": planned.vectors, "loss_fn": F.cross_entropy}
    cpu, gpu = (
        dry_run(planned.perceptron, config, 0, device=device, **given).memory for device in ("cpu", "cuda")
    )
    assert cpu.resting["states"] == gpu.resting["states"] and cpu.reserved == 0
    assert gpu.reserved >= gpu.peak and gpu.reserved % SMALL_SEGMENT == 0
    assert gpu.action is not None and gpu.action.op != "U"


def test_the_memory_of_this_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "own_memory", lambda: 1)
    config = Config.load({"batch": {"size": 8}}).resolve(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dry_run(planned.perceptron, config, 0, batch=planned.vectors, loss_fn=F.cross_entropy)


def test_a_pipeline_of_layers_is_planned() -> None:
    made = plan(
        planned.perceptron, {"batch": {"size": 8}, "mesh": {"pp": 2}}, 2, "cpu",
        batch=planned.vectors, loss_fn=F.cross_entropy,
    )  # fmt: skip
    assert made.details is not None and len(made.details.traces) == 2
