"""DeepSpeed's linear layer with LoRA and quantised weights: torch's own where it is asked for neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyreme.compat.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from polyreme.compat.deepspeed.refusal import refused


class OptimizedLinear(nn.Module):
    """A `torch.nn.Linear`, which is what is made. Raises UnsupportedError with a config of LoRA or of
    quantisation."""

    def __new__(
        cls,
        input_dim: int,
        output_dim: int,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> Any:
        if lora_config is not None or quantization_config is not None:
            raise refused(
                "OptimizedLinear with a lora_config or quantization_config",
                "adapters and quantised weights are those of other libraries",
                "wrap the model by peft, whose adapters train on shards at every ZeRO stage",
            )
        return linear_cls(input_dim, output_dim, bias=bias, dtype=dtype, device=device)
