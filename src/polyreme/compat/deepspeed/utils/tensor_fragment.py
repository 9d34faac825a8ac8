"""DeepSpeed's functions that read and write the masters, gradients and optimizer states of single parameters,
over `Engine.numbers`.

As in DeepSpeed, a frozen parameter, or one of no engine, has none, and nothing is done where they are set;
one that is in no group of the optimizer has the gradient that torch keeps.
Other than there, stage 0 has them, too; gradients are those of the mean loss (in fp16 without its scale);
before the last backward of a step they are this rank's sums so far at stages 0 and 1, else None. A rank's
part is as long as its `ds_tensor`: equal on all ranks, with zeros behind the end. All ranks must call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from polyreme.compat.deepspeed.refusal import OrderError
from polyreme.layout.region import MASTER
from polyreme.step.user.parameter_numbers import GRADIENT, ParameterNumbers
from polyreme.zero.parameter import engine_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole master of a parameter, on the device."""
    return _get_full(param, MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole master of a parameter, and the parameter, to rank 0's `value`."""
    _set_full(param, MASTER, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A whole optimizer state of a parameter, such as `exp_avg`; None before its first update."""
    return _get_full(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set a whole optimizer state of a parameter to rank 0's `value`."""
    _set_full(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient of a parameter; in the middle of a step, as inside of `no_sync`, what this rank has
    added up. Of one of no engine its `grad`."""
    numbers = _numbers(param)
    if numbers is None or not numbers.trains:
        return param.grad if engine_of(param) is None or param.requires_grad else None
    whole = numbers.whole(GRADIENT)
    return numbers.so_far() if whole is None else whole


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole gradient of a parameter to rank 0's `value`; of one of no engine its `grad`, if any."""
    if engine_of(param) is not None:
        _set_full(param, GRADIENT, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient of a parameter at stage 3, flat."""
    return _get_local("safe_get_local_grad", param, GRADIENT)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the gradient of a parameter at stage 3."""
    _set_local("safe_set_local_grad", param, GRADIENT, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the master of a parameter at stage 3, flat."""
    return _get_local("safe_get_local_fp32_param", param, MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master of a parameter at stage 3, and of the parameter."""
    _set_local("safe_set_local_fp32_param", param, MASTER, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of an optimizer state of a parameter at stage 3, flat."""
    return _get_local("safe_get_local_optimizer_state", param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of a parameter at stage 3."""
    _set_local("safe_set_local_optimizer_state", param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set the gradient of each of these parameters that has one to what `update_func` makes of it."""
    for param in param_list:
        if (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _numbers(param: nn.Parameter) -> ParameterNumbers | None:
    engine = engine_of(param)
    numbers: ParameterNumbers | None = None
    if engine is not None and param.requires_grad:
        numbers = engine.numbers(param)
    return numbers


def _get_full(param: nn.Parameter, kind: str) -> Tensor | None:
    numbers = _numbers(param)
    return None if numbers is None else numbers.whole(kind)


def _set_full(param: nn.Parameter, kind: str, value: Tensor) -> None:
    """`value` may have any shape of as many elements."""
    if (numbers := _numbers(param)) is not None:
        numbers.set_whole(kind, value.reshape(param.shape) if value.numel() == param.numel() else value)


def _get_local(name: str, param: nn.Parameter, kind: str) -> Tensor | None:
    _check_stage(name, param)
    numbers = _numbers(param)
    return None if numbers is None else numbers.equal_part(kind).read()


def _set_local(name: str, param: nn.Parameter, kind: str, value: Tensor) -> None:
    _check_stage(name, param)
    if (numbers := _numbers(param)) is not None:
        numbers.equal_part(kind).write(value)


def _check_stage(name: str, param: nn.Parameter) -> None:
    engine = engine_of(param)
    if engine is None or engine.config.zero.stage != 3:
        raise OrderError(
            f"{name} of a parameter that no engine of ZeRO stage 3 has: initialize with stage 3, or call "
            f"{name.replace('local', 'full')}, which works at every stage"
        )
