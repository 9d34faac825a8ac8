"""Collectives whose calls the communication logger measures.

Invariant: while it is on, a recorded call returns after the device has done its work."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import OrderError
from polyreme.compat.deepspeed.utils.comms_logging import CommsLogger, get_caller_func

comms_logger = CommsLogger()
"""The record of this process's collectives."""

MESSAGES = ("tensor", "tensors", "input_tensors", "input_list", "input_tensor_list", "p2p_op_list")
"""Names of the arguments that an operation sends, or receives into."""
_DEFAULTS: dict[str, Any] = {"None": None, "False": False, "0": 0, "SUM": dist.ReduceOp.SUM}


def message_bytes(arguments: Mapping[str, Any]) -> int:
    """Return the bytes of the first of `MESSAGES` that the arguments have; 0 without one."""
    message = next((arguments[name] for name in MESSAGES if name in arguments), None)
    parts = message if isinstance(message, list | tuple) else [message]
    tensors = (getattr(part, "tensor", part) for part in parts)
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


def require_group() -> None:
    """Raise OrderError unless a process group is open."""
    if not dist.is_initialized():
        raise OrderError("no process group is open: call init_distributed() first")


def collective(name: str, parameters: str, function: Callable[..., Any], log_name: str = "") -> Any:
    """Return DeepSpeed's collective `name`, which calls `function` with the values of these parameters (such
    as "tensor src group=None") in their order. Three more say how the call is recorded: under which
    `log_name` (by default `name`), and with `prof` in any case; `debug` says nothing: the logger finds the
    caller itself."""
    pairs = [each.partition("=")[::2] for each in parameters.split()]
    defaults = {each: _DEFAULTS[text] if text else inspect.Parameter.empty for each, text in pairs}
    defaults |= {"prof": False, "log_name": log_name or name, "debug": None}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind, default=v) for n, v in defaults.items()])

    def call(*args: Any, **kwargs: Any) -> Any:
        require_group()
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        *values, prof, log_name, _ = bound.arguments.values()
        if not comms_logger.enabled or not (
            prof or comms_logger.prof_all or log_name in comms_logger.prof_ops
        ):
            return function(*values)
        if comms_logger.debug:
            log_name += f" | [Caller Func: {get_caller_func(2)}]"
        size, began = message_bytes(bound.arguments), time.perf_counter()
        try:
            return function(*values)
        finally:
            get_accelerator().synchronize()
            comms_logger.append(name, log_name, (time.perf_counter() - began) * 1000, size)

    call.__name__, call.__signature__ = name, signature  # type: ignore[attr-defined]
    return call
