"""What goes between a device and the CPU that updates its buckets, where copies take place as late as they
may: an order of steps that does not wait for one shows as a wrong number. On a GPU the same code has streams
instead."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import models
import polyreme
import probe
import threads
import training
from cover import cover, together
from polyreme.layout.bucket_layout import ALIGN
from polyreme.offload import optimizer_states
from polyreme.offload.copy_stream import CopyStream
from polyreme.offload.host_transfer import HostTransfer
from pool import Ranks


class Copy:
    """A copy that is made when it is waited for; until then its target has NaN."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        target.view(torch.uint8).fill_(255)
        self._copy: Callable[[], object] | None = lambda: target.copy_(source)
        self._alone = threading.Lock()

    def synchronize(self) -> None:
        with self._alone:  # threads that write files wait for some
            if self._copy is not None:
                self._copy()
                self._copy = None


class LateLane(CopyStream):
    def __init__(self) -> None:
        self._leaving: list[Copy] = []
        self._coming: list[Copy] = []

    def out(self, source: Tensor, memory: Tensor) -> Copy:
        self._leaving.append(Copy(source, memory))
        return self._leaving[-1]

    def into(self, memory: Tensor, target: Tensor) -> Copy:
        self._coming.append(Copy(memory, target))
        return self._coming[-1]

    def arrive(self) -> None:
        for copy in self._coming:
            copy.synchronize()
        self._coming.clear()

    def settle(self) -> None:
        for copy in self._leaving:
            copy.synchronize()
        self._leaving.clear()


class LateTransfer(HostTransfer):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copy_stream = LateLane()


def train(rank: int, world: int, settings: list[dict[str, Any]], share: bool = True) -> list[training.Run]:
    """A run of each config; all but the first, which is of the device, with a transfer to the host, and with
    so small extents that several are on their way at a time."""
    runs = []
    for i, each in enumerate(settings):
        torch.manual_seed(0)
        engine = polyreme.initialize(
            models.llama(num_hidden_layers=4, tie_word_embeddings=True), each, loss_fn=models.causal_loss
        )
        told = []
        for step in range(3):
            batch = models.tokens(training.SAMPLES, seed=step)
            result = engine.train_step(models.share(batch, rank, world) if share else batch)
            told.append((result.loss, result.grad_norm))
            assert i == 0 or engine.tiers()["gradients"]["written"] > 0
        runs.append((told, engine.state_dict(master=True)))
    return runs


def train_late(world: int, settings: list[dict[str, Any]], share: bool = True) -> list[list[training.Run]]:
    """`train` on ranks that are threads."""
    with probe.updated_elsewhere(LateTransfer), patch.object(optimizer_states, "EXTENT", 4 * ALIGN):
        return threads.run(world, train, settings, share)


def assert_equal(runs: list[training.Run]) -> None:
    assert not [found for run in runs[1:] if (found := training.differences(runs[0], run))]


FILES = "files"  # in a config here: the test's own folder
SUMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "bf16": (1, {}, {"compute": "bf16"}),
    "fp16, two": (2, {}, {"compute": "fp16", "initial_scale": 2.0**20}),
    "fp32, two summed": (2, {"reduce_every": "microbatch"}, {"compute": "fp32"}),
}
"""Micro-batches and the sections `zero` and `precision`."""


class Case(NamedTuple):
    """What is compared with parameters and states on the device."""

    world: int
    stage: int
    sums: str
    home: str


HOMES: dict[str, dict[str, Any]] = {
    "host": {"states": "host"},
    "files": {"states": FILES},
    "half": {"states": {"host": 0.5, "device": 0.5}},
    "params": {"states": "host", "params": "host"},
    "params, half": {"states": {"host": 0.5, "device": 0.5}, "params": "host"},
    "gradients": {"states": "host", "gradients": FILES},
    "gradients and states": {"states": FILES, "gradients": FILES},
}


def possible(case: Case) -> bool:
    """Parameters leave at stage 3; gradients that are reduced do, not the sum of several micro-batches."""
    if "params" in case.home:
        return case.stage == 3
    return "gradients" not in case.home or case.world == 1 or case.stage > 1 or case.sums != "fp16, two"


