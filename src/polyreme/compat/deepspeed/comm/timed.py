"""The decorator of collectives that measures them for the communication logger.

Invariant: with the logger off, a call costs two tests and is otherwise the collective itself; with it on, a
call that is recorded returns after the device has done it."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.utils.comms_logging import CommsLogger, get_caller_func

F = TypeVar("F", bound=Callable[..., Any])
comms_logger = CommsLogger()
"""The record of this process's collectives."""

MESSAGES = ("tensor", "tensors", "input_tensors", "input_list", "input_tensor_list", "p2p_op_list")
"""Arguments that are what an operation sends, or receives into."""


def message_bytes(arguments: Mapping[str, Any]) -> int:
    """Bytes of the first of `MESSAGES` that the arguments have; 0 without one."""
    message = next((arguments[name] for name in MESSAGES if name in arguments), None)
    parts = message if isinstance(message, list | tuple) else [message]
    tensors = (getattr(part, "tensor", part) for part in parts)
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


def timed_op(func: F) -> F:
    """`func`, recorded in `comms_logger` under its argument `log_name` where that is to be."""
    signature = inspect.signature(func)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not comms_logger.enabled:
            return func(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        name = arguments.get("log_name", func.__name__)
        if not (arguments.get("prof") or comms_logger.prof_all or name in comms_logger.prof_ops):
            return func(*args, **kwargs)
        if comms_logger.debug:
            name += f" | [Caller Func: {get_caller_func(2)}]"
        size, began = message_bytes(arguments), time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().synchronize()
            comms_logger.append(func.__name__, name, (time.perf_counter() - began) * 1000, size)

    return call  # type: ignore[return-value]
