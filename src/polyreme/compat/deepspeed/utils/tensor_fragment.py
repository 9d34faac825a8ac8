"""DeepSpeed's functions that read and write the masters, gradients and optimizer states of single parameters,
by `Engine.numbers`. All ranks must call them.

As in DeepSpeed, a frozen parameter, or one of no engine, has none of these: reading returns None, and writing
does nothing. A parameter in no group of the optimizer has the gradient that torch keeps. Unlike in DeepSpeed,
they work at stage 0, too, and gradients are those of the mean loss, without fp16's scale. Before the last
backward of a step a gradient is this rank's sum so far at stages 0 and 1, and None above. A rank's part is as
long as its `ds_tensor`, and equally long on all ranks, filled up with zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn

from polyreme.compat.deepspeed.refusal import OrderError
from polyreme.layout.region import MASTER
from polyreme.step.user.parameter_numbers import GRADIENT, ParameterNumbers
from polyreme.zero.parameter import engine_of


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state of a parameter, such as `exp_avg`; None before its first update."""
    numbers = _numbers(param)
    return None if numbers is None else numbers.whole(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a whole optimizer state of a parameter to rank 0's `value`, of any shape of as many elements."""
    if (numbers := _numbers(param)) is not None:
        value = value.reshape(param.shape) if value.numel() == param.numel() else value
        numbers.set_whole(optim_state_key, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state of a parameter at stage 3, flat."""
    numbers = _numbers_at_stage_3(param)
    return None if numbers is None else numbers.equal_part(optim_state_key).read()


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of a parameter at stage 3."""
    if (numbers := _numbers_at_stage_3(param)) is not None:
        numbers.equal_part(optim_state_key).write(value)


# the same of masters (whose parameters follow them) and of gradients
safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key=MASTER)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=MASTER)
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key=MASTER)
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key=MASTER)
safe_get_local_grad = partial(safe_get_local_optimizer_state, optim_state_key=GRADIENT)
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key=GRADIENT)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient of a parameter; in the middle of a step, as inside of `no_sync`, what this
    rank has added up. Of one of no engine its `grad`."""
    numbers = _numbers(param)
    if numbers is None or not numbers.trains:
        return param.grad if engine_of(param) is None or param.requires_grad else None
    whole = numbers.whole(GRADIENT)
    return numbers.so_far() if whole is None else whole


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole gradient of a parameter to rank 0's `value`; of one of no engine its `grad`, if any."""
    if engine_of(param) is not None:
        safe_set_full_optimizer_state(param, value, GRADIENT)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by `update_func(gradient, parameter)`."""
    for param in param_list:
        if (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _numbers(param: nn.Parameter) -> ParameterNumbers | None:
    engine = engine_of(param)
    numbers: ParameterNumbers | None = None
    if engine is not None and param.requires_grad:
        numbers = engine.numbers(param)
    return numbers


def _numbers_at_stage_3(param: nn.Parameter) -> ParameterNumbers | None:
    engine = engine_of(param)
    if engine is None or engine.config.zero.stage != 3:
        raise OrderError(
            "safe_get_local_... or safe_set_local_... of a parameter that no engine of ZeRO stage 3 has: "
            "initialize with stage 3, or call safe_get_full_... and safe_set_full_..., which all stages have"
        )
    return _numbers(param)
