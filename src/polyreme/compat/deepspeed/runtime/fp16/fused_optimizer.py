"""The name of one of DeepSpeed's wrappers of optimizers, which there is none of: the engine has masters."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.refusal import refused


class _Kind(type):
    """An engine's optimizer is an instance of the class that DeepSpeed's would be of."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or getattr(instance, "_wrapper", None) == cls.__name__


class Wrapper(metaclass=_Kind):
    """Raises UnsupportedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refused(
            f"{type(self).__name__}(...)",
            "optimizers are not wrapped: an engine has the fp32 masters, their updates and the loss scale",
            "give deepspeed.initialize the optimizer itself",
        )


class FP16_Optimizer(Wrapper):
    """DeepSpeed's wrapper of a fused optimizer without ZeRO."""
