"""Runs a model's own forward with the calls of its blocks redirected to a function.

Invariant: afterwards, also after an error, the model is as it was; meanwhile its module tree has the same
names. No communication."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models.huggingface import tensors_in
from polyreme.pipeline.placeholders import StandIn, output_of

ENTERS = "_enters"
"""The attribute of a block that changes its first argument's shape: the function by which it does."""
Through = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""A function of (n, block, args, kwargs), called in place of the n-th block."""


class _Intercept(nn.Module):
    """A module in a block's place during a stage's forward, so that a block of another stage is not called
    and its hooks do not run."""

    def __init__(
        self,
        block: nn.Module,
        through: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
        absent: str | None,
    ) -> None:
        """absent: the block's name, if it is of another stage."""
        super().__init__()
        self.__dict__ |= {"_block": block, "_through": through, "_absent": absent}  # not as a child

    @property
    def _parameters(self) -> dict[str, Any]:
        """The block's parameters, by their names in it, so that loops over all parameters find them;
        stand-ins for those of other stages."""
        block, absent = self.__dict__["_block"], self.__dict__["_absent"]
        found = dict(block.named_parameters(remove_duplicate=False))
        if absent is None:
            return found
        return {
            name: p
            if isinstance(p, StandIn)
            else StandIn.make(p, f"{absent}.{name}", True, p.device).requires_grad_(p.requires_grad)
            for name, p in found.items()
        }

    @_parameters.setter
    def _parameters(self, value: object) -> None:
        """Ignore the empty dict that nn.Module assigns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


class _InterceptOfSeveral(_Intercept):
    """A module in the place of a block with numbered children (nn.Sequential): Python looks up these methods
    on classes only."""

    def __getitem__(self, key: Any) -> Any:
        return self._block[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._block)

    def __len__(self) -> int:
        return len(self._block)


@contextmanager
def wrapped(model: nn.Module, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Replace the model's forward, inside of the context, by `wrapper(its forward, ...)`; its hooks still
    run."""
    own = vars(model).get("forward")
    model.forward = partial(wrapper, model.forward)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


Intercepts = dict[tuple[int, nn.Module], _Intercept]
"""The modules in the blocks' places, by place and block."""


@contextmanager
def intercepted(
    model: nn.Module,
    owner: str,
    through: Through,
    made: Intercepts | None = None,
    mine: Container[int] | None = None,
) -> Iterator[None]:
    """Redirect, inside of the context, calls of the n-th block to `through(n, block, args, kwargs)`. made:
    keeps the modules for the next time, with the same `through`. mine: numbers of the blocks that a stage
    has; all by default."""
    modules = model.get_submodule(owner)._modules
    blocks = {name: block for name, block in modules.items() if block is not None}
    made = {} if made is None else made
    try:
        for key, name in zip(enumerate(blocks.values()), blocks, strict=True):
            if key not in made:
                absent = None if mine is None or key[0] in mine else f"{owner}.{name}".strip(".")
                kind = _InterceptOfSeveral if hasattr(key[1], "__getitem__") else _Intercept
                made[key] = kind(key[1], partial(through, key[0]), absent)
            made[key].__dict__["training"] = key[1].training
            modules[name] = made[key]
        yield
    finally:
        modules.update(blocks)


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Any]:
    """Find the argument that goes from block to block: the first with a floating-point tensor, else the
    first. Returns its position or name, and its value."""
    found: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if not found:
        raise ModelError("a block is called without arguments: a pipeline cannot send it anything")
    return next(
        ((key, value) for key, value in found if any(t.is_floating_point() for t in tensors_in(value))),
        found[0],
    )


# ---- the outputs of blocks


class Leaf(Enum):
    """The kind of one value in a block's output: its new hidden states, another tensor, or anything else, for
    which None is good enough."""

    HIDDEN = 1
    TENSOR = 2
    NONE = 3


@dataclass(frozen=True)
class Answer:
    """The form of a block's output that is not just its new hidden states: `leaves` in the structure
    `spec`."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]


def answer_like(output: Any) -> Answer | None:
    """The form of the block output `output`; None if it is just hidden states."""
    leaves, spec = pytree.tree_flatten(output)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors or isinstance(output, Tensor):
        return None
    kinds = (
        Leaf.HIDDEN if i == tensors[0] else Leaf.TENSOR if i in tensors else Leaf.NONE
        for i in range(len(leaves))
    )
    return Answer(spec, tuple(kinds))


def answer_with(answer: Answer | None, value: Any) -> Any:
    """Return a block output of this form with `value` as hidden states, and placeholders for the rest."""
    if answer is None:
        return value
    unknown = {Leaf.TENSOR: output_of("a block beside its hidden states", torch.zeros(())), Leaf.NONE: None}
    return pytree.tree_unflatten(
        [value if leaf is Leaf.HIDDEN else unknown[leaf] for leaf in answer.leaves], answer.spec
    )
