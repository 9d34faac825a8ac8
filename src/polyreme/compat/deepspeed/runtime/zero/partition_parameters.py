"""DeepSpeed's names around partitioned parameters: `zero.Init`, `zero.GatheredParameters`, and the attributes
that DeepSpeed gives parameters.

Until `initialize`, parameters made under `Init` are divided by `polyreme.zero.divided`, and others are whole;
from then on Polyreme's engine has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

import polyreme
from polyreme.compat.deepspeed.comm.initialize import init_distributed
from polyreme.compat.deepspeed.refusal import CallError, GatherError, refused
from polyreme.compat.deepspeed.runtime.zero.parameter_offload import external_parameters
from polyreme.errors import ModelError
from polyreme.layout.region import MASTER
from polyreme.step.user.equal_part import EqualPart
from polyreme.zero.divided import building, divide, gathered, share_of
from polyreme.zero.parameter import TrainedParameter, engine_of, state_of

_MAKERS = ("arange", "empty", "zeros", "ones", "full", "eye", "randn", "tensor")
globals().update({f"_orig_torch_{name}": getattr(torch, name) for name in _MAKERS})
_IDS = count()
_WAY = (
    " (under zero.Init): do it inside `with deepspeed.zero.GatheredParameters(parameter):` (with "
    "modifier_rank= to change it), which every rank must enter, or where the model is built"
)
partitioned_param_data_shape = [0]
"""The shape of a parameter that is divided, before `initialize`."""
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
    """The ways in which a parameter can be held: whole on each rank, in parts, or by another rank."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """The states of a parameter: its numbers are there, in parts on the ranks, or on their way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


TAGS = (
    *("ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_active_sub_modules", "ds_status"),
    *("ds_tensor", "partition_numel"),
)
"""The attributes that a parameter is given."""


def tag(engine: polyreme.Engine, module: nn.Module) -> None:
    """Give each parameter of `module` DeepSpeed's attributes (ds_id, ds_shape, ds_numel, ds_status,
    ds_persist, ds_tensor) for as long as `engine` has it."""
    engine.patches.attribute(module, "ds_external_parameters", external_parameters)
    engine.patches.call(partial(_untag, module))
    for parameter in module.parameters():
        for own in "ds_tensor", "partition_numel":
            vars(parameter).pop(own, None)
        _tag(parameter, ZeroParamStatus.AVAILABLE)  # but for as long as `_status` says otherwise


def _untag(module: nn.Module) -> None:
    """Remove DeepSpeed's attributes from the parameters that are ordinary ones again."""
    for parameter in module.parameters():
        for name in TAGS if type(parameter) is nn.Parameter else ():
            vars(parameter).pop(name, None)


def _divided(parameter: Any) -> None:
    """Give a parameter that is divided before `initialize` DeepSpeed's attributes; `ds_tensor` is this rank's
    part, flat."""
    _tag(parameter, ZeroParamStatus.NOT_AVAILABLE)
    if (share := share_of(parameter)) is not None:
        share.shard.ds_numel = share.shard.numel()  # type: ignore[attr-defined]
        vars(parameter)["ds_tensor"] = share.shard
        parameter.partition_numel = share.shard.numel


def _tag(parameter: Any, status: ZeroParamStatus) -> None:
    if not hasattr(parameter, "ds_id"):
        share = share_of(parameter)
        parameter.ds_id = next(_IDS)
        parameter.ds_shape = parameter.shape if share is None else share.shape
        parameter.ds_numel = parameter.ds_shape.numel()
        parameter.ds_persist = False
        parameter.ds_active_sub_modules = set()
    vars(parameter)["ds_status"] = status


def _status(parameter: TrainedParameter) -> ZeroParamStatus:
    """Return AVAILABLE if a parameter that an engine has is whole on this rank now, else NOT_AVAILABLE."""
    if "ds_id" not in vars(parameter):
        raise AttributeError("ds_status of a parameter that is not divided")
    return ZeroParamStatus.AVAILABLE if state_of(parameter).there else ZeroParamStatus.NOT_AVAILABLE


