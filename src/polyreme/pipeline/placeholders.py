"""Placeholders, on a stage, for what other stages have: parameters, and outputs of blocks that are not run.

Invariant: a stand-in has shape, dtype and device of what it stands for, and no numbers that mean anything.
What floats of it requires grad, so that whatever is computed from it with gradients on can be told by its
graph. What a user asks of its numbers raises ModelError, and so does what a forward or a loss asks of another
stage's block. No communication."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models.tensor_access import touching


def placeholder(like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


class _Running(threading.local):
    """What runs in this thread. stages: how many, which may compute with stand-ins; done: the last one has
    run its last block, from where on nothing of earlier stages is right."""

    stages = 0
    done = False


RUNNING = _Running()


class StandIn(Tensor):
    """The class of what stands in for a parameter or buffer of another stage, `of` this name. in_block: it is
    of a block, which no other stage computes with."""

    of: str
    in_block: bool
    is_buffer: bool

    @classmethod
    def make(
        cls, like: Tensor, of: str, in_block: bool, device: torch.device, dtype: torch.dtype | None = None
    ) -> StandIn:
        """One for `like`, of which another stage has the numbers."""
        made = placeholder(like, device, (dtype if like.is_floating_point() else None) or like.dtype)
        made = made.as_subclass(cls)
        made.of, made.in_block, made.is_buffer = of, in_block, not isinstance(like, nn.Parameter)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (what := touching(func)) is not None:
            unseen = RUNNING.done and (not torch.is_grad_enabled() or what in ("detach", "data"))
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, StandIn) and (
                    not RUNNING.stages or unseen or (leaf.in_block and not leaf.is_buffer)
                ):
                    leaf.refuse(what)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(REFUSED.format(what, self.of))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"(of another stage, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("pickling (torch.save, copy.copy)")


INSTEAD = "use optimizer.weight_decay, or set mesh.pp = 1"
"""What to do in place of a penalty."""
REFUSED = (
    "{0} of {1}, which another pipeline stage has (mesh.pp > 1): engine.state_dict() gives every rank whole "
    "copies of all, and engine.save writes them; the parameters that this rank has are those of "
    "engine.module.parameters(). A penalty over weights, or a loss scaled by them, would be that of one "
    f"stage's part: {INSTEAD}"
)


@contextmanager
def shown(model: nn.Module, watches: bool) -> Iterator[None]:
    """Have `parameters()` and the like yield the stand-ins, too, so that what goes over all parameters meets
    one; and, if it `watches`, refuse parameters that were taken from the model before it was cut."""
    added = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, StandIn) and not value.is_buffer
    ]
    for module, name in added:
        module._parameters[name] = vars(module)[name]
    try:
        with _Taken() if watches else nullcontext():
            yield
    finally:
        for module, name in added:
            del module._parameters[name]


class _Taken(TorchFunctionMode):
    """Refuses what reads a parameter that another stage has, and that a user holds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what a user compiled has this in its graph, too
        if not torch.compiler.is_compiling() and (what := touching(func)) is not None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and is_marked(leaf):
                    raise ModelError(REFUSED.format(what, vars(leaf)["_of_another_stage"].partition(",")[0]))
        return func(*args, **(kwargs or {}))


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
