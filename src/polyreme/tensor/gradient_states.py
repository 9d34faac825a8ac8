"""Finds out from autograd's graph, before the first backward, whether each parameter's gradient is whole on
this tensor-parallel rank or local to it, sums local ones, and refuses a gradient that is neither.

Invariant: after a backward every parameter has the gradient that the undivided model would have given it, or
this rank's slice of that where it is divided. The gradient of the loss is whole; functions that communicate
declare how they change that (`states`), and all others pass it on. Where a parameter is whole on every rank
and its gradients are local, they are summed. The graph is followed once for each pipeline stage after
`look_again`, and again where a parameter gets its first gradient later.

Communication: an all-reduce for each such sum, in the order of backward, which is the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from polyreme.distributed.mesh import Axis
from polyreme.errors import VERIFY, ModelError, named
from polyreme.layout.bucket_layout import Cut
from polyreme.pipeline.weight_gradients import current
from polyreme.tensor.first_forward import READ, WRONG, Watch, refuse_outside_reads
from polyreme.tensor.states import LOCAL, WHOLE, State

COMMUNICATE = ("polyreme.tensor.", "torch.distributed.")
"""Prefixes of the modules whose autograd functions must declare the states of gradients."""
SHOWN = 5
"""Parameters that an error lists."""
SIZES = 32
"""Most graph sizes that are each followed once; a model with more has a new size in every batch."""


class DividedParameters(AbstractContextManager[None], Protocol):
    """Divided parameters: from `refuse` to `allow` only their own layers may use them."""

    def refuse(self) -> None: ...
    def allow(self) -> None: ...


class GradientStates:
    """The states of the gradients of `parameters`, each with its name and cut over `axis`; some may be
    frozen.

    restrict: makes, of parameters and a check, the context in which the check runs before they are read.
    between: the state of gradients that pipeline stages send to each other; None without a pipeline."""

    def __init__(
        self,
        axis: Axis,
        parameters: Mapping[nn.Parameter, tuple[str, Cut]],
        restrict: Callable[[Iterable[nn.Parameter], Any], DividedParameters],
        between: State | None = None,
    ) -> None:
        self._axis, self._parameters, self.between = axis, parameters, between
        self.summed: set[Tensor] = set()
        """Parameters whose gradients are summed when autograd accumulates them."""
        self.divided = restrict(
            [p for p, (_, cut) in parameters.items() if not cut.is_whole], refuse_outside_reads
        )
        """The context in which only their own layers may use divided parameters."""
        self._seen: dict[Tensor, State] = {}
        self._followed: set[int] = set()  # stages, since the last `look_again`
        self._sizes: set[int] = set()  # of the graphs that were followed
        self._last = 0  # autograd's sequence number of the last graph's root
        self._evaluated = False
        self._roots: list[tuple[Any, State]] = []  # of the backward under way
        self._unknown: dict[Tensor, RemovableHandle] = {}
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that are released
            # kept, as autograd would make new ones without hooks
            self._accumulators = {p: get_gradient_edge(p).node for p in parameters if p.requires_grad}
        for parameter, node in self._accumulators.items():
            first = partial(_first, weakref.ref(self), weakref.ref(parameter))
            self._unknown[parameter] = node.register_prehook(first)
        self._hooks: list[RemovableHandle] = []

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and its loss: a `Watch` until a graph was followed, and for the
        first evaluation; else one that does nothing."""
        evaluates = not torch.is_grad_enabled()
        if self._evaluated if evaluates else self._followed:
            return nullcontext()
        self._evaluated |= evaluates
        return Watch({id(p): known for p, known in self._parameters.items()})

    def look_again(self) -> None:
        """Watch the next forward and follow the next graph again, as the model may use parameters in new
        ways."""
        self._followed.clear()

    labelled = True
    """False in a backward of a micro-batch without labels: its gradients are both, as they are 0."""

    def close(self) -> None:
        """Remove all hooks."""
        self.divided.allow()
        for handle in (*self._unknown.values(), *self._hooks):
            handle.remove()
        self._unknown.clear()
        self._accumulators.clear()
        self._roots = []

    def follow(self, roots: Iterable[Tensor], stage: int = 0, loss: bool = True) -> None:
        """Follow the graph of a backward of a pipeline stage from its `roots`, if its states are not known
        yet.
        loss: the roots are losses; else outputs that went to the next stage.

        Raises ModelError, on all ranks of the axis alike, where a gradient is neither whole nor local."""
        other = self._differs(roots := [*roots])
        if not self._unknown and stage in self._followed and not other:
            return
        state = WHOLE if loss or self.between is None else self.between
        self._roots = [(root.grad_fn, state) for root in roots if root.grad_fn is not None]
        again = stage not in self._followed or other or current() is not None
        if (
            again and self._roots and self._take().knows(self._parameters)
        ):  # else the graph is of other models
            # a graph of a new size was not watched: watch the next forward
            (self._followed.discard if other else self._followed.add)(stage)

    def _differs(self, roots: Sequence[Tensor]) -> bool:
        """Return whether the forward of `roots` had another number of operations than those before, so that
        it may be another graph. Autograd numbers operations, in each thread."""
        last = max((t.grad_fn._sequence_nr() for t in roots if t.grad_fn is not None), default=self._last)
        size, self._last = last - self._last, last
        differs = size < last and size not in self._sizes and len(self._sizes) < SIZES
        self._sizes.update([size] * differs)
        return differs

    def end(self) -> None:
        """Forget the roots of the backward that is under way."""
        self._roots = []

    def first_gradient(self, parameter: nn.Parameter, grads: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Follow the graph for a parameter that got no gradient before. Returns its gradient, summed, if it
        is local; None if it is complete."""
        if not self.labelled:
            return None
        undone = self._take().undone
        if parameter in self._unknown or undone:
            name = self._parameters[parameter][0]
            raise ModelError(
                f"{name} got its first gradient in a backward that does not tell whether it is whole or this "
                f"tensor-parallel rank's part: {_OPAQUE}"
            )
        return self._sum(grads) if parameter in self.summed else None

    def _take(self) -> Graph:
        """Follow the graph from the roots, and enter the states of all parameters below. Raises ModelError
        for those that cannot be corrected."""
        graph = Graph(self._roots)
        problems = [self._misused(*each) for each in graph.misused]
        read, mixed = [], []
        for node, here in graph.leaves.items():
            if (known := self._parameters.get(node.variable)) is None:
                problems += [_RECEIVED] * (self.between not in (None, here))
                continue
            # another stage of this rank may use it, too
            state = self._seen[node.variable] = self._seen.get(node.variable, State.NONE) | here
            if not known[1].is_whole and state & WHOLE:
                read.append(known[0])
            elif state == WHOLE | LOCAL:
                mixed.append(known[0])
            else:
                self._settle(node.variable, sums=known[1].is_whole and state == LOCAL)
        problems += [READ.format(named(read, SHOWN))] * bool(read)
        problems += [_MIXED.format(named(mixed, SHOWN))] * (bool(mixed) and not problems)
        if problems:
            raise ModelError(WRONG + "\n  - ".join(dict.fromkeys(problems[:SHOWN])))
        return graph

    def _settle(self, parameter: nn.Parameter, sums: bool) -> None:
        """Note that the state of a parameter's gradient is known. sums: sum it from now on."""
        if (waiting := self._unknown.pop(parameter, None)) is None:
            return
        waiting.remove()
        if sums:
            self.summed.add(parameter)
            put_right = partial(_summed, weakref.ref(self))
            self._hooks.append(self._accumulators[parameter].register_prehook(put_right))

    def _sum(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        found = []
        for grad in grads:
            if grad is not None:
                grad = grad.to_dense() if grad.is_sparse else grad
                grad = grad.clone(memory_format=torch.contiguous_format)
                self._axis.all_reduce(grad).wait()
            found.append(grad)
        return tuple(found)  # type: ignore[arg-type]

    def _misused(self, node: Any, state: State) -> str:
        """Say what is wrong at a communicating function whose output's gradient has this state."""
        kind = type(node)._forward_cls
        below = next((self._parameters[p][0] for p in _leaves(node) if p in self._parameters), None)
        what = f"the layer of {below}" if below is not None else "the model's input"
        if not hasattr(kind, "passes"):
            return f"{kind.__module__}.{kind.__qualname__}, above {what}, communicates, and nothing tells " \
                   "over which ranks it sums gradients: leave it out, or set mesh.tp = 1"  # fmt: skip
        return (_AS_WHOLE if state & WHOLE else _AS_LOCAL).format(what)


class Graph:
    """Autograd's graph below `roots`, given as nodes with the states of their gradients. leaves: the state of
    each leaf's gradient. misused: communicating functions that get a state which they do not take."""

    def __init__(self, roots: Iterable[tuple[Any, State]]) -> None:
        self.leaves: dict[Any, State] = {}
        self.misused: list[tuple[Any, State]] = []
        self.undone = False
        """Whether a function summed gradients so far that turn out to be whole."""
        found: dict[tuple[Any, int], State] = {}
        todo = [((node, 0), state) for node, state in roots]
        while todo:
            at, state = todo.pop()
            before = found.get(at, State.NONE)
            if (now := before | state) == before:
                continue
            found[at] = now
            if hasattr(at[0], "variable"):
                self.leaves[at[0]] = now
            else:
                todo += self._below(*at, now)

    def knows(self, parameters: Mapping[nn.Parameter, Any]) -> bool:
        """Whether any leaf is one of `parameters`."""
        return any(node.variable in parameters for node in self.leaves)

    def _below(self, node: Any, output: int, state: State) -> Iterator[tuple[tuple[Any, int], State]]:
        """Yield the inputs of a node, with the states of their gradients."""
        kind = getattr(type(node), "_forward_cls", None)
        edges = enumerate(node.next_functions)
        alone = getattr(getattr(node, "axis", None), "size", 0) == 1
        if kind is None or alone or not kind.__module__.startswith(COMMUNICATE):
            yield from ((edge, state) for _, edge in edges if edge[0] is not None)
        elif not hasattr(kind, "passes"):
            self.misused.append((node, state))
        else:
            takes, gives, undoes = kind.passes(node, output, state)
            self.undone |= undoes
            if state & ~takes:
                self.misused.append((node, state))
            else:
                yield from ((edge, gives[i]) for i, edge in edges if edge[0] is not None and i in gives)


def _leaves(node: Any) -> Iterator[Any]:
    """Yield the leaves below a node, the nearest first."""
    todo, seen = [node], {node}
    while todo:
        here = todo.pop(0)
        if hasattr(here, "variable"):
            yield here.variable
        below = [each for each, _ in here.next_functions if each is not None and each not in seen]
        seen.update(below)
        todo += below


# autograd's C++ objects hold the hooks, and Python's collector cannot see through them: so weak references


def _first(
    states: weakref.ref[GradientStates], parameter: weakref.ref[nn.Parameter], grads: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    known, mine = states(), parameter()
    return None if known is None or mine is None else known.first_gradient(mine, grads)


def _summed(states: weakref.ref[GradientStates], grads: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    known = states()
    return None if known is None else known._sum(grads)


_MIXED = (
    "{0}: used on activations of which each rank has a part, and on whole ones as well, so that the gradient "
    "is neither whole nor a part: use it in one of both places (before the column layer, or after the row "
    f'layer), or write mesh.tp_plan with "replicate" for the layers between; {VERIFY}'
)
_AS_WHOLE = (
    "{0} gives each rank a part of its outputs, and what follows (a loss, or a layer that is whole on every "
    f'rank) takes them for whole: "colwise_gather_output" for it, or "replicate", in mesh.tp_plan; {VERIFY}'
)
_AS_LOCAL = (
    "{0} gives every rank the whole output, and what follows works on a part of it without a layer that "
    'divides: its gradient would be a part, which nobody sums. Write mesh.tp_plan with "replicate" for what '
    f"follows; {VERIFY}"
)
_RECEIVED = (
    "what a pipeline stage receives is used in a divided layer and outside of it, so that its gradient is "
    f'neither whole nor a part: write mesh.tp_plan with "replicate" for the layers of that block; {VERIFY}'
)
_OPAQUE = (
    "a checkpoint with use_reentrant=True, or a compiled part, hides it. Use use_reentrant=False, "
    'memory.activations = "recompute" or compile = true'
)
