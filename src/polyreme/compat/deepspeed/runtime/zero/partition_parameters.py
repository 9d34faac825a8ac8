"""DeepSpeed's names around partitioned parameters: `zero.Init`, `zero.GatheredParameters`, and the tags of
parameters.

Until `initialize`, parameters are whole on every rank, whatever the stage; from then on Polyreme's engine has
them. `Init` so makes modules as they are made without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from itertools import count
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyreme.zero.parameter import engine_of
from polyreme.zero.released import Released

_orig_torch_arange = torch.arange
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn
_orig_torch_tensor = torch.tensor
_IDS = count()
INIT_OPTIONS = {
    "config",
    "enabled",
    "dtype",
    "mpu",
    "zero_param_parallel_group",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "sequence_data_parallel_group",
    "param_swapper",
}


class ZeroParamType(Enum):
    """How a parameter is held: whole on each rank, in parts, or by another rank."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a parameter's numbers are there, or in parts on the ranks, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def tag(module: nn.Module) -> None:
    """Give each parameter DeepSpeed's attributes: ds_id, ds_shape, ds_numel, ds_status, ds_persist."""
    for parameter in module.parameters():
        _tag(parameter, ZeroParamStatus.NOT_AVAILABLE)


def _tag(parameter: Any, status: ZeroParamStatus) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.ds_id = next(_IDS)
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_persist = False
    parameter.ds_status = status


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter has DeepSpeed's attributes."""
    return hasattr(parameter, "ds_id")


class Init(AbstractContextManager["Init"]):
    """`with zero.Init(...):` around the code that builds a model. Its tensors of floating point are made in
    the dtype of the config (or `dtype`), and on the CPU or `remote_device`."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        **options: Any,
    ) -> None:
        """`options`: `enabled` and `dtype`; others are DeepSpeed's own and change nothing here."""
        if unknown := sorted(options.keys() - INIT_OPTIONS):
            raise TypeError(f"zero.Init() got an unexpected keyword argument {unknown[0]!r}")
        self._enabled = bool(options.get("enabled", True))
        self._dtype: torch.dtype | None = options.get("dtype")
        self._before = torch.get_default_dtype()
        if module is not None and self._enabled:
            tag(module)

    def __enter__(self) -> Self:
        if self._enabled and self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled and self._dtype is not None:
            torch.set_default_dtype(self._before)


class GatheredParameters(AbstractContextManager[None]):
    """`with zero.GatheredParameters(params, modifier_rank=0):` has the parameters whole on every rank, and at
    its end gives all ranks what that rank made of them. Every rank must enter."""

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else list(_parameters(params))
        self._params = given if enabled else []
        self._modifier = modifier_rank
        self._stack = ExitStack()

    def __enter__(self) -> None:
        engines: list[Any] = []
        for parameter in self._params:
            if self._modifier is None and not isinstance(parameter, Released):
                continue  # whole already, as a head is inside a forward, where a fused loss reads it
            engine = engine_of(parameter)
            if engine is not None and all(engine is not each for each in engines):
                engines.append(engine)
        for engine in engines:
            self._stack.enter_context(engine.full_parameters(write=self._modifier is not None))
        for parameter in self._params:
            if is_zero_param(parameter):
                _tag(parameter, ZeroParamStatus.AVAILABLE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (
            kind is None
            and self._modifier is not None
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            with torch.no_grad():
                for parameter in self._params:
                    whole = parameter.detach().contiguous()
                    dist.broadcast(whole, self._modifier)
                    parameter.copy_(whole)
        for parameter in self._params:
            if is_zero_param(parameter):
                _tag(parameter, ZeroParamStatus.NOT_AVAILABLE)
        self._stack.__exit__(kind, error, trace)


def _parameters(params: Any) -> Iterable[Any]:
    """Each parameter of a collection, once."""
    seen: set[int] = set()
    for each in params.values() if isinstance(params, dict) else params:
        if id(each) not in seen:
            seen.add(id(each))
            yield each


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a module may use any parameter of the model, as each is gathered where it is used, or the
    engine says that it cannot be."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see `register_external_parameter`."""


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., Tensor]:
    """`fn`, whose tensors of floating point have the dtype `target_fp_dtype`."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return made


def shutdown_init_context() -> None:
    """Do nothing: `Init` changes no modules."""


def restore_init_context() -> None:
    """Do nothing: `Init` changes no modules."""
