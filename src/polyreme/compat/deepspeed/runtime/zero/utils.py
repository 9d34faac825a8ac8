"""DeepSpeed's names for the optimizers that ZeRO shards unasked, and for the error of a checkpoint."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from polyreme.compat.deepspeed.ops.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import is_zero_param
from polyreme.errors import CheckpointError
from polyreme.optim.groups import Lion

ZeRORuntimeException = CheckpointError
"""The error of a checkpoint that does not fit the model it is loaded into."""
_TORCHS: list[type] = [torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon]
_OF_THE_DOOR: list[type] = [DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion]
ZERO_SUPPORTED_OPTIMIZERS: list[type] = [*_TORCHS, *_OF_THE_DOOR, Lion]
"""Classes that DeepSpeed shards unasked. Polyreme shards others, too, if the config allows it by
zero_allow_untested_optimizer."""

__all__ = [
    "ZERO_SUPPORTED_OPTIMIZERS",
    "ZeRORuntimeException",
    "is_zero_param",
    "is_zero_supported_optimizer",
]


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is sharded without `zero_allow_untested_optimizer` in the config."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS
