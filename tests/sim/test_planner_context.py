"""A plan of divided sequences: when ranks wait for each other, and "auto" where only cp fits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import models
from polyreme.config import Config
from polyreme.planner.dry_run import dry_run
from polyreme.planner.hardware import Cluster
from polyreme.planner.plan import Plan, plan, schedule_of
from polyreme.planner.time_model import step_time
from polyreme.planner.trace import Collective, Compute

LENGTH = 4096


def planned(method: str, hidden: int = 64, **given: Any) -> Plan:
    """A small model with a large vocabulary, on four ranks: a sample of many tokens for each."""
    model = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config: dict[str, Any] = {
        "model": {"config": model},
        "data": {"sequence": LENGTH, "vocab_size": 4096},
        "context": {"method": method},
        "batch": {"size": 4, "micro": 1},
        "precision": {"compute": "fp32"},
    }
    cluster = given.pop("cluster", "cpu")
    return plan(None, config | given, 4, cluster, grow=False)


def test_a_ring_is_hidden_under_attention_and_an_exchange_of_heads_is_not() -> None:
    exposed = {}
    for method in ("ring", "ulysses"):
        # a GPU's collectives take few of its units; those of CPU ranks take the cores that compute
        made = planned(method, 1024, mesh={"cp": 4}, zero={"stage": 0}, batch={"size": 1}, cluster="h100")
        details = made.details
        assert details is not None
        trace = details.worst
        assert trace.coordinates["cp"] == 3 and trace.axes["cp"] == (0, 1, 2, 3)
        exchanges = [
            made.cluster.collective(event.verb, event.bytes, trace.axes["cp"])[1]
            for segment in trace.segments
            for event in segment.events
            if isinstance(event, Collective) and event.verb == "all_to_all"
        ]
        without = step_time(
            details.traces, schedule_of(details.config), made.cluster, overlapped=["cp all_to_all"]
        )
        exposed[method] = (details.timeline.seconds - without.seconds) / sum(exchanges)
    assert exposed["ring"] < 0.3 and exposed["ulysses"] > 0.8, exposed


@pytest.mark.parametrize("device, taken", [("cpu", 2), ("cuda", 0)])
def test_attention_is_that_of_the_device_which_computes(device: str, taken: int) -> None:
    """On CPUs the fused kernel's, over the block of the rank before and the rank's own, with its FLOPs."""
    config = {
        "batch": {"size": 1},
        "mesh": {"cp": 2},
        "context": {"method": "ring", "balance": "contiguous"},
        "memory": {"activations": "keep"},
    }
    trace = dry_run(
        partial(models.llama, num_hidden_layers=1),
        Config.load(config).resolve(2),
        1,
        batch=lambda _: models.tokens(1, 64),
        device=device,
    )
    computed = [each for part in trace.segments for each in part.events if isinstance(each, Compute)]
    calls = [each for each in computed if "scaled_dot_product" in each.op]
    backward = [each for each in calls if "backward" in each.op]
    assert len(calls) == 2 * taken and len(backward) == taken
    product = 2 * 4 * 32 * 32 * (24 // 4)
    assert sum(each.flops for each in calls) == taken * (2 + 5) * product


def test_auto_takes_cp_where_a_long_sequence_fits_nowhere_else() -> None:
    alone = planned("ring", mesh={"cp": 1}).details
    assert alone is not None
    cluster = Cluster.load("cpu")
    small = cluster.device.model_copy(update={"memory": type(cluster.device.memory)(alone.worst.memory.peak)})
    small_cluster = cluster.model_copy(update={"device": small})
    every = {"pp": 1, "cp": "auto"}
    found = planned("auto", mesh=every, memory={"activations": "auto"}, cluster=small_cluster)
    assert found.fits and found.details is not None
    assert found.details.config.mesh.cp > 1, [each.layout.values for each in found.found.best]
    assert all(each.layout.config.mesh.cp > 1 for each in found.found.best)
    assert found.found.best[0].layout.values["mesh.cp"] == found.details.config.mesh.cp
    fixed = planned("auto", mesh=every | {"cp": 1}, memory={"activations": "auto"}, cluster=small_cluster)
    assert not fixed.fits and all("more than the" in each.why for each in fixed.found.failed)
