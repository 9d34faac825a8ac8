"""Polyreme's pipeline, through its public interface: the unmodified model, and the config's schedule, its
default or a named one.

It is cut where the config's default does, or as `blocks` says: "even" is everybody's cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import SIZES, Batch, Job, Outcome
from systems.polyreme_zero import initialize, step_of
from systems.stages import counts


def build(
    model: Any, job: Job, *, schedule: str = "auto", blocks: str | None = None
) -> Callable[[Batch], Outcome]:
    pipeline: dict[str, Any] = {"schedule": schedule}
    if blocks is not None:
        pipeline["blocks"] = counts(SIZES[job.size].blocks, job.world) if blocks == "even" else blocks
    samples = job.batch * job.world
    batch = {"size": samples, "micro": samples // job.microbatches}
    data = {"sequence": job.sequence}
    return step_of(
        initialize(model, job, stage=0, mesh={"pp": job.world}, pipeline=pipeline, batch=batch, data=data)
    )
