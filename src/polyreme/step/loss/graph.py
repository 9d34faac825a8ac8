"""Readings of a loss' autograd graph: the number that it is a mean over, and whether it is a sum or was
divided. Changes nothing.

Of a user's loss only its last operators are read; a model's own loss is followed to the means that it is put
together from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import BatchError, ModelError
from polyreme.models.tensor_access import touching
from polyreme.zero.parameter import engine_of

MEAN, SUM = 1, 2
"""torch's codes of loss reductions."""

BY_FREQUENCY = (
    "by which a row's gradient is divided by how often it was looked up in one micro-batch of one rank: the "
    "step would depend on how the batch is cut. Leave it out; weight rare rows in the loss, or give "
    "optimizer.groups a learning rate for the table"
)
"""The problem with `scale_grad_by_freq` where a batch is cut."""


def refuse_tables(module: nn.Module, micro_batches: int) -> None:
    """Raise ModelError for embedding tables with `max_norm`, whose lookups would change each rank's copy in
    its own way, and no master; and for `scale_grad_by_freq` where a batch is cut into `micro_batches`, on
    which the gradients would depend."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise ModelError(f"{name} has max_norm = {each.max_norm}, with which "
                             "lookups change its weight, on each rank another way: "
                             "leave max_norm out, and scale what "
                             "it returns in the model's forward")  # fmt: skip
        if getattr(each, "scale_grad_by_freq", False) is True and micro_batches > 1:
            raise ModelError(f"{name or 'the model'} has scale_grad_by_freq = True, {BY_FREQUENCY}")


def refuse_by_frequency(roots: Iterable[Tensor]) -> None:
    """Raise ModelError where a lookup anywhere behind `roots` has `scale_grad_by_freq`."""
    if any(getattr(node, "_saved_scale_grad_by_freq", False) for node in _behind(roots)):
        raise ModelError(f"the model looks rows up with scale_grad_by_freq=True, {BY_FREQUENCY}")


def untrained_parameters(loss: Tensor) -> list[nn.Parameter]:
    """Return the parameters that `loss` depends on and that no engine was given."""
    leaves = (getattr(node, "variable", None) for node in _behind([loss]))
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and engine_of(leaf) is None]


def computed_from(loss: Tensor, outputs: Iterable[Tensor]) -> bool:
    """Return whether the graph of `loss` contains one of `outputs`."""
    nodes = {output.grad_fn for output in outputs}
    return any(node in nodes for node in _behind([loss]))


def _behind(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Return all nodes of the graph behind `roots`."""
    waiting, seen = [root.grad_fn for root in roots], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [inner for inner, _ in node.next_functions]


def weight_of(loss: Tensor) -> float | None:
    """Return the number that a loss of torch's cross entropy or nll_loss (scaled, smoothed, or several of
    them) is a mean over: the class weights of all targets but ignored ones, summed. None for other losses,
    and where its terms are means over different numbers. Waits for the device."""
    means = list(_means(loss.grad_fn))
    if not any(name.startswith("NllLoss") for name, _ in means) or len({over for _, over in means}) > 1:
        return None
    return means[0][1]


def refuse_scaled(loss: Tensor, own: Any, microbatches: int, samples: int) -> None:
    """Raise BatchError for a loss that is no mean over its micro-batch: a torch loss with reduction="sum", a
    sum over all `samples`, or a mean (or the model's `own` loss) divided by the number of `microbatches` of a
    step."""
    node: Any = loss.grad_fn
    if _is_sum(node, samples):
        raise BatchError(
            "the loss is a sum over the samples, and "
            "engine.backward takes a mean and what it is the mean of: "
            "engine.backward(loss / n, weight=n); the step is the mean over all n"
        )
    inner = node.next_functions[0][0] if _name(node).startswith(_SCALES) else None
    if (
        inner is None
        or microbatches == 1
        or not isinstance(other := node._saved_other, Tensor)
        or other.dim()
    ):
        return
    by = float(other) if _name(node).startswith("DivBackward") else 1 / float(other or 1)
    is_mean = _name(inner).startswith("MeanBackward") or getattr(inner, "_saved_reduction", None) == MEAN
    if by == microbatches and (is_mean or inner is getattr(own, "grad_fn", None)):
        raise BatchError(
            f"the loss was divided by {microbatches}, the micro-batches "
            "of a step, as other loops need it: a step is the mean of its micro-batches already. Call "
            "backward of the mean loss as it is, or engine.backward(loss, weight=...) if that is meant"
        )


def describe_terms(loss: Tensor, weight: float) -> str | None:
    """Return in words what a loss is made of, if not all its terms are means over `weight` labels or samples
    of one size each; None where they are, or where autograd has no record of them. Waits for the device."""
    means = list(_means(loss.grad_fn))
    if all(over is not None and over > 0 and over % weight == 0 for _, over in means):
        return None
    return ", ".join(
        dict.fromkeys(
            f"{name} ({'no mean' if over is None else f'a mean over {over:g}'})" for name, over in means
        )
    )


_THROUGH = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "ToCopy",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
)
"""Operators that keep a mean a mean, or combine means."""
_SCALES = ("DivBackward", "MulBackward")
"""Prefixes of products' and quotients' names; there are losses whose names begin with "Mul"."""


