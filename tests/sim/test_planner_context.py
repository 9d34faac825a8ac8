"""A plan of divided sequences: when ranks wait for each other, and "auto" where only cp fits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import models
from polyreme.cli.inspect import context_choice
from polyreme.config import Config
from polyreme.planner.dry_run import dry_run
from polyreme.planner.hardware import Cluster
from polyreme.planner.plan import Plan, plan, schedule_of
from polyreme.planner.time_model import step_time
from polyreme.planner.trace import Collective, Compute

LENGTH = 4096


def planned(method: str, hidden: int = 64, key_heads: int = 4, **given: Any) -> Plan:
    """A small model with a large vocabulary, on four ranks: a sample of many tokens for each."""
    model = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
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


@pytest.mark.parametrize(
    ("device", "compute", "kernel"),
    [
        ("cpu", "fp32", "flash_attention_for_cpu"),
        ("cuda", "bf16", "flash_attention"),
        ("cuda", "fp32", "efficient_attention"),
        ("cuda", "fp64", ""),
    ],
)
def test_attention_is_that_of_the_device_which_computes(device: str, compute: str, kernel: str) -> None:
    """Over the block of the rank before, and over the rank's own, where it is causal."""
    config = {
        "batch": {"size": 1},
        "precision": {"compute": compute},
        "mesh": {"cp": 2},
        "context": {"method": "ring", "balance": "contiguous"},
        "memory": {"activations": "keep"},
    }
    trace = dry_run(
        partial(models.llama, num_hidden_layers=1, hidden_size=32),
        Config.load(config).resolve(2),
        1,
        batch=lambda _: models.tokens(1, 64),
        device=device,
    )
    computed = [each for part in trace.segments for each in part.events if isinstance(each, Compute)]
    calls = [each for each in computed if "scaled_dot_product" in each.op]
    names = [f"_scaled_dot_product_{kernel}{way}" for way in ("", "_backward") for _ in range(2)]
    assert [each.op for each in calls] == (names if kernel else [])
    product = 2 * 4 * 32 * 32 * (32 // 4)
    assert [each.flops for each in calls] == [n * product for n in (2, 2, 5, 5)][: len(calls)]
    # the own block is the first forward and the last backward, while the other one comes
    assert [each.causal for each in calls] == [True, False, False, True][: len(calls)]


def test_more_samples_fit_where_the_loss_is_in_chunks() -> None:
    """On a device whose memory is between what four samples take with whole logits, and with chunks."""
    whole = {"mesh": {"cp": 1}, "data": {"sequence": 256, "vocab_size": 4096}, "batch": {"size": 16}}
    chunks = whole | {"context": {"loss_chunk": 64}}
    four = {"batch": {"size": 16, "micro": 4}}
    details = [planned("ring", **(each | four)).details for each in (whole, chunks)]
    peaks = [each.worst.memory.peak for each in details if each is not None]
    assert peaks[0] - peaks[1] > 4 * 256 * 4096 * 4  # a copy of all logits
    cluster = Cluster.load("cpu")
    memory = type(cluster.device.memory)(sum(peaks) // 2)
    small = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory": memory})})
    best = [planned("ring", **each, cluster=small).found.best[0] for each in (whole, chunks)]
    few, many = (int(each.layout.config.batch.micro) for each in best)
    assert few < 4 == many


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


@pytest.mark.parametrize("per_host", [2, 4])
def test_ranks_of_a_plan_are_on_the_hosts_of_its_cluster(tmp_path: Path, per_host: int) -> None:
    """Attention is what inspect says for that cluster, and its axes are priced over these hosts."""
    cluster = Cluster.load({"base": "h100", "ranks_per_host": per_host})
    made = planned("auto", key_heads=2, mesh={"cp": 4}, cluster=cluster)
    trace = made.details.worst
    (tmp_path / "cluster.toml").write_text(cluster.to_toml(), "utf-8")
    config = Config.load(made.details.config, [f"plan.cluster={tmp_path / 'cluster.toml'}"]).resolve(4)
    choice = context_choice(config)
    assert choice is not None
    used = {event.axis for part in trace.segments for event in part.events if isinstance(event, Collective)}
    of_cp = {name: trace.axes[name] for name in used if name.startswith("cp")}
    if per_host == 4:
        assert choice.method != "mix" and of_cp == {"cp": (0, 1, 2, 3)}
        return
    assert str(choice) == "2 ulysses x 2 ring"
    assert of_cp == {"cp": (0, 1, 2, 3), "cp_ulysses": (2, 3), "cp_ring": (1, 3)}
    links = {name: cluster.collective("all_to_all", 1 << 20, ranks)[0] for name, ranks in of_cp.items()}
    assert links == {"cp": "between", "cp_ulysses": "inside", "cp_ring": "between"}


def test_tables_of_a_micro_batch_end_with_its_backward() -> None:
    """So that a step of more micro-batches has no more of them on the device."""
    config: dict[str, Any] = {
        "batch": {"size": 3, "micro": 1},
        "mesh": {"cp": 2},
        "context": {"method": "gather"},
    }
    config |= {"precision": {"compute": "fp64"}}  # whose attention is in tiles of scores, with masks
    model, resolved = partial(models.llama, num_hidden_layers=1), Config.load(config).resolve(2)
    trace = dry_run(model, resolved, 1, batch=lambda samples: models.tokens(samples, 64), device="cuda")
    left = {trace.segments[each.segment].action: sum(each.live) for each in trace.memory.timeline}
    ends = [size for action, size in left.items() if action is not None and action.op == "B"]
    assert len(ends) == 3 and ends[1] == ends[2]
