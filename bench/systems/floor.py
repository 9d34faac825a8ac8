"""The floor: each process trains alone, at the same time as the other, and nothing is communicated.

It is the time that the computation takes where two ranks share the machine's memory bandwidth. In bf16 it
makes the same casts as the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from cases import ADAMW, CLIP, DTYPES, Batch, Job, Outcome
from systems.masters import Masters


def build(model: nn.Module, job: Job) -> Callable[[Batch], Outcome]:
    masters = Masters(model, DTYPES[job.dtype])
    optimizer = torch.optim.AdamW(masters.weights, fused=True, **ADAMW)

    def step(batch: Batch) -> Outcome:
        loss = model(**batch).loss
        loss.backward()
        masters.read_grads()
        norm = nn.utils.clip_grad_norm_(masters.weights, CLIP)
        optimizer.step()
        masters.write_back()
        return Outcome(loss.item(), norm.item())

    return step
