"""DeepSpeed's collectives: those of torch.distributed, by their names and arguments, measured.

`log_name` is the name under which a call is recorded, `prof` asks for that; `debug` is what DeepSpeed's
callers pass, and says nothing: the logger finds the caller itself. `op` is one of `ReduceOp`. Ranks are those
of the world, also in a group. With `async_op` what returns has `wait()`, else None returns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.comm.initialize import configure, init_distributed, mpi_discovery
from polyreme.compat.deepspeed.comm.timed import comms_logger, timed_op
from polyreme.compat.deepspeed.comm.utils import get_local_rank_from_launcher
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.comms_logging import CommsLogger, get_caller_func

__all__ = [
    "CommsLogger",
    "DeviceMesh",
    "GradBucket",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "enable_symm_mem_for_group",
    "gather",
    "get_all_ranks_from_group",
    "get_backend",
    "get_caller_func",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_device_mesh",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "timed_op",
]

# renamed in torch 2.13
_gather_into = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_into = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def is_available() -> bool:
    """True: the names of this module are there."""
    return True


def is_initialized() -> bool:
    """Whether a process group is open."""
    return torch_dist.is_initialized()


def _open() -> None:
    if not torch_dist.is_initialized():
        raise OrderError("DeepSpeed backend not set: no process group is open; call init_distributed() first")


def new_group(ranks: Sequence[int]) -> Any:
    """A group of these ranks. All ranks of the world call it."""
    _open()
    return torch_dist.new_group(list(ranks))


def destroy_process_group(group: Any = None) -> None:
    """Leave a group, by default all of them."""
    from polyreme.compat.deepspeed.utils import groups

    world = group is None or group is torch_dist.group.WORLD
    torch_dist.destroy_process_group(group)
    groups._release_process_group_references(None if world else group)


def get_world_group() -> Any:
    """The group of all ranks."""
    _open()
    return torch_dist.group.WORLD


def get_world_size(group: Any = None) -> int:
    """The number of ranks in the group; -1 outside it."""
    _open()
    return torch_dist.get_world_size(group)


def get_rank(group: Any = None) -> int:
    """This rank's place in the group; -1 outside it."""
    _open()
    return torch_dist.get_rank(group)


def get_local_rank() -> int:
    """This rank's number on its host."""
    _open()
    return get_local_rank_from_launcher()


def get_backend(group: Any = None) -> str:
    """The name of what the group communicates with."""
    _open()
    return torch_dist.get_backend(group)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank in the world of this place in a group."""
    _open()
    return get_all_ranks_from_group(group)[group_rank]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks in the world of a group, in its order."""
    _open()
    return torch_dist.get_process_group_ranks(group or torch_dist.group.WORLD)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """All ranks, in rows and columns of the accelerator's devices."""
    _open()
    device = get_accelerator().device_name()
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def enable_symm_mem_for_group(group_name: Any) -> None:
    """Let ranks of the group of this name map each other's memory."""
    _open()
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    enable(group_name)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True


@timed_op
def broadcast(
    tensor: Tensor,
    src: int,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: Any = None,
) -> Any:
    """Have `tensor` be that of rank `src`."""
    return torch_dist.broadcast(tensor, src, group, async_op)


@timed_op
def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Any = None,
    device: Any = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: Any = None,
) -> Any:
    """Have `object_list` be that of rank `src`, by torch's pickles: of ranks that trust each other."""
    return torch_dist.broadcast_object_list(object_list, src, group, device)


@timed_op
def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: Any = None,
) -> Any:
    """Fill `tensor_list` with the tensors of all ranks."""
    return torch_dist.all_gather(tensor_list, tensor, group, async_op)


@timed_op
def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> Any:
    """Fill `output_tensor` with the tensors of all ranks, one after the other."""
    return _gather_into(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None
) -> Any:
    """`all_gather_into_tensor`, by another name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@timed_op
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: Any = None,
) -> Any:
    """Fill `object_list` with the objects of all ranks, by torch's pickles: of ranks that trust each
    other."""
    return torch_dist.all_gather_object(object_list, obj, group)


class _All:
    """Several operations under way."""

    def __init__(self, pending: Sequence[Any]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for each in self._pending:
            each.wait()


@timed_op
def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Fill each of `output_tensors` with the tensors of all ranks at its place of `input_tensors`. Raises
    ArgumentError for lists of different lengths."""
    if len(output_tensors) != len(input_tensors):
        raise ArgumentError(
            f"{len(output_tensors)} output_tensors for {len(input_tensors)} input_tensors: give one for each"
        )
    pending = _All([
        _gather_into(output, tensor, group=group, async_op=True)
        for output, tensor in zip(output_tensors, input_tensors, strict=True)
    ])  # fmt: skip
    return pending if async_op else pending.wait()


