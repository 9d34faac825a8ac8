"""LAMB by DeepSpeed's names."""

from polyreme.compat.deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
