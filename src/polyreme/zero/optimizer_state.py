"""The masters and optimizer states of a bucket, to a checkpoint and back.

Invariant: values set within `loading` are written at its end; an error inside leaves extents as they were. No
communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyreme.layout.bucket_layout import GroupInterval, Slot, align
from polyreme.layout.intervals import Interval, overlap
from polyreme.layout.region import MASTER, Stored, fetched
from polyreme.optim.quantized_states import SCALE, Key, QuantizedKernel
from polyreme.zero.pieces import Piece, Pieces

SingleNumbers = Mapping[str, float]
"""Single-number states of a parameter (`step`, ...), by name."""


class OptimizerState:
    """Reads and writes the masters and states of `pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._staged: dict[int, Tensor] = {}  # bytes of all extents by number, while states are loaded
        # quantized states in float32, while they are loaded
        self._wide: dict[Piece, dict[str, Tensor]] = {}

    def masters(self) -> Iterable[tuple[GroupInterval, Tensor | Stored]]:
        """Return every interval with its masters, in their own memory or stored."""
        for interval, numbers in self._numbers():
            yield interval, numbers[MASTER]

    def by_interval(self) -> Iterable[tuple[GroupInterval, dict[str, Any]]]:
        """Return every interval with its optimizer state, as torch names it."""
        for interval, numbers in self._numbers():
            yield interval, {kind: value for kind, value in numbers.items() if kind != MASTER}

    def read(self, slot: Slot, kind: str) -> Tensor | None:
        """Return this rank's shard of a parameter's state: the numbers of the elements that it updates, flat;
        or a state with a shape of its own; or one number. None where there is none yet. Read-only."""
        found = []
        for interval, state in self.by_interval():
            inside = overlap(interval, slot)
            if not inside or (value := state.get(kind)) is None:
                continue
            if not isinstance(value, Tensor | Stored):
                return torch.tensor(value)
            if interval.slot is not None:
                return fetched(value).view(value.shape)
            if isinstance(value, Tensor) and not value.dim():
                return value
            elements = inside.since(interval.start)
            found.append(fetched(value, elements.start, elements.stop))
        return torch.cat(found) if found else None

    def write(self, slot: Slot, kind: str, values: Tensor) -> None:
        """Set a state of a parameter. `values` is flat, one number per element, of which this rank takes its
        own; or one number; or all of a state with a shape of its own."""
        self._pieces.bucket.require("masters", "states")
        if not values.dim():
            self._pieces.isolate(slot)
        if (offloaded := self._pieces.offloaded) is not None and self._pieces.compact is None:
            offloaded.write(kind, slot.start, values.reshape(-1))
        for piece in self._pieces:
            if not (both := overlap(piece.interval, slot)):
                continue
            inside = both.since(piece.interval.start)
            numbers = values[both.since(slot.start)] if values.dim() else values
            old = piece.state.get(kind)
            if isinstance(kernel := self._pieces.kernel(piece), QuantizedKernel) and values.dim():
                self._rewrite(piece, kernel, kind, inside, numbers)
            elif old is not None and not isinstance(old, Tensor):
                piece.state[kind] = type(old)(values.item())
            elif old is None:  # the state is in an extent
                continue
            elif piece.interval.slot is not None or not old.dim():
                old.copy_(values.view(old.shape))
            else:
                old[inside] = numbers.to(old.device)

    def _rewrite(
        self, piece: Piece, kernel: QuantizedKernel, kind: str, inside: slice, numbers: Tensor
    ) -> None:
        """Set the elements `inside` a piece's quantized state."""
        kinds = [name for name in (kind, kind + SCALE) if name in kernel.fields(0)]
        extent, offloaded = piece.extent, self._pieces.offloaded
        if extent is None or offloaded is None:
            state = {name: piece.state[name] for name in kinds}
        else:
            state = {name: fetched(offloaded.numbers(extent, name, piece.interval)) for name in kinds}
        wide = kernel.widened(state, kind, piece.interval.size)
        wide[inside] = numbers.to("cpu")
        kernel.keep(state, kind, wide, Key(kind, 0, self._pieces.random_offset + piece.interval.start))
        if extent is not None and offloaded is not None:
            for name, compressed in state.items():
                offloaded.keep(extent, name, piece.interval, compressed)

    def _numbers(self) -> Iterator[tuple[GroupInterval, dict[str, Any]]]:
        self._pieces.bucket.require("masters", "states")
        for piece in self._pieces:
            if (extent := piece.extent) is None or self._pieces.offloaded is None:
                yield piece.interval, self._widened(piece, {MASTER: piece.tensor, **piece.state})
                continue
            numbers: dict[str, Any] = {}
            for kind, field in extent.fields.items():
                if kind != MASTER and piece.fresh:
                    continue
                if (staged := self._staged.get(extent.number)) is not None:
                    numbers[kind] = piece.within(extent, field.of(staged))
                else:
                    numbers[kind] = self._pieces.offloaded.numbers(
                        extent, kind, None if piece.interval.slot is not None else piece.interval
                    )
            yield piece.interval, self._widened(piece, {**numbers, **piece.state})

    def _widened(self, piece: Piece, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return `numbers` with quantized states as float32: dequantized when they are read, or as loaded."""
        kernel, size = self._pieces.kernel(piece), piece.interval.size
        if not isinstance(kernel, QuantizedKernel) or piece.fresh:
            return numbers
        compressed = {
            kind: value for kind, value in numbers.items() if kind.removesuffix(SCALE) in kernel.names
        }
        found = {kind: value for kind, value in numbers.items() if kind not in compressed}
        for name in kernel.names:

            def fetch(start: int, stop: int, name: str = name) -> Tensor:
                state = {kind: fetched(value) for kind, value in compressed.items()}
                return kernel.widened(state, name, size)[start:stop]

            wide = self._wide.get(piece, {}).get(name)
            found[name] = Stored(torch.float32, (size,), fetch) if wide is None else wide
        return found

    def try_options(
        self, ways: Iterable[Sequence[Mapping[str, Any]]], there: Mapping[str, Collection[str]]
    ) -> None:
        """Choose the options for the states that are loaded next.

        ways: candidates, each the options of every group. Takes the first with which the optimizer has
        exactly the states `there` for each parameter that has some; if none fits, the options that the
        optimizer was made with."""
        for options in (*ways, ()):
            self._pieces.options = options
            if all({*there.get(slot.name, ())} in ({*self.shapes(slot)}, set()) for slot in self.slots()):
                return

    def empty(self, computes_on: str) -> dict[str, Tensor]:
        """Return memory for new states, by name, to be filled before `loading` takes it: per-element states,
        flat, of the bucket's region, zero in the padding. Empty unless the states are torch's own, on a CPU,
        in no store, and of elementwise optimizers. computes_on: the type of the device, or of the one that
        it stands for."""
        bucket = self._pieces.bucket
        if (
            self._pieces.offloaded is not None
            or self._pieces.compact is not None
            or computes_on != "cpu"
            or bucket.layout.boundary == "tensor"
        ):
            return {}
        forms = [
            {
                (k, v.dtype)
                for k, v in self._pieces.trial(group, None).items()
                if isinstance(v, Tensor) and v.dim()
            }
            for group in self._pieces.optimizers
        ]
        region = bucket.region
        found = (
            {
                kind: torch.empty(region.stop - region.start, dtype=form, device=bucket.device)
                for kind, form in sorted(set.intersection(*forms), key=str)
            }
            if forms
            else {}
        )
        for padding in bucket.layout.gaps():
            for state in found.values():
                state[overlap(padding, region).since(region.start)].zero_()
        return found

    @contextmanager
    def loading(
        self, scalars: Mapping[str, SingleNumbers | None], new_states: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Replace all states by `new_states` or zeros. Within, `masters` and `by_interval` give writable
        numbers, which are kept at the end.

        `scalars` has the single-number states of each parameter by name, or None for a parameter without
        states, such as one that was never updated."""
        self.allocate(scalars, new_states or {})
        store = None if self._pieces.offloaded is None else self._pieces.offloaded.store
        for extent in self._pieces.offloaded or ():
            assert store is not None
            memory = self._staged[extent.number] = store.get(extent.number, 0, extent.nbytes)
            for kind, field in extent.fields.items():
                if kind != MASTER:
                    field.of(memory).zero_()
        for piece in self._pieces:
            if isinstance(kernel := self._pieces.kernel(piece), QuantizedKernel) and not piece.fresh:
                size = piece.interval.size
                self._wide[piece] = {name: torch.zeros(size, dtype=torch.float32) for name in kernel.names}
        try:
            yield
            for piece, wide in self._wide.items():
                self._narrow(piece, wide)
            if self._pieces.offloaded is None:
                self._pieces.bucket.round()
                return
            target = self._pieces.bucket.rounded(keep=False)
            for extent in self._pieces.offloaded:
                self._pieces.offloaded.store.put(extent.number, self._staged[extent.number])
                self._pieces.view(target, extent.interval).copy_(
                    extent.fields[MASTER].of(self._staged[extent.number])
                )
        finally:
            self._staged.clear()
            self._wide.clear()

    def _narrow(self, piece: Piece, wide: Mapping[str, Tensor]) -> None:
        """Quantize the loaded states of a piece."""
        kernel, state = self._pieces.kernel(piece), piece.state
        assert isinstance(kernel, QuantizedKernel)
        if (extent := piece.extent) is not None:
            memory = self._staged[extent.number]
            state = {kind: piece.within(extent, field.of(memory)) for kind, field in extent.fields.items()}
        for name, values in wide.items():
            kernel.keep(state, name, values, Key(name, 0, self._pieces.random_offset + piece.interval.start))

    def allocate(self, scalars: Mapping[str, SingleNumbers | None], new_states: Mapping[str, Tensor]) -> None:
        """Replace all states but those in extents. Arguments as in `loading`."""
        slots = self.slots()
        numbers_of = {
            slot.name: None if scalars[slot.name] is None else tuple(sorted(scalars[slot.name].items()))  # type: ignore[union-attr]
            for slot in slots
        }
        for piece in self._pieces:
            piece.state, piece.fresh = {}, True
        common = max(numbers_of.values(), key=list(numbers_of.values()).count, default=None)
        for slot in slots:
            if numbers_of[slot.name] != common:
                self._pieces.isolate(slot)
        for piece in self._pieces:
            name = next(s.name for s in slots if overlap(Interval(s.start, align(s.stop)), piece.interval))
            if (numbers := scalars[name]) is not None:
                piece.state, piece.fresh = self._fresh(piece, numbers, new_states), False

    def slots(self) -> list[Slot]:
        """Return the slots of parameters of which this rank updates any element."""
        region = self._pieces.bucket.region
        return [slot for slot in self._pieces.bucket.layout.slots if overlap(slot, region)]

    def shapes(self, slot: Slot) -> dict[str, tuple[int, ...] | None]:
        """Return the shapes of the states that the optimizer has for an updated parameter, by name; None for
        one number."""
        state = self._pieces.trial(
            slot.group, slot.shape if self._pieces.bucket.layout.boundary == "tensor" else None
        )
        found: dict[str, tuple[int, ...] | None] = {}
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found[kind] = (
                    slot.shape if self._pieces.bucket.layout.boundary == "element" else tuple(value.shape)
                )
            elif value is not None:
                found[kind] = None
        return found

    def _fresh(
        self, piece: Piece, numbers: SingleNumbers, new_states: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the states of a piece after a step on zeros, or those in `new_states`, with `numbers`;
        without the states in its extent."""
        flat = piece.interval.slot is None
        found: dict[str, Any] = {}
        kernel = self._pieces.kernel(piece)
        if isinstance(kernel, QuantizedKernel):
            fields = kernel.fields(piece.interval.size) if piece.extent is None else {}
            found = {kind: torch.zeros(size, dtype=form) for kind, (form, size) in fields.items()}
            return found | ({"step": torch.tensor(float(numbers["step"]))} if kernel.counts else {})
        for key, value in self._pieces.trial(
            piece.interval.group, None if piece.interval.slot is None else piece.interval.slot.shape
        ).items():
            if key in new_states:
                found[key] = self._pieces.view(new_states[key], piece.interval)
            elif isinstance(value, Tensor) and value.dim():
                if piece.extent is None or key not in piece.extent.fields:
                    found[key] = torch.zeros(
                        (piece.interval.size,) if flat else value.shape,
                        dtype=value.dtype,
                        device=value.device,
                    )
            elif isinstance(value, Tensor):
                found[key] = torch.full_like(value, numbers.get(key, 0.0))
            else:
                found[key] = value if value is None or key not in numbers else type(value)(numbers[key])
        return found