def _means(loss: Any) -> Iterator[tuple[str, float | None]]:
    """Return the operators that a loss is put together from, each with the number that it is a mean over;
    None where it is no known mean."""
    waiting, seen = [loss] if loss is not None else [], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        name = _name(node).partition("Backward")[0]
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "_saved_reduction", None) == MEAN:
            yield (
                name,
                float(node._saved_total_weight if name.startswith("NllLoss") else node._saved_self.numel()),
            )
        elif name == "Mean":
            yield name, node._saved_self_sym_numel
        elif name == "Div" and (summed := _sum_in(node.next_functions[0][0])) is not None:
            # our loss of logits that are divided over the vocabulary
            ours = _name(summed.next_functions[0][0]).startswith("_CrossEntropy")
            yield "NllLoss" if ours else "Sum / n", float(node._saved_other)
        elif name in _THROUGH:
            waiting += [inner for inner, _ in node.next_functions if inner is not None]
        else:
            yield name, None


def _sum_in(node: Any) -> Any:
    """Return the sum that `node` is, perhaps times a number; None for anything else."""
    while (
        _name(node).startswith(("NegBackward", "MulBackward"))
        and len([inner for inner, _ in node.next_functions if inner is not None]) == 1
    ):
        node = next(inner for inner, _ in node.next_functions if inner is not None)
    return node if _name(node).startswith("SumBackward") else None


def refuse_penalty(
    loss: Tensor,
    outputs: Iterable[Tensor],
    parameters: Iterable[tuple[str, Tensor]],
    among: Sequence[str],
    is_last: bool = False,
) -> None:
    """Raise ModelError for a loss with a term that depends on `parameters` alone, and not on the `outputs` of
    the model (without any: on the input that a pipeline stage received), as each stage would have its own
    summand of the term.

    Counted are parameters of the modules `among`, of which other stages have some, and others of more than
    one number, unless the rank has the last stage alone (`is_last`) and so all of the term."""
    names = {
        id(p): name
        for name, p in parameters
        if name.startswith(tuple(among)) or (p.numel() > 1 and not is_last)
    }
    given = {tensor.grad_fn for tensor in outputs}
    found = _depending(loss, given, names)
    if not found[loss.grad_fn][0]:  # no stage before this one is trained
        return
    for node in [node for node, (depends, *_) in found.items() if depends and node not in given]:
        for each, output in [edge for edge in node.next_functions if edge[0] is not None]:
            depends, name, size = found[each]
            if not given and _size(node, 0) > 1 and _name(node).startswith(_SCALES):
                continue  # for a model's own loss all blocks are searched, and these scale activations
            # a parameter of one number may scale many; a term of the loss is added to one number
            if not depends and _size(each, output) == 1 and size > (_size(node, 0) > 1):
                raise ModelError(_PENALTY.format(name))


class Unrecorded(TorchFunctionMode):
    """Refuses a loss that reads parameters in a way that autograd does not record. names: of parameters, by
    id. outputs: the model's."""

    def __init__(self, names: Mapping[int, str], outputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._names, self._given = names, {tensor.grad_fn for tensor in outputs} - {None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # in compiled code this call is in the graph
        if not torch.compiler.is_compiling() and (what := touching(func)) is not None:
            takes = what in ("detach", "data", "item", "tolist", "__float__")
            for leaf in pytree.tree_leaves((args, kwargs)) if takes or not torch.is_grad_enabled() else ():
                name = self._names.get(id(leaf))
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    depends, of, _ = _depending(leaf, self._given, self._names)[leaf.grad_fn]
                    name = None if depends else of
                if name:
                    raise ModelError(_PENALTY.format(name))
        return func(*args, **(kwargs or {}))


def _depending(
    loss: Tensor, given: Collection[Any], names: Mapping[int, str]
) -> dict[Any, tuple[bool, str, int]]:
    """Return for each node of the graph down to `given`: whether it depends on these or on something other
    than a parameter; and the name and size of the largest parameter in `names` that it depends on."""
    found: dict[Any, tuple[bool, str, int]] = {}
    todo = [loss.grad_fn]
    while todo:  # visit a node after those below it
        node: Any = todo[-1]
        below = [each for each, _ in node.next_functions if each is not None and each not in found]
        if below and node not in found and node not in given:
            found[node] = (False, "", 0)  # visited again once those below it are done
            todo += below
            continue
        leaf = getattr(todo.pop(), "variable", None)
        edges = [found[each] for each, _ in node.next_functions if each in found]
        if leaf is not None:
            known = names.get(id(leaf), "")
            found[node] = not isinstance(leaf, nn.Parameter), known, leaf.numel() if known else 0
        else:
            depends = node in given or any(each[0] for each in edges)
            found[node] = depends, *max((each[1:] for each in edges), key=lambda of: of[1], default=("", 0))
    return found


def _size(node: Any, output: int) -> int:
    return math.prod(node._input_metadata[output].shape)


_PENALTY = (
    "the loss has a term of parameters alone, such as {0}: of a penalty over weights each stage of a "
    "pipeline (mesh.pp) has its own parameters' part, so that neither its value nor its gradients would be "
    "right: use optimizer.weight_decay, or set mesh.pp = 1"
)


def has_cross_entropy(loss: Tensor) -> bool:
    """Return whether torch's cross entropy is a term of the loss."""
    return any(name.startswith("NllLoss") for name, _ in _means(loss.grad_fn))


def _name(node: object) -> str:
    return type(node).__name__


def _is_sum(node: Any, samples: int) -> bool:
    if getattr(node, "_saved_reduction", None) == SUM:
        return True
    shape: Any = getattr(node, "_saved_self_sym_sizes", ()) if _name(node).startswith("SumBackward") else ()
    return (
        len(shape) > 0
        and shape[0] == samples > 1
        and not _name(node.next_functions[0][0]).startswith("Stack")
    )
