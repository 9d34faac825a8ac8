"""The package `deepspeed.comm`: torch.distributed's functions under DeepSpeed's names, with a record of what
they cost.

`op` is one of `ReduceOp`. Ranks are numbered as in the world, also for a group. With `async_op` a collective
returns an object that has `wait()`, else None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup, ReduceOp  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.comm.initialize import configure, init_distributed, mpi_discovery  # noqa: F401
from polyreme.compat.deepspeed.comm.timed import collective, comms_logger, require_group
from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.utils.comms_logging import CommsLogger, get_caller_func  # noqa: F401
from polyreme.distributed.environment import detect

NCCL_BACKEND, CCL_BACKEND, MPI_BACKEND, GLOO_BACKEND = "nccl", "ccl", "mpi", "gloo"
SCCL_BACKEND, HCCL_BACKEND = "sccl", "hccl"

# renamed in torch 2.13
_gather_into = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_into = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


class _All:
    """Operations that are under way."""

    def __init__(self, pending: Sequence[Any]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for each in self._pending:
            each.wait()


def _each(calls: Iterable[Callable[..., Any]], async_op: bool) -> Any:
    pending = _All([call(async_op=True) for call in calls])
    return pending if async_op else pending.wait()


def _gather_each(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any, async_op: bool) -> Any:
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{len(outputs)} output_tensors for {len(inputs)} input_tensors: give one for each"
        )
    pairs = zip(outputs, inputs, strict=True)
    return _each([partial(_gather_into, *pair, group=group) for pair in pairs], async_op)


def _reduce_each(tensors: Sequence[Tensor], op: Any, group: Any, async_op: bool) -> Any:
    return _each([partial(torch_dist.all_reduce, each, op, group) for each in tensors], async_op)


def _reduce_unless_alone(tensor: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    alone = torch_dist.get_world_size(group) <= 1
    return tensor if alone else torch_dist.all_reduce(tensor, op, group, async_op)


_GROUP, _REDUCED = "group=None async_op=False", "op=SUM group=None async_op=False"
_COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "all_gather": (f"tensor_list tensor {_GROUP}",),
    "all_gather_coalesced": (f"output_tensors input_tensors {_GROUP}", _gather_each),
    "all_gather_into_tensor": (f"output_tensor tensor {_GROUP}", _gather_into),
    "all_gather_object": ("object_list obj group=None",),
    "all_reduce": (f"tensor {_REDUCED}",),
    "all_reduce_coalesced": (f"tensors {_REDUCED}", _reduce_each, "all_reduce"),
    "all_to_all": (f"output_tensor_list input_tensor_list {_GROUP}",),
    "all_to_all_single": (f"output tensor output_split_sizes=None input_split_sizes=None {_GROUP}",),
    "allgather_fn": (f"output_tensor input_tensor {_GROUP}", _gather_into, "all_gather_into_tensor"),
    "barrier": (f"{_GROUP} device_ids=None",),
    "batch_isend_irecv": ("p2p_op_list",),
    "broadcast": (f"tensor src {_GROUP}",),
    "broadcast_object_list": ("object_list src group=None device=None",),
    "gather": (f"tensor gather_list=None dst=0 {_GROUP}",),
    "inference_all_reduce": (f"tensor {_REDUCED}", _reduce_unless_alone, "all_reduce"),
    "irecv": ("tensor src=None group=None tag=0",),
    "isend": ("tensor dst group=None tag=0",),
    "monitored_barrier": ("group=None timeout=None wait_all_ranks=False",),
    "recv": ("tensor src=None group=None tag=0",),
    "reduce": (f"tensor dst {_REDUCED}",),
    "reduce_scatter": (f"output input_list {_REDUCED}",),
    "reduce_scatter_fn": (f"output_tensor tensor {_REDUCED}", _reduce_scatter_into, "reduce_scatter_tensor"),
    "reduce_scatter_tensor": (f"output_tensor tensor {_REDUCED}", _reduce_scatter_into),
    "scatter": (f"tensor scatter_list=None src=0 {_GROUP}",),
    "send": ("tensor dst group=None tag=0",),
}
"""Each collective: its parameters, the function that does it with them in this order (torch's of this name
where none is written), and the name under which it is recorded where that is another."""
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _name, (_parameters, *_more) in _COLLECTIVES.items():
    globals()[_name] = collective(_name, _parameters, *(_more or [getattr(torch_dist, _name)]))


def P2POp(op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
    """Return one of the operations of `batch_isend_irecv`, whose `op` is `isend` or `irecv`. Raises
    ArgumentError for another."""
    if op not in (globals()["isend"], globals()["irecv"]):
        raise ArgumentError(f"P2POp of {op!r}: give deepspeed.comm.isend or deepspeed.comm.irecv")
    return torch_dist.P2POp(getattr(torch_dist, op.__name__), tensor, peer, group, tag)


def _of_torch(name: str) -> Callable[..., Any]:
    """Return torch's function that answers about a group, by default that of all ranks."""

    def ask(group: Any = None) -> Any:
        require_group()
        return getattr(torch_dist, name)(group)

    return ask


def _launched(name: str) -> Callable[[], int]:
    """Return a function that says what the launcher does of this process, before a group is open; a single
    process is the first of one."""
    return lambda: getattr(detect(), name)


def is_available() -> bool:
    """Return whether torch can communicate, as it always can."""
    return True


has_all_gather_into_tensor = has_reduce_scatter_tensor = is_available
has_all_reduce_coalesced = has_coalescing_manager = is_available
is_initialized = torch_dist.is_initialized
get_world_size, get_rank = _of_torch("get_world_size"), _of_torch("get_rank")  # -1 outside the group
get_backend = _of_torch("get_backend")
get_world_rank_from_launcher, get_world_size_from_launcher = _launched("rank"), _launched("world_size")
get_local_rank_from_launcher = _launched("local_rank")


def new_group(ranks: Sequence[int]) -> Any:
    """Open a group of these ranks. All ranks of the world call it."""
    require_group()
    return torch_dist.new_group(list(ranks))


def destroy_process_group(group: Any = None) -> None:
    """Destroy a group, by default all of them."""
    from polyreme.compat.deepspeed.utils import groups

    world = group is None or group is torch_dist.group.WORLD
    torch_dist.destroy_process_group(group)
    groups._release_process_group_references(None if world else group)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    require_group()
    return torch_dist.group.WORLD


def get_local_rank() -> int:
    """Return this rank's number on its host."""
    require_group()
    return detect().local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank in the world of this place in a group."""
    return get_all_ranks_from_group(group)[group_rank]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks in the world of a group, in its order."""
    require_group()
    return torch_dist.get_process_group_ranks(group or torch_dist.group.WORLD)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return all ranks, in rows and columns of the accelerator's devices."""
    require_group()
    device = get_accelerator().device_name()
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the recorded collectives on rank 0, and with `return_dict` return them. All ranks must call."""
    require_group()
    torch_dist.barrier()
    result = comms_logger.log_all(torch_dist.get_rank() == 0, show_straggler, return_dict)
    torch_dist.barrier()
    return result


reset_log, has_comm_data = comms_logger.reset_data, comms_logger.has_data
get_comm_operation_count = comms_logger.get_total_operations
get_logged_comm_ops = comms_logger.get_operation_names
