"""The name of one of DeepSpeed's wrappers of optimizers; see `fp16.fused_optimizer`."""

from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import Wrapper


class BF16_Optimizer(Wrapper):
    """DeepSpeed's wrapper of bf16 with fp32 gradients."""
