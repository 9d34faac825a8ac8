"""Follows divided activations, of which each rank has a shard along one dimension, through torch's functions:
along which dimension their results are divided, and which functions would take a shard for the whole.

Invariant: a refused function cannot be computed from a shard. A function that is not listed here is refused
where the divided dimension of a column layer's own outputs disappears; else its result is not followed any
more. No communication."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.tensor.ops import Divided, divided, mark_divided

REDUCTIONS = (
    "mean", "sum", "prod", "var", "std", "amax", "amin", "aminmax", "max", "min", "logsumexp", "nansum",
    "nanmean", "median", "nanmedian", "argmax", "argmin", "count_nonzero", "var_mean", "std_mean",
)  # fmt: skip
ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(REDUCTIONS, (1, None)),
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"), (1, None)
    ),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"), (2, None)),
    **dict.fromkeys(("sort", "argsort", "mode", "glu"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue", "diff"), (2, -1)),
    **dict.fromkeys(("logcumsumexp", "flip", "gather", "index_select", "scatter", "scatter_add"), (1, None)),
    "msort": (1, 0),
    "gumbel_softmax": (4, -1),
    **dict.fromkeys(("roll", "quantile", "take_along_dim", "renorm"), (2, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
}
"""Operations along a dimension: the position of the argument that names it, and its default (None: all)."""
MOVES = {
    "view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "transpose", "swapaxes",
    "t", "swapdims", "permute", "movedim", "moveaxis", "T", "mT", "H", "mH", "adjoint", "squeeze",
    "unsqueeze", "expand", "expand_as", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit",
    "unbind", "narrow", "select", "__getitem__", "diagonal",
}  # fmt: skip
"""Functions that rearrange numbers, or select some of them."""
RESHAPES = ("view", "reshape", "unflatten", "view_as", "reshape_as")
PRODUCTS = {
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "linear", "tensordot", "inner", "dot",
    "vdot",
}  # fmt: skip
DISTANCES = ("cdist", "pairwise_distance", "dist", "cosine_similarity")
LIKE = ("type_as", "new_tensor", "any", "all", "to")
"""Functions that only use a tensor's dtype or device, or look for numbers that are not finite."""


