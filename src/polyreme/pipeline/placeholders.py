"""Placeholders, on a stage, for what other stages have: parameters, and outputs of blocks that are not run.

Invariant: a stand-in has shape, dtype and device of what it stands for, and no numbers that mean anything.
What floats of it requires grad, so that whatever is computed from it with gradients on can be told by its
graph. What has no record in a graph is a stand-in itself. What a user asks of its numbers raises ModelError,
and so does what a forward asks without a record once it is at the stage's own blocks, or a loss. No
communication."""

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
    """A tensor of the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


class _Running(threading.local):
    """What runs in this thread. stages: how many, which may compute with stand-ins; counts: one of them has
    come to its own blocks, from where on nothing of other stages is right."""

    stages = 0
    counts = False


RUNNING = _Running()


class StandIn(Tensor):
    """The class of what stands in for a parameter or buffer of another stage, `of` this name, and of what is
    computed from one where autograd has no record of it. forbidden: no stage computes with it. recorded:
    autograd tells what is computed from it. trained: that stage trains it."""

    of: str
    forbidden: bool
    recorded: bool
    is_buffer: bool
    trained: bool

    @classmethod
    def make(
        cls, like: Tensor, of: str, forbidden: bool, device: torch.device, dtype: torch.dtype | None = None
    ) -> StandIn:
        """One for `like`, of which another stage has the numbers."""
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
    """Make `made`, which has no record in a graph of being `of` another stage, a stand-in."""
    made.__class__ = StandIn
    vars(made).update(of=of, forbidden=forbidden, recorded=False, is_buffer=not forbidden)


INSTEAD = "use optimizer.weight_decay, or set mesh.pp = 1"
"""What to do in place of a penalty."""
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
"""Where a model has stand-ins for parameters: a module's parameters, and a name among them."""


def absent(model: nn.Module) -> Absent:
    """What `shown` shows of `model`."""
    return [
        (module._parameters, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, StandIn) and not value.is_buffer
    ]


@contextmanager
def shown(found: Absent) -> Iterator[None]:
    """Have `parameters()` and the like yield the stand-ins, too, so that what goes over all parameters counts
    them, or meets one."""
    for parameters, name, value in found:
        parameters[name] = value
    try:
        yield
    finally:
        for parameters, name, _ in found:
            del parameters[name]


def mark(tensor: Tensor, what: str) -> None:
    """Make `tensor` one that `foreign` finds in what is computed from it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_()
        tensor._of_another_stage = what  # type: ignore[attr-defined]


def is_marked(value: object) -> bool:
    """Whether it is a tensor that `mark` marked."""
    return isinstance(value, Tensor) and hasattr(value, "_of_another_stage")


def output_of(name: str, tensor: Tensor) -> Tensor:
    """A placeholder for an output of `name`, which this stage does not run."""
    tensor = tensor.detach()
    mark(tensor, f"an output of {name}, which another stage runs")
    return Alias.apply(tensor)


def foreign(outputs: Iterable[Tensor]) -> str | None:
    """What of another stage `outputs` were computed from."""
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
    """The same numbers in a tensor that is neither a leaf nor a view, so that a model may write to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
