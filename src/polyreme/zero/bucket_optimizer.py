"""The optimizer of one bucket: any elementwise torch.optim class runs on the contiguous pieces of its
master shard.

On a CPU pieces are updated one after another, by a kernel that goes through memory once where there is one
(`optim.cpu_kernels`); on a GPU all pieces of a group at once, in one fused kernel. Masters and states are in
device memory, or in a tier, from which they come extent by extent to be updated on the CPU.

Invariants: a piece belongs to one optimizer group and begins and ends at multiples of ALIGN, so that results
do not depend on the cut; a parameter that got no gradient on any rank in a step is left alone in that step,
its step count too, as in torch.
Communication: none here but what `Bucket.publish` begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from polyreme.layout.intervals import overlap
from polyreme.layout.region import MASTER
from polyreme.optim.cpu_kernels import ChunkedKernel, Workers
from polyreme.optim.groups import FUSES, Group
from polyreme.optim.quantized_states import QuantizedKernel, States
from polyreme.zero.bucket import Bucket
from polyreme.zero.optimizer_state import OptimizerState
from polyreme.zero.pieces import Piece, Pieces


class BucketOptimizer:
    """The optimizer of one bucket: a torch optimizer for each of its groups."""

    def __init__(self, bucket: Bucket, groups: Sequence[Group], compact: States | None = None) -> None:
        """See `Pieces`."""
        self.bucket, self._pieces = bucket, Pieces(bucket, groups, compact)
        self.state = OptimizerState(self._pieces)
        """All masters and states, to a checkpoint and back."""
        self.offloaded, self.one_by_one = self._pieces.offloaded, self._pieces.one_by_one
        # True if everything for an update is in memory, so that several pieces are updated at a time
        self._stays = (
            self.offloaded is None or self.offloaded.store.in_memory
        ) and bucket.gradients.extents is None
        self._workers = Workers()

    @property
    def order(self) -> list[int]:
        """Extents, in the order in which `step` takes them."""
        return [] if self.offloaded is None else [extent.number for extent in self.offloaded]

    @torch.no_grad()
    def step(
        self,
        factor: float,
        options: Sequence[Mapping[str, Any]],
        unused: Collection[int] = (),
        stream: Iterable[Tensor] = (),
        count: int = 0,
        gradient_extents: Iterable[Tensor] = (),
    ) -> None:
        """Make one optimizer step from the bucket's reduced gradients times `factor`, with these `options`
        (lr, ...) of each group, and round the new parameters.

        unused: indices of parameters that have a gradient on no rank. stream: yields extents of states, from
        this bucket's first on. count: steps before this one. gradient_extents: yields extents of gradients,
        if these are in files."""
        self.bucket.require("params", "masters", "states")
        self._pieces.options = [*options]
        grad = self.bucket.gradients.numbers() if self.bucket.gradients.extents is None else None
        absent = [slot for index in unused if (slot := self.bucket.layout.slots[index]).size]
        for slot in absent:
            self._pieces.isolate(slot)
        for at, optimizer in self._pieces.optimizers.items():
            for group in optimizer.param_groups:
                group.update(
                    {
                        key: options[at][key]
                        for key in group
                        if key not in ("params", "fused") and key in options[at]
                    }
                )
        left_out = {p for p in self._pieces if any(overlap(p.interval, slot) for slot in absent)}
        if not self.one_by_one:
            assert grad is not None
            for at in self._pieces.optimizers:
                if pieces := [
                    piece for piece in self._pieces if piece.interval.group == at and piece not in left_out
                ]:
                    self._at_once(at, pieces, grad, factor)
            self.bucket.round()
            return
        target = self.bucket.rounded(keep=bool(left_out))
        coming = iter(stream)
        gradients, dtype = iter(gradient_extents), self.bucket.gradients.sums.reduce
        for extent, turn in groupby(self._pieces, lambda piece: piece.extent):
            memory = None if extent is None else next(coming)
            gradient, start = grad, None
            if gradient is None and extent is not None:
                gradient, start = next(gradients).view(dtype), extent.interval.start
            assert gradient is not None
            for piece in turn:
                if piece not in left_out:
                    self._one(
                        piece,
                        memory,
                        self._pieces.view(gradient, piece.interval, start),
                        factor,
                        self._pieces.view(target, piece.interval),
                        count,
                    )
        self._workers.finish()
        if self.bucket.transfer is not None:
            self.bucket.transfer.arrive()

    def _one(
        self, piece: Piece, memory: Tensor | None, gradient: Tensor, factor: float, target: Tensor, count: int
    ) -> None:
        """Update a piece, whose extent's bytes, if it has one, are in `memory`. `target` gets the new
        parameters."""
        tensor = piece.tensor
        recorded: dict[str, Tensor] = {}
        if piece.extent is not None and memory is not None:
            recorded = {
                kind: piece.within(piece.extent, field.of(memory))
                for kind, field in piece.extent.fields.items()
            }
            tensor = recorded.pop(MASTER)
            if (
                self._pieces.compact is None
                and piece.fresh
                and (made := self._pieces.begin_states(piece, tensor))
            ):
                piece.state, piece.fresh = made, False  # by its constructor, not by its first step
                for kind, field in recorded.items():
                    field.copy_(made[kind])
        assert tensor is not None
        state, kernel = {**piece.state, **recorded}, self._pieces.kernel(piece)
        if isinstance(kernel, QuantizedKernel) and not kernel.counts and not piece.fresh:
            state["step"] = torch.tensor(float(count))
        step = partial(
            kernel.step,
            tensor,
            gradient.to(tensor.device),
            state,
            factor,
            first=piece.fresh,
            at=self._pieces.random_offset + piece.interval.start,
            later=self._stays,
        )
        if self.bucket.transfer is None or self.bucket.is_offloaded:
            self._workers.do(step(out=target if target.data_ptr() != tensor.data_ptr() else None))
        else:
            self.bucket.transfer.send(target, lambda numbers: step(out=numbers), self._workers)
        left_out = {
            *recorded,
            *(("step",) if isinstance(kernel, QuantizedKernel) and not kernel.counts else ()),
        }
        piece.state = {kind: value for kind, value in state.items() if kind not in left_out}
        piece.fresh = False

    def _at_once(self, group: int, pieces: Sequence[Piece], grad: Tensor, factor: float) -> None:
        """Update pieces of one group in one kernel."""
        optimizer = self._pieces.optimizers[group]
        tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
        gradients = [
            self._pieces.view(grad, piece.interval).to(tensor.dtype)
            for piece, tensor in zip(pieces, tensors, strict=True)
        ]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for piece, tensor, gradient in zip(pieces, tensors, gradients, strict=True):
            tensor.grad, piece.fresh = gradient, False
            optimizer.state[tensor] = piece.state
        optimizer.param_groups[0]["params"] = tensors
        kernel, fuses = self._pieces.kernel(pieces[0]), optimizer.param_groups[0].get(FUSES)
        if tensors[0].is_meta and fuses and isinstance(kernel, ChunkedKernel) and kernel.on_gpus:
            for piece, tensor, gradient in zip(pieces, tensors, gradients, strict=True):
                kernel.step(tensor, gradient, piece.state)
        else:
            optimizer.step()
        for tensor in tensors:
            tensor.grad = None

    def nbytes(self) -> int:
        """Return the bytes of the optimizer's own states in device memory."""
        return 0 if "states" in self.bucket.asleep else sum(tensor.nbytes for tensor in self.on_device())

    def on_device(self) -> list[Tensor]:
        """Return the optimizer's own states in device memory."""
        return [t for piece in self._pieces for t in piece.state.values() if isinstance(t, Tensor)]
