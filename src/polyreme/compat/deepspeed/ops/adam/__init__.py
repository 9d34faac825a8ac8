"""Adam by DeepSpeed's names: torch's fused kernel, on the CPU and on GPUs."""

from polyreme.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from polyreme.compat.deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
