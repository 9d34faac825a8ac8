"""Divides a model over a tensor-parallel axis, in place: cuts each parameter to this rank's slice, and
replaces the forward of each planned module.

Invariant: names of parameters and modules do not change, and losses and joined gradients are those of the
undivided model. Works on real models (each rank holds the same one) and on the meta device, where the
returned Cuts tell how to make this rank's slice from the whole tensor."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.models.huggingface import find_blocks, tensors_in
from polyreme.pipeline.intercept import ENTERS
from polyreme.tensor import ops
from polyreme.tensor.layers import (
    Column,
    Columns,
    Replicate,
    Row,
    Site,
    Vocabulary,
    install_argument,
    install_dropout,
    install_embedding,
    install_head,
    install_row,
    install_summed,
)
from polyreme.tensor.plan import Heads, TensorPlan
from polyreme.tensor.rng import Fork


def parallelize(
    model: nn.Module, axis: Axis, plan: TensorPlan, sequence_parallel: bool = False
) -> dict[str, Cut]:
    """Cut `model` to this rank's slices of it, by the result of `plan(model, axis.size, ...)`.

    Returns the cut of each parameter, by each of its names (tied ones have several). Call it before the
    parameters move to another memory, and before forwards are wrapped (recomputed, compiled).
    sequence_parallel: split activations between blocks along the sequence. Raises ModelError for tied
    parameters that would be cut in two ways."""
    cuts = _cuts(model, axis.size, plan)
    if axis.size == 1:
        return cuts
    modules = dict(model.named_modules())
    blocks = find_blocks(model)
    for name, parameter in model.named_parameters():  # tied ones once
        if not cuts[name].is_whole:
            parameter.data = cuts[name].split(parameter.data, axis.rank)
    fork = Fork(axis) if _is_random(model) else None
    site = Site(
        axis, None if sequence_parallel else fork
    )  # whole blocks are forked where the sequence is split
    for name, heads in plan.heads.items():
        _set_heads(modules[name], heads, axis.size)
        for argument in plan.by_head:
            install_argument(modules[name], functools.partial(_own_heads, axis, heads.query), argument)
    all_columns = []
    for parent, names in plan.siblings.items():
        styles = [plan.styles[name] for name in names]
        columns = Columns(
            site,
            [modules[name] for name in names],
            styles,  # type: ignore[arg-type]
            sequence_parallel and parent in blocks,
        )
        all_columns.append(columns)
        if sequence_parallel and parent not in blocks and parent not in names and _within(parent, blocks):
            _gather_at_entry(modules[parent], axis, columns)
    for name, style in plan.styles.items():
        if isinstance(style, Row):
            install_row(site, modules[name], style, sequence_parallel and _within(name, blocks))
        elif isinstance(style, Vocabulary) and isinstance(embedding := modules[name], nn.Embedding):
            install_embedding(site, embedding, cuts[f"{name}.weight"])
        elif isinstance(style, Vocabulary):
            around = [each for path, each in modules.items() if not path or name.startswith(f"{path}.")]
            install_head(site, modules[name], cuts[f"{name}.weight"], around)
    for name, divided in plan.dropouts.items():
        install_dropout(site, modules[name], divided)
    for name, owner in {**blocks, "": model}.items():  # the model itself for what is outside of its blocks
        others = [block for block in blocks if name == ""]
        if summed := _summed(name, owner, others, plan, cuts, sequence_parallel and name in blocks):
            install_summed(axis, owner, summed)
    if sequence_parallel:
        _split_between(blocks, axis, fork)

    def begin(*_: object) -> None:
        for columns in all_columns:
            columns.settle()
        if fork is not None:
            fork.leave()  # where an exception ended the last forward

    model.register_forward_pre_hook(begin)
    return cuts


def _within(name: str, parents: Iterable[str]) -> bool:
    """Whether the module `name` is one of `parents`, or inside of one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


# ---- parameters


