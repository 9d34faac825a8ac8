"""Gathering of parameters: the model's blocks come into memory and leave it one after another, in forward and
in backward.

Invariants: a block's parameters are whole whenever its forward or backward runs; beside the root's, at most 1
+ `prefetch` blocks are gathered at a time; gathers are issued in the order of use, which is the same on every
rank.

The root (everything outside the blocks) is gathered when the model's forward begins. release="auto" keeps it
and the last block from forward to backward, where they are needed first; release="always" gathers everything
once in forward and once in backward, so that stage 3 moves exactly 3Ψ(n-1)/n."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from polyreme.errors import ModelError
from polyreme.models.compiler import uncompiled
from polyreme.models.huggingface import returned, tensors_in
from polyreme.models.tensor_access import sees_gradients
from polyreme.zero.bucket import Bucket
from polyreme.zero.parameter import in_backward
from polyreme.zero.released import GATHERED, AfterForward, refuse_loading


@dataclass(eq=False)
class Unit:
    """Buckets that are gathered and released together, for the modules (whole blocks) that use them."""

    name: str
    modules: Sequence[nn.Module]
    buckets: Sequence[Bucket]
    pinned: bool = False  # stays gathered like the root, as its parameters are used outside its modules

    @property
    def sharded(self) -> bool:
        return any(bucket.sharded for bucket in self.buckets)

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def ensure(self) -> None:
        self.gather()
        for bucket in self.buckets:
            bucket.ensure()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def enter(self) -> None:
        """Gather for a forward of the modules."""
        self.ensure()
        for bucket in self.buckets:
            bucket.note(GATHERED)

    def leave(self) -> None:
        """Note that a forward of the modules has ended."""
        for bucket in self.buckets if not self.pinned else ():
            bucket.note(AfterForward(WeakMethod(self.pin)))

    def pin(self) -> None:
        """Stay gathered like the root."""
        self.pinned = True
        self.enter()


class Blocks:
    """Gathers and releases the units of `model` by module hooks; does nothing unless a bucket is sharded."""

    def __init__(
        self,
        model: nn.Module,
        root: Unit,
        units: Sequence[Unit],
        prefetch: int = 1,
        release: Literal["auto", "always"] = "auto",
        finished: Callable[[Sequence[Bucket]], None] = lambda _: None,
    ) -> None:
        self.root, self.units, self._model = root, list(units), model
        self._prefetch, self._release, self._finished = prefetch, release, finished
        self._current: Unit | None = None
        self._inside: Unit | None = None  # the unit whose module's forward is running
        self.in_forward = False
        """True while a forward of the model runs, where parameters are gathered and released."""
        self._order: list[Unit] = []  # units of the forward under way, or the last one
        # units of each stage's last complete forward, for prefetching
        self._last: dict[int, list[Unit]] = {}
        self._trails: dict[tuple[int, int], list[Unit]] = {}  # units of forwards whose backward is to come
        self._checked: set[int] = set()  # stages whose first forward was checked
        self._task = -1  # autograd's id of the last backward here
        self._known = True  # True if the trail has all forwards of the coming backward
        self._here = False  # True if the current unit was found in the trail
        self._keep = False  # True if nothing is released, as derivatives will be differentiated
        self._outer_forwards = 0  # running forwards of modules around blocks, called without the model
        self._expected: list[Unit] = []
        self._hooks: list[RemovableHandle] = []
        self.restart()
        if not any(unit.sharded for unit in (root, *self.units)):
            return
        inside = {inner for unit in self.units for module in unit.modules for inner in module.modules()}
        self._storing_modules = {
            root: [
                module for module in model.modules() if module not in inside and _may_store_tensors(module)
            ]
        }
        for unit in self.units:
            self._storing_modules[unit] = [
                inner for module in unit.modules for inner in module.modules() if _may_store_tensors(inner)
            ]
        self._hooks.append(model.register_forward_pre_hook(Hook(self._begin_forward), prepend=True))
        self._hooks.append(model.register_forward_hook(Hook(self._end_forward), always_call=True))
        for unit in self.units:
            for module in unit.modules:
                self._hooks.append(module.register_forward_pre_hook(Hook(self._before(unit)), prepend=True))
                self._hooks.append(
                    module.register_forward_hook(Hook(self._after(unit)), with_kwargs=True, always_call=True)
                )
        for module in {module for module in model.modules() if module not in inside} - {model}:
            self._hooks.append(module.register_forward_pre_hook(Hook(self._begin_outer), prepend=True))
            self._hooks.append(module.register_forward_hook(Hook(self._end_outer), always_call=True))
        self._hooks += refuse_loading(model)
        self._guard = _Guard(
            {id(p): unit for unit in self.units for b in unit.buckets for p in b.parameters},
            self._pin_outside,
        )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def at(self, stage: int, microbatch: int) -> None:
        """Set the stage and micro-batch of the coming forward or backward. A backward visits the units of its
        forwards in reverse. Raises ModelError for training while the parameters are exposed to the user."""
        if torch.is_grad_enabled() and any(
            bucket.is_exposed for unit in (self.root, *self.units) for bucket in unit.buckets
        ):
            raise ModelError(
                "training (or engine.load) inside engine.full_parameters(): do it after the with block"
            )
        self._stage, self._key = stage, (stage, microbatch)
        self._trail = self._trails.setdefault(self._key, [])
        self._position = len(self._trail)
        self._current = None

    @property
    def place(self) -> tuple[int, int]:
        """The stage and the micro-batch that `at` set."""
        return self._key

    @property
    def watched(self) -> bool:
        """True if modules have hooks of the user's that see gradients."""
        return sees_gradients(self._model.modules())

    def restart(self) -> None:
        """Forget forwards that had no backward, before the first forward of a step."""
        self._outer_forwards = 0
        self._trails.clear()
        self._known = True
        self.at(0, 0)

    def release_all(self) -> None:
        """Free every gathered parameter."""
        self._current, self._keep = None, False
        for unit in (self.root, *self.units):
            unit.release()

    def end_backward(self, last: bool = True) -> None:
        """Free, after a backward, all but what the next forward would gather first. Not `last`: another
        backward of the same micro-batch may follow."""
        self._known = last
        self._current = None
        self._trail.clear()
        self._trails = {key: trail for key, trail in self._trails.items() if trail or key == self._key}
        for unit in () if self._keep else self.units:
            if not unit.pinned or self._release == "always":
                unit.release()
        if self._release == "always" and not self._keep:
            self.root.release()

    # ---- forward

    def _begin_forward(self, model: nn.Module, args: object) -> None:
        if in_backward():
            return
        self._order, self._current, self.in_forward = [], None, True
        self._expected = self._last.get(self._stage, [])
        self.root.gather()
        if self._expected:
            self._expected[0].gather()
        self._ensure_root()
        if self._stage not in self._checked:
            self._guard.__enter__()

    def _end_forward(self, model: nn.Module, args: object, output: object) -> None:
        if in_backward():
            return
        self.in_forward = False
        if self._stage not in self._checked:
            self._guard.__exit__(None, None, None)
            self._checked |= {self._stage} if output is not None else set()
        self._last[self._stage] = self._order
        if torch.is_grad_enabled():
            self._trail += self._order
            self._position = len(self._trail)
        if (self._release == "always" or not torch.is_grad_enabled()) and not self._keep:
            self.release_all()
        self._watch([*returned(output), *self._attribute_tensors(self.root)], self.root)

    @property
    def awaits_backward(self) -> bool:
        """True if forwards of sharded blocks still wait for their backward."""
        return any(self._trails.values())

    def _begin_outer(self, module: nn.Module, args: object) -> None:
        """Begin the forward of a module around blocks. Without gradients, every rank may call such a module
        by itself, for example an encoder for generation. With gradients it belongs to no step, and its
        parameters refuse to be used."""
        if self.in_forward or torch.is_grad_enabled() or in_backward():
            return
        if not self._outer_forwards:
            self._order, self._current, self._expected = [], None, []
            self._ensure_root()
        self._outer_forwards += 1

    def _end_outer(self, module: nn.Module, args: object, output: object) -> None:
        if self.in_forward or not self._outer_forwards:
            return
        self._outer_forwards -= 1
        if not self._outer_forwards and not self._keep:
            self.release_all()

    def _before(self, unit: Unit) -> Callable[[nn.Module, object], None]:
        def enter(module: nn.Module, args: object) -> None:
            if in_backward():  # a recomputation by the model itself
                unit.enter()
                return
            if unit is not self._current:
                self._leave()
                self._current = unit
                self._order.append(unit)
                unit.gather()
                at = len(self._order)
                if self._expected[:at] == self._order:
                    for ahead in self._expected[at : at + self._prefetch]:
                        ahead.gather()
            unit.enter()
            self._inside = unit

        return enter

    def _after(self, unit: Unit) -> Callable[[nn.Module, object, object, object], None]:
        def leave(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if not in_backward():
                self._inside = None
                unit.leave()
            # their gradient does not lead into this unit
            handed_on = {id(t) for t in tensors_in((args, kwargs))}
            self._watch(
                [t for t in (*returned(output), *self._attribute_tensors(unit)) if id(t) not in handed_on],
                unit,
            )

        return leave

    def _ensure_root(self) -> None:
        for unit in (self.root, *self.units):
            if unit is self.root or unit.pinned:
                unit.ensure()

    # ---- backward

    def _watch(self, outputs: Sequence[Tensor], unit: Unit) -> None:
        """Gather `unit` before the backward of `outputs`."""
        if torch.is_grad_enabled():
            begun = partial(_begun, ref(self), ref(unit))
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(begun)

    def _attribute_tensors(self, unit: Unit) -> Iterator[Tensor]:
        """Return tensors in attributes of the unit's modules: a forward may leave a loss there, whose
        backward does not pass through the output."""
        for module in self._storing_modules[unit]:
            attributes = vars(module)
            for name in attributes.keys() - _OF_EVERY_MODULE:  # skips nearly all attributes
                if isinstance(value := attributes[name], _HOLDERS):
                    found: Collection[Any] = (
                        [value]
                        if isinstance(value, Tensor)
                        else value.values()
                        if isinstance(value, dict)
                        else value
                    )
                    # a long collection of other values, such as a vocabulary, is skipped
                    if isinstance(next(iter(found), None), Tensor):
                        yield from tensors_in(list(found))

    def before_backward(self, unit: Unit) -> None:
        """Gather `unit`, where the backward of its computation begins."""
        # second derivatives read parameters again, in another order than the blocks'
        self._keep |= torch.is_grad_enabled()
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._position = task, len(self._trail)
        if unit is self.root:
            self._ensure_root()
            return
        # not at its place in the trail: search back for it
        if self._trail[self._position : self._position + 1] != [unit]:
            at = self._position
            while at > 0 and self._trail[at - 1] is not unit:
                at -= 1
            self._position = max(at - 1, 0)
        if (left := self._current) is not unit:
            self._leave()
            self._current, here = unit, self._here
            self._here = (
                self._known and not self._keep and self._trail[self._position : self._position + 1] == [unit]
            )
            if left is not None and not left.pinned and here and left not in self._trail[: self._position]:
                self._finished(left.buckets)
        unit.gather()
        for ahead in self._trail[max(self._position - self._prefetch, 0) : self._position][::-1]:
            ahead.gather()
        unit.ensure()

    @torch.no_grad()  # as in a backward
    def imitate_backward(self) -> None:
        """Gather and release in the same order as a backward, on a rank that has nothing to differentiate, as
        the other ranks' gathers wait for it."""
        if self._trail and any(unit.sharded for unit in (self.root, *self.units)):
            for unit in (self.root, *reversed(self._trail)):
                self.before_backward(unit)

    def _leave(self) -> None:
        """Free the unit that the forward or backward was in. Autograd runs later nodes first, so none of its
        nodes is left once another block's backward begins."""
        if self._current is not None and not self._current.pinned and not self._keep:
            self._current.release()

    def _pin_outside(self, unit: Unit) -> None:
        """Pin `unit` where its parameters are used outside its own forward."""
        if unit is not self._inside:
            unit.pin()


def _begun(blocks: ref[Blocks], unit: ref[Unit], gradient: Tensor) -> None:
    # autograd's memory holds this function, and Python's collector cannot free cycles through it
    if (mine := blocks()) is None or (its := unit()) is None:
        raise ModelError(
            "a backward comes to the model of an engine that is gone, whose parameters are in shards: keep a "
            "reference to the engine, and call backward before engine.close() and engine.refresh()"
        )
    mine.before_backward(its)


class Hook:
    """A hook of this engine's model; in a copy of the model it does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    @uncompiled  # of a model that a script compiled whole, it breaks the graph
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    """The hook in a copy of the model."""


class _Guard(TorchFunctionMode):
    """Finds parameters that are used outside their block's forward, during the first forward, and calls
    `used` with their unit, which then stays gathered.

    A later use after the block's forward is found by `AfterForward`; one before it, or after the release, is
    refused."""

    def __init__(self, owners: dict[int, Unit], used: Callable[[Unit], None]) -> None:
        super().__init__()
        self._owners, self._used = owners, used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            unit = self._owners.get(id(leaf)) if isinstance(leaf, nn.Parameter) else None
            if unit is not None:
                self._used(unit)
        return func(*args, **(kwargs or {}))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOLDERS = (Tensor, list, tuple, dict)


def _may_store_tensors(module: nn.Module) -> bool:
    """Return whether a module's forward may leave tensors in attributes, as torch's own modules do not."""
    return not type(module).__module__.startswith("torch.nn.")
