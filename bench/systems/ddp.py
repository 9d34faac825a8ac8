"""torch DistributedDataParallel, and torch ZeroRedundancyOptimizer (ZeRO-1) over it.

bf16: the replica computes in bf16, fp32 masters by hand. DDP's buckets are then bf16: a hook widens each to
fp32 for the all-reduce and narrows the mean again, so the sum is fp32 and its result rounded; `reduce="bf16"`
leaves the hook out. ZeroRedundancyOptimizer steps the masters it owns and broadcasts them in fp32: every rank
holds all masters.

The annotations are not postponed here: DDP reads those of its hook.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cases import ADAMW, CLIP, DTYPES, Batch, Job, Outcome
from systems.masters import Masters


def mean_in_fp32(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: the mean of the bucket over the ranks, summed in fp32."""
    narrow = bucket.buffer()
    wide = narrow.float().div_(dist.get_world_size())
    work = dist.all_reduce(wide, async_op=True)
    assert work is not None  # async_op
    return work.get_future().then(lambda done: narrow.copy_(done.value()[0]))


def build(
    model: nn.Module, job: Job, *, shard_states: bool = False, reduce: str = "fp32"
) -> Callable[[Batch], Outcome]:
    masters = Masters(model, DTYPES[job.dtype])
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    if job.dtype == "bf16" and reduce == "fp32":
        replica.register_comm_hook(None, mean_in_fp32)
    optimizer: torch.optim.Optimizer
    if shard_states:
        optimizer = ZeroRedundancyOptimizer(
            masters.weights, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
        )
    else:
        optimizer = torch.optim.AdamW(masters.weights, fused=True, **ADAMW)

    def step(batch: Batch) -> Outcome:
        loss = replica(**batch).loss
        loss.backward()
        masters.read_grads()
        norm = nn.utils.clip_grad_norm_(masters.weights, CLIP)
        optimizer.step()
        masters.write_back()
        return Outcome(loss.item(), norm.item())

    return step
