"""Parameters that are divided among the ranks while a model is built, before an engine has it.

Invariant: from the end of its module's `__init__` on, a parameter is empty and its state is a `Share`: an
equal shard on each rank. The numbers are those that a plain build would have left on rank 0, or on the rank
that wrote them last.
Communication over all ranks, which build the same, between CPUs: a broadcast of each parameter that is
divided, an all-gather of each that is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.distributed.mesh import Axis, everyone
from polyreme.errors import ModelError
from polyreme.layout.intervals import ceil_div
from polyreme.zero.parameter import ParameterState, TorchCall, record_of, set_apart, state_of
from polyreme.zero.released import view_of

OnDivided = Callable[[nn.Parameter], object]
"""A callback for each parameter that was divided."""
_MOVES = {"to", "cpu", "cuda", "half", "float", "double", "bfloat16", "contiguous"}


class Share(ParameterState):
    """This rank's shard of a divided parameter: `shard`, flat, on the CPU, zero beyond the parameter's end.

    While the model is built, code that reads the numbers gets them; afterwards that is a ModelError."""

    def __init__(self, numbers: Tensor, axis: Axis, source: int, way: str) -> None:
        """Take rank `source`'s numbers. way: how to get at them, for an error."""
        self.axis, self.shape, self.device, self._way = axis, numbers.shape, numbers.device, way
        size = ceil_div(numbers.numel(), axis.size)
        self.shard = torch.zeros(size, dtype=numbers.dtype)
        self.take(numbers, source)

    def take(self, numbers: Tensor, source: int) -> None:
        """Set the shard to this rank's range of rank `source`'s numbers."""
        whole = numbers.detach().to("cpu").contiguous()
        self.axis.broadcast(whole, source)
        mine = self._mine(whole)
        self.shard[: mine.numel()] = mine

    def whole(self) -> Tensor:
        """Return the whole parameter, in new memory."""
        found = self.axis.gathered(self.shard)
        return found[: self.shape.numel()].view(self.shape).to(self.device)

    def taken_whole(self) -> Tensor:
        """Return the whole parameter, and free the shard. All ranks must call."""
        numbers = self.whole()
        self.shard.untyped_storage().resize_(0)
        return numbers

    def differs(self, numbers: Tensor) -> bool:
        """Return whether the shard differs from this rank's range of `numbers`."""
        mine = self._mine(numbers.detach().to("cpu")).contiguous()
        return not torch.equal(mine.view(torch.uint8), self.shard[: mine.numel()].view(torch.uint8))

    def _mine(self, whole: Tensor) -> Tensor:
        start = self.axis.rank * self.shard.numel()
        return whole.reshape(-1)[start : start + self.shard.numel()]

    def before(self, parameter: Tensor, name: str, call: TorchCall, asked: Sequence[Any]) -> Any:
        if name in _MOVES and _keeps_dtype(*call):
            return call[1][0]
        if name == "data" and len(call[1]) > 1 and parameter is call[1][1]:
            return None  # `Module.to` sets the parameter to itself
        if _Building.current is not None:
            _Building.current.open(asked)
        elif name == "detach" or (name == "data" and len(call[1]) == 1):
            with torch._C.DisableTorchFunctionSubclass():
                return view_of(parameter, Tensor.detach(parameter))
        else:
            self.refuse(name, parameter)
        return NotImplemented

    def refuse(self, what: str, parameter: Tensor) -> None:
        raise ModelError(
            f"{what} of a parameter of shape {list(self.shape)}, of which each rank has a part since it was "
            f"made{self._way}"
        )


def share_of(parameter: Tensor) -> Share | None:
    """Return this rank's share of a parameter; None if it is not divided."""
    return state if isinstance(state := state_of(parameter), Share) else None


def divide(parameters: Iterable[nn.Parameter], way: str, axis: Axis | None = None, source: int = 0) -> None:
    """Keep this rank's shard of rank `source`'s numbers of each parameter, and leave the parameter empty. All
    ranks must call. way: how to get at the numbers, for an error."""
    for parameter in parameters:
        if share_of(parameter) is None:
            _close(parameter, Share(parameter.data, axis or everyone(), source, way), empty=True)


def shaped(parameters: Iterable[nn.Parameter], empty: bool = False) -> None:
    """Give each divided parameter its whole shape, without memory, or with `empty` the shape of no
    elements."""
    for parameter in parameters:
        if (share := share_of(parameter)) is not None:
            _close(parameter, share, empty)


def make_whole(parameters: Iterable[nn.Parameter]) -> None:
    """Make divided parameters plain whole ones again. All ranks must call."""
    for parameter in parameters:
        if (share := share_of(parameter)) is not None:
            _open(parameter, share.taken_whole())


@contextmanager
def gathered(parameters: Iterable[Any], source: int | None = None) -> Iterator[None]:
    """Make divided parameters whole inside, in memory of their own. All ranks must enter.

    source: the rank whose numbers at the end are kept. None: raises ModelError on leaving if any rank changed
    its shard."""
    if _Building.current is not None:
        _Building.current.close_idle()
    shares = [(parameter, share) for parameter in parameters if (share := share_of(parameter)) is not None]
    for parameter, share in shares:
        _open(parameter, share.whole())
    failed = True
    try:
        yield
        failed = False
    finally:
        changed = [
            share
            for parameter, share in shares
            if source is None and (parameter.shape != share.shape or share.differs(parameter.data))
        ]
        for parameter, share in shares:
            if source is not None and not failed:
                share.take(parameter.data, source)
            _close(parameter, share, empty=True)
    if changed:
        raise ModelError(
            f"in-place modification of a gathered parameter of shape {list(changed[0].shape)}, which was "
            "gathered to be read: name the rank whose numbers count, with modifier_rank="
        )


