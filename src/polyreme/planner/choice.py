"""Choose what a run's config leaves open ("auto") when the run starts: by the search of `polyreme plan`, for
the ranks that there are.

Invariant: every rank takes what rank 0 found, or raises. A script's random numbers stay as they are, and its
model is not changed. Communication: two exchanges, of what each rank has and of rank 0's answer."""

from __future__ import annotations

import inspect
import random
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ByteSize
from torch.optim import Optimizer

from polyreme.config import Config
from polyreme.distributed.mesh import Axis
from polyreme.errors import ConfigError, LaunchError, ModelError, PolyremeError, Problem
from polyreme.files.machine import boot
from polyreme.models import huggingface
from polyreme.offload import host
from polyreme.placement.opening import Model, maker
from polyreme.planner.dry_run import MakeBatch
from polyreme.planner.flops import data_sheet
from polyreme.planner.hardware import PRESETS, Cluster
from polyreme.planner.measure import measure
from polyreme.planner.meta_model import on_meta
from polyreme.planner.plan import MakeModel, expectations, judge_of, limits_of
from polyreme.planner.search import Cost, Found, Judged, Limits, binary, search, shown
from polyreme.step.memory.fit import own_memory
from polyreme.step.memory.kept import device_of_ranks
from polyreme.tensor.rng import restore_rng_states, rng_states

ENOUGH = 12
"""Layouts that fit after which no more are tried when a run starts."""
PATIENCE = 0.5
"""The part of `mesh.timeout`, for which the other ranks wait, that a search may take."""
Choice = tuple[Mapping[str, Any], str]
"""Values by dotted key, and a line that says what was chosen."""


@dataclass(frozen=True)
class Subject:
    """What is to be trained. make: builds the model, without memory. batch: makes a batch of so many samples.
    given: the arguments of `initialize` that count for its memory."""

    make: MakeModel
    batch: MakeBatch | None
    given: Mapping[str, Any]

    @classmethod
    def of(
        cls, model: Model, config: Config, optimizer: Any = None, loss_fn: Any = None, batch: Any = None
    ) -> Subject:
        """Make one of what `initialize` takes, of which it keeps no memory."""
        make = maker(model, config.model.trust_remote_code)
        return cls(make, batch, {"optimizer": _made_anew(optimizer), "loss_fn": loss_fn})


def _made_anew(optimizer: Any) -> Any:
    """Return what makes an optimizer like one that was made of the model's parameters."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    kind, taken = type(optimizer), inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return lambda parameters: kind(parameters, **options)


def choose(
    ranks: Axis, config: Config, subject: Subject, known: Callable[[], Choice | None] = lambda: None
) -> tuple[Config, str]:
    """Return the config with what it leaves open, and a line that says what that is. All ranks must call.
    known: on rank 0, what is known without a search.

    Raises on every rank where rank 0 finds nothing: there what was wrong, on the others LaunchError."""
    everyones = ranks.gather_objects([f"{socket.gethostname()} {boot()}", own_memory(), host.total()])
    failure: Exception | None = None
    values: Mapping[str, Any] = {}
    said = ""
    if ranks.rank == 0:
        try:
            values, said = known() or find(config, cluster_of(config, everyones), ranks.size, subject)
        except Exception as error:  # whatever it is, the others must not wait
            failure = error
    values, said, why = ranks.gather_objects([values, said, failure and (str(failure) or repr(failure))])[0]
    if failure is not None:
        raise failure
    if why is not None:
        raise LaunchError(f"rank 0 could not choose {', '.join(config.searched)} for all ranks: {why}")
    return config.chosen(values), said


def cluster_of(config: Config, ranks: Sequence[Sequence[Any]]) -> Cluster:
    """Describe what a run is on, as `plan.cluster` says. ranks: of each, its host's name, the bytes of memory
    that it computes in, and those of its host."""
    device, hosts = device_of_ranks(), Counter(name for name, *_ in ranks)
    if config.plan.cluster is not None:
        return _with(Cluster.load(config.plan.cluster), ranks_per_host=max(hosts.values()))
    if device.type == "cpu":
        found = Cluster.load("cpu")
        own = min(size // hosts[name] for name, size, _ in ranks)
    else:
        sheet = data_sheet(torch.cuda.get_device_name(device))
        names = {name: data_sheet(each["device"].get("name", "")) for name, each in PRESETS.items()}
        name = next((name for name, each in names.items() if sheet is not None and each == sheet), None)
        found = measure() if name is None else Cluster.load(name)
        own = min(size for _, size, _ in ranks)
    total = min(each for *_, each in ranks)
    found = _with(found, ranks_per_host=max(hosts.values()))
    return _with(found, device=_with(found.device, memory=own), host=_with(found.host, memory=total))


def _with(section: Any, **values: Any) -> Any:
    sizes = {name: ByteSize(each) if name == "memory" else each for name, each in values.items()}
    return section.model_copy(update=sizes)


def find(config: Config, cluster: Cluster, ranks: int, subject: Subject) -> Choice:
    """Search for what `config` leaves open on `ranks` ranks of `cluster`. Raises ConfigError where nothing
    fits, and what a dry run raises where none can be made."""
    limits = limits_of(cluster, config)
    tried = _Tried(config, limits, judge_of(subject.make, cluster, batch=subject.batch, **subject.given))
    with undisturbed():
        blocks = huggingface.pipeline_length(on_meta(subject.make))
        found = search(config, ranks, limits, tried, blocks)
    if tried.error is not None and not tried.count:
        raise tried.error
    if not found.best:
        raise ConfigError([Problem(key, "auto", *_nothing_fits(found, ranks)) for key in config.searched[:1]])
    best = found.best[0]
    assert best.cost is not None
    return {**best.layout.values, **expectations(best.cost.details)}, _line(found, config, cluster, limits)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the generators of random numbers as they are, and let nothing be said of what is only tried."""
    device = device_of_ranks()
    states, own, numpys = rng_states(device), random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        restore_rng_states(states, device)
        random.setstate(own)
        np.random.set_state(numpys)


