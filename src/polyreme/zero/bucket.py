"""The bucket: one flat buffer that the parameters of a block are views of, its twin for their gradients, and
its optimizer states' home.

Invariants: a parameter's memory is the all-gather's output, and a gradient's memory is the reduce-scatter's
input (nothing is packed or unpacked); padding is always zero; the arithmetic on every number is the same at
every residency.

Communication over the bucket's axis: `gather` and `publish` all-gather, `reduce` reduce-scatters,
`gather_grad` all-gathers (stage 0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import DONE, Work
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import ALIGN, BucketLayout, Slot
from polyreme.layout.region import Stored
from polyreme.offload.gradients import GradientStore
from polyreme.offload.gradients_in_host import HostTransfer
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.parameters import OffloadedShard
from polyreme.zero.buffer_pool import Buffers, Pool
from polyreme.zero.parameter import OWN_GRAD, name
from polyreme.zero.released import guard, unguard
from polyreme.zero.residency import Residency


@dataclass(frozen=True)
class Formats:
    """Number formats of a bucket: of parameters in the model, of the optimizer's copy, of reduced gradients,
    and of gradients on this rank before reduction (wider than `compute` where several micro-batches are added
    up first)."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    local: torch.dtype


Microbatches = Literal["one", "added", "reduced", "left"]
"""Of a step's micro-batches: there is only one; their gradients are added up on the rank, and then reduced;
or each's are reduced; and added up where the bucket's hold has them, if it has one (left)."""


def region_of(layout: BucketLayout, axis: Axis, residency: Residency) -> slice:
    """The part of a bucket's flat buffer whose optimizer states this rank holds."""
    return (
        slice(0, layout.size)
        if residency.states == "full" and axis.size > 1
        else slice(*layout.shard(axis.rank))
    )


def squares_by_row(flat: Tensor) -> Tensor:
    """Sums of squares of each ALIGN elements of a flat tensor: float64, not finite if any element is not."""
    # 64 elements of fp16 can overflow where each fits
    dtype = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32
    return torch.linalg.vector_norm(flat.view(-1, ALIGN), dim=1, dtype=dtype).double().square_()


def squared_norm(flat: Tensor) -> Tensor:
    """Sum of squares of a flat tensor whose size is a multiple of ALIGN: a float64 scalar, not finite if any
    element is not."""
    return squares_by_row(flat).sum()


