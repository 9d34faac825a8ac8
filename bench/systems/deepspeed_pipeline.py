"""DeepSpeed's `PipelineModule` (1F1B), each stage one of its layers, so that its cut is everybody's; its own
defaults otherwise.

A rank names the other ranks' stages only by a placeholder, so that it does not hold them. Its gradient norm
counts the parameters of the first stage alone, unless those of the others are marked as not being copies:
they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from cases import ADAMW, CLIP, Batch, Job, Outcome
from systems.stages import Stage, loss_of


def build(model: Any, job: Job) -> Callable[[Batch], Outcome]:
    deepspeed.init_distributed("gloo")
    samples = job.batch * job.world
    stages = [
        Stage(model, index, job.world) if index == job.rank else nn.Identity() for index in range(job.world)
    ]
    module = PipelineModule(stages, num_stages=job.world, loss_fn=loss_of(model), partition_method="uniform")
    for parameter in module.parameters():
        parameter.model_parallel = True
    config = {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": samples // job.microbatches,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": CLIP,
    }
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(batch: Batch) -> Outcome:
        parts = zip(*(batch[key].chunk(job.microbatches) for key in ("input_ids", "labels")), strict=True)
        loss = engine.train_batch(data_iter=parts)
        norm = engine.get_global_grad_norm()
        return Outcome(loss.item(), None if norm is None else float(norm))

    return step
