"""Helpers around ZeRO by DeepSpeed's names."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from polyreme.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from polyreme.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from polyreme.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param
from polyreme.errors import CheckpointError
from polyreme.optim.groups import Lion

ZeRORuntimeException = CheckpointError
"""What loading a checkpoint that does not fit raises."""
ZERO_SUPPORTED_OPTIMIZERS: list[type] = [
    torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam, torch.optim.Adagrad,
    DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion, Lion, torch.optim.Muon,
]  # fmt: skip
"""Classes that DeepSpeed shards unasked; Polyreme shards any other as well, but a config is to say so
(zero_allow_untested_optimizer)."""

__all__ = [
    "ZERO_SUPPORTED_OPTIMIZERS",
    "ZeRORuntimeException",
    "is_zero_param",
    "is_zero_supported_optimizer",
]


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether an optimizer is sharded without `zero_allow_untested_optimizer`."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS
