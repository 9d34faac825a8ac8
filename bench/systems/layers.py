"""Forward and backward of a model's blocks and final norm, divided over the ranks by tensor parallelism; no
optimizer.

Invariant: hidden states go in and come out whole, and depend on the tokens alone, so that losses can be
compared. Every rank computes the same loss: the mean squared distance of what comes out from other hidden
states. The gradient norm that is told is that of what went in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cases import DTYPES, SIZES, Batch, Job, Outcome
from polyreme.distributed.mesh import Mesh
from polyreme.distributed.work import DONE
from polyreme.tensor.parallelize import parallelize
from polyreme.tensor.plan import plan
from systems.masters import grad_of

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def divide_by_polyreme(
    model: nn.Module, world: int, sequence_parallel: bool = False, silent: bool = False
) -> None:
    """`silent` leaves out the sums over the ranks, so the numbers are wrong: what the divided computation
    takes by itself."""
    tp = Mesh.open({"tp": world}).tp
    parallelize(model, tp, plan(model, world, sequence_parallel=sequence_parallel), sequence_parallel)
    if silent:
        tp.all_reduce = lambda tensor: DONE  # type: ignore[method-assign]


def divide_by_dtensor(blocks: Sequence[nn.Module], world: int) -> None:
    """As torch's documentation has it for a Llama without sequence parallelism."""
    mesh = init_device_mesh("cpu", (world,))
    for block in blocks:
        styles = {
            **{name: ColwiseParallel() for name in COLUMNS},
            **{name: RowwiseParallel() for name in ROWS},
        }
        parallelize_module(block, mesh, styles)


def build(model: Any, job: Job, *, by: str | None = None, **options: bool) -> Callable[[Batch], Outcome]:
    """`by`: "polyreme", "dtensor", or None: not divided."""
    model.to(DTYPES[job.dtype])
    if by == "polyreme":
        divide_by_polyreme(model, job.world, **options)
    elif by == "dtensor":
        divide_by_dtensor(model.model.layers, job.world)
    body, shape = model.model, SIZES[job.size]
    states = torch.randn(shape.vocabulary, shape.hidden, generator=torch.Generator().manual_seed(0)).to(
        DTYPES[job.dtype]
    )
    # as embeddings begin: next to larger ones the blocks would hardly count
    small = model.config.initializer_range * states

    def step(batch: Batch) -> Outcome:
        given: Tensor = small[batch["input_ids"]].requires_grad_()
        wanted = states[batch["labels"].roll(1, dims=1)]
        out = body(inputs_embeds=given, use_cache=False).last_hidden_state
        loss = nn.functional.mse_loss(out, wanted)
        loss.backward()
        for parameter in body.parameters():
            parameter.grad = None
        return Outcome(loss.item(), grad_of(given).norm().item())

    return step
