"""The bucket: one flat buffer that the parameters of a block are views of, its twin for their gradients, and its optimizer states' home.

Invariants: a parameter's memory is the all-gather's output, and a gradient's memory is the reduce-scatter's input (nothing is packed or
unpacked); padding is always zero; the arithmetic on every number is the same at every residency.

Communication over the bucket's axis: `gather` and `publish` all-gather, `reduce` reduce-scatters, `gather_grad` all-gathers (stage 0).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from polyreme.layout import ALIGN, BucketLayout, Slot
from polyreme.mesh import Axis
from polyreme.transport.work import DONE, Work
from polyreme.zero.residency import Residency


@dataclass(frozen=True)
class Formats:
    """Number formats of a bucket: of parameters in the model, of the optimizer's copy, of reduced gradients, and of gradients on
    this rank before reduction (wider than `compute` where several micro-batches are added up first)."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    local: torch.dtype


class Pool:
    """Flat buffers of gradients that are used again: freshly mapped memory costs a page fault every 4 KiB. They are given to `axis` to
    reduce. On a GPU the allocator does the same, for all sizes at once."""

    def __init__(self, axis: Axis, device: torch.device, keep: int = 2) -> None:
        self._axis, self._device, self._keep = axis, device, keep if device.type == "cpu" else 0
        self._free: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Work]]] = defaultdict(deque)

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor."""
        free = self._free[size, dtype]
        if not free:
            return self._axis.empty(size, dtype, self._device)
        buffer, last = free.popleft()
        last.settle()
        return buffer

    def give(self, buffer: Tensor, last: Work) -> None:
        """Hand `buffer`, which `last` reads, back for the next `take` of its size and dtype."""
        free = self._free[buffer.numel(), buffer.dtype]
        if len(free) < self._keep:
            free.append((buffer, last))

    def nbytes(self) -> int:
        """Bytes that wait here for their next use."""
        return sum(buffer.nbytes for free in self._free.values() for buffer, _ in free)


def squared_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a flat tensor whose size is a multiple of ALIGN: a float64 scalar, not finite if any element is not."""
    dtype = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32  # 64 elements of fp16 can overflow where each fits
    rows = torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=dtype)
    return rows.double().square_().sum()


