"""The numbers of one parameter at any ZeRO stage and in any tier: its master, its gradient and the states of
its optimizer, to be read and written.

Invariant: what is set is what a plain optimizer would have after the same assignment; copies that several
ranks have stay equal.
Communication: of whole tensors a broadcast from each rank that has a part, and small ones to agree on shapes;
of a rank's own part none, but for copies of it that other ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyreme.distributed import watch
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Cut, Slot
from polyreme.layout.intervals import overlap
from polyreme.layout.region import MASTER
from polyreme.step.training import Training
from polyreme.step.user.equal_part import EqualPart
from polyreme.zero.bucket import Bucket
from polyreme.zero.parameter import in_backward, name_of
from polyreme.zero.sharded_optimizer import Update

collective = partial(watch.collective, of="numbers(...).")
GRADIENT = "gradient"
"""The kind of the gradients. MASTER is that of the weights that the optimizer updates; every other kind is
one of its states, by torch's name, such as `exp_avg`."""


@dataclass(frozen=True)
class ParameterLocation:
    """Where a parameter is: number `index` of its bucket. update: the bucket's; None: it is frozen."""

    training: Training
    bucket: Bucket
    slot: Slot
    index: int
    update: Update | None

    @property
    def cut(self) -> Cut:
        """How tensor parallelism divides it."""
        return self.training.placement.division.shardings[self.slot.name].cut

    @property
    def replicated(self) -> bool:
        """Whether each data-parallel rank has all of it."""
        return self.bucket.region == slice(0, self.bucket.layout.size)

    def elements(self, rank: int | None = None) -> slice:
        """The elements of the flattened parameter that a rank of the bucket's axis, or this one, has."""
        region = slice(*self.bucket.layout.shard(rank)) if rank is not None else self.bucket.region
        return overlap(self.slot, region).since(self.slot.start)

    def is_spread(self, part: Tensor) -> bool:
        """Whether a state, of which this rank has `part`, has a number for each element."""
        return part.shape == self.slot.shape if self.bucket.layout.boundary == "tensor" else part.dim() > 0


