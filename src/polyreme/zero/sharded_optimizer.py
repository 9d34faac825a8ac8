"""Optimizers on flat shards: any elementwise torch.optim class runs on the contiguous pieces of a bucket's
master shard.

On a CPU one piece after another, by a kernel that goes through memory once where there is one (`kernels`); on
a device all pieces of a group at once, in one fused kernel. Masters and states are in the memory of the
device, or in a tier, from which they come record by record to be updated on the CPU.

Invariants: a piece is of one optimizer group and begins and ends at multiples of ALIGN, so that results do
not depend on the cut; a parameter that got no gradient on any rank in a step is left alone in that step, its
step count too, as torch does.
Communication: none here but what `Bucket.publish` begins.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.errors import ConfigError, Problem
from polyreme.layout.bucket_layout import Run, Slot, align
from polyreme.layout.region import MASTER, Stored
from polyreme.offload.host import HostStore
from polyreme.offload.optimizer_states import StateRecord, cut, within
from polyreme.optim.cpu_kernels import ChunkedKernel, Kernel, Workers, kernel
from polyreme.optim.groups import Group, trial_state
from polyreme.optim.quantized_states import SCALE, Key, QuantizedKernel, States
from polyreme.zero.bucket import Bucket

CHUNK = 1 << 22
"""Most elements of a piece on a CPU, a multiple of ALIGN, where a kernel takes it in chunks within the
cache."""
IN_CACHE = 1 << 19
"""The same where an optimizer makes its own step: every pass of it then finds the piece in the cache. And
fewest where each thread takes a piece, if there is more."""

Numbers = Mapping[str, float]
"""The states of a parameter that are one number (`step`, ...), by name."""


@dataclass(eq=False)
class _Piece:
    """A run, the master's memory under it and all of its states; or the record that has them, and `state`:
    what of the states is not in the record. `fresh`: it was never updated."""

    run: Run
    tensor: Tensor | None = None
    record: StateRecord | None = None
    state: dict[str, Any] = field(default_factory=dict)
    fresh: bool = True

    def within(self, record: StateRecord, numbers: Tensor) -> Tensor:
        """This piece's part of a record's numbers of one kind."""
        return (
            numbers
            if self.run.slot is not None
            else numbers[slice(*within(record.run, self.run, numbers.numel()))]
        )


class Update:
    """The optimizer of one bucket: a torch optimizer for each group in it."""

    def __init__(self, bucket: Bucket, groups: Sequence[Group], compact: States | None = None) -> None:
        """`compact`: how moments are kept, if not as torch does. Raises ConfigError where an optimizer's
        cannot be."""
        self.bucket, self._groups, self._compact = bucket, groups, compact
        self.records = bucket.records
        """Where masters and states are, if they are not in the device's memory."""
        self.one_by_one = bucket.device.type == "cpu" or self.records is not None
        """Whether a piece is scaled and updated before the next one is read; else all of a group are at
        once."""
        # all that an update needs is in its place, so that several are updated at a time
        self._stays = (
            self.records is None or isinstance(self.records.store, HostStore)
        ) and bucket.gradients.records is None
        self._workers = Workers()
        self._staged: dict[int, Tensor] = {}  # bytes of all records by number, while they are loaded
        # states that are kept in fewer bits, while they are loaded
        self._wide: dict[_Piece, dict[str, Tensor]] = {}
        self._trials: dict[int, dict[str, Any]] = {}
        if self.records is not None:
            self._pieces = [_Piece(record.run, record=record) for record in self.records]
        else:
            whole = bucket.layout.runs(bucket.region.start, bucket.region.stop)
            chunks = {run.group: self._chunk(run) for run in whole}
            runs = [part for run in whole for part in cut(run, chunks[run.group])]
            self._pieces = [_Piece(run, self._view(bucket.resident, run)) for run in runs]
        self._optimizers: dict[int, Optimizer] = {}
        for group in sorted({piece.run.group for piece in self._pieces}):
            pieces = [piece for piece in self._pieces if piece.run.group == group]
            tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
            stand_in = torch.zeros(
                [1] * len(slot.shape) if (slot := pieces[0].run.slot) is not None else 1,
                dtype=bucket.formats.master,
            )
            optimizer = self._optimizers[group] = groups[group].optimizer(tensors or [stand_in])
            for piece in pieces if compact is None else ():  # some make states at once
                piece.state = optimizer.state.pop(piece.tensor, {})  # type: ignore[arg-type]
                piece.fresh = not piece.state
        self._kernels = {group: _kernel(optimizer, compact) for group, optimizer in self._optimizers.items()}
        name = bucket.layout.slots[0].name if bucket.layout.slots else ""
        self._place = zlib.crc32(name.encode()) << 32  # for random bits, which are others in every bucket
        if compact is not None and not self.one_by_one:
            raise ConfigError([Problem("optimizer.states", compact, "moments that are kept in fewer "
                                                                    "bits are updated by the CPU",
                                       'write memory.states = "host" (or a '
                                       'folder), or optimizer.states = "fp32"')])  # fmt: skip

    def _chunk(self, run: Run) -> int:
        """Most elements of a piece of the run's group."""
        if not self.one_by_one or run.slot is not None:
            return self.bucket.layout.size
        found = _kernel(self._groups[run.group].optimizer([torch.zeros(1)]), self._compact)
        if isinstance(found, ChunkedKernel):
            return min(CHUNK, max(IN_CACHE, align(-(-(run.stop - run.start) // torch.get_num_threads()))))
        return CHUNK if isinstance(found, QuantizedKernel) else IN_CACHE

    @property
    def order(self) -> list[int]:
        """The records in the order in which `step` takes them."""
        return [] if self.records is None else [record.number for record in self.records]

    @torch.no_grad()
    def step(
        self,
        factor: float,
        options: Sequence[Mapping[str, Any]],
        unused: Collection[int] = (),
        stream: Iterable[Tensor] = (),
        count: int = 0,
        gradient_records: Iterable[Tensor] = (),
    ) -> None:
        """One optimizer step from the bucket's reduced gradients times `factor`, with these `options` (lr,
        ...) of each group; and the new parameters, rounded.

        `unused` are the indices of parameters that no rank has a gradient for. `stream`: an iterator over
        records, from this bucket's on. `count`: steps before this one. `gradient_records`: an iterator
        likewise over records of gradients, if they are in files."""
        grad = self.bucket.gradients.numbers() if self.bucket.gradients.records is None else None
        absent = [slot for index in unused if (slot := self.bucket.layout.slots[index]).size]
        for slot in absent:
            self._isolate(slot)
        for at, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group.update(
                    {
                        key: options[at][key]
                        for key in group
                        if key not in ("params", "fused") and key in options[at]
                    }
                )
        left_out = {
            p
            for p in self._pieces
            if any(slot.start < p.run.stop and p.run.start < slot.stop for slot in absent)
        }
        if not self.one_by_one:
            assert grad is not None
            for at in self._optimizers:
                if pieces := [
                    piece for piece in self._pieces if piece.run.group == at and piece not in left_out
                ]:
                    self._at_once(at, pieces, grad, factor)
            self.bucket.round()
            return
        target = self.bucket.rounded(keep=bool(left_out))
        coming = iter(stream)
        gradients = iter(gradient_records)
        for record, turn in groupby(self._pieces, lambda piece: piece.record):
            memory = None if record is None else next(coming)
            gradient, start = grad, None
            if gradient is None and record is not None:
                gradient, start = next(gradients).view(self.bucket.formats.reduce), record.run.start
            assert gradient is not None
            for piece in turn:
                if piece not in left_out:
                    self._one(
                        piece,
                        memory,
                        self._view(gradient, piece.run, start),
                        factor,
                        self._view(target, piece.run),
                        count,
                    )
        self._workers.finish()
        if self.bucket.transfer is not None:
            self.bucket.transfer.arrive()

    def _one(
        self,
        piece: _Piece,
        memory: Tensor | None,
        gradient: Tensor,
        factor: float,
        target: Tensor,
        count: int,
    ) -> None:
        """The step of a piece, whose record's bytes are in `memory` where it has one; `target` gets the new
        parameters."""
        tensor = piece.tensor
        recorded: dict[str, Tensor] = {}
        if piece.record is not None and memory is not None:
            recorded = {
                kind: piece.within(piece.record, place.of(memory))
                for kind, place in piece.record.fields.items()
            }
            tensor = recorded.pop(MASTER)
            if (
                self._compact is None
                and piece.fresh
                and (made := self._groups[piece.run.group].optimizer([tensor]).state.get(tensor))
            ):
                piece.state, piece.fresh = made, False  # by the optimizer itself, not by its first step
                for kind, place in recorded.items():
                    place.copy_(made[kind])
        assert tensor is not None
        state, kernel = {**piece.state, **recorded}, self._kernels[piece.run.group]
        if isinstance(kernel, QuantizedKernel) and not kernel.counts and not piece.fresh:
            state["step"] = torch.tensor(float(count))
        step = partial(
            kernel.step,
            tensor,
            gradient.to(tensor.device),
            state,
            factor,
            first=piece.fresh,
            at=self._place + piece.run.start,
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

    def _at_once(self, group: int, pieces: Sequence[_Piece], grad: Tensor, factor: float) -> None:
        """The step of pieces of one group, in one kernel."""
        optimizer = self._optimizers[group]
        tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
        gradients = [
            self._view(grad, piece.run).to(tensor.dtype)
            for piece, tensor in zip(pieces, tensors, strict=True)
        ]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for piece, tensor, gradient in zip(pieces, tensors, gradients, strict=True):
            tensor.grad, piece.fresh = gradient, False
            optimizer.state[tensor] = piece.state
        optimizer.param_groups[0]["params"] = tensors
        optimizer.step()
        for tensor in tensors:
            tensor.grad = None

    def nbytes(self) -> int:
        """Bytes of the optimizer's own states in the device's memory."""
        return sum(t.nbytes for piece in self._pieces for t in piece.state.values() if isinstance(t, Tensor))

    # ---- to a checkpoint and back

    def masters(self) -> Iterable[tuple[Run, Tensor | Stored]]:
        """Every run with its masters, in their own memory or stored."""
        for run, numbers in self._held():
            yield run, numbers[MASTER]

    def state_of(self) -> Iterable[tuple[Run, dict[str, Any]]]:
        """Every run with the torch state of its parameter."""
        for run, numbers in self._held():
            yield run, {kind: value for kind, value in numbers.items() if kind != MASTER}

    def _held(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        for piece in self._pieces:
            if (record := piece.record) is None or self.records is None:
                yield piece.run, self._widened(piece, {MASTER: piece.tensor, **piece.state})
                continue
            numbers: dict[str, Any] = {}
            for kind, place in record.fields.items():
                if kind != MASTER and piece.fresh:
                    continue
                if (staged := self._staged.get(record.number)) is not None:
                    numbers[kind] = piece.within(record, place.of(staged))
                else:
                    numbers[kind] = self.records.held(
                        record, kind, None if piece.run.slot is not None else piece.run
                    )
            yield piece.run, self._widened(piece, {**numbers, **piece.state})

    def _widened(self, piece: _Piece, numbers: dict[str, Any]) -> dict[str, Any]:
        """`numbers`, with the states that are kept in fewer bits as float32: to be read when they are needed,
        or loaded."""
        kernel, size = self._kernels[piece.run.group], piece.run.stop - piece.run.start
        if not isinstance(kernel, QuantizedKernel) or piece.fresh:
            return numbers
        kept = {kind: value for kind, value in numbers.items() if kind.removesuffix(SCALE) in kernel.names}
        found = {kind: value for kind, value in numbers.items() if kind not in kept}
        for name in kernel.names:

            def fetch(start: int, stop: int, name: str = name) -> Tensor:
                state = {
                    kind: value if isinstance(value, Tensor) else value.fetch(0, value.numel())
                    for kind, value in kept.items()
                }
                return kernel.widened(state, name, size)[start:stop]

            wide = self._wide.get(piece, {}).get(name)
            found[name] = Stored(torch.float32, (size,), fetch) if wide is None else wide
        return found

    def new_states(self) -> dict[str, Tensor]:
        """Memory for new states, by name, which may be filled before `loading` is given it: of those with a
        number for each element, flat, of the bucket's region, and zero where that is padding. Of states
        elsewhere than in host memory, or in formats of ours, none."""
        bucket = self.bucket
        if (
            self.records is not None
            or self._compact is not None
            or bucket.device.type != "cpu"
            or bucket.layout.boundary == "tensor"
        ):
            return {}
        forms = [
            {(k, v.dtype) for k, v in self._trial(group, None).items() if isinstance(v, Tensor) and v.dim()}
            for group in self._optimizers
        ]
        low, high = bucket.region.start, bucket.region.stop
        found = (
            {
                kind: torch.empty(high - low, dtype=form)
                for kind, form in sorted(set.intersection(*forms), key=str)
            }
            if forms
            else {}
        )
        for start, stop in bucket.layout.gaps():
            for home in found.values():
                home[max(start - low, 0) : max(stop - low, 0)].zero_()
        return found

    @contextmanager
    def loading(
        self, scalars: Mapping[str, Numbers | None], new_states: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Make all states anew, of `new_states` or zeros; what `masters` and `state_of` give inside may be
        written to, and counts from the end on.

        `scalars` has by name of a parameter the states that are one number, or None for one that is to have
        no state, like one that was never updated."""
        self._allocate(scalars, new_states or {})
        store = None if self.records is None else self.records.store
        for record in self.records or ():
            assert store is not None
            memory = self._staged[record.number] = store.read(record.number, 0, record.nbytes)
            for kind, place in record.fields.items():
                if kind != MASTER:
                    place.of(memory).zero_()
        for piece in self._pieces:
            if isinstance(kernel := self._kernels[piece.run.group], QuantizedKernel) and not piece.fresh:
                size = piece.run.stop - piece.run.start
                self._wide[piece] = {name: torch.zeros(size, dtype=torch.float32) for name in kernel.names}
        try:
            yield
            for piece, wide in self._wide.items():
                self._narrow(piece, wide)
            if self.records is None:
                self.bucket.round()
                return
            target = self.bucket.rounded(keep=False)
            for record in self.records:
                self.records.store.write(record.number, 0, self._staged[record.number])
                self._view(target, record.run).copy_(record.fields[MASTER].of(self._staged[record.number]))
        finally:
            self._staged.clear()
            self._wide.clear()

    def _narrow(self, piece: _Piece, wide: Mapping[str, Tensor]) -> None:
        """Keep the states of a piece, which were loaded, in fewer bits."""
        kernel, state = self._kernels[piece.run.group], piece.state
        assert isinstance(kernel, QuantizedKernel)
        if (record := piece.record) is not None:
            memory = self._staged[record.number]
            state = {kind: piece.within(record, place.of(memory)) for kind, place in record.fields.items()}
        for name, values in wide.items():
            kernel.keep(state, name, values, Key(name, 0, self._place + piece.run.start))

    def _allocate(self, scalars: Mapping[str, Numbers | None], new_states: Mapping[str, Tensor]) -> None:
        slots = self.slots()
        told = {
            slot.name: None if scalars[slot.name] is None else tuple(sorted(scalars[slot.name].items()))  # type: ignore[union-attr]
            for slot in slots
        }
        for piece in self._pieces:
            piece.state, piece.fresh = {}, True
        common = max(told.values(), key=list(told.values()).count, default=None)
        for slot in slots:
            if told[slot.name] != common:
                self._isolate(slot)
        for piece in self._pieces:
            name = next(s.name for s in slots if s.start < piece.run.stop and align(s.stop) > piece.run.start)
            if (numbers := scalars[name]) is not None:
                piece.state, piece.fresh = self._fresh(piece, numbers, new_states), False

    def slots(self) -> list[Slot]:
        """Of the parameters of which this rank updates elements."""
        region = self.bucket.region
        return [
            slot
            for slot in self.bucket.layout.slots
            if slot.size and slot.start < region.stop and slot.stop > region.start
        ]

    def states(self, slot: Slot) -> dict[str, tuple[int, ...] | None]:
        """The states that the optimizer has for a parameter once it was updated, by name: their shapes, or
        None for one number."""
        state = self._trial(slot.group, slot.shape if self.bucket.layout.boundary == "tensor" else None)
        found: dict[str, tuple[int, ...] | None] = {}
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found[kind] = slot.shape if self.bucket.layout.boundary == "element" else tuple(value.shape)
            elif value is not None:
                found[kind] = None
        return found

    def _fresh(self, piece: _Piece, numbers: Numbers, new_states: Mapping[str, Tensor]) -> dict[str, Any]:
        """The states of a piece after a step on zeros, or what is in `new_states`, with `numbers`; without
        those that are in its record."""
        flat = piece.run.slot is None
        found: dict[str, Any] = {}
        kernel = self._kernels[piece.run.group]
        if isinstance(kernel, QuantizedKernel):
            fields = kernel.fields(piece.run.stop - piece.run.start) if piece.record is None else {}
            found = {kind: torch.zeros(size, dtype=form) for kind, (form, size) in fields.items()}
            return found | ({"step": torch.tensor(float(numbers["step"]))} if kernel.counts else {})
        for key, value in self._trial(
            piece.run.group, None if piece.run.slot is None else piece.run.slot.shape
        ).items():
            if key in new_states:
                found[key] = self._view(new_states[key], piece.run)
            elif isinstance(value, Tensor) and value.dim():
                if piece.tensor is not None:
                    found[key] = torch.zeros(
                        piece.tensor.shape if flat else value.shape, dtype=value.dtype, device=value.device
                    )
            elif isinstance(value, Tensor):
                found[key] = torch.full_like(value, numbers.get(key, 0.0))
            else:
                found[key] = value if value is None or key not in numbers else type(value)(numbers[key])
        return found

    def _trial(self, group: int, shape: tuple[int, ...] | None) -> dict[str, Any]:
        device = torch.device("cpu") if self.records is not None else self.bucket.device
        if shape is not None:
            return trial_state(self._groups[group], shape, self.bucket.formats.master, device)
        if group not in self._trials:
            self._trials[group] = trial_state(self._groups[group], None, self.bucket.formats.master, device)
        return self._trials[group]

    def _view(self, numbers: Tensor, run: Run, start: int | None = None) -> Tensor:
        """The run's part of numbers of the bucket's region, or from its element `start` on."""
        start = self.bucket.region.start if start is None else start
        flat = numbers[run.start - start : run.stop - start]
        return flat.view(run.slot.shape) if run.slot is not None else flat

    def _isolate(self, slot: Slot) -> None:
        """Give the parameter pieces of its own, with its part of the states and its own step count."""
        low, high = slot.start, align(slot.stop)
        pieces: list[_Piece] = []
        for piece in self._pieces:
            cuts = [
                piece.run.start,
                *(c for c in (low, high) if piece.run.start < c < piece.run.stop),
                piece.run.stop,
            ]
            if len(cuts) == 2 or piece.run.slot is not None:
                pieces.append(piece)
                continue
            for start, stop in pairwise(cuts):
                run = Run(piece.run.group, start, stop)
                inside = slice(start - piece.run.start, stop - piece.run.start)
                whole = piece.run.stop - piece.run.start
                state = {key: _part(value, inside, whole) for key, value in piece.state.items()}
                tensor = None if piece.tensor is None else self._view(self.bucket.resident, run)
                pieces.append(_Piece(run, tensor, piece.record, state, piece.fresh))
        self._pieces = pieces


def _part(value: Any, inside: slice, whole: int) -> Any:
    """The part of a state that belongs to `inside` of a piece of `whole` elements: of a number per element
    (or per ALIGN of them) theirs, of a single number a copy."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
    return value[inside.start * value.numel() // whole : inside.stop * value.numel() // whole]


def _kernel(optimizer: Optimizer, compact: States | None) -> Kernel:
    if compact is None:
        return kernel(optimizer)
    try:
        return QuantizedKernel(optimizer, compact)
    except ValueError as error:
        fix = 'use adamw, adam, lion, adagrad, or sgd with momentum, or write optimizer.states = "fp32"'
        raise ConfigError([Problem("optimizer.states", compact, str(error), fix)]) from error
