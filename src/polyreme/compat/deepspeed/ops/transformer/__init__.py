"""DeepSpeed's transformer kernels, refused: models keep their own layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyreme.compat.deepspeed.refusal import refused

_FIX = "leave the model's own layers in place: torch's attention kernels run in them"


class DeepSpeedTransformerConfig:
    """Raises UnsupportedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refused("DeepSpeedTransformerConfig", "there are no fused transformer kernels", _FIX)


class DeepSpeedTransformerLayer(nn.Module):
    """Raises UnsupportedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refused("DeepSpeedTransformerLayer", "there are no fused transformer kernels", _FIX)