def _add(total: Tensor, gradient: Tensor) -> None:
    """Add a micro-batch's gradient. One by rows, which may come several times, is summed by itself first, as
    it is wherever gradients are added up, so that these places make no difference."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        total.add_((gradient if gradient.layout == torch.strided else gradient.to_dense()).to(total.dtype))
        return
    rows, values = gradient._indices()[0], gradient._values()  # of one that is not coalesced
    found, places = torch.unique(rows, return_inverse=True)
    sums = values.new_zeros(len(found), *values.shape[1:])
    sums.add_(torch.sparse_coo_tensor(places[None], values, sums.shape, check_invariants=False))
    total.index_add_(0, found, sums.to(total.dtype))


class Bucket:
    """The parameters of one block (or a part of one), of one dtype, all trainable or all frozen.

    `parameters[i]` belongs to `layout.slots[i]`. `region` is the part of the flat buffer whose optimizer
    states this rank holds (everything at stage 0, its shard otherwise); `grad` (reduce dtype) covers it, and
    so does `master` (master dtype), where it is on the device, or `records`."""

    counted: bool | Tensor = True
    """Which of this rank's numbers count in a sum over all ranks of the model: all, none, or (a mask over its
    shard) those that no other rank holds."""
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
        microbatches: Microbatches = "one",
        records: OffloadedStates | None = None,
        offloaded: OffloadedShard | None = None,
        transfer: HostTransfer | None = None,
        gradient_store: GradientStore | None = None,
    ) -> None:
        if axis.size == 1:  # its shard is the whole
            residency = Residency("full" if offloaded is None else "shard", "full", "shard")
        self.layout = layout
        self.parameters = list(parameters)
        self.axis = axis
        self.residency = residency
        self.formats = formats
        self.trainable, self.device = trainable, device
        self.records = records
        """The home of masters and states, if that is not the device's memory."""
        self._offloaded = offloaded  # the home of the shard, if that is not the device's memory
        self.sharded = residency.params == "shard"
        # whether unreduced gradients give their buffer back after every reduction
        self._transient = residency.grads == "shard" or microbatches in ("reduced", "left")
        self.own = slice(*layout.shard(axis.rank))
        self._of = f" of {layout.slots[0].name} ..."
        self.region = region_of(layout, axis, residency)
        self._pool = pool
        self._state: Literal["full", "fetching", "gathering", "released"] = "full"
        self._here: Tensor | None = None  # the shard, which came to be gathered
        self._gathering: Work = DONE  # the last all-gather of parameters, which others may still read
        self.transfer = transfer if records is not None else None
        """To the CPU that updates this bucket, where that is another device."""

        if self.sharded:  # the full buffer's memory comes and goes
            self.full = torch.zeros(layout.size, dtype=formats.compute, device=device)
            self._shard = (
                None if offloaded else axis.empty(layout.shard_size, formats.compute, device).zero_()
            )
        else:
            self.full = axis.empty(layout.size, formats.compute, device).zero_()
            self._shard = self.full[self.own]
        self.master: Tensor | None = None
        if records is None and (offloaded is not None or formats.master != formats.compute) and trainable:
            self.master = torch.zeros(
                self.region.stop - self.region.start, dtype=formats.master, device=device
            )
        elif records is None and offloaded is None:
            self.master = self.rounded()
        # through .data: a view that shares autograd's version counter would make every later gather an error
        # in backward
        self._views = self._cut(self.full.data)
        self._point(self._views)
        self._lent: Tensor | None = (
            None  # the memory that the parameters have while they are in the user's hands
        )
        name(self.parameters, (slot.name for slot in layout.slots))

        self.grad: Tensor | None = None
        self._gradient_store = gradient_store  # where reduced gradients go, if they do not stay
        # at each of its reductions
        self._leaves = self._gradient_store is not None and microbatches != "reduced"
        # whether the memory of unreduced gradients comes and goes in a backward
        self._comes = trainable and (self._transient or self._leaves) and microbatches != "added"
        self._gone = False  # gradients have left the device
        self._squares: Tensor | None = (
            None  # of those: their sum, or those by row, which are counted where they went
        )
        self._local: Tensor | None = None
        self._reducing: Work = DONE
        self._reduced = False  # grad holds a sum to which the next reduction is added
        self._arrived: set[int] = set()  # since the last reduction
        self._in_place: set[int] = set()  # of those, to whose place in the buffer autograd adds itself
        self.ever_arrived: set[int] = set()
        """Indices of the parameters that got a gradient on this rank in this step."""

    # ---- parameters

    @property
    def resident(self) -> Tensor:
        """The master, which is in the device's memory."""
        assert self.master is not None, "the master is in a tier"
        return self.master

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is in host memory or in a file."""
        return self._offloaded is not None

    @property
    def shard(self) -> Tensor | Stored:
        """This rank's part of the parameters, between their uses."""
        return self._shard if self._offloaded is None else self._offloaded.stored()  # type: ignore[return-value]

    def rounded(self, keep: bool = True) -> Tensor:
        """The part `region` of the parameters, in the compute dtype: where what an update makes of the master
        goes. In a tier it is open until it is stored; without `keep` it may hold anything then."""
        if self.region != self.own:
            return self.full
        return self._shard if self._offloaded is None else self._offloaded.open(keep)  # type: ignore[return-value]

    def write(self, slot: Slot, tensor: Tensor) -> None:
        """Set one parameter to `tensor` (its full shape, any dtype): in the master, the shard, and the full
        buffer if it is there."""
        self.settle()
        flat = tensor.detach().reshape(-1)
        targets = []
        if self._shard is not None:
            targets += [(self.rounded(), self.region.start), (self._shard, self.own.start)]
        if self.master is not None:
            targets.append((self.master, self.region.start))
        if self.records is not None:
            self.records.write_master(slot.start, flat)
        if self._state == "full":
            targets.append((self.full, 0))
        for target, base in targets:
            start, stop = max(slot.start, base), min(slot.stop, base + target.numel())
            if start < stop:
                target[start - base : stop - base].copy_(flat[start - slot.start : stop - slot.start])
        low, high = max(slot.start, self.own.start), min(slot.stop, self.own.stop)
        if self._offloaded is not None and low < high:
            self._offloaded.write(low - self.own.start, flat[low - slot.start : high - slot.start])

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer's copy of the parameters is other memory than theirs."""
        return self.trainable and (
            self.records is not None or self.is_offloaded or self.formats.master != self.formats.compute
        )

    def adopt(self, numbers: Tensor) -> None:
        """Take `numbers` (flat, in the compute dtype, the same on every rank) for the parameters; the master
        keeps its digits where they are what it was rounded to."""
        self.settle()
        if self.has_copy:
            part = numbers[self.region]
            master = self.master if self.master is not None else self._recorded()
            kept = torch.where(part == master.to(part.dtype), master, part.to(master.dtype))
            if self.master is not None:
                self.master.copy_(kept)
            for slot in self.layout.slots if self.records is not None else ():
                start, stop = max(slot.start, self.region.start), min(slot.stop, self.region.stop)
                if self.records is not None and start < stop:
                    self.records.write_master(
                        start, kept[start - self.region.start : stop - self.region.start]
                    )
        if self._offloaded is not None:
            self._offloaded.open(keep=False).copy_(numbers[self.own])
            self._offloaded.store()
        elif self.sharded:
            assert self._shard is not None
            self._shard.copy_(numbers[self.own])
        elif numbers is not self.full:
            self.full.copy_(numbers)

    def lend(self) -> Tensor:
        """Give the parameters whole memory of their own, until `reclaim`: what shares it stays good for ever.
        Returns it, flat."""
        if self._lent is not None:
            raise ModelError(
                "engine.full_parameters() inside of another one: the parameters are whole there already"
            )
        self.ensure()
        with torch.inference_mode(False):  # what is lent inside of it may be kept
            self._lent = self.full.clone()
        self.release()
        unguard(self.parameters)
        self._point(self._cut(self._lent))
        return self._lent

    @property
    def is_lent(self) -> bool:
        """Whether the parameters are in the user's hands."""
        return self._lent is not None

    def reclaim(self) -> Tensor:
        """After a loan, or after parameters were given memory of their own: let them be views of the full
        buffer again. Returns what they were, flat, in the lent memory or else in that buffer; those of
        another shape stay as given. Raises ModelError for another dtype."""
        numbers, views = (
            (self.full, self._views) if self._lent is None else (self._lent, self._cut(self._lent))
        )
        self._lent, problem = None, ""
        for slot, parameter, view, home in zip(
            self.layout.slots, self.parameters, views, self._views, strict=True
        ):
            data = parameter.data
            if data.shape != view.shape:  # it is another one now, which `Roster` tells of
                continue
            if data.dtype != view.dtype:
                problem = (
                    f"parameter {slot.name} was made {data.dtype}, and is "
                    f"{view.dtype}: set precision.compute before initialize()"
                )
            elif data.data_ptr() != view.data_ptr():
                view.copy_(data)
            parameter.data = home
            if self.released:
                guard([parameter])
        if problem:
            raise ModelError(problem)
        return numbers

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots]

    def _point(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def gather(self) -> None:
        """Begin to fill the full buffer from the ranks' shards, unless it is filled already, or the
        parameters are whole elsewhere."""
        if self._state == "released" and self._lent is None:
            self._refuse_transforms()
            self._state = "fetching"
            if self._offloaded is not None:
                self._offloaded.fetch()
            if self._offloaded is None or self._offloaded.is_near:
                self._begin()

    def _refuse_transforms(self) -> None:
        """Raise ModelError inside a function transform that differentiates: it would follow the gather."""
        kinds = torch._C._functorch.TransformType
        levels = torch._C._functorch.get_interpreter_stack() or ()
        if any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels):
            raise ModelError(
                f"torch.func.grad, vjp or jvp runs a forward that gathers {self._of.removeprefix(' of ')} "
                "(zero.stage = 3, or memory.params elsewhere): call it inside `with "
                "engine.full_parameters():`, which every rank must enter, or use loss.backward()"
            )

    def _begin(self) -> None:
        """The shard is here, or near: give it to the others, and get theirs."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        if self._offloaded is None:
            assert self._shard is not None
            self._gathering = self.axis.all_gather(self.full, self._shard, self._of)
        elif self.axis.size == 1:
            self._gathering = self._offloaded.into(self.full)
        else:
            self._here = self._pool.take(self.layout.shard_size, self.formats.compute)
            self._offloaded.into(self._here)
            with self._offloaded.beside():
                self._gathering = self.axis.all_gather(self.full, self._here, self._of)
        self._state = "gathering"

    @property
    def released(self) -> bool:
        """Whether the full buffer is empty: reading a parameter would read freed memory."""
        return self._state == "released"

    def ensure(self) -> None:
        """Return when the full buffer is filled."""
        self.gather()
        if self._state == "fetching":
            self._begin()
        if self._state == "gathering":
            self._gathered()
            self._state = "full"
            unguard(self.parameters, gathered=True)

    def _gathered(self) -> None:
        self._gathering.wait()
        if self._here is not None:
            self._pool.give(self._here, self._gathering)
            self._here = None

    def release(self) -> None:
        """Free the full buffer where parameters are sharded. Tensors that autograd saved keep pointing to it,
        empty."""
        if self._state == "fetching" and self._offloaded is not None:
            self._offloaded.leave()
            self._state = "released"
        elif self.sharded and self._state != "released":
            self._gathered()
            guard(self.parameters)
            self.full.untyped_storage().resize_(0)
            self._state = "released"

    def round(self) -> None:
        """Give the parameters what the resident master has, in their dtype."""
        if (target := self.rounded(keep=False)).data_ptr() != self.resident.data_ptr():
            target.copy_(self.resident)

    def publish(self) -> Work:
        """After this rank's part of the parameters changed: begin to give it to the others."""
        self.store()
        if self.sharded or self.residency.states == "full":
            self.release()
            return DONE
        assert self._shard is not None
        self._gathering = self.axis.all_gather(self.full, self._shard)
        return self._gathering

    def store(self) -> None:
        """Keep what was written to `rounded`, which other ranks do not get."""
        if self._offloaded is not None:
            self._offloaded.store()

    def settle(self) -> None:
        """Return when this rank may write to its parameters: no other is still reading them."""
        self._gathering.settle()

    def whole(self, master: bool = False) -> Tensor:
        """A full buffer of current values, in the compute dtype or the master's; valid until the bucket's
        next gather or update."""
        if not master and self._state == "full":
            return self.full
        if master and (self.master is not None or self.records is not None):
            source = self.master if self.master is not None else self._recorded()
        elif self._offloaded is not None:
            self._offloaded.fetch()
            source = self._offloaded.arrive().to(self.device, copy=True)
            self._offloaded.leave()
        else:
            assert self._shard is not None
            source = self._shard
        if source.numel() == self.layout.size:
            return source
        full = torch.empty(self.layout.size, dtype=source.dtype, device=source.device)
        self.axis.all_gather(full, source).settle()
        return full

    def _recorded(self) -> Tensor:
        """The master, from its records."""
        assert self.records is not None
        master = torch.zeros(
            self.region.stop - self.region.start, dtype=self.formats.master, device=self.device
        )
        self.records.read_master(master, self.region.start)
        return master

    # ---- gradients

    def take_grad(self, index: int, more: bool = False, factor: float | None = None) -> bool:
        """Move parameter `index`'s complete gradient, times `factor`, into the flat gradient buffer, or add
        it to what is there. With `more`, autograd adds the next ones of this reduction itself, where that
        takes no conversion: whether it does."""
        parameter, slot = self.parameters[index], self.layout.slots[index]
        gradient: Tensor | None = OWN_GRAD.__get__(parameter)
        OWN_GRAD.__set__(parameter, None)
        if gradient is None:
            return False
        if factor is not None:  # of 0: from a loss of nothing, which is 0 / 0
            gradient = gradient * factor if factor else torch.zeros_like(gradient)
        if gradient.layout != torch.strided and gradient.dtype != self.formats.local:
            gradient = gradient.to_dense()  # summed in its own format
        if self._local is None:
            self._local = self._pool.take(self.layout.size, self.formats.local)
            for start, stop in self.layout.gaps():
                self._local[start:stop].zero_()
        view = self._local[slot.start : slot.stop].view(slot.shape)
        if index in self._in_place:  # the gradient is the sum, and nearly always this view
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
        """What parameter `index`'s gradients since the last reduction add up to, in the flat buffer; None
        before the first, and where that has another dtype than the parameter, or autograd adds to it."""
        parameter, slot = self.parameters[index], self.layout.slots[index]
        if (
            self._local is None
            or index not in self._arrived
            or index in self._in_place
            or self._local.dtype != parameter.dtype
        ):
            return None
        return self._local[slot.start : slot.stop].view(slot.shape)

    def reduce(self) -> None:
        """Begin to sum the gradients over the axis into this rank's part of `grad`. Parameters without a
        gradient count as zero."""
        self.take_back()
        if self._local is None:
            self._local = self._pool.take(self.layout.size, self.formats.local).zero_()
        for index, slot in enumerate(self.layout.slots):
            if index not in self._arrived:
                self._local[slot.start : slot.stop].zero_()
        if self.grad is None:
            self.grad = self._local[self.region] if self._reduces_in_place else self._room()
        self._reducing = self.axis.reduce_scatter(
            self.own_grad, self._local, accumulate=self._reduced, of=self._of
        )
        self._reduced = not self._adds_there

    def _room(self) -> Tensor:
        """For reduced gradients."""
        size = self.region.stop - self.region.start
        if self._gradient_store is not None:  # to which they go, so that it comes back
            return self._pool.take(size, self.formats.reduce)
        return self.axis.empty(size, self.formats.reduce, self.device)

    def take_back(self) -> None:
        """Let autograd make gradients of its own again, not add to those that are here."""
        while self._in_place:
            index = self._in_place.pop()
            parameter, slot = self.parameters[index], self.layout.slots[index]
            gradient: Tensor | None = OWN_GRAD.__get__(parameter)
            if gradient is not None and self._local is not None:
                view = self._local[slot.start : slot.stop].view(slot.shape)
                if gradient.data_ptr() != view.data_ptr():  # autograd has put the sum elsewhere
                    view.copy_(gradient)
            OWN_GRAD.__set__(parameter, None)

    def finish_reduce(self, last: bool = False) -> None:
        """Return when the reduction that `reduce` began is complete. `last`: no other one follows in this
        step, so that the gradients can go to where they are used."""
        self._reducing.wait()
        self._arrived.clear()
        leaves, gone = False, True
        if self._gradient_store is not None and self.grad is not None and (last or self._gradient_store.adds):
            leaves, gone = True, self._leave(self._gradient_store, last)
        if self._local is not None and (self._transient or leaves):
            if gone or not self._reduces_in_place:  # else it is what has just begun to leave
                self._pool.give(self._local, self._reducing)
            self._local = None

    def _leave(self, gradient_store: GradientStore, last: bool) -> bool:
        """Begin to move the reduced gradients to where they are added up or updated from. Returns whether
        they have left already."""
        assert self.grad is not None
        if self.region != self.own:
            self._reducing = self.gather_grad()  # which others end reading after the reduction
            self._reducing.wait()
        if not gradient_store.adds:
            self._squares = self.squares()
        elif last:
            self._squares = torch.zeros(self.layout.shard_size // ALIGN, dtype=torch.float64)
        gone = gradient_store.take(self.grad, self._count if last and gradient_store.adds else None)
        if gone and not self._reduces_in_place:
            self._pool.give(self.grad, self._reducing)
        self.grad, self._gone = None, True
        return gone

    def _count(self, gradient: Tensor, start: int) -> None:
        """Note the squares of what counts of the sums of gradients, from element `start` of the region on. In
        any thread."""
        low = max(start + self.region.start, self.own.start)
        high = min(start + self.region.start + gradient.numel(), self.own.stop)
        if low >= high or self.counted is False:
            return
        assert self._squares is not None
        part = gradient[low - start - self.region.start : high - start - self.region.start]
        if self.counted is not True:
            part = part * self.counted[low - self.own.start : high - self.own.start].to(part.device)
        if rest := -part.numel() % ALIGN:  # behind it is padding, which is zero
            part = torch.nn.functional.pad(part, (0, rest))
        at = (low - self.own.start) // ALIGN
        self._squares[at : at + part.numel() // ALIGN] = squares_by_row(part)

    @property
    def own_grad(self) -> Tensor:
        """This rank's shard of the reduced gradients."""
        if self.grad is None:
            raise RuntimeError("the bucket has no reduced gradients")
        return self.grad[self.own] if self.region != self.own else self.grad

    def gradients(self) -> Tensor:
        """The reduced gradients of `region`, on the device or, where they went there, on the CPU."""
        if self._gone and self._gradient_store is not None:
            return self._gradient_store.numbers()
        if self.grad is None:
            raise RuntimeError("the bucket has no reduced gradients")
        return self.grad

    @property
    def gradient_records(self) -> Sequence[int] | None:
        """The records of files that the reduced gradients are in, one for each of `records`; None where they
        are not in files."""
        return None if self._gradient_store is None else self._gradient_store.order

    def squares(self) -> Tensor:
        """Of this rank's shard of the reduced gradients, the sum of squares of what counts: a float64
        scalar."""
        if self._squares is not None:
            if self._squares.dim():
                assert self._gradient_store is not None
                self._gradient_store.complete()
            return self._squares.sum().to(self.device)
        if self.counted is False:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return squared_norm(self.own_grad if self.counted is True else self.own_grad * self.counted)

    def squares_by_slot(self) -> Tensor:
        """Of this rank's shard of the reduced gradients, the sum of squares of what counts of each parameter:
        float64."""
        found = torch.zeros(len(self.layout.slots), dtype=torch.float64, device=self.device)
        if self.counted is False:
            return found
        rows = squares_by_row(self._counted_shard())
        at = {slot.name: index for index, slot in enumerate(self.layout.slots)}
        for held in self.layout.within(self.own.start, self.own.stop):
            found[at[held.name]] = rows[
                held.offset // ALIGN : -(-(held.offset + held.stop - held.start) // ALIGN)
            ].sum()
        return found

    def _counted_shard(self) -> Tensor:
        """This rank's shard of the reduced gradients, wherever they are, with zero for what does not
        count."""
        gradients = self.gradients()
        shard = gradients[self.own] if self.region != self.own else gradients
        return shard if isinstance(self.counted, bool) else shard * self.counted.to(shard.device)

    def whole_grad(self) -> Tensor:
        """The reduced gradients of all ranks, in the reduce dtype."""
        gradients = self.gradients().to(self.device)
        if gradients.numel() == self.layout.size:
            return gradients
        full = torch.empty(self.layout.size, dtype=gradients.dtype, device=self.device)
        self.axis.all_gather(full, gradients).settle()
        return full

    def scale_grad(self, slot: Slot, factor: float) -> None:
        """Multiply one parameter's reduced gradient."""
        low, high = max(slot.start, self.region.start), min(slot.stop, self.region.stop)
        if low < high:
            self.gradients()[low - self.region.start : high - self.region.start].mul_(factor)
        if self._squares is not None:
            self._squares = (
                squared_norm(self._counted_shard())
                if self.counted is not False
                else torch.zeros((), dtype=torch.float64)
            )

    def gather_grad(self) -> Work:
        """Where states are full (stage 0): begin to give every rank the whole reduced gradient."""
        if self.region == self.own or self.grad is None:
            return DONE
        return self.axis.all_gather(self.grad, self.own_grad)

    def clear_grad(self) -> None:
        """Forget all gradients, reduced or not."""
        self.take_back()
        self.finish_reduce()
        self._reducing.settle()
        if self._gone and self._gradient_store is not None:
            self._gradient_store.clear()
            self._gone, self._squares = False, None
        self.ever_arrived.clear()
        self._reduced = False

    # ---- accounting

    @property
    def _adds_there(self) -> bool:
        """Whether the gradients of several micro-batches are added up where they are held."""
        return self._gradient_store is not None and self._gradient_store.adds

    @property
    def _reduces_in_place(self) -> bool:
        """Whether reduced gradients are in the buffer of those before reduction."""
        if self._adds_there and self.axis.size == 1:
            return True
        return self.formats.local == self.formats.reduce and not self._transient

    @property
    def _reduced_bytes(self) -> int:
        """Of memory that reduced gradients take for themselves."""
        return (
            0
            if self._reduces_in_place or not self.trainable
            else (self.region.stop - self.region.start) * self.formats.reduce.itemsize
        )

    @property
    def unreduced(self) -> int:
        """Bytes of gradients before they are reduced, where those stay."""
        return self.layout.size * self.formats.local.itemsize if self.trainable and not self._comes else 0

    def coming(self) -> int:
        """Bytes of the full parameters, where they come for a use and go again."""
        return self.layout.size * self.formats.compute.itemsize if self.sharded else 0

    def borrows(self) -> tuple[Buffers, Buffers, Buffers]:
        """What it takes of the pool and gives back: for gradients before they are reduced, for reduced ones,
        and for the shard that the other ranks are to get."""
        local = [(self.layout.size, self.formats.local)] if self._comes else []
        room = (
            [(self.region.stop - self.region.start, self.formats.reduce)]
            if self._leaves and self._reduced_bytes
            else []
        )
        here = (
            [(self.layout.shard_size, self.formats.compute)]
            if self._offloaded is not None and self.axis.size > 1
            else []
        )
        return Buffers(local), Buffers(room), Buffers(here)

    def staying(self) -> tuple[int, int, int]:
        """Bytes that it always has: parameters, gradients, the master where it is a copy."""
        itemsize, region = self.formats.compute.itemsize, self.region.stop - self.region.start
        parameters = (
            (self.layout.shard_size if self._offloaded is None else 0) if self.sharded else self.layout.size
        )
        gradients = self.unreduced
        if self.trainable:
            gradients += 0 if self._leaves else self._reduced_bytes
            # squares by row
            gradients += self.layout.shard_size // ALIGN * torch.float64.itemsize if self._adds_there else 0
        master = self.master is not None and (
            self._offloaded is not None or self.formats.master != self.formats.compute
        )
        return parameters * itemsize, gradients, region * self.formats.master.itemsize * master

    def nbytes(self) -> dict[str, int]:
        """Live bytes of this rank by category: parameters, gradients, states (the master where it is a
        copy)."""
        storages = {
            "parameters": [self.full] if self._shard is None else [self.full, self._shard],
            "gradients": [t for t in (self._local, self.grad) if t is not None],
            "states": [self.master] if self.master is not None else [],
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
