"""torch.distributed.pipelining: `Schedule1F1B` over stages written by hand.

It leaves clipping to its user: squares of the stages' gradients, and the loss of the last, are summed in one
all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cases import ADAMW, CLIP, DTYPES, Batch, Job, Outcome
from systems.masters import Masters, grad_of
from systems.stages import Stage, loss_of


def build(model: Any, job: Job) -> Callable[[Batch], Outcome]:
    mine = Stage(model, job.rank, job.world)
    masters = Masters(mine, DTYPES[job.dtype])
    optimizer = torch.optim.AdamW(masters.weights, fused=True, **ADAMW)
    stage = PipelineStage(mine, job.rank, job.world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.microbatches, loss_fn=loss_of(model))

    def step(batch: Batch) -> Outcome:
        losses: list[torch.Tensor] = []
        given = (batch["input_ids"],) if stage.is_first else ()
        target = batch["labels"] if stage.is_last else None
        schedule.step(*given, target=target, losses=losses if stage.is_last else None, return_outputs=False)
        masters.read_grads()
        squares = nn.utils.get_total_norm([grad_of(w) for w in masters.weights]).double().square()
        told = torch.stack(
            [squares, torch.stack(losses).mean().double() if losses else squares.new_zeros(())]
        )
        dist.all_reduce(told)
        norm = math.sqrt(told[0].item())
        nn.utils.clip_grads_with_norm_(masters.weights, CLIP, torch.tensor(norm))
        optimizer.step()
        masters.write_back()
        return Outcome(told[1].item(), norm)

    return step
