"""The number formats of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Formats:
    """Number formats of a bucket: of parameters in the model, and of the optimizer's copy."""

    compute: torch.dtype
    master: torch.dtype
    quantized: bool = False
    """Whether parameters are gathered for a forward or a backward in a byte a number, and not exactly."""
