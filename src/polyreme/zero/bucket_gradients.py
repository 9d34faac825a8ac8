"""The gradients of one bucket: a flat buffer that takes them as autograd makes them, its reduction over the
bucket's axis, and the place where reduced gradients go.

Invariants: a gradient's memory is the reduce-scatter's input (nothing is packed or unpacked); padding is
always zero.

Communication over the bucket's axis: `reduce` reduce-scatters; `gather` (stage 0) and `whole` all-gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import DONE, Work
from polyreme.layout.bucket_layout import ALIGN, BucketLayout, Slot
from polyreme.layout.intervals import Interval, ceil_div, overlap
from polyreme.offload.gradients import OffloadedGradients
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.gradient_sums import GradientSum, ReducedSum, StoredSum
from polyreme.zero.parameter import OWN_GRAD


def squares_by_row(flat: Tensor) -> Tensor:
    """Return the sum of squares of every ALIGN elements of a flat tensor, in float64; not finite where an
    element is not."""
    # in fp16 a sum over 64 elements can overflow where each fits
    dtype = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32
    return torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=dtype).double().square_()


def _add(total: Tensor, gradient: Tensor) -> None:
    """Add a micro-batch's gradient to `total`. A row-sparse gradient, whose rows may repeat, is summed by row
    first, as it is wherever gradients are added up, so that the place of the sum makes no difference."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        total.add_((gradient if gradient.layout == torch.strided else gradient.to_dense()).to(total.dtype))
        return
    rows, values = gradient._indices()[0], gradient._values()  # not coalesced
    # without numbers each row is taken to be another one
    found, places = (rows, rows) if rows.is_meta else torch.unique(rows, return_inverse=True)
    sums = values.new_zeros(len(found), *values.shape[1:])
    sums.add_(torch.sparse_coo_tensor(places[None], values, sums.shape, check_invariants=False))
    total.index_add_(0, found, sums.to(total.dtype))


