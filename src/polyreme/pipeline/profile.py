"""Measures how long each block of a model takes, so that stages can be balanced.

Invariant: the model stays as it was. No communication: one rank measures for all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.models.huggingface import tensors_in, training_arguments
from polyreme.pipeline.activation_spec import flatten, unflatten
from polyreme.pipeline.partition import blocks_in, partition_model
from polyreme.pipeline.stage import Stage


def measure(model: nn.Module, forward: Callable[[], Any], *, repeats: int = 3) -> list[float]:
    """Return the seconds that each block of an undivided model takes for forward and backward. The layers
    before the blocks count to the first, those after them to the last. No gradient is left behind.

    forward: calls the model on a batch and returns its output, as in `lambda: model(**batch)`."""
    count = len(blocks_in(model))
    partition = partition_model(model, count, counts=[1] * count)
    parameters = [p for p in model.parameters() if p.requires_grad]
    timed: list[tuple[Stage, list[float]]] = [(Stage(model, partition, index), []) for index in range(count)]
    devices = {p.device for p in parameters if p.is_cuda}

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with torch.random.fork_rng(devices=list(devices)):
        # all blocks in turn, so that other work of the machine does not always slow the same one
        for _ in range(1 + repeats):
            form, tensors = flatten(None)
            for stage, times in timed:
                received = unflatten(form, [t.detach().clone() for t in tensors])
                start = now()
                output = stage(forward, received)
                ends = [t for t in tensors_in(output) if t.requires_grad]
                inputs = parameters + [t for t in tensors_in(received) if t.requires_grad]
                if ends and inputs:
                    torch.autograd.grad(ends, inputs, [torch.ones_like(t) for t in ends], allow_unused=True)
                times.append(now() - start)
                form, tensors = flatten(None if stage.is_last else output)
    return [min(times[1:]) for _, times in timed]  # the first warms up


def block_seconds(model: nn.Module, batch: Mapping[str, Any]) -> list[float]:
    """Measure as `measure` does, with the model called on a micro-batch by keywords. If it has labels, the
    model's own loss counts to the last block."""

    def forward() -> Any:
        output = model(**training_arguments(model), **batch)
        loss = getattr(output, "loss", None)
        return output if loss is None else loss

    return measure(model, forward)


def copy_to(
    device: torch.device,
    dtype: torch.dtype | None,
    model: nn.Module,
    replay: Callable[[Callable[[str, Tensor], None]], None] | None = None,
) -> nn.Module:
    """Copy `model` to `device`, with its parameters in `dtype` (None: in their own), and buffers of its own.

    replay: for a model on the meta device; calls the function that it is given with the first name and the
    numbers of each parameter and buffer."""
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies: dict[int, Any] = {}

    def take(name: str, tensor: Tensor) -> None:
        old, numbers = own[name], tensor.detach()
        if isinstance(old, nn.Parameter):
            numbers = numbers.to(device, dtype if numbers.is_floating_point() else None)
            copies[id(old)] = nn.Parameter(numbers, old.requires_grad)
        else:
            copies[id(old)] = numbers.to(device, copy=True)

    if replay is not None:
        replay(take)
    else:
        for each in own.items():
            take(*each)
    return copy.deepcopy(model, copies)
