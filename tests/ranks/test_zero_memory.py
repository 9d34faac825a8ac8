"""Live bytes of model state equal the ZeRO formula between steps, and within a step exceed it by the root's
and two blocks' at most.

Counted twice: by `engine.memory()`, and from outside, by the storages of all tensors that the interpreter
knows."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import polyreme
import probe
import training
from cover import ALL, some
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.work import Work
from polyreme.zero.bucket_memory import resident_bytes
from pool import Ranks

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STATE = ("parameters", "gradients", "states")
LAYERS = 5


def live_bytes(stale: Iterable[Tensor]) -> int:
    """Bytes of every storage behind a live tensor, other than those of `stale`."""
    gc.collect()
    without = {each.untyped_storage()._cdata for each in stale}
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage._cdata not in without:
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def start(world: int, sections: dict[str, Any], **shape: int) -> tuple[polyreme.Engine, Any]:
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=LAYERS, **shape)
    engine = polyreme.initialize(model, training.config(world, **sections), loss_fn=models.causal_loss)
    return engine, models.batch_of("llama", training.SAMPLES)


def formula(engine: polyreme.Engine, stage: int, compute: str) -> dict[str, int]:
    """Bytes by category between steps: Ψ numbers in the compute dtype, Ψ gradients in float32, and float32
    moments (and, beside a half-precision model, a float32 copy); each divided by n from the stage on that
    shards it. Padding included."""
    found = dict.fromkeys(STATE, 0)
    for bucket in probe.trainable(engine):
        layout, wire, half = bucket.layout, BYTES[compute], compute != "fp32"
        whole, shard = layout.size, layout.shard_size
        found["parameters"] += wire * (shard if stage == 3 else whole)
        region = whole if stage == 0 else shard
        # fp32 at stages 0 and 1: reduced in place
        found["gradients"] += 4 * (region if stage >= 2 or half else whole)
        if half and stage < 2:
            found["gradients"] += wire * whole  # before reduction, in the dtype of the model
        found["states"] += 4 * region * half
        updated = sum(
            run.stop - run.start
            for run in layout.group_intervals(*((0, whole) if stage == 0 else layout.shard(bucket.axis.rank)))
        )
        found["states"] += 8 * updated
    return found


def between_steps(rank: int, world: int, stage: int, compute: str) -> list[str]:
    """What is wrong with the bytes that live between steps."""
    # of engines that were here before
    held = mine.unsettled._alive if (mine := heap()) else []
    stale = [each for _, inputs in held for each in inputs if isinstance(each, Tensor)]
    before = live_bytes(stale)
    engine, batch = start(
        world, {"zero": {"stage": stage}, "precision": {"compute": compute, "initial_scale": 8.0}}
    )
    for _ in range(2):
        assert not engine.train_step(models.share(batch, rank, world)).skipped
    del batch
    wrong, told, outside = [], engine.memory(), live_bytes(stale) - before
    steps = sum(
        t.nbytes
        for state in probe.optimizer_states(engine)
        for t in state.values()
        if isinstance(t, Tensor) and not t.dim()
    )
    transient = probe.pool(engine).waiting
    counted = {key: told[key] - {"gradients": transient, "states": steps}.get(key, 0) for key in STATE}
    if counted != (wanted := formula(engine, stage, compute)):
        wrong.append(f"{counted} is not {wanted}")
    staged = 4096  # small exchanges of a group, copied where others read them
    if not 0 <= outside - (told["buffers"] + sum(told[key] for key in STATE)) < 256 + staged:
        wrong.append(f"{outside} bytes from outside, told {told}")
    sizes = [sum(bucket.layout.size for bucket in unit) for unit in probe.units(engine)]
    if transient > (sizes[0] + 2 * max(sizes[1:])) * BYTES[compute] or (stage < 2 and transient):
        wrong.append(f"{transient} bytes wait in the pool")
    emptied = [p.untyped_storage().nbytes() == 0 for p in engine.module.parameters()]
    if (stage == 3) != all(emptied) or (stage < 3) != (not any(emptied)):
        wrong.append(f"{sum(emptied)} of {len(emptied)} parameters have no memory")
    return [f"rank {rank} of {world}, stage {stage}, {compute}: {problem}" for problem in wrong]


def all_between_steps(rank: int, world: int) -> list[str]:
    between_steps(rank, world, 0, "fp32")  # what a process has once, such as the scratch memory of kernels
    return [
        problem
        for stage, compute in some(2 if world == 2 else 1, (0, 1, 2, 3), tuple(BYTES))
        for problem in between_steps(rank, world, stage, compute)
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_state_between_steps(ranks: Ranks, world: int) -> None:
    wrong = list(chain(*ranks(world, all_between_steps)))
    assert not wrong, "\n".join(wrong)


def within_step(rank: int, world: int, sections: dict[str, Any]) -> dict[str, int]:
    """The most bytes at any module's forward or backward in a step: whole parameters, and gradients beyond
    the shards; and sizes."""
    engine, batch = start(world, sections)
    share = models.share(batch, rank, world)
    engine.train_step(share)
    peak = {"parameters": 0, "gradients": 0, "samples": 0}
    shards = sum(gradient.nbytes for gradient in probe.reduced_gradients(engine))

    def sample(*_: Any) -> None:
        whole = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.module.parameters()}
        now = {"parameters": sum(whole.values()), "gradients": engine.memory()["gradients"] - shards}
        peak["samples"] += 1
        for key, value in now.items():
            peak[key] = max(peak[key], value)

    def watch(_: Any, args: Any, output: Any) -> None:
        sample()
        for leaf in output if isinstance(output, tuple) else (output,):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(sample)

    for module in engine.module.modules():
        module.register_forward_pre_hook(sample)
        module.register_forward_hook(watch)
    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(sample)
    engine.train_step(share)
    wire = BYTES[engine.config.precision.compute]
    root, *blocks = [sum(b.layout.size for b in unit) * wire for unit in probe.units(engine)]
    assert len(blocks) == LAYERS
    return peak | {"root": root, "block": max(blocks)}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_working_set_of_stage_3(ranks: Ranks, prefetch: int) -> None:
    """Beside its shards a rank holds the root, to which small parameters may belong, and 1 + prefetch
    gathered blocks (two by default), and two blocks' gradients."""
    for release, compute, activations, small in (
        ("auto", "fp32", "keep", 64),
        ("always", "bf16", "recompute", 0),
    ):
        zero = {"stage": 3, "prefetch": prefetch, "release": release, "persistence_threshold": small}
        sections = {"zero": zero, "precision": {"compute": compute}, "memory": {"activations": activations}}
        for peak in ranks(2, within_step, sections):
            assert peak["samples"] > 100
            assert peak["parameters"] == peak["root"] + (1 + prefetch) * peak["block"]
            assert peak["gradients"] <= peak["root"] + 2 * peak["block"]