CASES = [case for each in product((1, 2), range(4), SUMS, HOMES) if possible(case := Case(*each))]
FEW = cover(CASES, lambda case: together(case._asdict(), 2))
"""Every two values of two kinds are in one."""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_ferry_changes_no_bit(
    request: pytest.FixtureRequest, tmp_path: Path, world: int, stage: int
) -> None:
    """fp16 begins with steps that overflow."""
    chosen = CASES if request.config.getoption("all_cases") else FEW
    chosen = [case for case in chosen if (case.world, case.stage) == (world, stage)]
    assert chosen
    for sums in {case.sums: None for case in chosen}:
        accumulation, zero, precision = SUMS[sums]
        sections = {"zero": {"stage": stage, "min_bucket": 0, **zero}, "precision": precision}
        homes = [{}, *(HOMES[case.home] for case in chosen if case.sums == sums)]
        settings = [
            training.config(world, accumulation, memory=placed(memory, tmp_path), **sections)
            for memory in homes
        ]
        for told in train_late(world, settings):
            found = {
                str(home): training.differences(told[0], run) for home, run in zip(homes, told, strict=True)
            }
            assert not any(found.values()), (sums, found)
            finite = {math.isfinite(norm) for _, norm in told[0][0]}
            assert len(finite) == (2 if precision["compute"] == "fp16" else 1), (
                "some steps have to overflow, not all"
            )


