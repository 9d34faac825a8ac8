"""The numbers of one parameter at any ZeRO stage and in any tier: its master, its gradient and its optimizer
states, to read and write.

Invariant: after an assignment the step is the one that a plain optimizer would make after it; copies that
several ranks have stay equal.
Communication: for whole tensors a broadcast from each rank that has a shard, and small ones to agree on
shapes; for a rank's own shard none, but for copies of it on other ranks."""

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
from polyreme.zero.bucket_optimizer import BucketOptimizer
from polyreme.zero.parameter import in_backward, name_of

collective = partial(watch.collective, of="numbers(...).")
GRADIENT = "gradient"
"""The kind of gradients. MASTER is that of the weights that the optimizer updates; every other kind is an
optimizer state, by torch's name, such as `exp_avg`."""


@dataclass(frozen=True)
class ParameterLocation:
    """The place of a parameter: number `index` of its bucket. optimizer: the bucket's; None: it is frozen."""

    training: Training
    bucket: Bucket
    slot: Slot
    index: int
    optimizer: BucketOptimizer | None

    @property
    def cut(self) -> Cut:
        """The division of the parameter by tensor parallelism."""
        return self.training.placement.division.parameters[self.slot.name].cut

    @property
    def replicated(self) -> bool:
        """True if each data-parallel rank has all of the parameter."""
        return self.bucket.region == slice(0, self.bucket.layout.size)

    def elements(self, rank: int | None = None) -> slice:
        """Return the elements of the flattened parameter on a rank of the bucket's axis, or on this one."""
        region = slice(*self.bucket.layout.shard(rank)) if rank is not None else self.bucket.region
        return overlap(self.slot, region).since(self.slot.start)

    def is_spread(self, own: Tensor) -> bool:
        """Return whether a state, of which this rank has `own`, has a number for each element."""
        return own.shape == self.slot.shape if self.bucket.layout.boundary == "tensor" else own.dim() > 0


