"""Polyreme, ZeRO stages 0 to 3, through its public interface and with its own defaults otherwise.

bf16: bf16 compute, fp32 masters in the flat shard, gradients reduced in fp32 (`reduce="bf16"`: in bf16). Its
loss is already the mean over the whole global batch, which costs it a reduction that the other systems are
spared. Ranks of one host read each other's buffers; without `shared_memory`, all goes over gloo's sockets, as
it does in the other systems. Without `sentinels`, nothing is checked while it trains. `states` and `params`:
where they are kept, FILES being the job's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import polyreme
from cases import ADAMW, CLIP, Batch, Job, Outcome

FILES = "files"


def initialize(
    model: nn.Module | Callable[[], nn.Module], job: Job, *, stage: int, reduce: str = "fp32", **sections: Any
) -> polyreme.Engine:
    """The engine; `sections` are further ones of its config."""
    config: dict[str, Any] = {
        "zero": {"stage": stage},
        "precision": {"compute": job.dtype, "reduce": reduce},
        "batch": {"size": job.batch * job.world, "micro": job.batch},
        "optimizer": {"name": "adamw", **ADAMW, "no_decay": "none", "clip": CLIP},
        "lr_schedule": {"name": "constant", "warmup": 0},
    }
    return polyreme.initialize(model, config=config | sections)


def step_of(engine: polyreme.Engine) -> Callable[[Batch], Outcome]:
    def step(batch: Batch) -> Outcome:
        result = engine.train_step(batch)
        return Outcome(result.loss, result.grad_norm)

    return step


def build(
    model: nn.Module,
    job: Job,
    *,
    stage: int,
    reduce: str = "fp32",
    shared_memory: bool = True,
    sentinels: bool = True,
    **memory: str,
) -> Callable[[Batch], Outcome]:
    return step_of(
        initialize(
            model,
            job,
            stage=stage,
            reduce=reduce,
            mesh={"shared_memory": shared_memory},
            memory=homes(job, memory),
            # An older Polyreme has no such section.
            **({} if sentinels else {"sentinels": {"enabled": False}}),
        )
    )


def homes(job: Job, memory: Mapping[str, str]) -> dict[str, str]:
    """`memory` with the folder that FILES stands for."""
    return {
        what: str(Path(job.folder) / job.system) if home == FILES else home for what, home in memory.items()
    }
