"""Whole tensors by the model's own names, out of an engine and into it.

Invariant: rank 0's numbers count; a master takes them in its own precision; where they do not fit the model,
every rank raises and nothing has changed.
Communication: gathers; for loading, one tensor at a time from rank 0 to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyreme.errors import ModelError, named
from polyreme.step.state.engine_state import EngineState


class Keys(NamedTuple):
    """Names that were not loaded, as torch's `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_dict(engine: EngineState, rank0_only: bool, master: bool) -> dict[str, Tensor]:
    """Return copies of all parameters and persistent buffers; see `Engine.state_dict`. All ranks must
    call."""
    placement, found = engine.placement, dict[str, Tensor]()
    for names, tensor in chain(placement.tensors(master), placement.buffers(engine.module)):
        if engine.mesh.rank == 0 or not rank0_only:
            found |= dict.fromkeys(names, tensor.detach().clone())
    return found


def load_state_dict(engine: EngineState, given: Any, strict: bool) -> Keys:
    """Set parameters, masters and buffers to rank 0's tensors; see `Engine.load_state_dict`. All ranks must
    call, between two steps."""
    mesh, placement = engine.mesh, engine.placement
    if any(bucket.is_exposed for bucket in placement.buckets):
        raise ModelError(
            "engine.load_state_dict inside of engine.full_parameters(): call it after the with block, or, "
            "with write=True, load_state_dict of the module that the block is given"
        )
    everyone = mesh.world
    described: Any = everyone.gather_objects(_described(given) if mesh.rank == 0 else None)[0]
    if isinstance(described, str):
        raise ModelError(described)
    divided = placement.division.parameters
    held = [names for bucket in placement.buckets for names, _ in placement.named(bucket)]
    mine = [(names, list(divided[names[0]].cut.shape)) for names in held]
    mine += [(names, list(buffer.shape)) for names, buffer in engine.buffers()]
    wanted: list[Any] = mesh.pp.gather_objects(mine)
    found = _compared({name: shape for name, (shape, _) in described.items()}, chain(*wanted), strict)
    buffers = {name: buffer for names, buffer in engine.buffers() for name in names}
    for bucket in placement.buckets:
        bucket.settle()
    for name, (shape, dtype) in described.items():
        if name in found.unexpected_keys:
            continue
        if mesh.rank == 0:
            numbers = given[name].detach().to(mesh.device).contiguous()
        else:
            numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
        everyone.broadcast(numbers)
        if name in placement.where:
            placement.write(name, numbers)
        elif name in buffers:
            buffers[name].data.copy_(numbers)
    return found


def _described(given: Any) -> dict[str, tuple[list[int], str]] | str:
    """Return the shape and dtype of each tensor, or why they cannot be loaded."""
    if not isinstance(given, Mapping):
        return (
            f"engine.load_state_dict got a {type(given).__name__}: give it whole tensors by name, as "
            "engine.state_dict() returns them. engine.load(path) reads a checkpoint"
        )
    for name, each in given.items():
        if not isinstance(each, Tensor) or each.is_meta or each.layout != torch.strided:
            what = f"a {type(each).__name__}" if not isinstance(each, Tensor) else "a tensor without numbers"
            return (
                f"engine.load_state_dict got {what} as {str(name)!r}: give it whole tensors by name. Of "
                "what a script saved, the model's part alone (saved['model'] or the like)"
            )
    return {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in given.items()}


def _compared(
    given: Mapping[str, Sequence[int]], wanted: Iterable[tuple[list[str], list[int]]], strict: bool
) -> Keys:
    """Return the names that are not in both. Raises ModelError for a different shape, and with `strict` for
    any such name."""
    missing, unlike, known = dict[str, None](), [], set[str]()
    for names, shape in wanted:
        there = [name for name in names if name in given]
        known.update(names)
        if not there:
            missing[names[0]] = None
        unlike += [f"{name} is of shape {list(given[name])}, not {shape}" for name in there
                   if list(given[name]) != shape]  # fmt: skip
    unexpected = [name for name in given if name not in known]
    problems = [named(unlike)] if unlike else []
    if strict:
        problems += [f"{named([*missing])} missing"] if missing else []
        problems += [f"{named(unexpected)} not of this model"] if unexpected else []
    if problems:
        way = "give the tensors of this model"
        way += "" if unlike else ", or strict=False to load what is in both"
        for prefix in ("module.", "_orig_mod."):  # prefixes of wrappers
            if unexpected and all(name.removeprefix(prefix) in known for name in unexpected):
                way = f"take away what a wrapper puts before names: name.removeprefix({prefix!r})"
        raise ModelError(f"engine.load_state_dict: {'; '.join(problems)}. Nothing has changed: {way}")
    return Keys([*missing], unexpected)
