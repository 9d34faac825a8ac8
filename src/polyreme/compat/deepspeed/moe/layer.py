"""DeepSpeed's layer of experts, refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyreme.compat.deepspeed.refusal import refused


class MoE(nn.Module):
    """Raises UnsupportedError when it is made; as a class it can be imported and asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refused(
            "deepspeed.moe.layer.MoE",
            "Polyreme has no experts that are divided between ranks yet",
            "use the model's own layer of experts, which trains as any other layer does",
        )