class _Tried:
    """A judge that stops after ENOUGH layouts that fit, and before the other ranks' patience ends. error: the
    first one of a layout that could not be run dry. count: those that could."""

    def __init__(self, config: Config, limits: Limits, judge: Callable[[Config], Cost]) -> None:
        self._judge, self._limits, self.count, self._fit = judge, limits, 0, 0
        self._until = time.monotonic() + PATIENCE * config.mesh.timeout
        self.error: Exception | None = None

    def __call__(self, config: Config) -> Cost:
        if self._fit == ENOUGH or time.monotonic() > self._until:
            raise PolyremeError(_ENDED)
        try:
            cost = self._judge(config)
        except Exception as error:
            known = isinstance(error, PolyremeError)
            self.error = self.error or (error if known else ModelError(_untold(error)))
            raise self.error from error
        self.count += 1
        self._fit += cost.memory <= self._limits.memory and cost.host <= self._limits.host
        return cost


_ENDED = "not tried, as others fit"


def _untold(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return (
        'what the model takes cannot be told without numbers, which a search for "auto" needs '
        f"({type(error).__name__}: {said}): write numbers for mesh, pipeline and memory"
    )


def _nothing_fits(found: Found, ranks: int) -> tuple[str, str]:
    near = found.failed[0]
    reason = (
        f"of {len(found.failed)} layouts of {ranks} ranks none fits; the nearest, {shown(near)}: {near.why}"
    )
    return reason, "polyreme plan CONFIG shows all, and on how many ranks one fits"


def _line(found: Found, config: Config, cluster: Cluster, limits: Limits) -> str:
    """Return a line that names the choice and the next best one."""
    best, *others = found.best
    tried = len(found.best) + sum(each.why != _ENDED for each in found.failed)
    told = [f"{shown(best)} ({_costs(best)})"]
    told += [f"next best {shown(others[0])} ({_costs(others[0])})"] if others else ["no other fits"]
    keys = ", ".join(config.searched)
    where = f"{cluster.name or cluster.device.name or 'this cluster'}, {binary(limits.memory)} a rank"
    return f'"auto" ({keys}) is chosen for {where}: {"; ".join(told)}; {tried} tried'


def _costs(judged: Judged) -> str:
    assert judged.cost is not None
    return f"{judged.seconds:.3g} s a step, {binary(judged.cost.memory)}"