class _Building:
    """Divides parameters as soon as their module is made.

    A divided parameter becomes whole again where code reads its numbers, and is divided again before the next
    one is, once nothing else shares its memory."""

    current: _Building | None = None

    def __init__(self, axis: Axis, noted: OnDivided, way: str) -> None:
        self.axis, self._noted, self._way = axis, noted, way
        self._under: set[int] = set()  # modules whose `__init__` runs
        self._opened: list[nn.Parameter] = []
        self._made: list[nn.Parameter] = []
        self._on_meta: list[nn.Module] = []  # modules whose parameters get memory later, as with `skip_init`
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        classes = list(nn.Module.__subclasses__())
        for each in classes:  # the list grows meanwhile
            classes += [below for below in each.__subclasses__() if below not in classes]
        for each in classes:
            self._follow(each)
        nn.Module.__init_subclass__ = classmethod(self._subclass)  # type: ignore[assignment]
        _Building.current = self

    def end(self, failed: bool) -> None:
        """Undo what `begin` set. Unless the build `failed`, perhaps on one rank alone, divide what is still
        whole, with all ranks."""
        _Building.current = None
        del nn.Module.__init_subclass__
        while self._undo:
            self._undo.pop()()
        if not failed:
            self._divide(self._opened)
            self._divide_late()
        shaped(self._made, empty=True)

    def open(self, parameters: Collection[nn.Parameter]) -> None:
        """Make these parameters whole. All ranks come here, as they build the same."""
        self.close_idle()
        for parameter in parameters:
            if (share := share_of(parameter)) is not None:
                _open(parameter, share.whole())
                self._opened.append(parameter)

    def close_idle(self) -> None:
        """Divide again the parameters that were made whole and that nothing uses any more."""
        idle = [parameter for parameter in self._opened if not _is_shared(parameter)]
        self._opened = [parameter for parameter in self._opened if _is_shared(parameter)]
        self._divide(idle)
        self._divide_late()

    def _divide_late(self) -> None:
        """Divide the parameters that got memory only after their module was made."""
        for module in [m for m in self._on_meta if not _has_meta(m)]:
            self._on_meta.remove(module)
            self._divide(vars(module)["_parameters"].values())

    def _divide(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if _can_be_divided(parameter):
                _close(parameter, Share(parameter.data, self.axis, 0, self._way))
                self._made.append(parameter)
                self._noted(parameter)

    def _subclass(self, cls: type[nn.Module], **options: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**options)
        self._follow(cls)

    def _follow(self, cls: type[nn.Module]) -> None:
        """Wrap `__init__` of a module class so that the module's own parameters are divided after the
        outermost one."""
        own = vars(cls).get("__init__")
        if own is None:
            return

        @functools.wraps(own)
        def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in self._under or _Building.current is not self:
                own(module, *args, **kwargs)
                return
            self._under.add(id(module))
            try:
                own(module, *args, **kwargs)
            finally:
                self._under.discard(id(module))
            self.close_idle()
            self._divide(vars(module).get("_parameters", {}).values())
            if _has_meta(module):
                self._on_meta.append(module)

        cls.__init__ = build  # type: ignore[method-assign, assignment]
        self._undo.append(functools.partial(setattr, cls, "__init__", own))


@contextmanager
def building(noted: OnDivided, way: str = ": do it where the model is built") -> Iterator[None]:
    """Divide the parameters of modules made inside as they are made, and call `noted` with each. way: see
    `divide`. All ranks must make the same modules. Inside another `building` it does nothing more."""
    if _Building.current is not None:
        yield
        return
    made = _Building(everyone(), noted, way)
    made.begin()
    failed = True
    try:
        yield
        failed = False
    finally:
        made.end(failed)


def _has_meta(module: nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in vars(module).get("_parameters", {}).values())


def _can_be_divided(parameter: nn.Parameter | None) -> bool:
    return (
        type(parameter) is nn.Parameter
        and not parameter.is_meta
        and parameter.layout == torch.strided
        and parameter.numel() > 0
    )


def _open(parameter: nn.Parameter, numbers: Tensor) -> None:
    set_apart(parameter)
    parameter.__class__ = nn.Parameter
    parameter.data = numbers


def _close(parameter: nn.Parameter, share: Share, empty: bool = False) -> None:
    _open(parameter, without_memory([0] if empty else share.shape, parameter))
    record_of(parameter).presence.become(share, [parameter])


def without_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of this shape without memory, of the dtype and on the device of `like`."""
    found = torch.empty(shape, dtype=like.dtype, device=like.device)
    found.untyped_storage().resize_(0)
    return found


def _is_shared(parameter: nn.Parameter) -> bool:
    """Return whether another tensor shares the parameter's memory."""
    # its own reference, and the one asked with
    return torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > 2


def _keeps_dtype(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call such as `to` keeps the parameter's dtype; then the shards stay where they are."""
    trial = torch.empty(0, dtype=args[0].dtype)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(func(trial, *args[1:], **kwargs).dtype == trial.dtype)
