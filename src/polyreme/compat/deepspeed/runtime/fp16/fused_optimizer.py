"""The classes that DeepSpeed wraps optimizers in. Here they are for `isinstance` alone, as the engine itself
has the fp32 masters."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.refusal import refused


class _Kind(type):
    """A metaclass by which `isinstance` takes an engine's optimizer for one of the class that DeepSpeed would
    have wrapped it in."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or getattr(instance, "_wrapper", None) == cls.__name__


class Wrapper(metaclass=_Kind):
    """The base of the wrappers' classes. Making an object of one raises UnsupportedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refused(
            f"{type(self).__name__}(...)",
            "optimizers are not wrapped: an engine has the fp32 masters, their updates and the loss scale",
            "give deepspeed.initialize the optimizer itself",
        )


class FP16_Optimizer(Wrapper):
    """The class of DeepSpeed's wrapper of a fused optimizer without ZeRO."""


class FP16_UnfusedOptimizer(Wrapper):
    """The class of DeepSpeed's wrapper of other optimizers without ZeRO."""


class BF16_Optimizer(Wrapper):
    """The class of DeepSpeed's wrapper of bf16 with fp32 gradients."""