def _partition_numel(parameter: TrainedParameter) -> int:
    """Return a parameter's number of elements over the number of data-parallel ranks, rounded up."""
    return -(-parameter.ds_numel // engine_of(parameter).mesh.dp.size)  # type: ignore[attr-defined]


def _part(parameter: TrainedParameter) -> Tensor:
    """Return this rank's part of a parameter. Before `initialize` it is the memory of one that is divided;
    afterwards a view by which all ranks alike read and write the engine's numbers. Raises AttributeError for
    a parameter that is whole, or divided by tensor parallelism, too."""
    engine, own = engine_of(parameter), vars(parameter)
    if "ds_tensor" in own:
        part: Tensor = own["ds_tensor"]
    elif "ds_id" in own and engine is not None:
        if engine.mesh.tp.size > 1:
            raise AttributeError("ds_tensor beside tensor parallelism: use safe_get_full_fp32_param")
        part = engine.numbers(parameter).equal_part(MASTER, rounded=True)
    else:
        raise AttributeError("ds_tensor of a parameter that no engine divides")
    return part


def _set_part(parameter: TrainedParameter, value: Tensor) -> None:
    """Copy `value` into this rank's part. `parameter.ds_tensor += x` has done so when it assigns the part."""
    if not isinstance(value, EqualPart):
        _part(parameter).copy_(value)


# properties of the class, so that they tell what an engine does with a parameter now
TrainedParameter.ds_status = property(_status)  # type: ignore[attr-defined]
TrainedParameter.partition_numel = _partition_numel  # type: ignore[attr-defined]
TrainedParameter.ds_tensor = property(_part, _set_part)  # type: ignore[attr-defined]
EqualPart.ds_numel = property(Tensor.numel)  # type: ignore[attr-defined]


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter has DeepSpeed's attributes."""
    return hasattr(parameter, "ds_id")


class Init(AbstractContextManager["Init"]):
    """A context in which a model is built: `with zero.Init(...):`. As soon as a module is made, its
    parameters take rank 0's numbers, and each rank keeps a part of them, in the host's memory. Floating-point
    tensors are made in `dtype`, or in torch's default. All ranks must build the same model."""

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
        """Divide the parameters of `module`, if it is given, or prepare the context. `options`: `enabled` and
        `dtype`; DeepSpeed's others change nothing here. Raises TypeError for an option that it has not."""
        if unknown := sorted(options.keys() - INIT_OPTIONS):
            raise TypeError(
                f"zero.Init({unknown[0]}=...) is no option of DeepSpeed's: leave it out, or correct its name"
            )
        self._enabled = bool(options.get("enabled", True))
        self._dtype: torch.dtype | None = options.get("dtype")
        self._stack = ExitStack()
        if self._enabled:
            init_distributed()
        if module is not None and self._enabled:
            divide(module.parameters(), _WAY)
            for parameter in module.parameters():
                _divided(parameter)

    def __enter__(self) -> Self:
        if self._enabled:
            self._stack.enter_context(building(_divided, _WAY))
            if self._dtype is not None:
                self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


class GatheredParameters(AbstractContextManager[None]):
    """A context in which parameters are whole on every rank: `with zero.GatheredParameters(params):`. With
    `modifier_rank=0` all ranks get rank 0's changes where it ends; without, a change raises GatherError.
    Every rank must enter. Parameters that share a bucket with one of these become whole, too."""

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, Tensor) else _parameters(params or ())
        # a layer without a bias has None in its place
        self._params = [each for each in given if isinstance(each, Tensor)] if enabled else []
        self._modifier = modifier_rank
        self._stack = ExitStack()

    def __enter__(self) -> None:
        owned: dict[int, tuple[Any, list[Any]]] = {}
        for parameter in self._params:
            engine = engine_of(parameter)
            # whole already, as a head is inside a forward, where a fused loss reads it
            whole = self._modifier is None and state_of(parameter).there
            if engine is not None and not whole:
                owned.setdefault(id(engine), (engine, []))[1].append(parameter)
        for engine, mine in owned.values():
            self._stack.enter_context(
                engine.full_parameters(self._modifier is not None, mine, self._modifier or 0)
            )
        self._stack.enter_context(gathered(self._params, self._modifier))
        self._tag(ZeroParamStatus.AVAILABLE)
        self._stack.callback(self._tag, ZeroParamStatus.NOT_AVAILABLE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        except ModelError as refusal:
            if kind is not None:
                raise
            raise GatherError(f"a change inside of GatheredParameters would be lost: {refusal}") from refusal

    def _tag(self, status: ZeroParamStatus) -> None:
        for parameter in self._params:
            if is_zero_param(parameter):
                _tag(parameter, status)


def _parameters(params: Any) -> Iterable[Any]:
    """Return the parameters of a list, or of a dictionary by name, each once."""
    every = params.values() if isinstance(params, dict) else params
    return {id(each): each for each in every}.values()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing but raise CallError for what is no parameter. A module may use parameters of other modules
    without saying so: each is gathered where it is used, or the engine says why it cannot be."""
    if not isinstance(parameter, nn.Parameter):
        raise CallError(f"{type(parameter).__name__} is no parameter of a model: give a torch.nn.Parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see `register_external_parameter`."""


def shutdown_init_context() -> None:
    """Do nothing: `initialize` may be called inside of `Init`."""


def restore_init_context() -> None:
    """Do nothing; see `shutdown_init_context`."""


class MultipleAllGatherHandles:
    """A handle that waits for several others."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for all of them."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


class _Held:
    """The parameters that one call of `all_gather` made whole. They are divided again once `partition` was
    called for each; `left` counts those for which it was not."""

    def __init__(self, parameters: list[Any]) -> None:
        self.left, self.context = len(parameters), GatheredParameters(parameters)
        self.context.__enter__()


_HELD: WeakIdKeyDictionary = WeakTensorKeyDictionary()
_HOLDS = ("all_gather", "all_gather_coalesced", "partition")


def _all_gather(
    parameter: Any, param_list: Any = None, async_op: bool = False, hierarchy: int = 0, **_: Any
) -> MultipleAllGatherHandles:
    """Make the parameters of `param_list`, or this one, whole on every rank until `partition` is called. They
    are there when this returns, `async_op` or not. All ranks must call."""
    given = [each for each in _parameters(param_list or [parameter]) if each not in _HELD]
    held = _Held(given)
    for each in given:
        _HELD[each] = held
        if type(each) is nn.Parameter:  # as those are that are whole before `initialize`
            vars(each).update({name: _bound(name, each) for name in _HOLDS})
    return MultipleAllGatherHandles([])


def _partition(
    parameter: Any,
    param_list: Any = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Divide the parameters of `param_list`, or this one, again, as soon as this was called for all that were
    gathered together. All ranks must call. Raises GatherError if one was changed, and UnsupportedError for
    `has_been_updated` or a false `free_data`."""
    if has_been_updated or not free_data:
        raise refused(
            f"parameter.partition(has_been_updated={has_been_updated}, free_data={free_data})",
            "numbers that were gathered to be read go again",
            "use zero.GatheredParameters(parameter, modifier_rank=0) for changes, and clone what is to stay",
        )
    for each in _parameters(param_list or [parameter]):
        held: _Held | None = _HELD.pop(each, None)
        for name in _HOLDS:
            vars(each).pop(name, None)
        if held is not None:
            held.left -= 1
            if not held.left:
                held.context.__exit__(None, None, None)


def _bound(name: str, parameter: Any) -> Callable[..., Any]:
    """Return the method `name` of a divided parameter, with a weak reference to it, as the parameter may hold
    the method."""
    known = ref(parameter)
    method = _partition if name == "partition" else _all_gather
    return lambda *args, **kwargs: method(known(), *args, **kwargs)


def _method(name: str) -> property:
    def get(parameter: TrainedParameter) -> Callable[..., Any]:
        if "ds_id" not in vars(parameter):
            raise AttributeError(f"{name} of a parameter that is not divided")
        return _bound(name, parameter)

    return property(get)


for _name in _HOLDS:
    setattr(TrainedParameter, _name, _method(_name))
