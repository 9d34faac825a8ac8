"""The styles in which a module can be divided over a tensor-parallel axis: each cuts the module's parameters,
and replaces its forward.

A module stays the object that it is and keeps the names of its parameters; its parameters get local shapes
and its `forward` is replaced."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from polyreme.distributed.mesh import Axis
from polyreme.errors import VERIFY, ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.models.tensor_access import sees_gradients
from polyreme.pipeline.weight_gradients import expected
from polyreme.tensor import ops
from polyreme.tensor.families import LINEAR
from polyreme.tensor.rng import Fork
from polyreme.tensor.vocab_parallel_loss import VocabParallelLogits


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer: torch's, or GPT-2's."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`, a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def has_own_forward(module: nn.Module) -> bool:
    """Whether its class is a subclass of nn.Linear that computes something else."""
    kind = type(module)
    return (
        isinstance(module, nn.Linear)
        and kind.forward is not nn.Linear.forward
        and kind.__name__ not in LINEAR
    )


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    shape: Sequence[int] = module.weight.shape  # type: ignore[assignment]
    return (shape[0], shape[1]) if is_transposed(module) else (shape[1], shape[0])


@dataclass
class Site:
    """The axis over which modules are divided, and the random state of split regions (None where they have no
    dropout, or whole blocks are forked)."""

    axis: Axis
    fork: Fork | None


class Style(Protocol):
    """A way to divide a module over an axis."""

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        """Return the cut of each of the module's own parameters over `ways` ranks, by its name in the module.
        Raises ValueError where it cannot be divided."""
        ...


@dataclass(frozen=True)
class Column:
    """A linear layer of which each rank has a slice of the outputs.

    sections: of each layer packed into it, (outputs, number of units such as heads, which are not divided);
    () for a single one that is divided evenly.
    gathered: the outputs are gathered, so that each rank gets all of them.
    """

    sections: tuple[tuple[int, int], ...] = ()
    gathered: bool = False

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        outputs = linear_sizes(module)[1]
        sections = self.sections or ((outputs, ways),)
        if sum(size for size, _ in sections) != outputs:
            raise ValueError(f"its {outputs} outputs are not {' + '.join(str(size) for size, _ in sections)}")
        return {
            name: Cut.packed(p.shape, 1 if is_transposed(module) and p.dim() == 2 else 0, ways, sections)
            for name, p in module.named_parameters(recurse=False)
        }


@dataclass(frozen=True)
class Row:
    """A linear layer of which each rank has a slice of the inputs; its outputs are summed. split_input: its
    input comes whole, and is split first."""

    split_input: bool = False

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        return {
            name: Cut.even(p.shape, 0 if is_transposed(module) else 1, ways)
            if p.dim() == 2
            else Cut.whole(p.shape, ways)
            for name, p in module.named_parameters(recurse=False)
        }


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, or the linear layer of a head, of which each rank has a slice of the vocabulary (shorter
    ones are padded)."""

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        return {name: Cut.padded(p.shape, 0, ways) for name, p in module.named_parameters(recurse=False)}


@dataclass(frozen=True)
class EmbeddingColumns:
    """An embedding of which each rank has a slice of the width, such as one number for each attention
    head."""

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        return {name: Cut.even(p.shape, 1, ways) for name, p in module.named_parameters(recurse=False)}


@dataclass(frozen=True)
class Replicate:
    """A module that is whole on every rank. summed: it is used in a split region, so that its gradient is the
    sum of the ranks' gradients."""

    summed: bool = False

    def cuts(self, module: nn.Module, ways: int) -> dict[str, Cut]:
        return {name: Cut.whole(p.shape, ways) for name, p in module.named_parameters()}


