"""Ranks as coordinates: how many there are along each named axis, and who shares which.

Invariant: ranks count in row-major order; the axis named last varies fastest."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.refusal import ArgumentError


class ProcessTopology:
    """Ranks along `axes` of so many (`dims`) each. Coordinates are named tuples (`ProcessCoord`)."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = axes, dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", list(axes))  # type: ignore[misc]
        places: Any = itertools.product(*map(range, dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*at): rank for rank, at in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at these coordinates. Raises ArgumentError unless there is exactly one."""
        if len(coord_kwargs) != len(self.axes):
            raise ArgumentError(
                f"get_rank({coord_kwargs}) does not say one rank: name all of {[*self.axes]}, or use "
                "filter_match"
            )
        if (key := self.ProcessCoord(**coord_kwargs)) not in self.mapping:
            raise CoordinateError(
                f"{coord_kwargs} is outside of {dict(self._sizes())}: count from 0 on each axis"
            )
        return self.mapping[key]

    def _sizes(self) -> zip[tuple[str, int]]:
        return zip(self.axes, self.dims, strict=True)

    def get_axis_names(self) -> Sequence[str]:
        """Return the axes, in their order."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's coordinates as part of a file's name, such as `model_01`, without these axes."""
        at = self.get_coord(rank)._asdict()
        return outer_sep.join(
            f"{axis}{inner_sep}{at[axis]:02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Return how many ranks there are along an axis; 0 along one that is none."""
        return dict(self._sizes()).get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank. Raises ArgumentError for one that is not there."""
        if not 0 <= rank < len(self.mapping):
            raise ArgumentError(f"rank {rank} is none of the topology's {len(self.mapping)}: count from 0")
        return [*self.mapping][rank]  # which lists them in the order of ranks

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return groups of ranks whose coordinates differ along this axis alone; none along no axis."""
        if axis not in self.axes:
            return []
        lists: dict[Any, list[int]] = {}
        for coordinates, rank in self.mapping.items():
            lists.setdefault(coordinates._replace(**{axis: 0}), []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these coordinates, whatever the others are."""
        return [rank for at, rank in self.mapping.items() if at._replace(**filter_kwargs) == at]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at this place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return how many ranks there are."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class CoordinateError(ArgumentError, AssertionError):
    """Coordinates outside a topology."""


def _prime_factors(N: int) -> list[int]:
    """Return the prime factors of a number, the small ones first. Raises ArgumentError below 1."""
    if N < 1:
        raise ArgumentError(f"the prime factors of {N}: give 1 or more")
    factor = next((each for each in range(2, math.isqrt(N) + 1) if N % each == 0), N)
    return [factor, *_prime_factors(N // factor)] if N > 1 else []


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each of data-parallel ranks that are next to each other."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each of data-parallel ranks, each of tensor-parallel ranks next to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place in a topology, and its groups. All ranks make it together. Raises CoordinateError for
    a topology of another number of ranks."""

    def __init__(self, topology: ProcessTopology, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology
        if not self._is_grid_valid():
            raise CoordinateError(
                f"a grid of {topology.world_size()} ranks, and there are {self.world_size}: have the "
                "topology's sizes make as many"
            )
        sizes = {axis: max(topology.get_dim(axis), 1) for axis in ("data", "pipe", "model")}
        self.data_parallel_size, self.pipe_parallel_size = sizes["data"], sizes["pipe"]
        self.model_parallel_size = self.slice_parallel_size = sizes["model"]
        at = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = at.pipe, at.data
        self.slice_rank = getattr(at, "model", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        replicas = [sorted(topology.get_axis_list("data", at)) for at in range(self.data_parallel_size)]
        own, self.ds_model_proc_group = self._group(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(own), own.index(self.global_rank)
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = self._group(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = self._group(self.pipe_groups)
        alone = [[rank] for rank in range(self.world_size)]
        self.model_groups = topology.get_axis_comm_lists("model") if sizes["model"] > 1 else alone
        self.slice_group, self.slice_proc_group = self._group(self.model_groups)

    def _group(self, groups: Sequence[list[int]]) -> tuple[list[int], Any]:
        """Return the ranks of this rank's one of `groups`, and the process group. Collective."""
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage with this rank's other coordinates, but for those given."""
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**at._asdict())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _getter(attribute: str) -> Callable[[PipelineParallelGrid], Any]:
    return lambda grid: getattr(grid, attribute)


_PLACES = {
    ("pipe_parallel", "pipeline_model_parallel"): ("stage_id", "pipe_parallel_size", "pp_proc_group"),
    ("data_parallel",): ("data_parallel_id", "data_parallel_size", "dp_proc_group"),
    # among those with the same samples: other stages and other parts of layers
    ("model_parallel",): ("ds_model_rank", "ds_model_world_size", "ds_model_proc_group"),
    ("slice_parallel", "tensor_model_parallel"): ("slice_rank", "slice_parallel_size", "slice_proc_group"),
}
"""By the names that getters have, the attributes of a rank's place, the number of places and the group."""
_GETTERS = {
    "stage_id": "stage_id",
    "data_parallel_id": "data_parallel_id",
    "global_rank": "global_rank",
    "data_parallel_group_ranks": "dp_group",
    **{
        f"{name}_{what}": attribute
        for names, attributes in _PLACES.items()
        for name in names
        for what, attribute in zip(("rank", "world_size", "group"), attributes, strict=True)
    },
}
for _name, _attribute in _GETTERS.items():
    setattr(PipelineParallelGrid, f"get_{_name}", _getter(_attribute))