class BucketGradients:
    """Gradients of one bucket.

    `grad` (reduce dtype) covers `region`, the elements of the flat buffer whose optimizer states this rank
    holds; `own_shard` is this rank's shard of it."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        axis: Axis,
        region: slice,
        sums: GradientSum,
        pool: Pool,
        counted: bool | Tensor = True,
    ) -> None:
        """`counted`: which numbers of this rank enter a sum over all ranks of the model: all, none, or, by a
        mask over its shard, those that no other rank holds."""
        self._layout, self._parameters, self._axis, self._region = layout, parameters, axis, region
        self._pool, self._device, self._counted = pool, pool.device, counted
        self._own, self._size = slice(*layout.shard(axis.rank)), region.stop - region.start
        self._of = f" of {layout.slots[0].name} ..."
        self.sums = sums
        """The way in which the gradients of a step's micro-batches are summed."""
        self.grad: Tensor | None = None
        # the store of reduced gradients that have left the device
        self._away: OffloadedGradients | None = None
        # the sum of their squares, or sums by row, which are computed in the store
        self._squares: Tensor | None = None
        self._local: Tensor | None = None
        self._reducing: Work = DONE
        self._reduced = False  # True if grad holds a sum to which the next reduction is added
        self._arrived: set[int] = set()  # since the last reduction
        self._in_place: set[int] = set()  # those whose next gradients autograd adds to the buffer itself
        self.ever_arrived: set[int] = set()
        """Indices of the parameters that got a gradient on this rank in this step."""

    def take(self, index: int, more: bool = False, factor: float | None = None) -> bool:
        """Move parameter `index`'s complete gradient, times `factor`, into the flat buffer, or add it to what
        is there. With `more`, autograd may add the next gradients of this reduction to the buffer itself,
        where dtypes allow. Returns whether it does."""
        parameter, slot = self._parameters[index], self._layout.slots[index]
        gradient: Tensor | None = OWN_GRAD.__get__(parameter)
        OWN_GRAD.__set__(parameter, None)
        if gradient is None:
            return False
        if factor is not None:  # factor 0 is for a loss without labels, whose gradient is 0 / 0
            gradient = gradient * factor if factor else torch.zeros_like(gradient)
        if gradient.layout != torch.strided and gradient.dtype != self.sums.local:
            gradient = gradient.to_dense()  # summed in its own dtype
        if self._local is None:
            self._local = self._pool.take(self._layout.size, self.sums.local)
            for start, stop in self._layout.gaps():
                self._local[start:stop].zero_()
        view = self._local[slot.start : slot.stop].view(slot.shape)
        if index in self._in_place:  # the gradient is the sum already, and nearly always this view
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        elif index in self._arrived:
            _add(view, gradient)
        else:
            if gradient.layout == torch.strided:
                view.copy_(gradient)
            else:
                view.zero_().add_(gradient.to(view.dtype))
            self._arrived.add(index)
            self.ever_arrived.add(index)
        if more and view.dtype == parameter.dtype and gradient.layout == torch.strided:
            OWN_GRAD.__set__(parameter, view)
            self._in_place.add(index)
            return True
        self._in_place.discard(index)
        return False

    def sum_of(self, index: int) -> Tensor | None:
        """Return the sum of parameter `index`'s gradients since the last reduction, in the flat buffer. None
        before the first, where the buffer has another dtype than the parameter, and where autograd adds to
        it."""
        found = None if index in self._in_place else self.so_far(index)
        return found if found is not None and found.dtype == self._parameters[index].dtype else None

    def so_far(self, index: int) -> Tensor | None:
        """Return the sum of parameter `index`'s gradients since the last reduction; None before the first."""
        if self._local is None or index not in self._arrived:
            return None
        slot = self._layout.slots[index]
        return self._local[slot.start : slot.stop].view(slot.shape)

    def make_room(self, sums: GradientSum) -> None:
        """Sum several micro-batches in this way, from the coming step on."""
        self.clear()
        self._go_on(sums)
        self.drop()

    def drop(self) -> None:
        """Free the buffers between steps. The next backward takes new ones."""
        self._local = self.grad = None

    def keep_adding(self, sums: GradientSum) -> None:
        """Add further gradients of the step, in this way, to those already reduced."""
        if isinstance(sums, StoredSum):  # already stored
            return
        if self._away is not None or self.sums.in_place or self.sums.reduce != sums.reduce:
            copy = self._axis.empty(self._size, sums.reduce, self._device)
            self.grad = copy.copy_(self.numbers())
        self._return()
        self._local = None
        self._go_on(sums)
        self._reduced = True

    def _go_on(self, sums: GradientSum) -> None:
        before, self.sums = self.sums.store, sums
        if before is not None and before is not sums.store:
            before.release()

    def reduce(self) -> None:
        """Begin to sum the gradients over the axis into this rank's shard of `grad`. Parameters without a
        gradient count as zero."""
        self.take_back()
        if self._local is None:
            self._local = self._pool.take(self._layout.size, self.sums.local).zero_()
        for index, slot in enumerate(self._layout.slots):
            if index not in self._arrived:
                self._local[slot.start : slot.stop].zero_()
        if self.grad is None:
            if self.sums.in_place:
                self.grad = self._local[self._region]
            elif self.sums.store is not None:  # from the pool, as it is moved to the store
                self.grad = self._pool.take(self._size, self.sums.reduce)
            else:
                self.grad = self._axis.empty(self._size, self.sums.reduce, self._device)
        self._reducing = self._axis.reduce_scatter(
            self.own_shard, self._local, accumulate=self._reduced, of=self._of
        )
        self._reduced = isinstance(self.sums, ReducedSum)

    def take_back(self) -> None:
        """Make autograd allocate new gradients, and add to none in the buffer."""
        while self._in_place:
            index = self._in_place.pop()
            parameter, slot = self._parameters[index], self._layout.slots[index]
            gradient: Tensor | None = OWN_GRAD.__get__(parameter)
            if gradient is not None and self._local is not None:
                view = self._local[slot.start : slot.stop].view(slot.shape)
                if gradient.data_ptr() != view.data_ptr():  # autograd has put the sum elsewhere
                    view.copy_(gradient)
            OWN_GRAD.__set__(parameter, None)

    def finish_reduce(self, last: bool = False) -> None:
        """Wait for the reduction that `reduce` began. `last`: no other one follows in this step, so that the
        gradients can move to where they are used."""
        self._reducing.wait()
        self._arrived.clear()
        gone, store = True, self.sums.store
        if store is not None and self.grad is not None and (last or self.sums.leaves):
            gone = self._leave(store, last)
        if self._local is not None and self.sums.frees:
            if gone or not self.sums.in_place:  # otherwise it has just begun to leave
                self._pool.give(self._local, self._reducing)
            self._local = None

    def _leave(self, store: OffloadedGradients, last: bool) -> bool:
        """Begin to move the reduced gradients to their store. Returns whether they have left already."""
        assert self.grad is not None
        if self._region != self._own:
            self._reducing = self.gather()  # other ranks read the reduction until then
            self._reducing.wait()
        if not store.adds:
            self._squares = self.squares()
        elif last:
            self._squares = torch.zeros(self._layout.shard_size // ALIGN, dtype=torch.float64)
        gone = store.put(self.grad, self._count if last and store.adds else None)
        if gone and not self.sums.in_place:
            self._pool.give(self.grad, self._reducing)
        self.grad, self._away = None, store
        return gone

    def _return(self) -> None:
        """Forget the gradients that were moved to the store."""
        if self._away is not None:
            self._away.clear()
        self._away = self._squares = None

    def _count(self, start: int, gradient: Tensor) -> None:
        """Record the squares of the counted gradients in `gradient`, a range of the sum that begins at
        element `start` of the region. Runs in any thread."""
        begin = start + self._region.start
        inside = overlap(Interval(begin, begin + gradient.numel()), self._own)
        if not inside or self._counted is False:
            return
        assert self._squares is not None
        own = gradient[inside.since(begin)]
        if self._counted is not True:
            own = own * self._counted[inside.since(self._own.start)].to(own.device)
        if rest := -own.numel() % ALIGN:  # pads with zeros up to a whole row
            own = torch.nn.functional.pad(own, (0, rest))
        at = (inside.start - self._own.start) // ALIGN
        self._squares[at : at + own.numel() // ALIGN] = squares_by_row(own)

    @property
    def own_shard(self) -> Tensor:
        """This rank's shard of the reduced gradients."""
        if self.grad is None:
            raise RuntimeError("the bucket has no reduced gradients")
        return self.grad[self._own] if self._region != self._own else self.grad

    def numbers(self) -> Tensor:
        """Return the reduced gradients of `region`: on the device, or on the CPU where they were moved; from
        files, a copy."""
        if (away := self._away) is not None:
            return away.whole() if self.extents is None else away.read(0, self._size)
        if self.grad is None:
            raise RuntimeError("the bucket has no reduced gradients")
        return self.grad

    @property
    def extents(self) -> Sequence[int] | None:
        """File extents that hold the reduced gradients, one for each of `offloaded_states`; None where these
        are not in files."""
        store = self.sums.store
        return None if store is None or store.store.in_memory else store.extents

    def squares(self) -> Tensor:
        """Return the sum of squares of the counted numbers in this rank's shard of the reduced gradients, a
        float64 scalar."""
        if self._squares is not None:
            if self._squares.dim() and self._away is not None:
                self._away.settle()
            return self._squares.sum().to(self._device)
        if self._counted is False:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return squares_by_row(self._counted_shard()).sum().to(self._device)

    def squares_by_slot(self) -> Tensor:
        """Return the sum of squares of the counted numbers in this rank's shard, for each parameter:
        float64."""
        found = torch.zeros(len(self._layout.slots), dtype=torch.float64, device=self._device)
        if self._counted is False:
            return found
        rows = squares_by_row(self._counted_shard())
        at = {slot.name: index for index, slot in enumerate(self._layout.slots)}
        for inside in self._layout.within(self._own.start, self._own.stop):
            found[at[inside.name]] = rows[
                inside.offset // ALIGN : ceil_div(inside.offset + inside.size, ALIGN)
            ].sum()
        return found

    def _counted_shard(self) -> Tensor:
        """Return this rank's shard of the reduced gradients, wherever they are, with zeros for numbers that
        do not count."""
        shard = self.read(self._own.start, self._own.stop)
        return shard if isinstance(self._counted, bool) else shard * self._counted.to(shard.device)

    def whole(self) -> Tensor:
        """Return the reduced gradients of all ranks, in the reduce dtype."""
        return self._axis.gathered(self.numbers().to(self._device), self._layout.size)

    def scale(self, slot: Slot, factor: float) -> None:
        """Multiply one parameter's reduced gradient."""
        if inside := overlap(slot, self._region):
            self._set(inside, self.read(*inside) * factor)
        self._squares = None

    def read(self, start: int, stop: int) -> Tensor:
        """Return the reduced gradients of elements [start, stop) of the flat buffer, all within `region`: a
        view, or a copy where they are off the device."""
        low, high = start - self._region.start, stop - self._region.start
        if self._away is not None:
            return self._away.read(low, high)
        return self.numbers()[low:high]

    def write(self, index: int, flat: Tensor) -> None:
        """Set this rank's elements of parameter `index`'s reduced gradient; `flat` is the whole gradient."""
        slot = self._layout.slots[index]
        if inside := overlap(slot, self._region):
            self._set(inside, flat[inside.since(slot.start)])
        self._squares = None
        self.ever_arrived.add(index)

    def _set(self, inside: Interval, numbers: Tensor) -> None:
        if self._away is not None:
            self._away.write(inside.start - self._region.start, numbers)
        else:
            self.read(*inside).copy_(numbers)

    def gather(self) -> Work:
        """Begin to give every rank the whole reduced gradient, where states are full (stage 0)."""
        if self._region == self._own or self.grad is None:
            return DONE
        return self._axis.all_gather(self.grad, self.own_shard)

    def clear(self) -> None:
        """Forget all gradients, reduced or not."""
        self.take_back()
        complete = self._reducing.join(settled=True)  # even of a failed reduction
        self._arrived.clear()
        if self.sums.leaves:
            self.grad = None
        if self._local is not None and self.sums.frees:
            if complete:
                self._pool.give(self._local, self._reducing)
            self._local = None
        self._return()
        self.ever_arrived.clear()
        self._reduced = False

    # ---- accounting

    @property
    def unreduced(self) -> int:
        """Bytes of the buffer for unreduced gradients, where it stays between backwards."""
        return 0 if self.sums.comes else self._layout.size * self.sums.local.itemsize

    @property
    def live(self) -> list[Tensor]:
        """Tensors that hold gradients now."""
        return [tensor for tensor in (self._local, self.grad) if tensor is not None]
