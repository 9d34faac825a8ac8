"""A graph of the operators by which a model was built, and the evaluator that computes any of its tensors
again, on demand.

The graph consists of values: a value is the content of one storage between two writes, so that views, slices
and `.data` need no rows of their own.

Invariant: a value is computed with the bits that it had in the build, however often and in whatever order
values are asked for: each random row starts from the same generator state as in the build, which is the end
of an earlier row. No communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only

from polyreme.errors import ModelError


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of one value; offset, stride: in elements."""

    value: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return this view of a storage."""
        tensor = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


@dataclass(slots=True, eq=False)
class Op:
    """One row of the graph: an operator's call. Tensors in `args` and `kwargs` are `View`s."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]  # values whose numbers affect the result or the number of random draws
    needs: frozenset[int]  # `reads`, and values that the call overwrites only partly
    writes: tuple[tuple[int, int], ...]  # the values before and after, of each storage written
    creates: tuple[tuple[int, View], ...]  # the index of the output, and its view, for each new storage
    default_dtype: torch.dtype
    random: bool = False
    private: bool = False  # draws from a generator that the build made
    start: int | Tensor | None = (
        None  # generator state before the draw: that at an earlier row's end, or a state
    )


class Graph:
    """The rows in order, and for each value the row that produces it and its size in bytes."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.producer: list[int] = []
        self.nbytes: list[int] = []
        self.largest = 0

    def new_value(self, nbytes: int) -> int:
        """Add a value that the next row produces. Returns its number."""
        self.producer.append(len(self.ops))
        self.nbytes.append(nbytes)
        self.largest = max(self.largest, nbytes)
        return len(self.nbytes) - 1

    def live(self, targets: Iterable[int]) -> tuple[set[int], dict[int, list[int]]]:
        """Return the rows that `targets` depend on, and for each value the rows that will need it."""
        draws = {i for i, op in enumerate(self.ops) if op.random and not op.private}
        live: set[int] = set()
        stack = [*targets, *(v for i in draws for v in self.ops[i].reads)]
        while stack:
            row = self.producer[stack.pop()]
            if row not in live:
                live.add(row)
                stack.extend(self.ops[row].needs)
        consumers: dict[int, list[int]] = defaultdict(list)
        for row in sorted(live | draws):
            for value in self.ops[row].needs if row in live else self.ops[row].reads:
                consumers[value].append(row)
        return live, consumers


class Evaluator:
    """Computes values of a graph on demand.

    A value stays in memory while `pending(value)`; but if the kept values (without the one just asked for)
    are together larger than the largest value of the graph, the oldest are dropped, and computed again on
    demand."""

    def __init__(self, graph: Graph, pending: Callable[[int], bool]) -> None:
        self.graph = graph
        self.pending = pending
        self.executed: set[int] = set()
        self.ends: dict[int, Tensor] = {}  # generator state after each random row
        self._slab = torch.empty(0)
        self._storages: dict[int, UntypedStorage] = {}
        self._storage_bytes = 0

    def tensor(self, view: View) -> Tensor:
        """Return the real tensor of `view`, in memory that this evaluator may keep."""
        if view.value not in self._storages:
            self.run(self.graph.producer[view.value], full=True, result=view.value)
        return view.on(self._storages[view.value])

    def release(self, value: int) -> None:
        """Drop `value` unless it is pending."""
        if value in self._storages and not self.pending(value):
            self._drop(value)

    def state(self, position: int | Tensor) -> Tensor:
        """Return the generator state at `position`: a state itself, or the number of the row at whose end it
        is."""
        # torch reads a state from its storage's start
        return (position if isinstance(position, Tensor) else self.ends[position]).clone()

    def run(self, row: int, full: bool, result: int | None = None) -> None:
        """Execute `row` and the rows that it depends on, and keep the value `result`. Not `full`: only for
        the random draws, without keeping values."""
        needed = self._needed_rows(row, full)
        uses = Counter(v for i, whole in needed.items() for v in self._inputs(i, whole))
        for i in sorted(needed):
            self._execute(i, needed[i], uses, result)
            for value in self._inputs(i, needed[i]):
                uses[value] -= 1
                if not uses[value] and value != result:
                    self.release(value)
        limit = self.graph.largest + (0 if result is None else self.graph.nbytes[result])
        for value in list(self._storages):
            if self._storage_bytes <= limit:
                break
            if value != result:
                self._drop(value)

    def _inputs(self, row: int, full: bool) -> frozenset[int]:
        return self.graph.ops[row].needs if full else self.graph.ops[row].reads

    def _needed_rows(self, row: int, full: bool) -> dict[int, bool]:
        needed: dict[int, bool] = {}
        stack = [(row, full)]
        while stack:
            i, full = stack.pop()
            if i in needed and needed[i] >= full:
                continue
            needed[i] = full
            stack.extend(
                (self.graph.producer[v], True) for v in self._inputs(i, full) if v not in self._storages
            )
            start = self.graph.ops[i].start
            if isinstance(start, int) and start not in self.ends:
                stack.append((start, False))
        return needed

    def _execute(self, row: int, full: bool, uses: Counter[int], result: int | None) -> None:
        op = self.graph.ops[row]
        inputs = self._inputs(row, full)
        self.executed.add(row)
        storages = {value: self._storages[value] for value in inputs}
        for old, _ in op.writes:
            if old in inputs and (uses[old] > 1 or old == result or self.pending(old)):
                storages[old] = storages[old].clone()

        def real(view: View) -> Tensor:
            if view.value not in storages:  # only its shape matters
                storages[view.value] = UntypedStorage(self.graph.nbytes[view.value])
            return view.on(storages[view.value])

        outputs = self._call(row, op, *tree_map_only(View, real, (op.args, op.kwargs)))
        made = {new: storages[old] for old, new in op.writes}
        made |= {view.value: self._as_recorded(op, outputs[i], view) for i, view in op.creates}
        for value, storage in made.items():
            if (
                full
                and (uses[value] or value == result or self.pending(value))
                and value not in self._storages
            ):
                self._storages[value] = storage
                self._storage_bytes += self.graph.nbytes[value]

    def _call(self, row: int, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call the operator with the default dtype and the generator state of the build. Returns its
        outputs."""
        dtype, state = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(op.default_dtype)
        try:
            if not op.random:
                return tree_leaves(op.func(*args, **kwargs))
            assert op.start is not None  # set for every random row by the recorder
            start = self.state(op.start)
            if op.private:
                generator = torch.Generator().set_state(start)
                outputs = tree_leaves(op.func(*args, **kwargs | {"generator": generator}))
                self._remember(row, generator.get_state())
            else:
                torch.set_rng_state(start)
                outputs = tree_leaves(op.func(*args, **kwargs))
                self._remember(row, torch.get_rng_state())
            return outputs
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)

    def _remember(self, row: int, state: Tensor) -> None:
        if row in self.ends:
            return
        slot = len(self.ends) % 64
        if slot == 0:  # in slabs, as many small blocks that stay would fragment the memory
            self._slab = torch.empty(64, state.numel(), dtype=state.dtype)
        self.ends[row] = self._slab[slot].copy_(state)

    def _as_recorded(self, op: Op, tensor: Tensor, view: View) -> UntypedStorage:
        """Return the output's storage, in the layout of the build, on which the recorded views rely."""
        if tuple(tensor.shape) != view.size or tensor.dtype != view.dtype:
            raise ModelError(
                f"{op.func} gave {tensor.dtype} {tuple(tensor.shape)} but "
                f"{view.dtype} {view.size} when the model was recorded; "
                "build the model whole and pass the module"
            )
        storage = tensor.untyped_storage()
        nbytes = self.graph.nbytes[view.value]
        same = (tensor.stride(), tensor.storage_offset(), storage.nbytes()) == (
            view.stride,
            view.offset,
            nbytes,
        )
        if same and (tensor.is_conj(), tensor.is_neg()) == (view.conj, view.neg):
            return storage
        storage = UntypedStorage(nbytes)
        view.on(storage).copy_(tensor)
        return storage

    def _drop(self, value: int) -> None:
        self._storage_bytes -= self.graph.nbytes[value]
        del self._storages[value]
