"""An engine's optimizer by DeepSpeed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from polyreme.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from polyreme.compat.deepspeed.ops.lamb import FusedLamb
from polyreme.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from polyreme.compat.deepspeed.refusal import refused
from polyreme.compat.deepspeed.runtime.fp16 import of_engine
from polyreme.compat.deepspeed.runtime.fp16.loss_scaler import LossScaleConfig, LossScalerBase
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
    """What `deepspeed.initialize` returns second. It is equal to the optimizer that a script gave, whose
    groups it has, and `isinstance` takes it for one of what DeepSpeed would have returned there."""

    def __init__(self, engine: DeepSpeedEngine, basic: Optimizer | type[Optimizer]) -> None:
        own = engine.polyreme.optimizer
        super().__init__(own._engine, own._source)
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
    def optimizer(self) -> DeepSpeedOptimizer:
        """The optimizer that is wrapped: itself."""
        return self

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """Of stage 3, what libraries ask for hooks. Raises AttributeError at others."""
        if self._front[0].translation.stage != 3:
            raise AttributeError("parameter_offload of an optimizer below ZeRO stage 3")
        return DeepSpeedZeRoOffload(self._front[0].module)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return bool(self.param_groups[0].get("decoupled_weight_decay"))

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """What the model computes in."""
        given = self._front[0].translation.values
        return (
            torch.float16
            if given["fp16.enabled"]
            else torch.bfloat16
            if given["bf16.enabled"]
            else torch.float32
        )

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """This rank's part of the gradient of each parameter that trains, as `parameter.ds_tensor` is one, by
        group, at stage 3. They are there from the last backward of a window to its step. Raises
        AttributeError at other stages."""
        front = self._front[0]
        if front.translation.stage != 3 or front.polyreme.mesh.tp.size > 1:
            raise AttributeError  # for `__getattr__` to say
        return {
            index: [front.polyreme.numbers(p).equal_part(GRADIENT) for p in group if p.requires_grad]
            for index, group in enumerate(self.fp16_groups)
        }

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """The same, by group and the number of the parameter in it."""
        return {index: dict(enumerate(parts)) for index, parts in self.averaged_gradients.items()}

    @property
    def fp16_groups(self) -> list[list[Any]]:
        """The parameters of each group. Raises AttributeError for the config's Muon, whose groups are the
        engine's."""
        if isinstance(self._basic, type):
            raise AttributeError  # for `__getattr__` to say
        return [list(group["params"]) for group in self.param_groups]

    bit16_groups = fp16_groups

    @property
    def _global_grad_norm(self) -> float | None:
        return self._front[0].get_global_grad_norm()

    def __getattr__(self, name: str) -> Any:
        if name in _BUFFERS:
            raise AttributeError(f"there is no optimizer.{name} here: {_BUFFERS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's `step`."""
        if closure is not None:
            raise refused(
                "optimizer.step(closure)",
                "gradients are there already",
                "call engine.backward(loss), then engine.step()",
            )
        self._front[0].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; within a window at stage 2 leave them, as DeepSpeed does.
        Lightning calls it there where the batches of an epoch are no whole number of windows."""
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
        """The engine's `backward`, without dividing by the accumulation steps."""
        self._front[0].backward(loss, retain_graph, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """The groups, and what this rank has of the states; `load_checkpoint` brings them back."""
        return Optimizer.state_dict(self)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's fp32 masters, flat, bucket by bucket: those that the next step updates, or copies of
        what is off the device."""
        masters = [master for update in self._updates for _, master in update.state.masters()]
        return [each.fetch(0, each.numel()) if isinstance(each, Stored) else each for each in masters]

    fp32_groups_flat = single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """The same, as of one group."""
        return [self.fp32_partitioned_groups_flat]

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Do nothing: groups have their parameters at all times."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups

    @property
    def overflow(self) -> bool:
        """Whether an overflow made the last step leave the weights alone."""
        last = self._front[0].last
        return last is not None and last.skipped

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self._front[0].polyreme.state.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return of_engine.is_dynamic(self._front[0].translation)

    def set_lr(self, lr: float) -> None:
        """Give each group this learning rate."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """The engine's `offload_states`."""
        self._front[0].offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """The engine's `reload_states`."""
        self._front[0].reload_states(non_blocking)

    def needs_scaler(self) -> bool:
        """Whether `loss.backward()` needs the engine's `scale`."""
        return self.dynamic_loss_scale

    @property
    def loss_scaler(self) -> LossScalerBase:
        """The loss scale, as an object of DeepSpeed's that follows it."""
        return of_engine.scaler(self._front[0])

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """The loss scale, followed, and how it moves."""
        return of_engine.scale_config(self._front[0])


ZeROOptimizer = DeepSpeedOptimizer

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
"""Attributes of DeepSpeed's optimizers that are not here, and what takes their place."""


def basic_class(basic: Optimizer | type[Optimizer], translation: Translation) -> type:
    """The class that DeepSpeed makes of the config's optimizer; that of any other."""
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
    """The name of the class that DeepSpeed wraps around an optimizer of this class, if it does."""
    if translation.stage:
        return "DeepSpeedZeroOptimizer" + ("_Stage3" if translation.stage == 3 else "")
    if not (translation.values["fp16.enabled"] or translation.values["bf16.enabled"]):
        return None
    return "FP16_Optimizer" if issubclass(basic, FusedAdam) else "FP16_UnfusedOptimizer"