def placed(memory: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {key: str(folder) if value == FILES else value for key, value in memory.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_with_a_pipeline(tmp_path: Path, schedule: str) -> None:
    """The embedding is tied to the head, so that its gradients are summed over the stages before they go."""
    homes: list[dict[str, Any]] = [
        {},
        {"states": "host"},
        {"states": "host", "params": "host"},
        {"states": "host", "gradients": str(tmp_path)},
    ]
    settings = [
        training.config(
            1,
            2,
            zero={"stage": 3 if "params" in memory else 1, "min_bucket": 0},
            mesh={"pp": 2},
            pipeline={"schedule": schedule},
            memory=memory,
        )
        for memory in homes
    ]
    for told in train_late(2, settings, False):
        assert_equal(told)


def test_with_tensor_parallelism(tmp_path: Path) -> None:
    """Where a part of a shard is on several ranks, and counts once in the norm."""
    settings = [
        training.config(
            1,
            2,
            zero={"stage": 3, "min_bucket": 0},
            mesh={"tp": 2},
            precision={"compute": "bf16"},
            memory=memory,
        )
        for memory in (
            {},
            {"states": "host"},
            {"states": "host", "params": "host"},
            {"states": "host", "gradients": str(tmp_path)},
        )
    ]
    for told in train_late(2, settings, False):
        assert_equal(told)


def account(rank: int, world: int, stage: int) -> dict[str, Any]:
    made = training.config(
        world,
        zero={"stage": stage, "min_bucket": 0},
        precision={"compute": "bf16"},
        memory={"states": "host"},
    )
    with probe.updated_elsewhere(LateTransfer):
        engine = polyreme.initialize(models.llama(), made, loss_fn=models.causal_loss)
    for _ in range(2):
        engine.train_step(models.share(models.tokens(training.SAMPLES), rank, world))
    shards = sum(bucket.layout.shard_size for bucket in probe.trainable(engine))
    updated = sum(extent.interval.size for extent in probe.offloaded_states(engine))
    return {
        "shards": shards,
        "updated": updated,
        "tier": engine.tiers()["gradients"],
        "held": probe.gradients(engine),
    }


@pytest.mark.parametrize(("world", "itemsize"), [(1, 2), (2, 4)])
def test_what_goes_is_what_must_and_leaves_the_device(ranks: Ranks, world: int, itemsize: int) -> None:
    """Of bf16, parameters come in bf16, and gradients go in float32, or in bf16 where nothing is summed;
    between the last reduction and the next backward none is on the device."""
    for told in ranks(world, account, 2):
        assert told["tier"]["written"] == 2 * itemsize * told["shards"]
        assert told["tier"]["read"] == 2 * 2 * told["updated"]
        assert told["tier"]["memory"] >= itemsize * told["shards"]
        assert not told["held"]


def accumulate(rank: int, world: int, memory: dict[str, Any]) -> dict[str, Any]:
    """Two micro-batches; what of gradients is on the device after each."""
    made = training.config(
        world, 2, zero={"stage": 3, "min_bucket": 0}, precision={"compute": "bf16"}, memory=memory
    )
    with probe.updated_elsewhere(LateTransfer):
        engine = polyreme.initialize(models.llama(), made, loss_fn=models.causal_loss)
    held = []
    for at in range(2):
        engine.backward(
            engine(
                **models.share(models.tokens(training.SAMPLES // 2, seed=at), rank, world), use_cache=False
            ).loss
        )
        held.append(sum(kept.nbytes for kept in probe.gradients(engine)))
    engine.step()
    shards = sum(bucket.layout.shard_size for bucket in probe.trainable(engine))
    return {"shards": shards, "held": held, "written": engine.tiers()["gradients"]["written"]}


@pytest.mark.parametrize(("world", "itemsize"), [(1, 2), (2, 4)])
def test_gradients_of_several_micro_batches_are_added_up_where_parameters_are(
    ranks: Ranks, world: int, itemsize: int
) -> None:
    """With parameters off the device, it has no gradients between micro-batches, and each one's leave: in
    bf16 where nothing is summed over ranks. With parameters on it, they are added up there, and leave
    once."""
    for told in ranks(world, accumulate, {"states": "host", "params": "host"}):
        assert told["held"] == [0, 0]
        assert told["written"] == 2 * itemsize * told["shards"]
    for told in ranks(world, accumulate, {"states": "host"}):
        assert told["held"][0] >= 4 * told["shards"]
        assert told["written"] == 4 * told["shards"]


def looked_at(rank: int, world: int, folder: Path) -> None:
    """What is read ahead of the update is not what it was, where something else was done with the tier
    meanwhile."""
    results = []
    for looks in (False, True):
        torch.manual_seed(0)
        engine = polyreme.initialize(models.llama(), training.config(world, memory={"states": str(folder)}))
        for step in range(2):
            engine.backward(
                engine(**models.share(models.tokens(training.SAMPLES, seed=step), rank, world)).loss
            )
            if looks:
                before = engine.state_dict(master=True)
                engine.save(folder / "between") if step else None
            results.append(engine.step().loss)
        if looks:
            assert any(
                not torch.equal(tensor, before[name])
                for name, tensor in engine.state_dict(master=True).items()
            )
        results.append(sum(tensor.double().sum() for tensor in engine.state_dict(master=True).values()))
        engine.close()
    assert results[:3] == results[3:]


def test_a_tier_may_be_used_between_backward_and_update(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, looked_at, tmp_path)


def extended(rank: int, world: int, settings: list[dict[str, Any]]) -> list[Tensor]:
    """Weights after windows whose every backward may be the last, of each config; all but the first with a
    transfer."""
    found = []
    for i, each in enumerate(settings):
        with probe.updated_elsewhere(LateTransfer) if i else nullcontext():
            torch.manual_seed(0)
            engine = polyreme.initialize(
                torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), each
            )
        for step in range(3):
            for k in range(3):
                engine.set_boundary(True, extend=True)
                draw = torch.Generator().manual_seed(rank + 10 * k + 100 * step)
                engine.backward(engine(torch.randn(2, 4, generator=draw)).square().sum())
                if step == 1:
                    assert engine.gradients().norms()
            engine.step()
        found.append(torch.cat([tensor.flatten() for tensor in engine.state_dict().values()]))
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_may_have_a_backward_after_the_last(ranks: Ranks, accumulation: int) -> None:
    def config(stage: int, **memory: Any) -> dict[str, Any]:
        batch = {"size": 4 * accumulation, "micro": 2, "mean": "ranks"}
        return {"batch": batch, "zero": {"stage": stage}, "memory": memory}

    settings = [
        config(2),
        *(config(stage, states="host") for stage in (0, 2)),
        config(3, states="host", params="host"),
    ]
    for first, *others in ranks(2, extended, settings):
        assert all(torch.equal(first, other) for other in others)