def follow(
    func: Callable[..., Any],
    name: str,
    shard: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
) -> bool:
    """Mark the divided tensors in the `result` of a function of the divided tensor `shard`. Returns whether
    the function would take the shard for the whole."""
    mark = divided(shard)
    first = args[0] if args else kwargs.get("input")
    results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if (shard is first or name in DISTANCES) and _is_along(name, shard, mark, args, kwargs):
        return True
    if name in RESHAPES and shard is first and _miscounts(shard, mark, args, kwargs, results):
        return True
    if not mark.followed:
        for each in results:
            if each.shape == shard.shape:
                mark_divided(each, mark)
        return False
    if name in PRODUCTS or name == "einsum":
        return _contracts(name, shard, mark, args) or _keep(shard, mark, results, True)
    if name in ("cat", "concat", "concatenate"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return dim % shard.dim() == mark.dim or _keep(shard, mark, results, True)
    if name in MOVES and shard is first:
        return _move(func, shard, mark, args, kwargs, results, name in RESHAPES)
    return _keep(shard, mark, results, shard is not first or name in LIKE)


def _miscounts(
    shard: Tensor, mark: Divided, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
) -> bool:
    """Whether a reshape gives a fixed number of pieces along the last dimension, and leaves their size to
    torch: the number is that of all ranks, so that the pieces would be too small. Not where they keep whole
    units."""
    given = [each for each in pytree.tree_leaves((args[1:], kwargs)) if isinstance(each, int)]
    pieces: list[int] = []
    while math.prod(pieces) < shard.shape[-1] and len(pieces) < results[0].dim():
        pieces.insert(0, results[0].shape[-1 - len(pieces)])
    if mark.dim != shard.dim() - 1 or mark.split or -1 not in given[len(given) + 1 - len(pieces) :]:
        return False
    return not mark.unit or math.prod(pieces[1:]) % mark.unit > 0


def _keep(shard: Tensor, mark: Divided, results: Sequence[Tensor], elsewhere: bool) -> bool:
    """Mark the results of an operation that is elementwise, or works along other dimensions. Returns whether
    the divided dimension disappeared. elsewhere: it may, as the result is of another tensor."""
    from_end = shard.dim() - mark.dim
    for each in results:
        if each.dim() >= from_end and each.shape[-from_end] == shard.shape[mark.dim]:
            if each is not shard:
                mark_divided(each, replace(mark, dim=each.dim() - from_end))
        elif not elsewhere and not mark.split and each.is_floating_point():
            return True
    return False


def _move(
    func: Callable[..., Any],
    shard: Tensor,
    mark: Divided,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
    reshapes: bool,
) -> bool:
    """Run the function on indices along the divided dimension, and mark its results by where those go.
    Returns whether it selects only some of them."""
    size = shard.shape[mark.dim]
    places = (
        torch.arange(size, device=shard.device)
        .view(-1, *[1] * (shard.dim() - mark.dim - 1))
        .expand(shard.shape)
    )
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    try:
        found = [
            leaf for leaf in pytree.tree_leaves(func(places, *args[1:], **rest)) if isinstance(leaf, Tensor)
        ]
    except (RuntimeError, TypeError):
        return False
    for each, at in zip(results, found, strict=True):
        if not at.numel():
            continue
        seen = torch.zeros(size, dtype=torch.bool, device=at.device)
        seen[at.reshape(-1)] = True
        if not seen.all():
            return True
        _mark_moved(each, at, mark, made=reshapes and at.dim() > shard.dim())
    return False


def _mark_moved(moved: Tensor, at: Tensor, mark: Divided, made: bool) -> None:
    """Mark `moved` where its indices along the divided dimension, `at`, are still in order along one. made: a
    reshape may have split the dimension."""
    first = [at.select(i, 0).unsqueeze(i) for i in range(at.dim())]
    varying = [i for i in range(at.dim()) if bool((at != first[i]).any())]
    if not varying:
        return
    dim = varying[0]
    line = at[tuple(slice(None) if i == dim else 0 for i in range(at.dim()))]
    split = len(varying) > 1
    unclear = made and not split  # one head on each rank looks like no split
    if bool((line[1:] >= line[:-1]).all()) and not unclear:
        mark_divided(moved, replace(mark, dim=dim, split=mark.split or split))


def _is_along(
    name: str, shard: Tensor, mark: Divided, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function reduces, normalises or orders along the divided dimension."""
    from_end = shard.dim() - mark.dim
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return not mark.followed or from_end <= len(shape)
    if (at := ALONG.get(name)) is not None:
        return any(dim % shard.dim() == mark.dim for dim in _dims(name, *at, shard, args, kwargs))
    if not mark.followed:
        return False
    if pools := re.search(r"(pool|instance_norm)(\d)?", name):
        return from_end <= int(pools[2] or shard.dim() - 2)
    if name in ("group_norm", "local_response_norm", "channel_shuffle"):
        return mark.dim == 1
    if name.startswith("linalg_"):
        return from_end <= 2
    return from_end == 1 and (name in (*DISTANCES, "interpolate") or name.startswith("fft_"))


def _dims(
    name: str, at: int, default: int | None, shard: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[int]:
    given = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), None)
    if given is None and len(args) > at:
        given = args[at:] if name == "flip" else args[at]
    given = default if given is None else given
    if isinstance(given, Tensor) or isinstance(kwargs.get("other"), Tensor):  # max or min of two tensors
        return
    if given is None or isinstance(given, bool):
        yield from range(shard.dim())
    else:
        yield from (dim for dim in pytree.tree_leaves(given) if isinstance(dim, int))


def _contracts(name: str, shard: Tensor, mark: Divided, args: Sequence[Any]) -> bool:
    """Whether a product sums over the divided dimension."""
    if name == "einsum":
        operands = pytree.tree_leaves(args[1:])
        inputs, _, output = str(args[0]).replace(" ", "").replace("...", "").partition("->")
        mine = [letters for letters, each in zip(inputs.split(","), operands, strict=False) if each is shard]
        back = shard.dim() - mark.dim
        return bool(output or "->" in str(args[0])) and any(
            back <= len(letters) and letters[-back] not in output for letters in mine
        )
    if name == "tensordot":
        return shard is args[0] and mark.dim == shard.dim() - 1
    last = mark.dim == shard.dim() - 1
    second = (
        last
        if name in ("inner", "dot", "vdot", "linear") or shard.dim() == 1
        else mark.dim == shard.dim() - 2
    )
    return (shard is args[0] and last) or (len(args) > 1 and shard is args[1] and second)
