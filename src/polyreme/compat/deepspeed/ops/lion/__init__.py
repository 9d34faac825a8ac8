"""Lion by DeepSpeed's names."""

from polyreme.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from polyreme.compat.deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
