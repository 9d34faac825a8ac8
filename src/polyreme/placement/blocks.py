"""The units of a model: blocks that are gathered and released together, each with its parameters.

Invariant: every distinct parameter is in exactly one unit, under the first of its names. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from polyreme.errors import ConfigError, Problem
from polyreme.placement.parameters import ParameterEntry, ParameterNames


def released(
    module: nn.Module, blocks: Mapping[str, nn.Module], keep: Sequence[str]
) -> Mapping[str, nn.Module]:
    """Return the blocks that are gathered for each use: those for which neither they nor a module around them
    match `keep`. Raises ConfigError for a pattern that no module's name matches."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError([Problem("zero.keep", pattern, "no module of the model has such a name",
                                       "names are such as "
                                       f"{', '.join(list(blocks)[:3] or names[1:4])}")])  # fmt: skip

    def matches(name: str) -> bool:
        path = name.split(".")
        return any(
            fnmatchcase(".".join(path[:end]), pattern) for end in range(1, len(path) + 1) for pattern in keep
        )

    return {name: block for name, block in blocks.items() if not matches(name)}


def units(
    found: Iterable[ParameterEntry], blocks: Iterable[str], dtype: torch.dtype, least: int
) -> dict[ParameterNames, list[ParameterEntry]]:
    """Return the parameters of each unit, by the names of its blocks, in the order of registration. The first
    unit is the root, with no blocks: it has parameters outside of blocks, of several blocks, and persistent
    ones.

    A unit has consecutive blocks of the same pipeline stages, of at least `least` bytes in `dtype` but for a
    stage's last unit."""
    blocks = list(blocks)
    of_block: dict[str, list[ParameterEntry]] = defaultdict(list)
    for entry in found:
        owners = {_block_of(name, blocks) for name in entry.names}
        # persistent parameters are reduced together
        of_block["" if len(owners) > 1 or entry.persistent else owners.pop()].append(entry)
    members: dict[ParameterNames, list[ParameterEntry]] = {(): of_block[""]}
    names: ParameterNames = ()
    size, stages = least, None
    for name in blocks:
        if not (mine := of_block.get(name)):
            continue
        if size >= least or mine[0].division.stages != stages:
            names, size, stages = (), 0, mine[0].division.stages
        joined = [*(members.pop(names) if names else ()), *mine]
        names = (*names, name)
        members[names] = sorted(joined, key=lambda entry: entry.at)
        size += sum(entry.bytes_in(dtype) for entry in mine)
    return members


def _block_of(name: str, blocks: Iterable[str]) -> str:
    """Return the block that a parameter is in; "" outside of blocks."""
    return next((block for block in blocks if name.startswith(block + ".")), "")
