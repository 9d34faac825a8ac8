"""The name of one of DeepSpeed's wrappers of optimizers; see `fused_optimizer`."""

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper


class FP16_UnfusedOptimizer(Wrapper):
    """DeepSpeed's wrapper of other optimizers without ZeRO."""
