"""DeepSpeed, ZeRO stages 0 to 3, with torch's fused AdamW handed to it and its own defaults otherwise.

bf16: its `bf16` mode keeps fp32 masters in the optimizer and is told to reduce in fp32 (`communication_data_type`;
`reduce="bf16"` leaves its default). It casts the model's buffers too; they are put back, or the rotary
frequencies would differ from everybody else's. Its stage 0 in bf16 begins Adam's step count one too high, so its
losses are off by more than rounding in the first steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from cases import ADAMW, CLIP, Batch, Job, Outcome


def initialize(model: nn.Module, job: Job, *, stage: int, reduce: str = "fp32") -> Any:
    """Its engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "train_batch_size": job.batch * job.world,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": job.dtype == "bf16"},
    }
    if reduce != job.dtype:
        config["communication_data_type"] = reduce
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), config=config)
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


def build(model: nn.Module, job: Job, *, stage: int, reduce: str = "fp32") -> Callable[[Batch], Outcome]:
    return step_of(initialize(model, job, stage=stage, reduce=reduce))
