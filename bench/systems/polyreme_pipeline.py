"""Polyreme's pipeline, through its public interface: the unmodified model, cut where everybody's is, and a schedule of the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import SIZES, Batch, Job, Outcome
from systems.polyreme_zero import initialize, step_of
from systems.stages import counts


def build(model: Any, job: Job, *, schedule: str = "1f1b") -> Callable[[Batch], Outcome]:
    pipeline: dict[str, Any] = {"schedule": schedule}
    if schedule not in ("interleaved", "zb-v"):  # whose stages are not one for each rank
        pipeline["blocks"] = counts(SIZES[job.size].blocks, job.world)
    samples = job.batch * job.world
    batch = {"size": samples, "micro": samples // job.microbatches}
    return step_of(initialize(model, job, stage=0, mesh={"pp": job.world}, pipeline=pipeline, batch=batch))