class TensorForm(NamedTuple):
    """The shape and dtype of a whole tensor of one kind. holder: the data-parallel rank that has it, where it
    has a shape of its own or is one number; None: it is sharded as the parameter is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    holder: int | None = None


class ParameterNumbers:
    """The result of `Engine.numbers`: reads and writes one parameter's tensor of one `kind`:

    - "master": the weights that the optimizer updates; for a frozen parameter, its own;
    - "gradient": of the mean over the global batch, before clipping, from the last backward of a step to
      `step`;
    - or an optimizer state by name, such as "exp_avg".

    Masters and gradients have the masters' dtype, states their own. Data- and tensor-parallel ranks that have
    the parameter call alike. Raises ModelError for a state that the optimizer does not have, within a forward
    or a backward, and for setting a tensor that is not there yet or has another shape."""

    def __init__(
        self, parameter: nn.Parameter, training: Callable[[], Training], complete: Callable[[], None]
    ) -> None:
        """`training` returns the current training; `complete` ends the backward calls of a step."""
        self._parameter, self._training, self._complete = parameter, training, complete
        self._locate(moving=True)

    @collective
    @torch.no_grad()
    def whole(self, kind: str) -> Tensor | None:
        """Return a copy of the whole tensor, on the device of every rank. None for a gradient before the last
        backward of a step, for a state before the parameter's first update, and for both of a frozen one."""
        at = self._locate()
        own, form = self._agree(at, kind)
        if form is None:
            return None
        if form.holder is None:
            return at.training.placement.joined(at.slot, self._gathered(at, own, form.dtype))
        if at.replicated or form.holder == at.bucket.axis.rank:
            whole = own
        else:
            whole = torch.empty(form.shape, dtype=form.dtype, device=at.bucket.device)
        if not at.replicated and whole is not None:
            at.bucket.axis.broadcast(whole, form.holder)
        return whole

    @collective
    @torch.no_grad()
    def set_whole(self, kind: str, value: Tensor | float | None) -> None:
        """Set the whole tensor to rank 0's value, of any dtype and device; others may give None. After a
        master is set, forwards from before can have no backward any more."""
        at = self._locate()
        form = self._agree(at, kind)[1]
        self._check_setting(at, kind, form is not None)
        assert form is not None
        mesh, division = at.training.engine_state.mesh, at.training.placement.division
        given, everyone = None if value is None else torch.as_tensor(value), mesh.axis("loss", "tp")
        shape = everyone.gather_objects(None if given is None else list(given.shape))[0]
        if shape is None or tuple(shape) != form.shape:
            raise ModelError(
                f"{kind} of {at.slot.name} is set to {'nothing' if shape is None else f'shape {shape}'} by "
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
        """Return a copy of this rank's shard: the consecutive elements of the flattened tensor that it
        updates, all of them at stage 0, perhaps none; or all of a state that has a shape of its own or is one
        number. None as for `whole`, on ranks that have elements.

        Raises ModelError for masters of parameters that were written to since the last step."""
        at = self._locate()
        writes = at.training.step.user_writes
        if kind == MASTER and not at.bucket.sharded and writes.seen(at.bucket.device, at.bucket):
            raise ModelError(
                f"{at.slot.name}, or a parameter beside it, was written to, and all ranks have to take that "
                'in before one reads its part of the master: ask for whole("master") first'
            )
        own = self._read(at, kind)
        return own if own is None or not own.dim() else own.reshape(-1)

    @collective
    @torch.no_grad()
    def set_local(self, kind: str, value: Tensor | float) -> None:
        """Set this rank's shard, with as many elements as `local` returns. Of elements that several ranks
        have, the first rank's value counts."""
        at = self._locate()
        self._settle(at, kind)
        own, given = self._read(at, kind), torch.as_tensor(value)
        self._check_setting(at, kind, own is not None)
        assert own is not None
        if given.numel() != own.numel():
            raise ModelError(
                f"this rank's part of {kind} of {at.slot.name} is set to {given.numel()} elements, and has "
                f"{own.numel()}: give as many as local({kind!r})"
            )
        given, bucket = given.to(own.device, own.dtype).reshape(-1).contiguous(), at.bucket
        if bucket.axis.replicas is not None:
            bucket.axis.replicas.broadcast(given)
        if kind not in (MASTER, GRADIENT) and own.numel() and not at.is_spread(own):
            self._put(at, kind, given if own.dim() else given[0])
            return
        flat = torch.zeros(at.slot.size, dtype=given.dtype, device=given.device)
        flat[at.elements()] = given
        if at.replicated:
            bucket.axis.broadcast(flat)
        elif kind == MASTER and not bucket.released:  # other ranks have the parameter whole
            flat = self._gathered(at, given, given.dtype)
        if at.cut.is_whole:
            at.training.placement.division.tp.broadcast(flat)
        if bucket.tie is not None:
            bucket.tie.broadcast(flat)
        self._put(at, kind, flat)

    def equal_part(self, kind: str, rounded: bool = False) -> EqualPart:
        """Return a tensor that stands for this rank's one of equal parts of the flattened tensor, as many as
        there are data-parallel ranks, all of which read and write it alike; in the masters' dtype, or
        `rounded` to the parameter's. Raises ModelError where tensor parallelism divides the parameter."""
        at = self._locate(moving=True)
        if not at.cut.is_whole:
            raise ModelError(f"an equal part of {at.slot.name}, which mesh.tp divides: use whole({kind!r})")
        dtype = at.bucket.formats.compute if rounded else at.bucket.formats.master
        like = torch.empty(0, dtype=dtype, device=at.bucket.device)
        return EqualPart.of(self, kind, at.training.engine_state.mesh.loss, at.slot.name, at.slot.size, like)

    @property
    def trains(self) -> bool:
        """True if an optimizer updates the parameter: it is not frozen, and is in a group."""
        return self._locate(moving=True).bucket.trainable

    @property
    def arrived(self) -> bool:
        """True if a backward of the step gave the parameter a gradient on this rank."""
        at = self._locate()
        return at.index in at.bucket.gradients.ever_arrived

    @torch.no_grad()
    def so_far(self) -> Tensor | None:
        """Return a copy of the gradient that this rank's backwards have added up before the step's last one:
        that of the sum of their losses (each times its labels where batch.mean says so), whole, in the
        masters' dtype. None before the first, and where each micro-batch is reduced by itself."""
        at = self._locate()
        found = at.training.step.so_far(self._parameter) if at.bucket.trainable else None
        return None if found is None else found.to(at.bucket.formats.master)

    # ---- steps of the above

    def _locate(self, moving: bool = False) -> ParameterLocation:
        """Return the parameter's place. Raises ModelError where it is not the engine's, or, unless `moving`,
        within a forward or backward, where numbers come and go."""
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
        optimizer = next(
            (optimizer for optimizer in training.sharded_optimizer if optimizer.bucket is bucket), None
        )
        return ParameterLocation(training, bucket, slot, indices[0], optimizer)

    def _settle(self, at: ParameterLocation, kind: str) -> None:
        """Take what a script wrote to the parameters of a bucket into their masters."""
        if kind == MASTER and not at.bucket.sharded:
            at.training.step.user_writes.settle(at.training.saver.wait_until_copied, at.bucket)

    def _agree(self, at: ParameterLocation, kind: str) -> tuple[Tensor | None, TensorForm | None]:
        """Return this rank's shard of the numbers of a kind (a state, the gradient, the master), and the form
        of the whole tensor, on which all ranks agree; None where there is none."""
        self._settle(at, kind)
        own, whole = self._read(at, kind), at.cut.shape
        if kind in (MASTER, GRADIENT):
            return own, None if own is None else TensorForm(whole, own.dtype)
        reported: list[Any] | None = None
        if own is not None and own.numel():
            reported = [list(own.shape), str(own.dtype).removeprefix("torch."), at.is_spread(own)]
        found = [reported] if at.replicated else at.bucket.axis.gather_objects(reported)
        known = [(rank, *each) for rank, each in enumerate(found) if each is not None]
        if not known:
            return None, None
        holder, shape, dtype, spread = known[0]
        if spread:
            return own, TensorForm(whole, getattr(torch, dtype))
        if shape and not at.cut.is_whole:
            raise ModelError(
                f"{kind} of {at.slot.name} has a shape of its own, and the parameter is divided by mesh.tp: "
                "there is no whole one; ask for local(...), which is of this rank's part"
            )
        return own, TensorForm(tuple(shape), getattr(torch, dtype), holder)

    def _read(self, at: ParameterLocation, kind: str) -> Tensor | None:
        """Return a copy of this rank's shard: flat; or a state of whole tensors in its shape; or one
        number."""
        bucket, elements = at.bucket, at.elements()
        low, high = at.slot.start + elements.start, at.slot.start + elements.stop
        if kind == GRADIENT and not self._reduced(at):
            return None
        if low == high and at.optimizer is not None:
            self._check(at, kind)
            return torch.empty(0, dtype=bucket.formats.master, device=bucket.device)
        if kind == GRADIENT:
            own = bucket.gradients.read(low, high).to(bucket.device, bucket.formats.master)
            return own * at.training.step.to_mean
        if kind == MASTER:
            return bucket.read_masters(low, high)
        state = None if at.optimizer is None else at.optimizer.state.read(at.slot, kind)
        if state is None:
            self._check(at, kind)
        return None if state is None else state.to(bucket.device, copy=True)

    def _reduced(self, at: ParameterLocation) -> bool:
        """Return whether there is a gradient. All ranks must call, as they do after the last backward of a
        step."""
        step = at.training.step
        if at.bucket.trainable and step.order.phase == "ended":
            self._complete()
        return at.bucket.trainable and step.order.phase == "reduced"

    def _check(self, at: ParameterLocation, kind: str) -> None:
        """Raise ModelError for a state that the optimizer does not have."""
        if kind in (MASTER, GRADIENT) or at.optimizer is None:
            return
        if kind not in (known := at.optimizer.state.shapes(at.slot)):
            raise ModelError(
                f"{kind!r} of {at.slot.name}: its optimizer has no such state; there are "
                f"{', '.join((MASTER, GRADIENT, *known))}"
            )

    def _check_setting(self, at: ParameterLocation, kind: str, exists: bool) -> None:
        """Raise ModelError where the value to be set would be lost."""
        name, step = at.slot.name, at.training.step
        if not exists and kind == GRADIENT:
            reason = "it has a gradient from the last backward of a step to step(): set it then"
        elif not exists:
            reason = "it has a state from its first update on: set it after the first step"
        elif kind == MASTER and at.bucket.is_exposed:
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

    def _gathered(self, at: ParameterLocation, own: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the whole of this tensor-parallel rank's tensor, flat, given this rank's `own`."""
        if at.replicated and own is not None:
            return own.reshape(-1)
        flat = torch.empty(at.slot.size, dtype=dtype, device=at.bucket.device)
        for rank in range(at.bucket.axis.size):
            inside = flat[at.elements(rank)]
            if rank == at.bucket.axis.rank and own is not None and inside.numel():
                inside.copy_(own.reshape(-1))
            at.bucket.axis.broadcast(inside, rank)
        return flat

    def _put(self, at: ParameterLocation, kind: str, value: Tensor) -> None:
        """Set this rank's shard of `value`, which is all of the tensor, flat, or one number."""
        step, bucket = at.training.step, at.bucket
        if kind == GRADIENT:
            step.put_gradient(bucket, at.index, value)
            return
        at.training.saver.wait_until_copied()
        if kind == MASTER:
            if not bucket.released:
                bucket.ensure()
            bucket.write(at.slot, value)
            step.note_written(bucket)
        elif at.optimizer is not None:
            at.optimizer.state.write(at.slot, kind, value)
