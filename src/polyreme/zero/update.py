"""Optimizers on flat shards: any elementwise torch.optim class runs on the contiguous pieces of a bucket's master shard.

On a CPU one piece after another, each small enough to stay in the cache; on a device all pieces of a group at once, in one fused kernel.

Invariants: a piece is of one optimizer group and begins and ends at multiples of ALIGN, so that results do not depend on the cut; a
parameter that got no gradient on any rank in a step is left alone in that step, its step count too, as torch does.
Communication: none here but what `Bucket.publish` begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.layout import ALIGN, Run, Slot, align
from polyreme.zero.bucket import Bucket
from polyreme.zero.optimizers import Group

CHUNK = 1 << 19
"""Most elements of a piece on a CPU, a multiple of ALIGN: scaling, conversion and every pass of an update then find it in the cache."""


@dataclass(eq=False)
class _Piece:
    """A run and the master's memory under it, which is what the torch optimizer takes for a parameter."""

    run: Run
    tensor: Tensor


class Update:
    """The optimizer of one bucket: a torch optimizer for each group in it."""

    def __init__(self, bucket: Bucket, groups: Sequence[Group]) -> None:
        self.bucket = bucket
        self.one_by_one = bucket.master.device.type == "cpu"
        """Whether a piece is scaled and updated before the next one is read; else all of a group are at once."""
        chunk = CHUNK if self.one_by_one else bucket.layout.size
        self._pieces = [_Piece(part, self._view(bucket.master, part))
                        for run in bucket.layout.runs(bucket.region.start, bucket.region.stop) for part in _cut(run, chunk)]  # fmt: skip
        self._groups = groups
        self._optimizers: dict[int, Optimizer] = {}
        self._probes: dict[int, dict[str, Any]] = {}
        for group in sorted({piece.run.group for piece in self._pieces}):
            self._optimizers[group] = groups[group].optimizer([p.tensor for p in self._pieces if p.run.group == group])

    @torch.no_grad()
    def step(self, factor: float, options: Sequence[Mapping[str, Any]], unused: Collection[int] = ()) -> None:
        """One optimizer step from the bucket's reduced gradients times `factor`, with these `options` (lr, ...) of each group.

        `unused` are the indices of parameters that no rank has a gradient for. The gradients are consumed.
        """
        grad = self.bucket.grad
        if grad is None:
            return
        absent = [slot for index in unused if (slot := self.bucket.layout.slots[index]).size]
        for slot in absent:
            self._isolate(slot)
        for at, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group.update({key: options[at][key] for key in group if key != "params" and key in options[at]})
        pieces = [p for p in self._pieces if not any(slot.start < p.run.stop and p.run.start < slot.stop for slot in absent)]
        if self.one_by_one:
            turns = [[piece] for piece in pieces]
        else:
            turns = [[piece for piece in pieces if piece.run.group == at] for at in self._optimizers]
        for turn in filter(None, turns):
            gradients = [self._view(grad, piece.run).to(piece.tensor.dtype) for piece in turn]
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            for piece, gradient in zip(turn, gradients, strict=True):
                piece.tensor.grad = gradient
            optimizer = self._optimizers[turn[0].run.group]
            optimizer.param_groups[0]["params"] = [piece.tensor for piece in turn]
            optimizer.step()
            for piece in turn:
                piece.tensor.grad = None

    def nbytes(self) -> int:
        """Bytes of the optimizer's own states."""
        return sum(t.nbytes for _, state in self.state_of() for t in state.values() if isinstance(t, Tensor))

    def state_of(self) -> Iterable[tuple[Run, dict[str, Any]]]:
        """Every piece's run with the torch state of its parameter."""
        return [(piece.run, self._optimizers[piece.run.group].state.get(piece.tensor, {})) for piece in self._pieces]

    def allocate(self, scalars: Mapping[str, Mapping[str, float] | None]) -> None:
        """Make all states anew, as they are after a step, of zeros. `scalars` has by name of a parameter the states that are one number
        (`step`, ...; see `states`), or None for one that is to have no state, like one that was never updated."""
        slots = [s for s in self.bucket.layout.slots if s.size and s.start < self.bucket.region.stop and s.stop > self.bucket.region.start]
        told = {slot.name: None if scalars[slot.name] is None else tuple(sorted(scalars[slot.name].items())) for slot in slots}  # type: ignore[union-attr]
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        common = max(told.values(), key=list(told.values()).count, default=None)
        for slot in slots:
            if told[slot.name] != common:
                self._isolate(slot)
        for piece in self._pieces:
            name = next(s.name for s in slots if s.start < piece.run.stop and align(s.stop) > piece.run.start)
            if (numbers := scalars[name]) is not None:
                self._optimizers[piece.run.group].state[piece.tensor] = self._fresh(piece, numbers)

    def states(self, slot: Slot) -> dict[str, tuple[int, ...] | None]:
        """The states that the optimizer has for a parameter once it was updated, by name: their shapes, or None for one number."""
        state = self._probe(slot.group, slot.shape if self.bucket.layout.boundary == "tensor" else None)
        found: dict[str, tuple[int, ...] | None] = {}
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found[kind] = slot.shape if self.bucket.layout.boundary == "element" else tuple(value.shape)
            elif value is not None:
                found[kind] = None
        return found

    def _fresh(self, piece: _Piece, numbers: Mapping[str, float]) -> dict[str, Any]:
        """The states of a piece after a step on zeros, with `numbers`."""
        flat = piece.run.slot is None
        found: dict[str, Any] = {}
        for key, value in self._probe(piece.run.group, None if flat else tuple(piece.tensor.shape)).items():
            if isinstance(value, Tensor) and value.dim():
                found[key] = torch.zeros(piece.tensor.shape if flat else value.shape, dtype=value.dtype, device=value.device)
            elif isinstance(value, Tensor):
                found[key] = torch.full_like(value, numbers.get(key, 0.0))
            else:
                found[key] = value if value is None or key not in numbers else type(value)(numbers[key])
        return found

    def _probe(self, group: int, shape: tuple[int, ...] | None) -> dict[str, Any]:
        """The torch states of a parameter of this shape after a step on zeros; None: of a few elements of any."""
        if shape is None and group in self._probes:
            return self._probes[group]
        probe = torch.zeros((ALIGN,) if shape is None else shape, dtype=self.bucket.master.dtype, device=self.bucket.master.device)
        probe.grad = torch.zeros_like(probe)
        optimizer = self._groups[group].optimizer([probe])
        optimizer.step()
        if shape is None:
            self._probes[group] = optimizer.state[probe]
        return optimizer.state[probe]

    def _view(self, region: Tensor, run: Run) -> Tensor:
        flat = region[run.start - self.bucket.region.start : run.stop - self.bucket.region.start]
        return flat.view(run.slot.shape) if run.slot is not None else flat

    def _isolate(self, slot: Slot) -> None:
        """Give the parameter pieces of its own, with its part of the states and its own step count."""
        low, high = slot.start, align(slot.stop)
        pieces: list[_Piece] = []
        for piece in self._pieces:
            cuts = [piece.run.start, *(c for c in (low, high) if piece.run.start < c < piece.run.stop), piece.run.stop]
            if len(cuts) == 2 or piece.run.slot is not None:
                pieces.append(piece)
                continue
            states = self._optimizers[piece.run.group].state
            state = states.pop(piece.tensor, {})
            for start, stop in pairwise(cuts):
                run = Run(piece.run.group, start, stop)
                part = _Piece(run, self._view(self.bucket.master, run))
                inside = slice(start - piece.run.start, stop - piece.run.start)
                if state:
                    states[part.tensor] = {key: _part(value, inside, piece.tensor) for key, value in state.items()}
                pieces.append(part)
        self._pieces = pieces


def _cut(run: Run, chunk: int) -> list[Run]:
    """`run` in parts of at most `chunk` elements each, or as it is where it is one whole tensor."""
    if run.slot is not None:
        return [run]
    return [Run(run.group, start, min(start + chunk, run.stop)) for start in range(run.start, run.stop, chunk)]


def _part(value: Any, inside: slice, whole: Tensor) -> Any:
    """The part of a state that belongs to `inside` of the flat parameter `whole`: of a number per element theirs, of others a copy."""
    if not isinstance(value, Tensor):
        return value
    return value[inside] if value.shape == whole.shape else value.clone()
