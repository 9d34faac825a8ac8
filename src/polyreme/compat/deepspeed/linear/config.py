"""What DeepSpeed's layers with LoRA and quantised weights are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """LoRA's rank and scale, the ranks that divide the frozen weights, and where these are."""

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(default_factory=lambda: list(_TARGETS))


@dataclass
class QuantizationConfig:
    """Bits of a number and of its mantissa, numbers of one scale, and what they are held in."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8