class Bucket:
    """The parameters of one block (or a part of one), of one dtype, all trainable or all frozen.

    `parameters[i]` belongs to `layout.slots[i]`. `region` is the part of the flat buffer whose optimizer states this rank holds
    (everything at stage 0, its shard otherwise); `master` (master dtype) and `grad` (reduce dtype) cover it.
    """

    counted: bool | Tensor = True
    """Which of this rank's numbers count in a sum over all ranks of the model: all, none, or (a mask over its shard) those that no other
    rank holds."""
    stages: tuple[int, ...] = (0,)
    """The pipeline stages that use the bucket."""
    tie: Axis | None = None
    """The ranks of the pipeline that have a copy of this bucket, if others do."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        axis: Axis,
        residency: Residency,
        formats: Formats,
        pool: Pool,
        device: torch.device,
        trainable: bool = True,
        reduces_microbatches: bool = False,
    ) -> None:
        if axis.size == 1:  # its shard is the whole
            residency = Residency("full", "full", "shard")
        self.layout, self.parameters, self.axis, self.residency, self.formats = layout, list(parameters), axis, residency, formats
        self.trainable = trainable
        self.sharded = residency.params == "shard"
        # whether unreduced gradients give their buffer back after every reduction
        self._transient = residency.grads == "shard" or reduces_microbatches
        self.own = slice(*layout.shard(axis.rank))
        self.region = slice(0, layout.size) if residency.states == "full" else self.own
        self._pool = pool
        self._state: Literal["full", "gathering", "released"] = "full"
        self._gathering: Work = DONE  # the last all-gather of parameters, which others may still read

        if self.sharded:  # the full buffer's memory comes and goes
            self.full = torch.zeros(layout.size, dtype=formats.compute, device=device)
            self.shard = axis.empty(layout.shard_size, formats.compute, device).zero_()
        else:
            self.full = axis.empty(layout.size, formats.compute, device).zero_()
            self.shard = self.full[self.own]
        self.master = self.shard if self.region == self.own else self.full
        if trainable and formats.master != formats.compute:
            self.master = torch.zeros(self.master.numel(), dtype=formats.master, device=device)
        for slot, parameter in zip(layout.slots, self.parameters, strict=True):
            # through .data: a view that shares autograd's version counter would make every later gather an error in backward
            parameter.data = self.full.data[slot.start : slot.stop].view(slot.shape)

        self.grad: Tensor | None = None
        self._local: Tensor | None = None
        self._reducing: Work = DONE
        self._reduced = False  # grad holds a sum to which the next reduction is added
        self._arrived: set[int] = set()  # since the last reduction
        self._in_place: set[int] = set()  # of those, to whose place in the buffer autograd adds itself
        self.ever_arrived: set[int] = set()
        """Indices of the parameters that got a gradient on this rank in this step."""

    # ---- parameters

    def write(self, slot: Slot, tensor: Tensor) -> None:
        """Set one parameter to `tensor` (its full shape, any dtype): in the master, the shard, and the full buffer if it is there."""
        self.settle()
        flat = tensor.detach().reshape(-1)
        targets = [(self.master, self.region.start), (self.shard, self.own.start)]
        if self._state == "full":
            targets.append((self.full, 0))
        for target, base in targets:
            start, stop = max(slot.start, base), min(slot.stop, base + target.numel())
            if start < stop:
                target[start - base : stop - base].copy_(flat[start - slot.start : stop - slot.start])

    def gather(self) -> None:
        """Begin to fill the full buffer from the ranks' shards, unless it is filled already."""
        if self._state == "released":
            self.full.untyped_storage().resize_(self.full.nbytes)
            self._gathering = self.axis.all_gather(self.full, self.shard)
            self._state = "gathering"

    @property
    def released(self) -> bool:
        """Whether the full buffer is empty: reading a parameter would read freed memory."""
        return self._state == "released"

    def ensure(self) -> None:
        """Return when the full buffer is filled."""
        self.gather()
        if self._state == "gathering":
            self._gathering.wait()
            self._state = "full"

    def release(self) -> None:
        """Free the full buffer where parameters are sharded. Tensors that autograd saved keep pointing to it, empty."""
        if self.sharded and self._state != "released":
            self._gathering.wait()
            self.full.untyped_storage().resize_(0)
            self._state = "released"

    def publish(self) -> Work:
        """After an update: round the master to the compute dtype and begin to give the others this rank's part."""
        target = self.full if self.region != self.own else self.shard
        if self.master.data_ptr() != target.data_ptr():
            target.copy_(self.master)
        if self.sharded or self.residency.states == "full":
            self.release()
            return DONE
        self._gathering = self.axis.all_gather(self.full, self.shard)
        return self._gathering

    def settle(self) -> None:
        """Return when this rank may write to its parameters: no other is still reading them."""
        self._gathering.settle()

    def whole(self, master: bool = False) -> Tensor:
        """A full buffer of current values, in the compute dtype or the master's; valid until the bucket's next gather or update."""
        source = self.master if master else self.shard
        if not master and self._state == "full":
            return self.full
        if source.numel() == self.layout.size:
            return source
        full = torch.empty(self.layout.size, dtype=source.dtype, device=source.device)
        self.axis.all_gather(full, source).settle()
        return full

    # ---- gradients

    def take_grad(self, index: int, more: bool = False) -> None:
        """Move parameter `index`'s complete gradient into the flat gradient buffer, or add it to what is there. With `more`, autograd adds
        the next ones of this reduction itself, where that takes no conversion."""
        parameter, slot = self.parameters[index], self.layout.slots[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if self._local is None:
            self._local = self._pool.take(self.layout.size, self.formats.local)
            for start, stop in self.layout.gaps():
                self._local[start:stop].zero_()
        view = self._local[slot.start : slot.stop].view(slot.shape)
        if index in self._in_place:  # the gradient is the sum, and nearly always this view
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        elif index in self._arrived:
            view.add_(gradient.to(view.dtype))
        else:
            view.copy_(gradient)
            self._arrived.add(index)
            self.ever_arrived.add(index)
        if more and view.dtype == parameter.dtype:
            parameter.grad = view
            self._in_place.add(index)
        else:
            self._in_place.discard(index)

    def reduce(self) -> None:
        """Begin to sum the gradients over the axis into this rank's part of `grad`. Parameters without a gradient count as zero."""
        self._take_back()
        if self._local is None:
            self._local = self._pool.take(self.layout.size, self.formats.local).zero_()
        for index, slot in enumerate(self.layout.slots):
            if index not in self._arrived:
                self._local[slot.start : slot.stop].zero_()
        if self.grad is None:
            in_place = self.formats.local == self.formats.reduce and not self._transient
            self.grad = self._local[self.region] if in_place else self.axis.empty(
                self.master.numel(), self.formats.reduce, self.master.device)  # fmt: skip
        self._reducing = self.axis.reduce_scatter(self.own_grad, self._local, accumulate=self._reduced)
        self._reduced = True

    def _take_back(self) -> None:
        """Gradients are autograd's own again."""
        while self._in_place:
            self.parameters[self._in_place.pop()].grad = None

    def finish_reduce(self) -> None:
        """Return when the reduction that `reduce` began is complete."""
        self._reducing.wait()
        self._arrived.clear()
        if self._local is not None and self._transient:
            self._pool.give(self._local, self._reducing)
            self._local = None

    @property
    def own_grad(self) -> Tensor:
        """This rank's shard of the reduced gradients."""
        if self.grad is None:
            raise RuntimeError("the bucket has no reduced gradients")
        return self.grad[self.own] if self.region != self.own else self.grad

    def squares(self) -> Tensor:
        """Of this rank's shard of the reduced gradients, the sum of squares of what counts: a float64 scalar."""
        if self.counted is False:
            return torch.zeros((), dtype=torch.float64, device=self.own_grad.device)
        return squared_norm(self.own_grad if self.counted is True else self.own_grad * self.counted)

    def gather_grad(self) -> Work:
        """Where states are full (stage 0): begin to give every rank the whole reduced gradient."""
        if self.region == self.own or self.grad is None:
            return DONE
        return self.axis.all_gather(self.grad, self.own_grad)

    def clear_grad(self) -> None:
        """Forget all gradients, reduced or not."""
        self._take_back()
        self.finish_reduce()
        self._reducing.settle()
        self.ever_arrived.clear()
        self._reduced = False

    # ---- accounting

    def nbytes(self) -> dict[str, int]:
        """Live bytes of this rank by category: parameters, gradients, states (the master where it is a copy)."""
        storages = {
            "parameters": [self.full, self.shard],
            "gradients": [t for t in (self._local, self.grad) if t is not None],
            "states": [self.master],
        }
        seen: set[int] = set()
        found = {}
        for category, tensors in storages.items():
            found[category] = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[category] += storage.nbytes()
        return found
