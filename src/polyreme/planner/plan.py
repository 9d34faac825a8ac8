"""What a job takes and how long a step of it runs, before it runs: `polyreme.plan`.

Invariant: memory and traffic are those of the engine's own step on simulated ranks (`dry_run`), seconds those
of the time model over what they do. No device is touched. Communication: none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from polyreme.config import Config
from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.models import huggingface
from polyreme.pipeline.schedule import Schedule, build
from polyreme.placement.opening import Model, maker
from polyreme.planner.dry_run import MakeBatch, run_kinds
from polyreme.planner.hardware import Cluster, Device
from polyreme.planner.meta_model import builder, on_meta
from polyreme.planner.search import TRIES, Cost, Found, Judge, Judged, Limits, binary, search, shown, smallest
from polyreme.planner.time_model import Timeline, step_time
from polyreme.planner.trace import MemoryTrace, RankTrace
from polyreme.step.loss.objective import LossFn
from polyreme.step.memory.fit import USED

MakeModel = Callable[[], nn.Module]
LEANER = ("memory.states", "memory.params", "memory.activations")
"""Keys that are tried where nothing fits as the config has them."""


@dataclass(frozen=True)
class Details:
    """One layout in full. traces: the steps of one pipeline rank of each kind."""

    config: Config
    traces: Sequence[RankTrace]
    timeline: Timeline
    device: Device

    @property
    def worst(self) -> RankTrace:
        """The rank that takes the most memory of its device."""
        return max(self.traces, key=lambda each: taken(each.memory, self.device))


def taken(memory: MemoryTrace, device: Device) -> int:
    """Return the bytes of its device that a rank takes at its peak: on a GPU those that torch's allocator
    reserves for its tensors, and those of the driver."""
    return max(memory.peak, memory.reserved) + int(device.context)


@dataclass(frozen=True, repr=False)
class Plan:
    """What a job takes on so many `ranks` of `cluster`. limits: what a rank has. details: of the layout that
    was chosen, or of the nearest one where none fits. found: all layouts that were tried. grown: where none
    fits, the smallest number of ranks found on which one does, with values of its own where no other helps;
    tier: one on as many ranks that keeps less on the device than the config asks for."""

    ranks: int
    cluster: Cluster
    limits: Limits
    details: Details
    found: Found
    grown: tuple[int, Judged] | None = None
    tier: Judged | None = None

    @property
    def fits(self) -> bool:
        """Whether a layout fits."""
        return bool(self.found.best)

    def __repr__(self) -> str:
        """Say on one line what the layout takes, and whether it fits."""
        judged, where = (*self.found.best, *self.found.failed)[0], self.cluster.name or "this cluster"
        how = f"does not fit: {judged.why}" if judged.why else "fits"
        memory = binary(taken(self.details.worst.memory, self.details.device))
        takes = f"{self.details.timeline.seconds:.3g} s a step, {memory} a rank; {how}"
        return f"<Plan: {self.ranks} ranks of {where}, {shown(judged)}: {takes}>"


def plan(
    model: Model | None,
    config: str | Path | Mapping[str, Any] | Config,
    ranks: int,
    cluster: str | Path | Mapping[str, Any] | Cluster = "h100",
    *,
    batch: MakeBatch | None = None,
    loss_fn: LossFn | None = None,
    tries: int = TRIES,
    grow: bool = True,
) -> Plan:
    """Return what a job on `ranks` ranks takes; where `config` has "auto", with the fastest layout that fits.

    model, config: as for `polyreme.initialize`; None for the model that the config names. A function that
    builds the model is called without memory. cluster: the name of a preset, a file or a description. batch:
    for models that are not Hugging Face's, a function that makes a batch of so many samples, of which only
    shapes and dtypes are read. tries: the most layouts that are run dry. grow: where none fits, look for more
    ranks, or another tier, with which one does.

    Raises ConfigError for a config or cluster that cannot be, and ModelError for a model that cannot be run
    without numbers."""
    config, hardware = Config.load(config), Cluster.load(cluster)
    if not isinstance(tries, int) or tries < 1:
        raise ConfigError([Problem("tries", tries, "no layout would be run dry", "give 1 or more")])
    make = named_model(config) if model is None else maker(model, config.model.trust_remote_code)
    limits = limits_of(hardware, config)
    judge = judge_of(make, hardware, batch=batch, loss_fn=loss_fn)
    blocks = huggingface.pipeline_length(on_meta(make))
    found = search(config, ranks, limits, judge, blocks, tries)
    nearest = next((each.cost for each in (*found.best, *found.failed) if each.cost is not None), None)
    if nearest is None:
        raise ModelError(f"no layout of {ranks} ranks can be run without numbers: {found.failed[0].why}")
    made = Plan(ranks, hardware, limits, nearest.details, found)
    if found.best or not grow:
        return made
    own = [f"pipeline.schedule={config.schedule}"] * (not config.searched)
    less = Config.load(config, [*own, *(f"{key}=auto" for key in LEANER)])
    with warnings.catch_warnings(action="ignore"):  # of what is only tried
        at_hand = smallest(less, ranks, limits, judge, blocks, range(1))
        grown = smallest(config, ranks, limits, judge, blocks) or (
            None if at_hand else smallest(less, ranks, limits, judge, blocks)
        )
    return replace(made, grown=grown, tier=None if at_hand is None else at_hand[1])


def judge_of(make: MakeModel, cluster: Cluster, **given: Any) -> Judge:
    """Return a function that says what a resolved config costs on `cluster`. given: as for `dry_run`."""
    device = "cuda" if cluster.device.is_accelerator else "cpu"

    def judge(resolved: Config) -> Cost:
        kinds = run_kinds(make, resolved, device=device, per_host=cluster.ranks_per_host, **given)
        traces = [*kinds.values()]
        timeline = step_time(traces, schedule_of(resolved), cluster)
        details = Details(resolved, traces, timeline, cluster.device)
        memory = details.worst.memory
        most = sorted(memory.by_category.items(), key=lambda each: -each[1])[:2]
        where = f"rank {details.worst.rank}, " + ", ".join(f"{name} {binary(size)}" for name, size in most)
        host = max(each.memory.host for each in traces)
        own = taken(memory, cluster.device) + host * (device == "cpu")  # which computes in its host's memory
        flops = timeline.tflops * 1e12 * timeline.seconds * math.prod(resolved.axes.values())
        return Cost(own, host * (device != "cpu"), where, timeline.seconds, flops, details)

    return judge


def expectations(details: Details) -> dict[str, object]:
    """Return the keys of `plan` in a config that say what is expected of this layout."""
    return {
        "plan.ranks": math.prod(details.config.axes.values()),
        "plan.seconds": float(f"{details.timeline.seconds:.4g}"),
        "plan.memory": {name: size for name, size in details.worst.memory.by_category.items() if size},
    }


def limits_of(cluster: Cluster, config: Config) -> Limits:
    """Return what a rank of `cluster` has for a plan."""
    return Limits(
        int(cluster.device.memory * USED),
        int(cluster.host.memory * cluster.device.is_accelerator * USED / cluster.ranks_per_host),
        cluster.device.rate(config.precision.compute.removeprefix("autocast-")),
        cluster.ranks_per_host,
    )


def named_model(config: Config) -> MakeModel:
    """Return a function that builds the model that a config names. Raises ConfigError where it names none."""
    if (make := builder(config.model, config.data)) is not None:
        return make
    folders = {"model.path": config.model.path, "data.tokenizer": config.data.tokenizer}
    fix = 'write model.config = {model_type = "llama", ...}, or give polyreme.plan a function'
    raise ConfigError(
        [
            Problem(key, path, "it is no directory of this machine", "give the path of one")
            for key, path in folders.items()
            if path is not None and not Path(path).expanduser().is_dir()
        ]
        or [Problem("model.path", None, "the config names no model", fix)]
    )


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of a resolved config."""
    return build(config.schedule, config.mesh.pp, config.accumulation, config.pipeline.virtual)