def _cuts(model: nn.Module, ways: int, plan: TensorPlan) -> dict[str, Cut]:
    by_id: dict[int, Cut] = {}
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        for own, cut in style.cuts(module, ways).items():
            parameter = module.get_parameter(own)
            if by_id.setdefault(id(parameter), cut) != cut:
                raise ModelError(
                    f"{name}.{own} is tied to a parameter that is "
                    "divided in another way: give both the same style"
                )
    return {
        name: by_id.get(id(p), Cut.whole(p.shape, ways))
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _summed(
    owner_name: str,
    owner: nn.Module,
    others: Iterable[str],
    plan: TensorPlan,
    cuts: Mapping[str, Cut],
    sequence: bool,
) -> list[tuple[nn.Module, str, ops.Summed]]:
    """The parameters of `owner`, without those of the modules `others`, whose gradients have to be summed
    over ranks: those used on divided activations or on slices of the sequence, and those that several ranks
    hold (key-value heads)."""
    found = []
    gathered = [
        parent
        for parent, names in plan.siblings.items()
        if parent != owner_name and parent.startswith(owner_name + ".")
    ]
    for path, module in owner.named_modules(prefix=owner_name):
        if _within(path, others):
            continue
        for own in module._parameters:
            if module._parameters[own] is None:
                continue
            name = f"{path}.{own}".removeprefix(".")
            cut = cuts[name]
            style = next((style for other, style in plan.styles.items() if _within(path, [other])), None)
            if isinstance(style, Replicate):
                partial = style.summed or (sequence and not _within(path, gathered))
            elif cut.is_whole and not isinstance(style, Column):
                partial = sequence and (isinstance(style, Row) or not _within(path, gathered))
            else:
                partial = any(
                    cut.owned(rank) != [(0, cut.used(rank))] for rank in range(plan.ways) if cut.used(rank)
                )
            if partial:
                found.append((module, own, ops.Summed(cut)))
    return found


# ---- modules


def _set_heads(module: nn.Module, heads: Heads, ways: int) -> None:
    """Set the counts of heads, in the module and in a copy of its config, to those of this rank."""
    for name, value in heads.changes(module, ways).items():
        setattr(module, name, value)
    config = getattr(module, "config", None)
    if config is not None and (changes := heads.changes(config, ways)):
        module.config = copy.copy(config)
        for name, value in changes.items():
            setattr(module.config, name, value)


def _own_heads(axis: Axis, heads: int, by_head: Tensor) -> Tensor:
    """Select this rank's heads: (batch * heads, x, y) -> (batch * own heads, x, y), (batch, heads, x, y) ->
    (batch, own heads, x, y). Anything else is returned as it is."""
    if by_head.dim() == 4 and by_head.shape[1] == heads:
        return ops.local_shard(axis, by_head, 1)
    if by_head.dim() == 3 and by_head.shape[0] % heads == 0:
        return ops.local_shard(axis, by_head.unflatten(0, (-1, heads)), 1).flatten(0, 1)
    return by_head


def _is_random(model: nn.Module) -> bool:
    """Whether the model may have dropout: any but one whose config says that it has none."""
    values = getattr(getattr(model, "config", None), "__dict__", {})
    named = [value for name, value in values.items() if "drop" in name and isinstance(value, int | float)]
    modules = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    return not named or any(value > 0 for value in (*named, *modules))


# ---- the sequence between blocks


def _gather_at_entry(module: nn.Module, axis: Axis, columns: Columns) -> None:
    """Gather the sequence of the first argument of `module`, and tell its column layers the shard that it
    came from."""

    def whole(shard: Tensor) -> Tensor:
        full = ops.gather(axis, shard, ops.sequence_dim(shard))
        columns.enter(full, shard)
        return full

    install_argument(module, whole)
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            columns.leave()

    module.forward = wrapped


def _split_between(blocks: Mapping[str, nn.Module], axis: Axis, fork: Fork | None) -> None:
    """Split the sequence before the first block of each stack, and gather it after the last one. Inside of
    blocks each rank draws its own random numbers."""
    stacks: dict[str, list[nn.Module]] = defaultdict(list)
    for name, block in blocks.items():
        stacks[name.rpartition(".")[0]].append(block)

    def own(hidden: Tensor) -> Tensor:
        return ops.split_sequence(axis, hidden)

    for stack in stacks.values():
        install_argument(stack[0], own)
        setattr(stack[0], ENTERS, own)
        _gather_output(stack[-1], axis)
        if fork is not None:
            for block in stack:
                _fork(block, fork)


def _gather_output(block: nn.Module, axis: Axis) -> None:
    forward = block.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        hidden = out[0] if isinstance(out, tuple) else out
        full = ops.gather(axis, hidden, ops.sequence_dim(hidden))
        return (full, *out[1:]) if isinstance(out, tuple) else full

    block.forward = wrapped


def _fork(block: nn.Module, fork: Fork) -> None:
    forward = block.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if not block.training or not tensors:
            return forward(*args, **kwargs)
        with fork.inside(tensors[0].device):
            return forward(*args, **kwargs)

    block.forward = wrapped
