"""DeepSpeed's optimizers by their names and options: torch's fused Adam, Adagrad, and ours of Lion and LAMB.

Invariant: whether Adam's weight decay is decoupled (AdamW) is an option of each group, so that an optimizer
made of the same groups is the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.compat.deepspeed.refusal import refused
from polyreme.optim.groups import Lion
from polyreme.optim.lamb import Lamb

HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def widened(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Make half-precision parameters and their gradients fp32 inside, and as before after it, with what was
    computed rounded to their own precision."""
    before = [(each, each.data, each.grad) for each in parameters if each.dtype in HALVES]
    for each, data, grad in before:
        each.grad = None  # which may not be of another dtype than its parameter
        each.data = data.float()
        each.grad = None if grad is None else grad.float()
    try:
        yield
    finally:
        for each, data, grad in before:
            each.grad = None
            data.copy_(each.data)
            each.data = data
            each.grad = grad


class WideStates(Optimizer):
    """An optimizer whose states are fp32 whatever its parameters are, unless `fp32_optimizer_states` is
    False; it updates in fp32 then, too."""

    fp32_optimizer_states = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        with widened(every if self.fp32_optimizer_states else ()):
            super().step()
        return loss


class KeptGradients(Optimizer):
    """An optimizer whose `zero_grad` keeps gradients and fills them with zeros where `set_grad_none` is
    False."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


_BETAS = (0.9, 0.999)
_REFUSED = {
    "amsgrad": ("it keeps no largest variance", "leave it out"),
    "bias_correction": ("torch's Adam always corrects", "leave it out"),
    "max_grad_norm": ("it does not clip", "write gradient_clipping in the config"),
}
"""Options that raise UnsupportedError where they are given another value than DeepSpeed's default."""
_FLAGS = ("set_grad_none", "fp32_optimizer_states")
"""Options that become attributes of these classes."""
_RENAMED = {
    "model_params": "params", "adam_w_mode": "decoupled_weight_decay", "adamw_mode": "decoupled_weight_decay",
}  # fmt: skip
"""Options that torch has under another name."""


class Named(Optimizer):
    """Takes the options of DeepSpeed's optimizer: by its names, in its order and with its defaults."""

    __signature__: inspect.Signature
    DOES: tuple[str, ...] = ()
    """The options of `_REFUSED` that this one can do."""

    def __init_subclass__(cls, parameters: str = "", **options: Any) -> None:
        super().__init_subclass__()
        if parameters:
            kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
            takes = {parameters: required, **options}
            cls.__signature__ = inspect.Signature(
                [inspect.Parameter(name, kind, default=value) for name, value in takes.items()]
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signature = type(self).__signature__
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = {}
        for name, value in bound.arguments.items():
            if name in _REFUSED and name not in self.DOES:
                if value != signature.parameters[name].default:
                    raise refused(f"{type(self).__name__}({name}=...)", *_REFUSED[name])
            elif name in _FLAGS:
                setattr(self, name, value)
            else:
                options[_RENAMED.get(name, name)] = value
        super().__init__(**options)


class TorchAdam(torch.optim.Adam):
    """torch's fused Adam or AdamW."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self.param_groups[0]["decoupled_weight_decay"]


class FusedAdam(
    Named, KeptGradients, TorchAdam,
    parameters="params", lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, adam_w_mode=True,
    weight_decay=0.0, amsgrad=False, set_grad_none=True,
):  # fmt: skip
    """DeepSpeed's Adam for GPUs: Adam or (`adam_w_mode`) AdamW."""


class DeepSpeedCPUAdam(
    Named, WideStates, TorchAdam,
    parameters="model_params", lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, weight_decay=0,
    amsgrad=False, adamw_mode=True, fp32_optimizer_states=True,
):  # fmt: skip
    """DeepSpeed's Adam for the CPU: Adam or (`adamw_mode`) AdamW, with fp32 momentum and variance unless
    `fp32_optimizer_states` is False."""


class DeepSpeedCPUAdagrad(
    Named, WideStates, torch.optim.Adagrad,
    parameters="model_params", lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True,
):  # fmt: skip
    """torch's Adagrad. Its sum of squares is fp32 unless `fp32_optimizer_states` is False."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter, state in self.state.items():  # which torch makes at once, in the parameter's dtype
            if self.fp32_optimizer_states and parameter.dtype in HALVES:
                state["sum"] = state["sum"].float()


class FusedLion(
    Named, KeptGradients, Lion,
    parameters="params", lr=1e-3, betas=_BETAS, weight_decay=0.0, set_grad_none=True,
):  # fmt: skip
    """DeepSpeed's Lion for GPUs."""


class DeepSpeedCPULion(
    Named, WideStates, Lion,
    parameters="model_params", lr=1e-3, betas=_BETAS, weight_decay=0, fp32_optimizer_states=True,
):  # fmt: skip
    """DeepSpeed's Lion for the CPU, with fp32 momentum unless `fp32_optimizer_states` is False."""


class FusedLamb(
    Named, Lamb,
    parameters="params", lr=1e-3, bias_correction=True, betas=_BETAS, eps=1e-8, eps_inside_sqrt=False,
    weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False,
):  # fmt: skip
    """LAMB, on any device."""

    DOES = ("bias_correction",)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step that this optimizer made itself, by parameter."""
        return [ratio.item() for ratio in self.trust_ratios]