class Columns:
    """Column layers that a module calls with the same input. All are computed when the first is called, so
    that backward sums one gradient.

    Layers that turn out to be called with different inputs (cross-attention) are computed one by one from the
    next `settle` on; not earlier, so that a recomputed forward does the same as the first."""

    def __init__(
        self, site: Site, modules: Sequence[nn.Module], styles: Sequence[Column], gathers: bool
    ) -> None:
        """gathers: the input is this rank's slice of the sequence, and is gathered here."""
        self._site, self._modules, self._styles, self._gathers = site, modules, styles, gathers
        self._computes_all = self._same_inputs = True
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        self._entered: tuple[Tensor, Tensor] | None = None
        for index, module in enumerate(modules):
            module.forward = functools.partial(self._call, index)
            _resize(module)

    def settle(self) -> None:
        """Drop outputs that are left of the last forward; called before each forward of the model."""
        self._computes_all = self._same_inputs
        self._input, self._outputs = None, {}

    def enter(self, full: Tensor, shard: Tensor) -> None:
        """Note that `full` was gathered from this rank's `shard` of the sequence."""
        self._entered = full, shard

    def leave(self) -> None:
        """Forget the input noted by `enter`."""
        self._entered = None

    def _call(self, index: int, x: Tensor) -> Tensor:
        if self._input is not x or index not in self._outputs:
            self._same_inputs &= not self._outputs
            members = range(len(self._modules)) if self._computes_all else [index]
            self._input, self._outputs = x, dict(zip(members, self._compute(x, members), strict=True))
        out = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        if self._styles[index].gathered:
            return ops.gather(self._site.axis, out, -1)
        if self._site.fork is not None and self._modules[index].training:
            self._site.fork.enter(out.device)
        return out

    def _compute(self, x: Tensor, members: Sequence[int]) -> tuple[Tensor, ...]:
        modules = [self._modules[i] for i in members]
        weights, biases = [m.weight for m in modules], [m.bias for m in modules]
        shapes = [ops.Shape(is_transposed(m)) for m in modules]
        sequence, full = self._gathers, None
        if self._entered is not None and self._entered[0] is x:
            full, x = self._entered
            sequence = True
        found = ops.columns(self._site.axis, x, weights, biases, shapes, sequence, full)  # type: ignore[arg-type]
        for i, each in zip(members, found, strict=True):
            if ops.is_divided(each):
                sections = self._styles[i].sections
                unit = math.gcd(*(size // units for size, units in sections))
                ops.mark_divided(each, ops.Divided(each.dim() - 1, followed=not sections, unit=unit))
        return found


def install_row(site: Site, module: nn.Module, style: Row, sequence: bool) -> None:
    """Replace the forward of a row layer. sequence: each rank gets its slice of the output's sequence."""
    shape = ops.Shape(is_transposed(module))

    def forward(x: Tensor) -> Tensor:
        if site.fork is not None:
            site.fork.leave()
        if style.split_input:
            x = ops.split(site.axis, x, -1)
        return ops.row(site.axis, x, module.weight, module.bias, shape, sequence)  # type: ignore[arg-type]

    module.forward = forward
    _resize(module)


def install_dropout(site: Site, module: nn.Module, divided: bool) -> None:
    """Replace the forward of a dropout before an adapter's low rank, inside a split region. divided: its
    input is divided, and each rank draws for itself; else all ranks drop the same."""
    forward = module.forward

    def wrapped(x: Tensor) -> Tensor:
        if site.fork is not None and module.training:
            site.fork.enter(x.device) if divided else site.fork.leave()
        return forward(x)

    module.forward = wrapped


def install_head(site: Site, module: nn.Module, cut: Cut, around: Iterable[nn.Module] = ()) -> None:
    """Replace the forward of a head by one that returns `VocabParallelLogits`; or the whole logits, where it
    or a module `around` it has a user's hook that sees gradients, which would get this rank's slice alone."""
    hooked = (module, *around)
    used = cut.used(site.axis.rank)
    shape = ops.Shape(used=None if used == cut.length else used)

    def forward(x: Tensor) -> Tensor:
        (out,) = ops.columns(site.axis, x, [module.weight], [module.bias], [shape])  # type: ignore[list-item]
        logits = VocabParallelLogits.of(out, site.axis, cut)
        return logits.whole() if sees_gradients(hooked) else logits

    module.forward = forward  # its sizes stay those of the logits that it seems to return


def put_off_weights(model: nn.Module) -> None:
    """Replace the forward of linear layers that are not divided, so that a backward can put off the gradients
    of their weights (`weight_gradients`). Classes with a forward of their own are left as they are."""
    alone = Axis("tp")
    for module in model.modules():
        plain = type(module).forward is nn.Linear.forward or is_transposed(module)
        if not plain or "forward" in vars(module):
            continue
        module.forward = functools.partial(
            _now_or_later, alone, module, ops.Shape(is_transposed(module)), module.forward
        )


def _now_or_later(
    alone: Axis, module: nn.Module, shape: ops.Shape, forward: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    if not expected():
        return forward(x)
    return ops.columns(alone, x, [module.weight], [module.bias], [shape])[0]  # type: ignore[list-item]


def install_embedding(site: Site, module: nn.Embedding, cut: Cut) -> None:
    """Replace the forward of an embedding: each rank looks up the rows that it has, and the results are
    summed, with zeros for the others' rows. A subclass's own forward is applied to the rows.

    Raises ModelError for options of nn.Embedding that need rows of other ranks."""
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ModelError("an embedding with max_norm, sparse or scale_grad_by_freq "
                         "cannot be divided by its vocabulary: turn them off, "
                         f'or place it whole on every rank with "replicate"; {VERIFY}')  # fmt: skip
    (start, stop), size = cut.pieces[site.axis.rank][0], cut.shape[0]
    look_up = module.forward
    padding = module.padding_idx
    module.padding_idx = padding - start if padding is not None and start <= padding < stop else None

    def forward(ids: Tensor) -> Tensor:
        ops.refuse_outside(ids, size, f"token {{}} is outside of the vocabulary of {size}")
        elsewhere = (ids < start) | (ids >= stop)
        rows = look_up((ids - start).masked_fill_(elsewhere, 0))
        return ops.reduce(site.axis, rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    module.forward = forward  # type: ignore[assignment]
    module.num_embeddings = stop - start


def install_summed(axis: Axis, block: nn.Module, held: Sequence[tuple[nn.Module, str, ops.Summed]]) -> None:
    """Replace parameters, while `block` runs, by tensors whose gradients are summed over the axis, all in one
    all-reduce. held: each as (module, name in it, its sum)."""
    forward = block.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        here = [(each[0]._parameters.get(each[1]), each) for each in held]  # None for those of other stages
        trained = [each for parameter, each in here if parameter is not None and parameter.requires_grad]
        parameters = [module.get_parameter(name) for module, name, _ in trained]
        summed = ops.sum_gradients(axis, parameters, [each for _, _, each in trained])
        try:
            for (module, name, _), tensor in zip(trained, summed, strict=True):
                module._parameters[name] = tensor  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            for (module, name, _), parameter in zip(trained, parameters, strict=True):
                module._parameters[name] = parameter

    block.forward = wrapped


def install_argument(module: nn.Module, change: Callable[[Tensor], Tensor], name: str | None = None) -> None:
    """Pass the argument `name` of the module's forward through `change` where it is a tensor. Without a name:
    its first argument, which must be a tensor."""
    forward = module.forward
    names = list(inspect.signature(forward).parameters)
    position = names.index(name) if name is not None else 0
    key = names[position]

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get(key)
        if not isinstance(given, Tensor):
            if name is None:
                raise ModelError(f"{type(module).__name__} was called without hidden "
                                 f"states as its first argument ({key}), whose sequence "
                                 "was to be split: set mesh.sequence_parallel = false")  # fmt: skip
        elif position < len(args):
            args = (*args[:position], change(given), *args[position + 1 :])
        else:
            kwargs[key] = change(given)
        return forward(*args, **kwargs)

    module.forward = wrapped


def _resize(module: nn.Module) -> None:
    """Set a linear layer's sizes to those of its weight, as they are printed."""
    inputs, outputs = linear_sizes(module)
    names = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    for name, size in zip(names, (inputs, outputs), strict=True):
        setattr(module, name, size)