class Form(NamedTuple):
    """What a whole tensor of one kind is. holder: the data-parallel rank that has it, where it has a shape of
    its own or is one number; None: it is spread as the parameter is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    holder: int | None = None


class ParameterNumbers:
    """What `Engine.numbers` returns, of one parameter, to read or write its tensor of one `kind`:

    - "master": the weights that the optimizer updates; of a frozen parameter those that it has;
    - "gradient": that of the mean over the global batch, before clipping, from the last backward of a step
      to `step`;
    - or a state of the optimizer by name, such as "exp_avg".

    Masters and gradients are of the masters' dtype, states of their own. Data- and tensor-parallel ranks that
    have the parameter call alike. Raises ModelError for a state that the optimizer does not have, inside of a
    forward or a backward, and where what is set is not there yet or has another shape."""

    def __init__(
        self, parameter: nn.Parameter, training: Callable[[], Training], complete: Callable[[], None]
    ) -> None:
        """`training` gives what trains the model now; `complete` ends the backward calls of a step."""
        self._parameter, self._training, self._complete = parameter, training, complete
        self._locate(moving=True)

    @collective
    @torch.no_grad()
    def whole(self, kind: str) -> Tensor | None:
        """A copy of the whole tensor, on the device of every rank. None for a gradient before the last
        backward of a step, and for a state before the parameter's first update; both of a frozen one."""
        at = self._locate()
        part, form = self._agree(at, kind)
        if form is None:
            return None
        if form.holder is None:
            return at.training.placement.joined(at.slot, self._gathered(at, part, form.dtype))
        if at.replicated or form.holder == at.bucket.axis.rank:
            whole = part
        else:
            whole = torch.empty(form.shape, dtype=form.dtype, device=at.bucket.device)
        if not at.replicated and whole is not None:
            at.bucket.axis.broadcast(whole, form.holder)
        return whole

    @collective
    @torch.no_grad()
    def set_whole(self, kind: str, value: Tensor | float | None) -> None:
        """Set the whole tensor to what rank 0 gives, of any dtype and device; others may give None. A forward
        from before a master was set can have no backward any more."""
        at = self._locate()
        form = self._agree(at, kind)[1]
        self._check_setting(at, kind, form is not None)
        assert form is not None
        mesh, division = at.training.engine_state.mesh, at.training.placement.division
        given, everyone = None if value is None else torch.as_tensor(value), mesh.axis("loss", "tp")
        told = everyone.gather_objects(None if given is None else list(given.shape))[0]
        if told is None or tuple(told) != form.shape:
            raise ModelError(
                f"{kind} of {at.slot.name} is set to {'nothing' if told is None else f'shape {told}'} by "
                f"rank 0, whose value counts: give a tensor of shape {list(form.shape)}"
            )
        whole = torch.empty(form.shape, dtype=form.dtype, device=at.bucket.device)
        if given is not None and given.shape == whole.shape:
            whole.copy_(given)
        everyone.broadcast(whole)
        if at.bucket.tie is not None:
            at.bucket.tie.broadcast(whole)
        if form.holder is None:
            whole = division.local(at.slot.name, whole).reshape(-1)
        self._put(at, kind, whole.reshape(-1) if form.shape else whole)

    @collective
    @torch.no_grad()
    def local(self, kind: str) -> Tensor | None:
        """A copy of what this rank has: the consecutive elements of the flattened tensor that it updates, all
        of them at stage 0, perhaps none; of a state with a shape of its own, or of one number, that. None as
        in `whole`, for states where this rank has elements.

        Raises ModelError for masters in place of parameters that were written to since the last step."""
        at = self._locate()
        written = at.training.step.written
        if kind == MASTER and not at.bucket.sharded and written.seen(at.bucket.device, at.bucket):
            raise ModelError(
                f"{at.slot.name}, or a parameter beside it, was written to, and all ranks have to take that "
                'in before one reads its part of the master: ask for whole("master") first'
            )
        part = self._read(at, kind)
        return part if part is None or not part.dim() else part.reshape(-1)

    @collective
    @torch.no_grad()
    def set_local(self, kind: str, value: Tensor | float) -> None:
        """Set what this rank has, to as many elements as `local` returns. Of elements that several ranks
        have, what the first of them gives counts."""
        at = self._locate()
        self._settle(at, kind)
        part, given = self._read(at, kind), torch.as_tensor(value)
        self._check_setting(at, kind, part is not None)
        assert part is not None
        if given.numel() != part.numel():
            raise ModelError(
                f"this rank's part of {kind} of {at.slot.name} is set to {given.numel()} elements, and has "
                f"{part.numel()}: give as many as local({kind!r})"
            )
        given, bucket = given.to(part.device, part.dtype).reshape(-1).contiguous(), at.bucket
        if bucket.axis.replicas is not None:
            bucket.axis.replicas.broadcast(given)
        if kind not in (MASTER, GRADIENT) and part.numel() and not at.is_spread(part):
            self._put(at, kind, given if part.dim() else given[0])
            return
        flat = torch.zeros(at.slot.size, dtype=given.dtype, device=given.device)
        flat[at.elements()] = given
        if at.replicated:
            bucket.axis.broadcast(flat)
        elif kind == MASTER and not bucket.released:  # others have the parameter whole
            flat = self._gathered(at, given, given.dtype)
        if at.cut.is_whole:
            at.training.placement.division.tp.broadcast(flat)
        if bucket.tie is not None:
            bucket.tie.broadcast(flat)
        self._put(at, kind, flat)

    def equal_part(self, kind: str, rounded: bool = False) -> EqualPart:
        """This rank's of as many equal parts of the flattened tensor as there are data-parallel ranks, to be
        read and written as a tensor by all of them alike, in the masters' dtype, or `rounded` to the
        parameter's. Raises ModelError where tensor parallelism divides it."""
        at = self._locate(moving=True)
        if not at.cut.is_whole:
            raise ModelError(f"an equal part of {at.slot.name}, which mesh.tp divides: use whole({kind!r})")
        dtype = at.bucket.formats.compute if rounded else at.bucket.formats.master
        like = torch.empty(0, dtype=dtype, device=at.bucket.device)
        return EqualPart.of(self, kind, at.training.engine_state.mesh.loss, at.slot.name, at.slot.size, like)

    @property
    def trains(self) -> bool:
        """Whether an optimizer updates the parameter: it is neither frozen nor in no group."""
        return self._locate(moving=True).bucket.trainable

    @property
    def arrived(self) -> bool:
        """Whether a backward of the step gave the parameter a gradient on this rank."""
        at = self._locate()
        return at.index in at.bucket.gradients.ever_arrived

    @torch.no_grad()
    def so_far(self) -> Tensor | None:
        """A copy of what this rank's backwards have added up in a step whose last one is to come: the
        gradient of the sum of their losses (each times its labels where batch.mean says so), whole, in the
        masters' dtype. None before the first, and where each micro-batch is reduced by itself."""
        at = self._locate()
        found = at.training.step.so_far(self._parameter) if at.bucket.trainable else None
        return None if found is None else found.to(at.bucket.formats.master)

    # ---- parts

    def _locate(self, moving: bool = False) -> ParameterLocation:
        """Raises ModelError where the parameter is not the engine's, or, unless `moving`, where numbers are
        on their way."""
        training, name = self._training(), name_of(self._parameter)
        bucket, slot = training.placement.where.get(name, (None, None))
        indices = [i for i, p in enumerate(bucket.parameters) if p is self._parameter] if bucket else []
        if bucket is None or slot is None or not indices:
            raise ModelError(
                "engine.numbers(...) of a tensor that is no parameter of this engine's model, or of this "
                "rank's stage of a pipeline: give one of engine.module.parameters(), after "
                "engine.refresh() where the model has changed"
            )
        if not moving and (training.blocks.in_forward or in_backward()):
            raise ModelError(
                f"engine.numbers(...) of {name} inside of a forward or a backward, where parameters and "
                "gradients come and go: ask before or after it"
            )
        update = next((update for update in training.updates if update.bucket is bucket), None)
        return ParameterLocation(training, bucket, slot, indices[0], update)

    def _settle(self, at: ParameterLocation, kind: str) -> None:
        """Let what a script wrote to the parameters of a bucket reach their masters."""
        if kind == MASTER and not at.bucket.sharded:
            at.training.step.written.settle(at.training.saver.taken, at.bucket)

    def _agree(self, at: ParameterLocation, kind: str) -> tuple[Tensor | None, Form | None]:
        """This rank's part, and what the whole tensor is; None: there is none."""
        self._settle(at, kind)
        part, whole = self._read(at, kind), at.cut.shape
        if kind in (MASTER, GRADIENT):
            return part, None if part is None else Form(whole, part.dtype)
        told: list[Any] | None = None
        if part is not None and part.numel():
            told = [list(part.shape), str(part.dtype).removeprefix("torch."), at.is_spread(part)]
        found = [told] if at.replicated else at.bucket.axis.gather_objects(told)
        known = [(rank, *each) for rank, each in enumerate(found) if each is not None]
        if not known:
            return None, None
        holder, shape, dtype, spread = known[0]
        if spread:
            return part, Form(whole, getattr(torch, dtype))
        if shape and not at.cut.is_whole:
            raise ModelError(
                f"{kind} of {at.slot.name} has a shape of its own, and the parameter is divided by mesh.tp: "
                "there is no whole one; ask for local(...), which is of this rank's part"
            )
        return part, Form(tuple(shape), getattr(torch, dtype), holder)

    def _read(self, at: ParameterLocation, kind: str) -> Tensor | None:
        """A copy of this rank's part: flat; or a state of whole tensors in its shape, or one number."""
        bucket, elements = at.bucket, at.elements()
        low, high = at.slot.start + elements.start, at.slot.start + elements.stop
        if kind == GRADIENT and not self._reduced(at):
            return None
        if low == high and at.update is not None:
            self._check(at, kind)
            return torch.empty(0, dtype=bucket.formats.master, device=bucket.device)
        if kind == GRADIENT:
            part = bucket.gradients.part(low, high).to(bucket.device, bucket.formats.master)
            return part * at.training.step.to_mean
        if kind == MASTER:
            return bucket.part(low, high)
        state = None if at.update is None else at.update.state.read(at.slot, kind)
        if state is None:
            self._check(at, kind)
        return None if state is None else state.to(bucket.device, copy=True)

    def _reduced(self, at: ParameterLocation) -> bool:
        """Whether there is a gradient. All ranks must call, as they do after the last backward of a step."""
        step = at.training.step
        if at.bucket.trainable and step.order.phase == "ended":
            self._complete()
        return at.bucket.trainable and step.order.phase == "reduced"

    def _check(self, at: ParameterLocation, kind: str) -> None:
        """Raise ModelError for a state that the optimizer does not have."""
        if kind in (MASTER, GRADIENT) or at.update is None:
            return
        if kind not in (known := at.update.state.shapes(at.slot)):
            raise ModelError(
                f"{kind!r} of {at.slot.name}: its optimizer has no such state; there are "
                f"{', '.join((MASTER, GRADIENT, *known))}"
            )

    def _check_setting(self, at: ParameterLocation, kind: str, exists: bool) -> None:
        """Raise ModelError where what is set would be lost."""
        name, step = at.slot.name, at.training.step
        if not exists and kind == GRADIENT:
            reason = "it has a gradient from the last backward of a step to step(): set it then"
        elif not exists:
            reason = "it has a state from its first update on: set it after the first step"
        elif kind == MASTER and at.bucket.is_summoned:
            reason = "inside of engine.full_parameters(), write to the parameter, or set it after the block"
        elif kind == GRADIENT and at.training.engine_state.mesh.pp.size > 1:
            reason = "in a pipeline, use engine.gradients().scale_ or a hook (parameter.register_hook)"
        elif kind == GRADIENT and not step.to_mean:
            reason = "the batch has no label, so that its step leaves the weights alone"
        else:
            return
        if not at.bucket.trainable:
            left_out = self._parameter.requires_grad
            reason = (
                "the optimizer leaves it out, so that torch keeps it in parameter.grad"
                if left_out
                else "it is frozen: set requires_grad, and call engine.refresh()"
            )
        raise ModelError(f"{kind} of {name} cannot be set: {reason}")

    def _gathered(self, at: ParameterLocation, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The whole of this tensor-parallel rank's, flat, of which this rank has `part`."""
        if at.replicated and part is not None:
            return part.reshape(-1)
        flat = torch.empty(at.slot.size, dtype=dtype, device=at.bucket.device)
        for rank in range(at.bucket.axis.size):
            inside = flat[at.elements(rank)]
            if rank == at.bucket.axis.rank and part is not None and inside.numel():
                inside.copy_(part.reshape(-1))
            at.bucket.axis.broadcast(inside, rank)
        return flat

    def _put(self, at: ParameterLocation, kind: str, value: Tensor) -> None:
        """Set what this rank has of `value`, which is flat and all of the tensor, or one number."""
        step, bucket = at.training.step, at.bucket
        if kind == GRADIENT:
            step.put_gradient(bucket, at.index, value)
            return
        at.training.saver.taken()
        if kind == MASTER:
            if not bucket.released:
                bucket.ensure()
            bucket.write(at.slot, value)
            step.note_written(bucket)
        elif at.update is not None:
            at.update.state.write(at.slot, kind, value)
