"""The bucket: a flat buffer whose views are the parameters of a block, and a second buffer for their
gradients.

Invariants: a parameter's memory is the all-gather's output (nothing is packed or unpacked); padding is always
zero; the arithmetic on every number is the same at every residency.

Communication over the bucket's axis: `gather`, `publish` and `whole` all-gather; `bucket_gradients`
reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from polyreme.distributed import quantized
from polyreme.distributed.work import DONE, Work
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Slot
from polyreme.layout.intervals import Interval, overlap
from polyreme.layout.region import MASTER, Stored, fetched
from polyreme.offload.gradients import OffloadedGradients
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.optimizer_states import OffloadedStates
from polyreme.offload.parameters import OffloadedShard
from polyreme.zero.bucket_gradients import BucketGradients
from polyreme.zero.bucket_spec import BucketSpec
from polyreme.zero.buffer_pool import Pool
from polyreme.zero.gradient_sums import Accumulation
from polyreme.zero.parameter import IN_MEMORY, RELEASED, ParameterState, Presence, set_apart
from polyreme.zero.released import GATHERED, refuse_transforms


@dataclass(frozen=True)
class BucketMemory:
    """The memory of a bucket.

    pool: lends device memory for gradients and for shards that are being gathered. states, shard, gradients:
    the stores of masters and optimizer states, of the parameter shard and of reduced gradients; None where
    these are on the device. transfer: moves numbers to the CPU that updates, where that is another device."""

    pool: Pool
    states: OffloadedStates | None = None
    shard: OffloadedShard | None = None
    gradients: OffloadedGradients | None = None
    transfer: HostTransfer | None = None


MemoryKind = Literal["params", "masters", "states", "gradients"]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
"""Contents of a bucket that may leave the device between steps (`zero.sleep`)."""
ASLEEP = "{}: away from the device since {}"


class Bucket:
    """The parameters of one block (or of some of its modules), of one dtype, all trainable or all frozen.

    `parameters[i]` belongs to `layout.slots[i]`. `region` are the elements of the flat buffer whose optimizer
    states this rank holds. `master` (master dtype) covers it where it is on the device, else
    `offloaded_states`; so does `gradients.grad` (reduce dtype)."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[nn.Parameter], memory: BucketMemory) -> None:
        layout, axis, formats = spec.layout, spec.axis, spec.formats
        self.spec, self.layout, self.axis, self.formats = spec, layout, axis, formats
        self.parameters, self.residency, self.trainable = list(parameters), spec.residency, spec.trainable
        self.stages, self.tie = spec.stages, spec.tie
        self.own, self.region, self.sharded = spec.own, spec.region, spec.residency.params == "shard"
        self._pool, self.device = memory.pool, memory.pool.device
        self._offloaded, self.offloaded_states = memory.shard, memory.states
        self.transfer = memory.transfer
        """The transfer to the CPU that updates this bucket, where that is another device."""
        self._of = f" of {layout.slots[0].name} ..."
        self._state: Literal["full", "fetching", "gathering", "released"] = "full"
        self._here: Tensor | None = None  # the shard on the device, while it is gathered
        self._gathering: Work = DONE  # the last all-gather of parameters, which other ranks may still read
        self._quantized = False  # True if the full buffer was gathered in one byte a number
        self._exposed: Tensor | None = None  # memory of the parameters while they are exposed to the user
        self.asleep: dict[MemoryKind, str] = {}
        """Kinds of memory that are away from the device, with the call that moved each."""
        self._allocate()
        self.presence = Presence(zip(self.parameters, (slot.name for slot in layout.slots), strict=True))
        sums = spec.accumulation or Accumulation("whole", formats.compute, formats.compute)
        self.gradients = BucketGradients(
            layout,
            self.parameters,
            axis,
            self.region,
            sums.of(spec.residency, axis, memory.gradients),
            memory.pool,
            spec.mask(self.device),
        )

    def _allocate(self) -> None:
        """Make the parameters views of a flat buffer, and make the shard and the master that stay."""
        layout, formats, axis, device = self.layout, self.formats, self.axis, self.device
        if self.sharded:  # memory of the full buffer is allocated for each gather
            self.full = torch.zeros(layout.size, dtype=formats.compute, device=device)
            self.device_shard: Tensor | None = None
            """This rank's shard of the parameters, where it is in device memory."""
            if not self.is_offloaded:
                self.device_shard = axis.empty(layout.shard_size, formats.compute, device).zero_()
        else:
            self.full = axis.empty(layout.size, formats.compute, device).zero_()
            self.device_shard = self.full[self.own]
        self.master: Tensor | None = None
        if self.offloaded_states is None:
            if self.trainable and (self.is_offloaded or formats.master != formats.compute):
                size = self.region.stop - self.region.start
                self.master = torch.zeros(size, dtype=formats.master, device=device)
            elif not self.is_offloaded:
                self.master = self.rounded()
        # through .data: a view that shares autograd's version counter would make backward fail after every
        # later gather
        self._views = self._cut(self.full.data)
        self._point(self._views)

    def require(self, *kinds: MemoryKind) -> None:
        """Raise ModelError where any of these kinds is away from the device."""
        if gone := sorted(self.asleep.keys() & {*kinds}):
            raise ModelError(ASLEEP.format(f"{', '.join(gone)}{self._of}", self.asleep[gone[0]]))

    # ---- parameters

    @property
    def resident(self) -> Tensor:
        """The master in device memory."""
        self.require("masters")
        assert self.master is not None, "the master is in a tier"
        return self.master

    @property
    def is_offloaded(self) -> bool:
        """True if the shard is in host memory or in a file."""
        return self._offloaded is not None

    @property
    def shard(self) -> Tensor | Stored:
        """This rank's shard of the parameters between their uses."""
        return self.device_shard if self._offloaded is None else self._offloaded.stored()  # type: ignore[return-value]

    def rounded(self, keep: bool = True) -> Tensor:
        """Return the parameters of `region` in the compute dtype, to be set to the rounded master after an
        update. An offloaded shard stays open until `store`; without `keep` its numbers may be anything
        then."""
        if self.region != self.own:
            return self.full
        return self.device_shard if self._offloaded is None else self._offloaded.open(keep)  # type: ignore[return-value]

    def write(self, slot: Slot, tensor: Tensor) -> None:
        """Set one parameter to `tensor` (its full shape, any dtype): in the master, in the shard, and in the
        full buffer if that is filled."""
        self.require("params", "masters")
        self.settle()
        flat = tensor.detach().reshape(-1)
        targets = []
        if self.device_shard is not None:
            targets += [(self.rounded(), self.region.start), (self.device_shard, self.own.start)]
        if self.master is not None:
            targets.append((self.master, self.region.start))
        if self.offloaded_states is not None:
            self.offloaded_states.write(MASTER, slot.start, flat)
        if self._state == "full":
            targets.append((self.full, 0))
        for target, base in targets:
            if inside := overlap(slot, Interval(base, base + target.numel())):
                target[inside.since(base)].copy_(flat[inside.since(slot.start)])
        own = overlap(slot, self.own)
        if self._offloaded is not None and own:
            self._offloaded.write(own.start - self.own.start, flat[own.since(slot.start)])

    def read_masters(self, start: int, stop: int) -> Tensor:
        """Return a copy of the masters of elements [start, stop) of the flat buffer, all within `region`; for
        frozen parameters, of the parameters. In the master dtype, on the device."""
        self.require("params", "masters")
        found = torch.zeros(stop - start, dtype=self.formats.master, device=self.device)
        low, high = start - self.region.start, stop - self.region.start
        if self.master is not None:
            found.copy_(self.master[low:high])
        elif self.offloaded_states is not None:
            self.offloaded_states.read_master(found, start)
        else:
            found.copy_(fetched(self.shard, low, high))
        return found

    @property
    def has_copy(self) -> bool:
        """True if the optimizer's copy of the parameters is other memory than theirs."""
        return self.trainable and (
            self.offloaded_states is not None
            or self.is_offloaded
            or self.formats.master != self.formats.compute
        )

    def set(self, numbers: Tensor) -> None:
        """Set the parameters to `numbers` (flat, in the compute dtype, the same on every rank)."""
        self.require("params")
        if self._offloaded is not None:
            self._offloaded.open(keep=False).copy_(numbers[self.own])
            self._offloaded.store()
        elif self.sharded:
            assert self.device_shard is not None
            self.device_shard.copy_(numbers[self.own])
        elif numbers is not self.full:
            self.full.copy_(numbers)

    def expose_whole(self) -> Tensor:
        """Give the parameters whole memory of their own until `restore_views`, and return it, flat. Views of
        it that a script keeps stay valid afterwards."""
        if self._exposed is not None:
            raise ModelError(
                "engine.full_parameters() inside of another one: the parameters are whole there already"
            )
        self.ensure(exactly=True)
        with torch.inference_mode(False):  # exposed memory may be kept beyond inference mode
            self._exposed = self.full.clone()
        self.release()
        self.presence.become(IN_MEMORY, self.parameters)
        self._point(self._cut(self._exposed))
        return self._exposed

    @property
    def is_exposed(self) -> bool:
        """True if the parameters have whole memory of their own, for the user."""
        return self._exposed is not None

    def restore_views(self) -> Tensor:
        """Make the parameters views of the full buffer again, after `expose_whole` or after a script gave
        them memory of their own. Returns their numbers, flat. A parameter of another shape stays as the
        script set it. Raises ModelError for another dtype."""
        numbers, views = (
            (self.full, self._views) if self._exposed is None else (self._exposed, self._cut(self._exposed))
        )
        self._exposed, problem, apart = None, "", []
        for slot, parameter, view, own_view in zip(
            self.layout.slots, self.parameters, views, self._views, strict=True
        ):
            data = parameter.data
            if data.shape != view.shape:  # the parameter was replaced, as `ModelSnapshot` will report
                apart.append(parameter)
                continue
            if data.dtype != view.dtype:
                problem = (
                    f"parameter {slot.name} was made {data.dtype}, and is "
                    f"{view.dtype}: set precision.compute before initialize()"
                )
            elif data.data_ptr() != view.data_ptr():
                view.copy_(data)
            parameter.data = own_view
        if self.released:
            self.presence.become(RELEASED, self.parameters)
        for parameter in apart:
            set_apart(parameter)
        if problem:
            raise ModelError(problem)
        return numbers

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots]

    def _point(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def gather(self, exactly: bool = False) -> None:
        """Begin to fill the full buffer from the ranks' shards, unless it is filled or the parameters are
        exposed. `exactly`: in full precision, where forwards gather one byte a number."""
        self.require("params")
        if exactly and self._quantized:
            self.release()
        if self._state == "released" and self._exposed is None:
            refuse_transforms(self._of.removeprefix(" of "))
            self._state = "fetching"
            self._quantized = self.formats.quantized and self.axis.size > 1 and not exactly
            if self._offloaded is not None:
                self._offloaded.fetch()
            if self._offloaded is None or self._offloaded.is_near:
                self._begin()

    def _begin(self) -> None:
        """Begin the all-gather, once this rank's shard is on the device or in host memory."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        if self._offloaded is None:
            assert self.device_shard is not None
            self._gathering = self._all_gather(self.device_shard)
        elif self.axis.size == 1:
            self._gathering = self._offloaded.into(self.full)
        else:
            self._here = self._pool.take(self.layout.shard_size, self.formats.compute)
            self._offloaded.into(self._here)
            with self._offloaded.beside():
                self._gathering = self._all_gather(self._here)
        self._state = "gathering"

    def _all_gather(self, shard: Tensor) -> Work:
        if self._quantized:
            return quantized.all_gather(self.axis, self.full, shard, self._of)
        return self.axis.all_gather(self.full, shard, self._of)

    @property
    def released(self) -> bool:
        """True if the full buffer is empty, so that reading a parameter would read freed memory."""
        return self._state == "released"

    def ensure(self, exactly: bool = False) -> None:
        """Wait until the full buffer is filled."""
        self.gather(exactly)
        if self._state == "fetching":
            self._begin()
        if self._state == "gathering":
            self._gathering.wait()
            self._give_back()
            self._state = "full"
            self.presence.become(GATHERED, self.parameters)

    def note(self, state: ParameterState) -> None:
        """Set the state of the parameters where a forward of their block begins or ends, if they are gathered
        for it."""
        if self.sharded and self._state == "full" and self._exposed is None:
            self.presence.become(state, self.parameters)

    def _give_back(self) -> None:
        if self._here is not None:
            self._pool.give(self._here, self._gathering)
        self._here = None

    def release(self) -> None:
        """Free the full buffer where parameters are sharded. Tensors that autograd saved still point to it,
        empty."""
        if self._state == "fetching" and self._offloaded is not None:
            self._offloaded.leave()
            self._state = "released"
        elif self.sharded and self._state != "released":
            if not self._gathering.join():  # other ranks cannot read it any more
                self._here = None
            self._give_back()
            self.presence.become(RELEASED, self.parameters)
            self.full.untyped_storage().resize_(0)
            self._state = "released"

    def round(self) -> None:
        """Set the parameters to the resident master, in their dtype."""
        if (target := self.rounded(keep=False)).data_ptr() != self.resident.data_ptr():
            target.copy_(self.resident)

    def publish(self) -> Work:
        """Begin to send this rank's updated parameters to the other ranks."""
        self.store()
        if self.sharded or self.residency.states == "full":
            self.release()
            return DONE
        assert self.device_shard is not None
        self._gathering = self.axis.all_gather(self.full, self.device_shard)
        return self._gathering

    def store(self) -> None:
        """Keep the numbers that were written to `rounded`, without sending them to other ranks."""
        if self._offloaded is not None:
            self._offloaded.store()

    def settle(self) -> None:
        """Wait until this rank may write to its parameters, as no other rank still reads them."""
        self._gathering.join(settled=True)

    def whole(self, master: bool = False) -> Tensor:
        """Return a full buffer of current values, in the compute dtype or the master's; valid until the
        bucket's next gather or update."""
        self.require("params", *(("masters",) if master else ()))
        if not master and self._state == "full" and not self._quantized:
            return self.full
        if master and (self.master is not None or self.offloaded_states is not None):
            source = (
                self.master
                if self.master is not None
                else self.read_masters(self.region.start, self.region.stop)
            )
        elif self._offloaded is not None:
            self._offloaded.fetch()
            source = self._offloaded.arrive().to(self.device, copy=True)
            self._offloaded.leave()
        else:
            assert self.device_shard is not None
            source = self.device_shard
        return self.axis.gathered(source, self.layout.size)
