"""The record of a step under way on one rank, real or simulated: operators, collectives, transfers, and every
storage from its first to its last byte.

Invariant: only what lives on the rank's own device is counted: results of operators, memory of buckets, and
what is named before the step (`Recorder.resting`). Memory of tiers, and of other ranks, is not.
No communication."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from polyreme.distributed.mesh import Axis
from polyreme.distributed.without_numbers import note_all
from polyreme.observer import OBSERVER
from polyreme.offload.planned import PlannedStore
from polyreme.offload.store import Store, Traffic
from polyreme.pipeline.schedule import Action
from polyreme.planner.flops import FORMULAS
from polyreme.planner.trace import Category, Collective, Compute, Event, Transfer, Wait
from polyreme.zero.buffer_pool import Pool

aten = torch.ops.aten
Phase = Literal["forward", "backward", "recompute"]


_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    **FORMULAS,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass(slots=True)
class Block:
    """A storage from its first to its last byte. born: the index of its segment."""

    nbytes: int
    category: Category
    born: int
    module: str = ""


Change = tuple[Block, int]
"""A storage that grows by so many bytes, or shrinks."""


@dataclass
class Recorded:
    """What one action did. changes: to memory, each with the number of events before it, and the module in
    which it happened. flops: by phase. resting: how many of the changes were there before the step."""

    action: Action | None
    events: list[Event] = field(default_factory=list)
    changes: list[tuple[int, Block, int, str]] = field(default_factory=list)
    flops: dict[Phase, int] = field(default_factory=dict)
    resting: int = 0


class Recorder(TorchDispatchMode):
    """The context of a step that is recorded. Memory is followed on devices of the type `device`.

    On the meta device results of operators are made from those of an earlier call with the same arguments, as
    torch's own way to their shapes takes ten times as long."""

    def __init__(self, module: nn.Module, device: str) -> None:
        super().__init__()
        self.segments = [Recorded(None)]
        self._device, self._meta = device, device == "meta"
        self._names = {each: name for name, each in module.named_modules()}
        self._live: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._known: dict[Any, _Result] = {}
        self._modules: list[str] = []
        self._paused = 0
        self._numbers = 0
        self._stack = ExitStack()

    # ---- the context

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            recorder = self
            resize, empty = torch.UntypedStorage.resize_, Axis.empty
            take, extent, get = Pool.take, PlannedStore._take, PlannedStore.get

            def resized(storage: Any, nbytes: int) -> Any:
                found = resize(storage, nbytes)
                recorder._resized(storage)
                return found

            def emptied(axis: Axis, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
                return recorder._named(empty(axis, size, dtype, device))

            def taken(pool: Pool, size: int, dtype: torch.dtype) -> Tensor:
                return recorder._named(take(pool, size, dtype))

            def elsewhere(store: PlannedStore, nbytes: int) -> Tensor:
                with recorder.paused():
                    return extent(store, nbytes)

            def copied(store: PlannedStore, *where: int) -> Tensor:
                with recorder.paused():
                    return get(store, *where)

            for owner, name, own in (
                (torch.UntypedStorage, "resize_", resized),
                (Axis, "empty", emptied),
                (Pool, "take", taken),
                (PlannedStore, "_take", elsewhere),
                (PlannedStore, "get", copied),
            ):
                stack.enter_context(patch.object(owner, name, own))
            for hook in (
                register_module_forward_pre_hook(lambda module, _: self._enter(module)),
                register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True),
            ):
                stack.callback(hook.remove)
            token = OBSERVER.set(self)
            stack.callback(OBSERVER.reset, token)
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def resting(self, category: Category, tensors: Iterable[Tensor], anywhere: bool = False) -> None:
        """Note tensors that live already. Of a storage that several of them share the first one counts.
        anywhere: on whichever device, as counts of steps are on the CPU, which stands for the device."""
        for tensor in tensors:
            if tensor.layout == torch.strided and (anywhere or tensor.device.type == self._device):
                self._storage(tensor, category, known=True)
        self.segments[0].resting = len(self.segments[0].changes)

    # ---- what the rank tells

    def action(self, action: tuple[object, ...]) -> None:
        self.segments.append(Recorded(Action(*action)))  # type: ignore[arg-type]

    def collective(self, axis: str, verb: str, nbytes: int, ranks: int) -> Callable[[], None]:
        number = self._begin(partial(Collective, axis=axis, verb=verb, bytes=nbytes, ranks=ranks))
        return lambda: self._event(Wait(number))

    def update(self, elements: int, nbytes: int) -> None:
        self._event(Compute("update", 0, nbytes, (), "float32"))

    def transfer(self, tier: Literal["host", "files"], direction: Literal["in", "out"], nbytes: int) -> int:
        """Note a transfer that begins. Returns its number."""
        return self._begin(partial(Transfer, tier=tier, direction=direction, bytes=nbytes))

    def watch(self, store: Store) -> None:
        """Note the transfers of a store from now on."""
        tier: Literal["host", "files"] = "host" if store.in_memory else "files"
        told = _Told(store.traffic.read, store.traffic.written, store.traffic.waited)
        told.to, told.tier, store.traffic = self, tier, told

    def _begin(self, event: Callable[[int], Event]) -> int:
        self._numbers += 1
        self._event(event(self._numbers))
        return self._numbers

    def _event(self, event: Event) -> None:
        if not self._paused:
            self.segments[-1].events.append(event)

    # ---- memory

    def _storage(self, tensor: Tensor, category: Category, known: bool = False) -> None:
        """Follow the storage of a tensor from now on. known: it may be followed already."""
        storage = tensor.untyped_storage()
        at = storage._cdata
        if at in self._live or (not storage.nbytes() and not known):
            return
        here = self._modules[-1] if self._modules else ""
        block = Block(storage.nbytes(), category, len(self.segments) - 1, here)
        self._live[at] = weakref.ref(storage, partial(self._freed, at)), block
        self._change(block, block.nbytes)

    def _freed(self, at: int, _: object) -> None:
        block = self._live.pop(at)[1]
        self._change(block, -block.nbytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (found := self._live.get(storage._cdata)) is not None:
            block = found[1]
            by, block.nbytes = storage.nbytes() - block.nbytes, storage.nbytes()
            self._change(block, by)

    def _change(self, block: Block, by: int) -> None:
        now = self.segments[-1]
        now.changes.append((len(now.events), block, by, self._modules[-1] if self._modules else ""))

    def _named(self, tensor: Tensor) -> Tensor:
        """Follow memory of a bucket, or of the pool."""
        self._storage(tensor, "gradients", known=True)
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is not None and found[1].category == "temporary":
            found[1].category = "gradients"
        return tensor

    # ---- modules

    def _enter(self, module: nn.Module) -> None:
        self._modules.append(self._names.get(module, ""))

    def _leave(self, module: nn.Module) -> None:
        self._modules.pop()

    @property
    def _phase(self) -> Phase:
        action = self.segments[-1].action
        if action is None or action.op not in ("B", "W"):
            return "forward"
        return "recompute" if torch.is_grad_enabled() or self._modules else "backward"

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            guard = torch._C._DisableTorchDispatch()  # for the modes below, too, which have no part in it
            found = func(*args, **kwargs)
            del guard
            return found
        if self._paused:
            return func(*args, **kwargs)
        key = _key(func, args, kwargs) if self._meta else None
        if key is not None and (known := self._known.get(key)) is not None:
            found = known.again(args)
        else:
            found = func(*args, **kwargs)
            known = self._result(func, args, kwargs, found)
            if key is not None and known.repeats:
                self._known[key] = known
        if self._meta:
            note_all(func, found)
        if known.makes:
            category: Category = "temporary"
            if self.segments[-1].action is not None and self._phase == "recompute":
                category = "activations"
            for tensor in known.made(found):
                self._storage(tensor, category)  # all are on the device
        elif known.resizes:
            for tensor in known.made(found):
                self._resized(tensor.untyped_storage())
        if known.compute is not None:
            now = self.segments[-1]
            now.events.append(known.compute)
            if known.compute.flops:
                phase = self._phase
                now.flops[phase] = now.flops.get(phase, 0) + known.compute.flops
        return found

    def _result(self, func: Any, args: Any, kwargs: Any, found: Any) -> _Result:
        given, made = _tensors((args, kwargs)), _tensors(found)
        here = [each for each in (*given, *made) if each.device.type == self._device]
        schema = func._schema
        before = {each.untyped_storage()._cdata for each in given if each.device.type == self._device}
        fresh = all(
            each.device.type == self._device and each.untyped_storage()._cdata not in before for each in made
        )
        if not schema.is_mutable and not fresh:  # a view, or a copy to another device
            return _Result()
        name = func._overloadpacket.__name__
        compute = None
        if here and "empty" not in name:
            written = given if schema.is_mutable else made
            nbytes = sum(each.nbytes for each in (*given, *(each for each in made if fresh)))
            if schema.is_mutable:
                nbytes += sum(each.nbytes for each in written[:1])
            dtype = str((made or given)[0].dtype).removeprefix("torch.")
            flops = _flops(func, args, kwargs, found)
            causal = _is_causal(func, args, kwargs)
            compute = Compute(name, flops, nbytes, _shape(func, args, made), dtype, causal)
        alone = all(each.device.type == self._device for each in given)
        if schema.is_mutable:
            makes = bool(made) and fresh and all(each.alias_info is None for each in schema.returns)
            same = isinstance(found, Tensor) and found is args[0] and name not in _RESIZES
            return _Result(compute, makes, same and alone, resizes=name in _RESIZES)
        forms, several = _form(found)
        return _Result(compute, bool(made), alone and forms is not None, forms, several)


class _Told(Traffic):
    """The traffic of a tier, which tells a recorder of what is added to it."""

    to: Recorder | None = None
    tier: Literal["host", "files"] = "host"
    last: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if self.to is not None and name in ("read", "written") and value > getattr(self, name):
            direction: Literal["in", "out"] = "in" if name == "read" else "out"
            number = self.to.transfer(self.tier, direction, value - getattr(self, name))
            if direction == "in":
                object.__setattr__(self, "last", number)
        object.__setattr__(self, name, value)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree, of those by rows their parts."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            by_rows = leaf.layout == torch.sparse_coo
            found += [leaf._indices(), leaf._values()] if by_rows else [leaf]
    return found


_RESIZES = {"resize_", "set_", "resize_as_"}


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operator did with some arguments. makes: its results are new storages. repeats: they can be
    made again without it, from `forms`, alone or as a tuple (`several`); or it returns its first argument.
    resizes: its result may have another size."""

    compute: Compute | None = None
    makes: bool = False
    repeats: bool = False
    forms: tuple[Any, ...] | None = None
    several: bool = False
    resizes: bool = False

    def again(self, args: Any) -> Any:
        if self.forms is None:
            return args[0]
        guard = torch._C._DisableTorchDispatch()
        found = tuple(
            torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
            if type(each) is tuple
            else each
            for each in self.forms
        )
        del guard
        return found if self.several else found[0]

    def made(self, found: Any) -> Iterable[Tensor]:
        if isinstance(found, Tensor) and found.layout == torch.strided:
            return (found,)
        return _tensors(found)


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator only returns parts of its arguments."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _form(found: Any) -> tuple[tuple[Any, ...] | None, bool]:
    several = isinstance(found, tuple)
    forms: list[Any] = []
    for each in found if several else (found,):
        if isinstance(each, Tensor):
            forms.append((tuple(each.shape), each.stride(), each.dtype))
        elif each is None or isinstance(each, int | float):
            forms.append(each)
        else:
            return None, False
    return tuple(forms), several


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a key that is equal for calls whose results have the same shapes; None where there is none."""
    try:
        found = [func, *map(_key_of, args)]
        for name, value in kwargs.items():
            found += [name, _key_of(value)]
        key = tuple(found)
        hash(key)
    except TypeError:
        return None
    return key


def _key_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple([_key_of(each) for each in value])
    return (type(value), value) if isinstance(value, int | float) else value


def _flops(func: Any, args: Any, kwargs: Any, found: Any) -> int:
    formula = _FORMULAS.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=found))


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether attention leaves out the keys after a query."""
    for at, each in enumerate(func._schema.arguments):
        if each.name == "is_causal":
            return bool(args[at] if at < len(args) else kwargs.get(each.name, each.default_value))
    return False


_PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
"""Matrix products, and the place of their first matrix among the arguments."""


def _shape(func: Any, args: Any, made: Sequence[Tensor]) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a matrix product; (batch x heads, queries, keys, width) of attention."""
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        a, b = args[_PRODUCTS[packet] :][:2]
        return math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]
    if "scaled_dot_product" in packet.__name__:
        query, key = args[1:3] if "backward" in packet.__name__ else args[:2]
        return math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    return ()
