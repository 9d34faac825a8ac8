"""What is known of each parameter before it is in a bucket. No memory, no communication."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Boundary, Cut
from polyreme.layout.region import strided_ranges
from polyreme.optim.groups import Recipe
from polyreme.placement.dividing import Division, Sharding
from polyreme.placement.settings import PlacementSettings

Names = tuple[str, ...]
Owned = Literal["all", "some", "none"]
"""How much of its part of a parameter a tensor-parallel rank has that no rank before it has."""


@dataclass(frozen=True)
class Entry:
    """A distinct parameter.

    names: all of them. at: where it comes in the order of registration. dtype: which it is placed in. group:
    the optimizer's; boundary: where shards may cut it. owned: of each rank that it is divided over, so that
    buckets are the same on all of them. persistent: whether it stays whole at stage 3, between steps, too."""

    names: Names
    parameter: nn.Parameter
    at: int
    trainable: bool
    dtype: torch.dtype
    group: int
    boundary: Boundary
    sharding: Sharding
    owned: tuple[Owned, ...]
    persistent: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """What the parameters of one bucket have in common."""
        sharding = self.sharding
        common = self.trainable, self.dtype, self.boundary, self.owned, self.persistent
        return *common, sharding.stages, sharding.over

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Its bytes in this dtype."""
        return self.parameter.numel() * dtype.itemsize


def entries(model: nn.Module, recipe: Recipe, settings: PlacementSettings, division: Division) -> list[Entry]:
    """The parameters of `model`. Raises ModelError for trainable ones that are not real floating-point
    numbers, and for an optimizer that needs whole tensors of which ranks have parts."""
    named: dict[nn.Parameter, list[tuple[int, str]]] = defaultdict(list)
    for at, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        named[parameter].append((at, name))
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ModelError(
                f"parameter {name} is trainable and {parameter.dtype}; "
                "only real floating-point parameters can be trained"
            )
    found = []
    for parameter, places in named.items():
        at, name = places[0]
        sharding, group = division.shardings[name], recipe.group_of[name]
        boundary = recipe.boundary(group)
        if boundary == "tensor" and not sharding.cut.is_whole:
            raise ModelError(f"the optimizer of {name} needs whole tensors, "
                             "and tensor parallelism gives each rank a part of it: "
                             "use an elementwise optimizer such as adamw, or write mesh.tp = 1")  # fmt: skip
        own = name in recipe.own_dtypes or not parameter.is_floating_point()
        # by the size that it has over all tensor-parallel ranks
        small = max(math.prod(sharding.cut.shape), 1) <= settings.zero.persistence_threshold
        found.append(
            Entry(
                tuple(each for _, each in places),
                parameter,
                at,
                recipe.trains(name, parameter),
                parameter.dtype if own else settings.formats.compute,
                group,
                boundary,
                sharding,
                tuple(_owned(sharding.cut, rank) for rank in range(division.over(name).size)),
                settings.zero.stage == 3 and small,
            )
        )
    return found


def _owned(cut: Cut, rank: int) -> Owned:
    every = math.prod(cut.local)
    held, owned = (
        sum(part.elements for part in strided_ranges(cut, rank, 0, every, only)) for only in (False, True)
    )
    return "all" if owned == held else "some" if owned else "none"
