"""Facts of each parameter before it is in a bucket. No memory, no communication."""

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
from polyreme.placement.dividing import Division, ParameterDivision
from polyreme.placement.settings import PlacementSettings

ParameterNames = tuple[str, ...]
Owned = Literal["all", "some", "none"]
"""How much of a tensor-parallel rank's slice of a parameter no earlier rank has."""


@dataclass(frozen=True)
class ParameterEntry:
    """A distinct parameter.

    names: all of its names. at: its position in the order of registration. dtype: in which it is placed.
    group: the optimizer's. boundary: where shards may cut it. division: over stages and tensor parallelism.
    owned: how much of its slice each rank of the division owns, known for all of them so that they make the
    same buckets. persistent: whether it stays whole between steps at stage 3, too."""

    names: ParameterNames
    parameter: nn.Parameter
    at: int
    trainable: bool
    dtype: torch.dtype
    group: int
    boundary: Boundary
    division: ParameterDivision
    owned: tuple[Owned, ...]
    persistent: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that the parameters of one bucket have in common."""
        own = self.division
        common = self.trainable, self.dtype, self.boundary, self.owned, self.persistent
        return *common, own.stages, own.over

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return the bytes that it takes in this dtype."""
        return self.parameter.numel() * dtype.itemsize


def entries(
    model: nn.Module, recipe: Recipe, settings: PlacementSettings, division: Division
) -> list[ParameterEntry]:
    """Return the parameters of `model`. Raises ModelError for trainable ones that are not real floating-point
    numbers, and for an optimizer that needs whole tensors where ranks have slices of them."""
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
        own, group = division.parameters[name], recipe.group_of[name]
        boundary = recipe.boundary(group)
        if boundary == "tensor" and not own.cut.is_whole:
            raise ModelError(f"the optimizer of {name} needs whole tensors, "
                             "and tensor parallelism gives each rank a part of it: "
                             "use an elementwise optimizer such as adamw, or write mesh.tp = 1")  # fmt: skip
        keeps_dtype = name in recipe.own_dtypes or not parameter.is_floating_point()
        # by its size over all tensor-parallel ranks
        small = max(math.prod(own.cut.shape), 1) <= settings.zero.persistence_threshold
        found.append(
            ParameterEntry(
                tuple(each for _, each in places),
                parameter,
                at,
                recipe.trains(name, parameter),
                parameter.dtype if keeps_dtype else settings.formats.compute,
                group,
                boundary,
                own,
                tuple(_owned(own.cut, rank) for rank in range(division.over(name).size)),
                settings.zero.stage == 3 and small,
            )
        )
    return found


def _owned(cut: Cut, rank: int) -> Owned:
    every = math.prod(cut.local)
    held, owned = (
        sum(run.elements for run in strided_ranges(cut, rank, 0, every, only)) for only in (False, True)
    )
    return "all" if owned == held else "some" if owned else "none"
