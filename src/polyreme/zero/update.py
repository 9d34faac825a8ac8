"""Optimizers on flat shards: any elementwise torch.optim class runs on the contiguous pieces of a bucket's master shard.

Invariants: a run is of one optimizer group and begins and ends at multiples of ALIGN, so that results do not depend on the cut; a
parameter that got no gradient on any rank in a step is left alone in that step, its step count too, as torch does.
Communication: none here but what `Bucket.publish` begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.layout import Run, align
from polyreme.zero.bucket import Bucket
from polyreme.zero.optimizers import Group, Make

@dataclass(eq=False)
class _Piece:
    """A run and the master's memory under it, which is what the torch optimizer takes for a parameter."""

    run: Run
    tensor: Tensor
    optimizer: Optimizer


class Update:
    """The optimizer of one bucket."""

    def __init__(self, bucket: Bucket, makers: Sequence[Make], groups: Sequence[Group]) -> None:
        self.bucket = bucket
        self.optimizers: list[Optimizer] = []
        self._pieces: list[_Piece] = []
        runs = bucket.layout.runs(bucket.region.start, bucket.region.stop)
        for at, make in enumerate(makers):
            mine: dict[int, list[tuple[Run, Tensor]]] = {}
            for run in runs:
                if groups[run.group].maker == at:
                    mine.setdefault(run.group, []).append((run, self._view(bucket.master, run)))
            if mine:
                made = make([{"params": [t for _, t in pairs], **(groups[g].options or {})} for g, pairs in mine.items()])
                for group in made.param_groups:
                    group.setdefault("initial_lr", float(group["lr"]))
                self.optimizers.append(made)
                self._pieces += [_Piece(run, tensor, made) for pairs in mine.values() for run, tensor in pairs]

    @torch.no_grad()
    def step(self, factor: float, lr_factor: float, unused: Collection[int] = ()) -> None:
        """One optimizer step from the bucket's reduced gradients times `factor`, at the initial learning rates times `lr_factor`.

        `unused` are the indices of parameters that no rank has a gradient for. The gradients are consumed.
        """
        grad = self.bucket.grad
        if grad is None or not self._pieces:
            return
        for index in unused:
            self._isolate(index)
        skipped = {self.bucket.layout.slots[index].start for index in unused}
        if factor != 1.0:
            grad.mul_(factor)
        for piece in self._pieces:
            inside = any(piece.run.start <= s.stop - 1 and s.start < piece.run.stop and s.start in skipped for s in self.bucket.layout.slots)
            piece.tensor.grad = None if skipped and inside else self._view(grad, piece.run).to(piece.tensor.dtype)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_factor
            optimizer.step()
        for piece in self._pieces:
            piece.tensor.grad = None

    def nbytes(self) -> int:
        """Bytes of the optimizer's own states."""
        return sum(t.nbytes for piece in self._pieces for t in _tensors(piece.optimizer.state.get(piece.tensor, {})))

    def state_of(self) -> Iterable[tuple[Run, dict[str, Any]]]:
        """Every run with the torch state of its parameter."""
        return [(piece.run, piece.optimizer.state.get(piece.tensor, {})) for piece in self._pieces]

    def _view(self, region: Tensor, run: Run) -> Tensor:
        flat = region[run.start - self.bucket.region.start : run.stop - self.bucket.region.start]
        return flat.view(run.slot.shape) if run.slot is not None else flat

    def _isolate(self, index: int) -> None:
        """Give the parameter pieces of its own, with its part of the states and its own step count."""
        slot = self.bucket.layout.slots[index]
        low, high = slot.start, align(slot.stop)
        pieces: list[_Piece] = []
        for piece in self._pieces:
            cuts = sorted({piece.run.start, piece.run.stop, *(c for c in (low, high) if piece.run.start < c < piece.run.stop)})
            if len(cuts) == 2 or piece.run.slot is not None:
                pieces.append(piece)
                continue
            parts = [_Piece(Run(piece.run.group, a, b), self._view(self.bucket.master, Run(0, a, b)), piece.optimizer)
                     for a, b in zip(cuts, cuts[1:], strict=False)]  # fmt: skip
            state = piece.optimizer.state.pop(piece.tensor, None)
            for part in parts if state is not None else ():
                start, stop = part.run.start - piece.run.start, part.run.stop - piece.run.start
                piece.optimizer.state[part.tensor] = {
                    key: value[start:stop] if isinstance(value, Tensor) and value.shape == piece.tensor.shape
                    else value.clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }  # fmt: skip
            for group in piece.optimizer.param_groups:
                group["params"] = [new for old in group["params"]
                                   for new in ([p.tensor for p in parts] if old is piece.tensor else [old])]  # fmt: skip
            pieces += parts
        self._pieces = pieces


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
