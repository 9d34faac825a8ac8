"""The memory report of an engine. No communication."""

from __future__ import annotations

from dataclasses import asdict

from polyreme.placement import memory_model
from polyreme.step.training import Training
from polyreme.zero.bucket_memory import live_bytes


def memory(training: Training) -> dict[str, int]:
    """See `Engine.memory`."""
    found = {"parameters": 0, "gradients": training.placement.pool.waiting, "states": 0}
    for bucket in training.placement.buckets:
        for category, size in live_bytes(bucket).items():
            found[category] += size
    found["states"] += training.sharded_optimizer.nbytes
    found["activations"] = training.activations.saved.bytes
    if training.activations.offload is not None:
        found[f"activations_{training.activations.offload.tier}"] = training.activations.saved.moved
    found["buffers"] = sum(buffer.nbytes for buffer in training.engine_state.module.buffers())
    return found | training.placement.offload.off_device_bytes()


def working_set(training: Training, prefetch: int) -> dict[str, int]:
    """See `Engine.working_set`."""
    placed = memory_model.working_set(training.placement, prefetch)
    states = placed["states"] + training.sharded_optimizer.nbytes
    return placed | {"states": states, "activations": training.activations.saved.bytes}


def tiers(training: Training) -> dict[str, dict[str, float]]:
    """See `Engine.tiers`."""
    found = training.placement.offload.report()
    if (offload := training.activations.offload) is not None:
        size = offload.disk if offload.tier == "files" else offload.memory
        found["activations"] = {"bytes": size, "memory": offload.memory, **asdict(offload.traffic)}
    return found