def lent(rank: int, world: int, folder: str, sections: dict[str, Any]) -> dict[str, int]:
    """Bytes that three steps take of the pool (of each size the most at once) and of memory for tiers, and
    what `working_set` says."""
    memory = {key: folder if value == "files" else value for key, value in sections["memory"].items()}
    # no bucket is as large as another's shard
    engine, batch = start(world, {**sections, "memory": memory}, intermediate_size=56)
    pool = probe.pool(engine)
    now = Counter[tuple[int, torch.dtype]]()
    most = Counter[tuple[int, torch.dtype]]()
    take, give = pool.take, pool.give

    def taken(size: int, dtype: torch.dtype) -> Tensor:
        nonlocal most
        now[size, dtype] += 1
        most |= now
        return take(size, dtype)

    def given(buffer: Tensor, last: Work) -> None:
        now[buffer.numel(), buffer.dtype] -= 1
        give(buffer, last)

    pool.take, pool.give = taken, given  # type: ignore[method-assign]
    for _ in range(3):
        engine.train_step(models.share(batch, rank, world))
    buckets, said = probe.buckets(engine), engine.working_set()
    single = max(slot.size * b.formats.compute.itemsize for b in buckets for slot in b.layout.slots)
    return {
        "pool": sum(count * size * dtype.itemsize for (size, dtype), count in most.items()),
        "pool said": said["gradients"]
        - single
        - sum(resident_bytes(b)[1] - b.gradients.unreduced for b in buckets),
        "tiers": int(sum(tier["memory"] for tier in engine.tiers().values())),
        "tiers said": said["tiers"],
    }


@pytest.mark.parametrize(
    ("world", "prefetch"), list(product((1, 2), (0, 1, 2))) if ALL in os.environ else [(1, 2), (2, 1)]
)
def test_working_set_with_tiers(ranks: Ranks, tmp_path: Path, world: int, prefetch: int) -> None:
    """The pool's buffers and the memory of tiers are those that the working set counts, each once."""
    far: dict[str, Any] = {"states": "files", "params": "files"}
    cases: list[dict[str, Any]] = [
        {"memory": far},
        {"memory": far, "precision": {"compute": "bf16"}},
        {"memory": far, "zero": {"bucket_size": 4096}},  # several buckets a block
        {"memory": far, "zero": {"release": "always", "persistence_threshold": 24}},
        {"memory": far, "batch": {"micro": training.SAMPLES // world // 2}},
        {"memory": {"states": "host", "params": "host"}},
        {"memory": {"states": "files", "params": "host", "gradients": "files"}},
        {"memory": {"states": "files"}},
    ]
    for case in cases:
        sections = {**case, "zero": {"stage": 3, "prefetch": prefetch, **case.get("zero", {})}}
        for found in ranks(world, lent, str(tmp_path), sections):
            assert found["pool"] == found["pool said"], (case, found)
            # what a thread lets go late leaves a gap in the memory of a tier, of a page
            assert found["tiers"] <= found["tiers said"] + 4096, (case, found)
            # else what is written may be gone in time
            assert found["tiers"] >= found["tiers said"] or not prefetch, (case, found)


def test_gradients_of_stage_2(ranks: Ranks) -> None:
    """Whole gradients exist for two blocks at a time, beside the root's."""
    for peak in ranks(2, within_step, {"zero": {"stage": 2}}):
        assert 2 * peak["block"] <= peak["gradients"] <= peak["root"] + 2 * peak["block"]
