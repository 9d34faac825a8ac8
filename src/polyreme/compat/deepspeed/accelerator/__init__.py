"""DeepSpeed's view of devices: `get_accelerator()` is the CPU or the GPUs of this process."""

from polyreme.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from polyreme.compat.deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
