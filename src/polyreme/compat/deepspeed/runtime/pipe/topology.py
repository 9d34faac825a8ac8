"""Ranks as coordinates: how many there are along each named axis, and who shares which.

Invariant: ranks count in row-major order; the axis named last varies fastest."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

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
        """The rank at these coordinates. Raises ArgumentError unless there is exactly one."""
        if len(coord_kwargs) != len(self.axes):
            raise ArgumentError("get_rank() does not support slices: name every axis, or use filter_match()")
        if (key := self.ProcessCoord(**coord_kwargs)) not in self.mapping:
            raise CoordinateError(f"key {coord_kwargs} invalid: the topology has {dict(self._sizes())}")
        return self.mapping[key]

    def _sizes(self) -> zip[tuple[str, int]]:
        return zip(self.axes, self.dims, strict=True)

    def get_axis_names(self) -> Sequence[str]:
        """The axes, in their order."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The coordinates of a rank as part of a file's name, such as `model_01`, without these axes."""
        at = self.get_coord(rank)._asdict()
        return outer_sep.join(
            f"{axis}{inner_sep}{at[axis]:02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """How many ranks there are along an axis; 0 along one that is none."""
        return dict(self._sizes()).get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank. Raises ArgumentError for one that is not there."""
        for coordinates, number in self.mapping.items():
            if number == rank:
                return coordinates
        raise ArgumentError(f"rank {rank} not found in topology: there are {len(self.mapping)} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Groups of ranks whose coordinates differ along this axis alone; none along one that is none."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        at = list(self.axes).index(axis)
        for coordinates, rank in self.mapping.items():
            lists.setdefault((*coordinates[:at], *coordinates[at + 1 :]), []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates, whatever the others are."""
        return [
            rank
            for coordinates, rank in self.mapping.items()
            if all(getattr(coordinates, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at this place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class CoordinateError(ArgumentError, AssertionError):
    """Coordinates outside a topology."""


def _prime_factors(N: int) -> list[int]:
    """The prime factors of a number, the small ones first. Raises ArgumentError below 1."""
    if N <= 0:
        raise ArgumentError(f"Values must be strictly positive, got {N}")
    primes, candidate = list[int](), 2
    while N > 1:
        while N % candidate == 0:
            primes.append(candidate)
            N //= candidate
        candidate += 1
    return primes


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each of data-parallel ranks that are next to each other."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each of data-parallel ranks, each of tensor-parallel ranks next to each other."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place in a topology (by default one of stages and data-parallel ranks), and its groups. All
    ranks make it together. Raises CoordinateError for a topology of another number of ranks."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if topology is None:
            primes = _prime_factors(self.world_size)
            topology = PipeDataParallelTopology(math.prod(primes[::2]), math.prod(primes[1::2]))
        self._topo = topology
        if topology.world_size() != self.world_size:
            raise CoordinateError(
                f"Invalid Grid: the topology has {topology.world_size()} ranks of {self.world_size}"
            )
        sizes = {axis: max(topology.get_dim(axis), 1) for axis in ("data", "pipe", "model")}
        self.data_parallel_size, self.pipe_parallel_size = sizes["data"], sizes["pipe"]
        self.model_parallel_size = self.slice_parallel_size = sizes["model"]
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        replicas = [sorted(topology.get_axis_list("data", at)) for at in range(self.data_parallel_size)]
        own, self.ds_model_proc_group = self._group(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(own), own.index(self.global_rank)
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = self._group(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = self._group(self.pipe_groups)
        self.p2p_groups = self._build_p2p_groups()
        alone = [[rank] for rank in range(self.world_size)]
        self.model_groups = topology.get_axis_comm_lists("model") if sizes["model"] > 1 else alone
        self.slice_group, self.slice_proc_group = self._group(self.model_groups)

    def _group(self, groups: Sequence[list[int]]) -> tuple[list[int], Any]:
        """The ranks of this rank's one of `groups`, and the process group. Collective."""
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    def _build_p2p_groups(self) -> list[list[int]]:
        """Each rank with that of the next stage, the last stage with the first."""
        follows = {
            rank: ranks[(at + 1) % len(ranks)] for ranks in self.pipe_groups for at, rank in enumerate(ranks)
        }
        return [[rank, follows[rank]] for rank in range(self.world_size)]

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage with this rank's other coordinates, but for those given."""
        at = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**at._asdict())

    def get_stage_id(self) -> int:
        return self._topo.get_coord(self.global_rank).pipe

    def get_data_parallel_id(self) -> int:
        return self._topo.get_coord(self.global_rank).data

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those with the same samples: other stages and other parts of layers."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This rank's place among those that divide layers."""
        return getattr(self._topo.get_coord(self.global_rank), "model", 0)

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
