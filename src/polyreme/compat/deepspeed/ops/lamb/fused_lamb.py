"""DeepSpeed's LAMB for GPUs, refused."""

from __future__ import annotations

from typing import Any

import torch

from polyreme.compat.deepspeed.refusal import refused


class FusedLamb(torch.optim.Optimizer):
    """Raises UnsupportedError when it is made."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        raise refused(
            "FusedLamb",
            "LAMB scales an update by the norms of whole tensors, which torch has no optimizer for",
            "take AdamW (torch.optim.AdamW or FusedAdam), or pass an optimizer class of your own",
        )
