"""torch FSDP2: `fully_shard` on each block and on the root, as its documentation has it.

`reshard=True` frees a block's parameters after forward (ZeRO-3), `reshard=False` keeps them until backward is
done. `offload=True` keeps shards, gradients and states in host memory (`CPUOffloadPolicy`), where AdamW then
updates them.
bf16: its own mixed precision, fp32 shards gathered as bf16, gradients reduced in fp32 (`reduce="bf16"`: in
bf16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from cases import ADAMW, CLIP, DTYPES, Batch, Job, Outcome


def initialize(
    model: Any, job: Job, *, reshard: bool, reduce: str = "fp32", offload: bool = False
) -> torch.optim.Optimizer:
    """Shards the model in place, and gives its optimizer."""
    # what is offloaded may begin in host memory
    device = "cuda" if offload and torch.cuda.is_available() else model.device.type
    mesh = init_device_mesh(device, (job.world,))
    home = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    policy = MixedPrecisionPolicy()
    if job.dtype != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[job.dtype], reduce_dtype=DTYPES[reduce], cast_forward_inputs=False
        )
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=home)
    # by default torch keeps the root gathered until backward
    root: dict[str, Any] = {} if reshard else {"reshard_after_forward": False}
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=home, **root)
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Outcome]:
    params = list(model.parameters())

    def step(batch: Batch) -> Outcome:
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in params]).full_tensor()  # type: ignore[attr-defined]
        nn.utils.clip_grads_with_norm_(params, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return Outcome(loss.item(), norm.item())

    return step


def build(
    model: Any, job: Job, *, reshard: bool, reduce: str = "fp32", offload: bool = False
) -> Callable[[Batch], Outcome]:
    return step_of(model, initialize(model, job, reshard=reshard, reduce=reduce, offload=offload))
