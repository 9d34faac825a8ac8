"""The optimizer that `deepspeed.initialize` returns, with the attributes of DeepSpeed's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.ops.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from polyreme.compat.deepspeed.refusal import refused
from polyreme.compat.deepspeed.runtime.fp16 import of_engine
from polyreme.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from polyreme.errors import warn
from polyreme.layout.region import Stored
from polyreme.optim.groups import Lion
from polyreme.optim.lamb import Lamb
from polyreme.step.user.optimizer_view import OptimizerView
from polyreme.step.user.parameter_numbers import GRADIENT

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine


class DeepSpeedOptimizer(OptimizerView):
    """The optimizer of an engine, which `deepspeed.initialize` returns beside it.

    It has the groups of the optimizer that the script gave, and compares equal to it. `isinstance` takes it
    for an object of the class that DeepSpeed would have returned for the same config."""

    def __init__(self, engine: DeepSpeedEngine, basic: Optimizer | type[Optimizer]) -> None:
        own = engine.polyreme.optimizer
        super().__init__(own._engine, own._shown)
        self._front = (engine,)  # in a tuple: the engine is a module, and has this as an attribute
        self._basic = basic
        self._taken_for = basic_class(basic, engine.translation)
        self._wrapper = wrapper_name(self._taken_for, engine.translation)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.__dict__.get("_taken_for", DeepSpeedOptimizer)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._basic

    def __hash__(self) -> int:
        return hash(self._basic)

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """Return the object that libraries ask for the hooks of ZeRO stage 3. Raises AttributeError at other
        stages."""
        if self._front[0].translation.stage != 3:
            raise AttributeError("parameter_offload of an optimizer below ZeRO stage 3")
        return DeepSpeedZeRoOffload(self._front[0].module)

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Return, by the number of a group, this rank's part of the gradient of each of its parameters that
        trains, cut as `parameter.ds_tensor` is. Gradients are there from the last backward of a window to its
        step. Raises AttributeError at stages other than 3."""
        front = self._front[0]
        if front.translation.stage != 3 or front.polyreme.mesh.tp.size > 1:
            raise AttributeError  # for `__getattr__` to say
        return {
            index: [front.polyreme.numbers(p).equal_part(GRADIENT) for p in group if p.requires_grad]
            for index, group in enumerate(self.fp16_groups)
        }

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return the parts of `averaged_gradients` by the number of the group and of the parameter in it."""
        return {index: dict(enumerate(parts)) for index, parts in self.averaged_gradients.items()}

    @property
    def fp16_groups(self) -> list[list[Any]]:
        """Return the parameters of each group. Raises AttributeError for the config's Muon, whose groups the
        engine makes."""
        if isinstance(self._basic, type):
            raise AttributeError  # for `__getattr__` to say
        return [list(group["params"]) for group in self.param_groups]

    bit16_groups = fp16_groups

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return _FACTS[name](self, self._front[0])
        if name in _BUFFERS:
            raise AttributeError(f"there is no optimizer.{name} here: {_BUFFERS[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the engine's `step`. Raises UnsupportedError for a closure."""
        if closure is not None:
            raise refused(
                "optimizer.step(closure)",
                "gradients are there already",
                "call engine.backward(loss), then engine.step()",
            )
        self._front[0].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step. At stage 2 those of a window that has not ended stay, as
        DeepSpeed's do: Lightning calls this where an epoch ends within a window."""
        front = self._front[0]
        if not front.in_window():
            super().zero_grad(set_to_none)
        elif front.translation.stage != 2:
            warn(
                "optimizer.zero_grad() drops the gradients of a window that has not ended, as DeepSpeed "
                "does, so its step is of those after it alone: have epochs of whole windows, use stage 2, or "
                "call it after a step that ends one"
            )
            super().zero_grad(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the engine's `backward` without dividing the loss by the accumulation steps."""
        self._front[0].backward(loss, retain_graph, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups and this rank's part of the states. `engine.load_checkpoint` restores states, not
        `load_state_dict`."""
        return Optimizer.state_dict(self)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Return this rank's fp32 master weights, one flat tensor per bucket: the tensors that the next step
        updates, or copies of those that are off the device."""
        masters = [master for optimizer in self._sharded_optimizer for _, master in optimizer.state.masters()]
        return [each.fetch(0, each.numel()) if isinstance(each, Stored) else each for each in masters]

    fp32_groups_flat = single_partition_of_fp32_groups = fp32_partitioned_groups_flat


ZeROOptimizer = DeepSpeedOptimizer


def _set_rate(optimizer: DeepSpeedOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _nothing() -> None:
    """Do nothing, in place of two methods that fill and empty the groups: here they are always filled."""


_FACTS: Mapping[str, Callable[[DeepSpeedOptimizer, DeepSpeedEngine], Any]] = {
    "optimizer": lambda own, _: own,  # the one that is wrapped
    "adam_w_mode": lambda own, _: bool(own.param_groups[0].get("decoupled_weight_decay")),
    "low_precision_dtype": lambda _, front: (
        torch.float16
        if front.fp16_enabled()
        else torch.bfloat16
        if front.bfloat16_enabled()
        else torch.float32
    ),
    "fp32_groups": lambda own, _: [own.fp32_partitioned_groups_flat],
    "_global_grad_norm": lambda _, front: front.get_global_grad_norm(),
    "overflow": lambda _, front: front.last is not None and front.last.skipped,
    **dict.fromkeys(("loss_scale", "cur_scale"), lambda _, front: front.polyreme.state.loss_scale),
    "dynamic_loss_scale": lambda _, front: of_engine.is_dynamic(front.translation),
    "needs_scaler": lambda own, _: lambda: own.dynamic_loss_scale,
    "loss_scaler": lambda _, front: of_engine.scaler(front),
    "loss_scale_config": lambda _, front: of_engine.scale_config(front),
    "set_lr": lambda own, _: partial(_set_rate, own),
    "get_lr": lambda own, _: lambda: float(own.param_groups[0]["lr"]),
    "offload_states": lambda _, front: front.offload_states,
    "reload_states": lambda _, front: front.reload_states,
    "_set_fp32_optimizer_param_groups": lambda _, __: _nothing,
    "_clear_fp32_optimizer_param_groups": lambda _, __: _nothing,
}
"""Further attributes of DeepSpeed's optimizers, each as a function of the optimizer and its engine."""

_MASTERS = "read masters by deepspeed.utils.safe_get_full_fp32_param(parameter), and set them by safe_set_..."
_GRADIENTS = "read gradients by deepspeed.utils.safe_get_full_grad(parameter), and set them by safe_set_..."
_BUFFERS = {
    **dict.fromkeys(
        ("fp16_partitioned_groups_flat", "parallel_partitioned_bit16_groups", "bit16_groups_flat"), _MASTERS
    ),
    **dict.fromkeys(("all_grad_tensors", "ipg_buckets", "grads_in_partition"), _GRADIENTS),
    "averaged_gradients": f"equal parts of gradients are there at stage 3, without autotp; {_GRADIENTS}",
    **dict.fromkeys(("fp16_groups", "bit16_groups"), "the config's Muon makes its groups by the model"),
}
"""Attributes of DeepSpeed's optimizers that are missing here, and what to call in place of each."""


def basic_class(basic: Optimizer | type[Optimizer], translation: Translation) -> type:
    """Return the class that DeepSpeed makes the config's optimizer of; for one that a script gave, its own
    class."""
    made = basic if isinstance(basic, type) else type(basic)
    named = translation.optimizer
    if named is None or named.params.get("torch_adam") or made not in _OF_TORCH:
        return made
    on_cpu = translation.config.get("memory", {}).get("states", "device") != "device"
    return _OF_TORCH[made][on_cpu]


_OF_TORCH: dict[type, tuple[type, type]] = {
    torch.optim.Adam: (FusedAdam, DeepSpeedCPUAdam),
    torch.optim.AdamW: (FusedAdam, DeepSpeedCPUAdam),
    torch.optim.Adagrad: (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    Lion: (FusedLion, DeepSpeedCPULion),
    Lamb: (FusedLamb, FusedLamb),
}


def wrapper_name(basic: type, translation: Translation) -> str | None:
    """Return the name of the class that DeepSpeed wraps an optimizer of the class `basic` in; None if it
    wraps it in none."""
    if translation.stage:
        return "DeepSpeedZeroOptimizer" + ("_Stage3" if translation.stage == 3 else "")
    if not (translation.values["fp16.enabled"] or translation.values["bf16.enabled"]):
        return None
    return "FP16_Optimizer" if issubclass(basic, FusedAdam) else "FP16_UnfusedOptimizer"
