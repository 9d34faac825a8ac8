"""Helpers around ZeRO by DeepSpeed's names."""

from __future__ import annotations

from torch.optim import Optimizer

from polyreme.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param
from polyreme.errors import CheckpointError

ZeRORuntimeException = CheckpointError
"""What loading a checkpoint that does not fit raises."""

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether an optimizer may be sharded: any of torch's is tried out on shards by `initialize`."""
    return isinstance(optimizer, Optimizer)
