"""Which blocks of a model are gathered and released together, and which parameters each such unit has.

Invariant: every distinct parameter is in exactly one unit, under the first of its names. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from polyreme.errors import ConfigError, ModelError, Problem

Names = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A distinct parameter: all its names, itself, and where it comes in the order of registration."""

    names: Names
    parameter: nn.Parameter
    at: int

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Its bytes in this dtype."""
        return self.parameter.numel() * dtype.itemsize


def entries(model: nn.Module) -> list[Entry]:
    """The parameters of `model`. Raises ModelError for trainable ones that are not real floating-point
    numbers."""
    named: dict[nn.Parameter, list[tuple[int, str]]] = defaultdict(list)
    for at, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        named[parameter].append((at, name))
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ModelError(
                f"parameter {name} is trainable and {parameter.dtype}; "
                "only real floating-point parameters can be trained"
            )
    return [Entry(tuple(name for _, name in each), p, each[0][0]) for p, each in named.items()]


def released(
    module: nn.Module, blocks: Mapping[str, nn.Module], keep: Sequence[str]
) -> Mapping[str, nn.Module]:
    """The blocks that are gathered for each use: neither they nor what they are in match `keep`. Raises
    ConfigError for a pattern that no module's name matches."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError([Problem("zero.keep", pattern, "no module of the model has such a name",
                                       "names are such as "
                                       f"{', '.join(list(blocks)[:3] or names[1:4])}")])  # fmt: skip

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(
            fnmatchcase(".".join(parts[:end]), pattern)
            for end in range(1, len(parts) + 1)
            for pattern in keep
        )

    return {name: block for name, block in blocks.items() if not matches(name)}


def units(
    found: Iterable[Entry],
    blocks: Iterable[str],
    whole: Collection[str],
    stage_of: Mapping[str, object],
    dtype: torch.dtype,
    least: int,
) -> dict[Names, list[Entry]]:
    """The parameters of each unit, by the names of its blocks, in the order of registration. The first is the
    root, of no block: it has what is outside of blocks, what several share, and the parameters `whole`.

    stage_of: the pipeline stages of each parameter. A unit is of consecutive blocks of one of them; each
    has at least `least` bytes in `dtype`, but for a stage's last."""
    blocks = list(blocks)
    of_block: dict[str, list[Entry]] = defaultdict(list)
    for entry in found:
        owners = {_block_of(name, blocks) for name in entry.names}
        shared = len(owners) > 1 or entry.name in whole
        of_block["" if shared else owners.pop()].append(entry)
    members: dict[Names, list[Entry]] = {(): of_block[""]}
    names: Names = ()
    size, stage = least, None
    for name in blocks:
        if not (mine := of_block.get(name)):
            continue
        if size >= least or stage_of[mine[0].name] != stage:
            names, size, stage = (), 0, stage_of[mine[0].name]
        joined = sorted([*(members.pop(names) if names else ()), *mine], key=lambda entry: entry.at)
        names = (*names, name)
        members[names] = joined
        size += sum(entry.bytes_in(dtype) for entry in mine)
    return members


def _block_of(name: str, blocks: Iterable[str]) -> str:
    """The block that a parameter is in; "" outside of them."""
    return next((block for block in blocks if name.startswith(block + ".")), "")
