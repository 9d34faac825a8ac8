"""Placeholders on a stage for the parameters and block outputs of other stages.

Invariant: a stand-in has the shape, dtype and device of the tensor that it stands for, and meaningless
numbers. Floating-point stand-ins require grad, so that autograd's graph shows whatever is computed from them.
A result without a record in the graph is a stand-in itself. Reading the numbers of a stand-in raises
ModelError outside of a stage's forward; so does, inside, computing with one without a record once the stage's
own blocks, or a loss, are reached. No communication."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models import tensor_access


def placeholder(like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


class _Running(threading.local):
    """The stages that run in this thread. stages: their number; inside of them stand-ins may be computed
    with.
    counts: one of them has reached its own blocks, after which no value of other stages may be used."""

    stages = 0
    counts = False


RUNNING = _Running()


class StandIn(Tensor):
    """A stand-in for a parameter or buffer of another stage, or a tensor computed from one without a record
    in autograd's graph. of: the name of that parameter or buffer. forbidden: no forward may use it. recorded:
    autograd's graph shows what is computed from it. trained: its stage trains it."""

    of: str
    forbidden: bool
    recorded: bool
    is_buffer: bool
    trained: bool

    @classmethod
    def make(
        cls, like: Tensor, of: str, forbidden: bool, device: torch.device, dtype: torch.dtype | None = None
    ) -> StandIn:
        """Make a stand-in for `like`, whose numbers another stage has."""
        made = placeholder(like, device, (dtype if like.is_floating_point() else None) or like.dtype)
        made = made.as_subclass(cls)
        made.is_buffer, made.trained = not isinstance(like, nn.Parameter), like.requires_grad
        made.of, made.forbidden = of, forbidden and not made.is_buffer
        made.recorded = made.is_floating_point() or made.is_complex()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what, leaves = tensor_access.read(func, args, kwargs)
        read = [leaf for leaf in leaves if isinstance(leaf, StandIn)]
        graph = torch.is_grad_enabled() and what not in ("detach", "data")
        for leaf in read:
            if not RUNNING.stages or leaf.forbidden or (RUNNING.counts and not (graph and leaf.recorded)):
                leaf.refuse(str(what))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not read:
                return result
            source = next((leaf for leaf in read if not leaf.recorded), read[0])
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor) and not (source.recorded and made.requires_grad):
                    follow(made, source.of)
            return result

    def refuse(self, what: str) -> NoReturn:
        """Raise ModelError for the function `what`."""
        if RUNNING.counts:
            raise ModelError(f"a stage {COMPUTES.format(f'{what} of {self.of}, which another one has')}")
        raise ModelError(REFUSED.format(what, self.of))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"(of another stage, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("pickling (torch.save, copy.copy)")


def follow(made: Tensor, of: str, forbidden: bool = False) -> None:
    """Turn the tensor `made` into a stand-in without a record in a graph; `of`: the name that it comes
    from."""
    made.__class__ = StandIn
    vars(made).update(of=of, forbidden=forbidden, recorded=False, is_buffer=not forbidden)


INSTEAD = "use optimizer.weight_decay, or set mesh.pp = 1"
"""The way out for a penalty over weights."""
COMPUTES = (
    "computes with {0}: only the blocks' first argument is sent from stage to stage. Cut the model elsewhere "
    "(pipeline.blocks), or have the blocks pass all they need in that argument, and do x + block(x) "
    "themselves; hold a parameter that is used behind the blocks alone (a temperature, logit_scale) in a "
    "small nn.Module of its own, made after their list and called behind them; for a penalty over weights "
    f"{INSTEAD}"
)
REFUSED = (
    "{0} of {1}, which another pipeline stage has (mesh.pp > 1): engine.state_dict() gives every rank whole "
    "copies of all, and engine.save writes them; the parameters that this rank has are those of "
    "engine.module.parameters(). A penalty over weights, or a loss scaled by them, would be that of one "
    f"stage's part: {INSTEAD}"
)


Absent = list[tuple[dict[str, Any], str, StandIn]]
"""The stand-ins for parameters in a model: each with its module's dict of parameters, and its name there."""


def absent(model: nn.Module) -> Absent:
    """List the stand-ins for parameters in `model`."""
    return [
        (module._parameters, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, StandIn) and not value.is_buffer
    ]


@contextmanager
def shown(found: Absent) -> Iterator[None]:
    """Make `parameters()` and the like yield the stand-ins, too, inside of the context, so that code over all
    parameters counts them, or is refused."""
    for parameters, name, value in found:
        parameters[name] = value
    try:
        yield
    finally:
        for parameters, name, _ in found:
            del parameters[name]


def mark(tensor: Tensor, what: str) -> None:
    """Mark `tensor`, so that `foreign` finds tensors that are computed from it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_()
        tensor._of_another_stage = what  # type: ignore[attr-defined]


def is_marked(value: object) -> bool:
    """Whether `value` is a tensor that `mark` marked."""
    return isinstance(value, Tensor) and hasattr(value, "_of_another_stage")


def output_of(name: str, tensor: Tensor) -> Tensor:
    """Return a marked placeholder for an output of `name`, which this stage does not run."""
    tensor = tensor.detach()
    mark(tensor, f"an output of {name}, which another stage runs")
    return Alias.apply(tensor)


def foreign(outputs: Iterable[Tensor]) -> str | None:
    """Say which tensor of another stage `outputs` were computed from; None if from none."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        if (what := getattr(getattr(node, "variable", None), "_of_another_stage", None)) is not None:
            return what
        fresh = {function for function, _ in node.next_functions if function is not None} - known
        known |= fresh
        todo += fresh
    return None


class Alias(torch.autograd.Function):
    """Identity in the same memory. The result is neither a leaf nor a view, so that a model may write to
    it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