@timed_op
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = None,
) -> Any:
    """Have `tensor` be the sum of all ranks', on rank `dst`."""
    return torch_dist.reduce(tensor, dst, op, group, async_op)


@timed_op
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = None,
) -> Any:
    """Have `output` be the sum of all ranks' tensors at this rank's place of `input_list`."""
    return torch_dist.reduce_scatter(output, input_list, op, group, async_op)


@timed_op
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = None,
) -> Any:
    """Have `output_tensor` be this rank's part of the sum of all ranks' `tensor`."""
    return _reduce_scatter_into(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """`reduce_scatter_tensor`, by another name."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof)


@timed_op
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Have `tensor` be the sum of all ranks'."""
    return torch_dist.all_reduce(tensor, op, group, async_op)


@timed_op
def inference_all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Have `tensor` be the sum of all ranks'; of a single one it returns as it is."""
    if torch_dist.get_world_size(group) <= 1:
        return tensor
    return torch_dist.all_reduce(tensor, op, group, async_op)


@timed_op
def all_reduce_coalesced(
    tensors: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Have each of `tensors` be the sum of all ranks'."""
    pending = _All([torch_dist.all_reduce(each, op, group, async_op=True) for each in tensors])
    return pending if async_op else pending.wait()


@timed_op
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = None,
) -> Any:
    """Send each rank its part of `tensor`, and fill `output` with the parts of all ranks for this one."""
    return torch_dist.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


@timed_op
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: Any = None,
) -> Any:
    """Send each rank its tensor of `input_tensor_list`, and receive one of each."""
    return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)


@timed_op
def send(
    tensor: Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: Any = None,
) -> Any:
    """Send `tensor` to rank `dst`."""
    return torch_dist.send(tensor, dst, group, tag)


@timed_op
def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: Any = None,
) -> Any:
    """Receive into `tensor` from rank `src`, or whichever sends; return which one did."""
    return torch_dist.recv(tensor, src, group, tag)


@timed_op
def isend(
    tensor: Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: Any = None,
) -> Any:
    """Begin to send `tensor` to rank `dst`."""
    return torch_dist.isend(tensor, dst, group, tag)


@timed_op
def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: Any = None,
) -> Any:
    """Begin to receive into `tensor` from rank `src`."""
    return torch_dist.irecv(tensor, src, group, tag)


class P2POp:
    """One of the operations of `batch_isend_irecv`: `op` is `isend` or `irecv`. Raises ArgumentError for
    another."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv):
            raise ArgumentError(f"op must be deepspeed.comm.isend or deepspeed.comm.irecv, got {op!r}")
        self.op = "isend" if op is isend else "irecv"
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@timed_op
def batch_isend_irecv(
    p2p_op_list: Sequence[P2POp], prof: bool = False, log_name: str = "batch_isend_irecv", debug: Any = None
) -> list[Any]:
    """Begin all of these, and return what to wait for."""
    return torch_dist.batch_isend_irecv(
        [
            torch_dist.P2POp(getattr(torch_dist, each.op), each.tensor, each.peer, each.group, each.tag)
            for each in p2p_op_list
        ]
    )


@timed_op
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: Any = None,
) -> Any:
    """Fill `gather_list` with the tensors of all ranks, on rank `dst`."""
    return torch_dist.gather(tensor, gather_list, dst, group, async_op)


@timed_op
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: Any = None,
) -> Any:
    """Have `tensor` be this rank's of rank `src`'s `scatter_list`."""
    return torch_dist.scatter(tensor, scatter_list, src, group, async_op)


@timed_op
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = None,
) -> Any:
    """Wait until all ranks are here."""
    _open()
    return torch_dist.barrier(group or torch_dist.group.WORLD, async_op, device_ids)


@timed_op
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: Any = None,
) -> Any:
    """Wait until all ranks are here; fail with the number of one that does not come."""
    _open()
    return torch_dist.monitored_barrier(group or torch_dist.group.WORLD, timeout, wait_all_ranks)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the recorded collectives on rank 0, and return them if asked. All ranks call it."""
    _open()
    torch_dist.barrier()
    result = comms_logger.log_all(torch_dist.get_rank() == 0, show_straggler, return_dict)
    torch_dist.barrier()
    return result


def reset_log() -> None:
    """Forget the recorded collectives."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether a collective was recorded."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many collectives were recorded."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names under which they were."""
    return comms_logger.get_operation_names()
