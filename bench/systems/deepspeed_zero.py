"""DeepSpeed, ZeRO stages 0 to 3, with torch's fused AdamW handed to it and its own defaults otherwise.

bf16: its `bf16` mode keeps fp32 masters in the optimizer and is told to reduce in fp32
(`communication_data_type`; `reduce="bf16"` leaves its default). It casts the model's buffers too; they are
put back, or the rotary frequencies would differ from everybody else's. Its stage 0 in bf16 begins Adam's step
count one too high, so its losses are off by more than rounding in the first steps.

With an offload (`states` and `params`: "cpu" or "nvme") it is given its own CPU Adam and, where states are in
files, parts of which one can be read and one written while a third is updated. Memory is pinned where there
is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from cases import ADAMW, CLIP, Batch, Job, Outcome

PART = 2**22
"""Elements of the parts in which states in files are updated."""
BUFFERS = 12
"""Of such a part: four for each that is read, updated or written. Fewer fail."""


def offload(job: Job, **homes: str) -> dict[str, Any]:
    """What its config says of ZeRO beside the stage: `homes` has where "params" and "states" are, unless on
    the device."""
    found: dict[str, Any] = {}
    for what, home in homes.items():
        place = {"device": home, "pin_memory": torch.cuda.is_available()}
        if home == "nvme":
            place["nvme_path"] = str(Path(job.folder) / job.system)
        if what == "states" and home == "nvme":
            found["sub_group_size"] = PART
            place |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS}
        found["offload_param" if what == "params" else "offload_optimizer"] = place
    return found


def initialize(model: nn.Module, job: Job, *, stage: int, reduce: str = "fp32", **homes: str) -> Any:
    """Its engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "train_batch_size": job.batch * job.world,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **offload(job, **homes)},
        "bf16": {"enabled": job.dtype == "bf16"},
    }
    if reduce != job.dtype:
        config["communication_data_type"] = reduce
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if homes:
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for name, buffer in engine.module.named_buffers():
        buffer.data = buffers[name]
    return engine


def step_of(engine: Any) -> Callable[[Batch], Outcome]:
    def step(batch: Batch) -> Outcome:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        return Outcome(loss.item(), None if norm is None else float(norm))

    return step


def build(
    model: nn.Module, job: Job, *, stage: int, reduce: str = "fp32", **homes: str
) -> Callable[[Batch], Outcome]:
    return step_of(initialize(model, job, stage=stage, reduce=reduce, **homes))
