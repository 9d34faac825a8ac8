"""The process group of torch.distributed: how ranks join it, the groups that meshes make of it, and its own
collectives (NCCL's; tests run gloo's in their place)."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.distributed import mpi
from polyreme.distributed.environment import (
    AGAIN,
    BY_MPI,
    LOCAL_RANK,
    LOOPBACK,
    TORCHRUN,
    Environment,
    announce,
    detect,
)
from polyreme.distributed.failure import speak_for
from polyreme.distributed.mpi_group import MpiGroup
from polyreme.distributed.rendezvous import INTERFACES, by_agent, forget, meet
from polyreme.distributed.sums import put, sum_into
from polyreme.distributed.watch import Watch, break_off
from polyreme.distributed.work import Work, reporting
from polyreme.distributed.world import Resource, World, current
from polyreme.errors import LaunchError, TransportError


class ProcessGroup:
    """A `Backend` of the group's own collectives. The library chooses the order of their sums."""

    kind, deterministic = "process group", False

    def __init__(
        self, axis: str, size: int, rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._axis, self._size, self._rank, self._group, self.device = axis, size, rank, group, device
        self._sums_shards = dist.get_backend(group) != "gloo"  # gloo has no reduce-scatter

    def all_gather(self, full: Tensor, shard: Tensor, of: str) -> Work:
        put(full.chunk(self._size)[self._rank], shard)
        # renamed in torch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with reporting(what := f"all-gather{of} over {self._axis}"):
            return Work([gather(full, shard, group=self._group, async_op=True)], what=what)

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool, of: str) -> Work:
        with reporting(what := f"reduce-scatter{of} over {self._axis}"):
            wide = full if full.dtype == out.dtype else full.to(out.dtype)
            if not self._sums_shards:
                total = wide.clone()
                pending = [dist.all_reduce(total, group=self._group, async_op=True)]
                shard = total.chunk(self._size)[self._rank]
                return Work(pending, lambda: sum_into(out, [shard], accumulate), what)
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            if wide is full and not accumulate:
                return Work([scatter(out, full, group=self._group, async_op=True)], what=what)
            shard = torch.empty_like(out)
            pending = [scatter(shard, wide, group=self._group, async_op=True)]
            return Work(pending, lambda: sum_into(out, [shard], accumulate), what)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor], of: str) -> Work:
        taken, given = ([chunk.numel() for chunk in chunks] for chunks in (received, sent))
        with reporting(what := f"all-to-all{of} over {self._axis}"):
            pending = dist.all_to_all_single(
                _whole(received), _whole(sent), taken, given, group=self._group, async_op=True
            )
            return Work([pending], what=what)

    def all_reduce(self, tensor: Tensor) -> Work:
        with reporting(what := f"all-reduce over {self._axis}"):
            return Work([dist.all_reduce(tensor, group=self._group, async_op=True)], what=what)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        with reporting(what := f"broadcast over {self._axis}"):
            pending = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
            return Work([pending], what=what)

    def send(self, tensor: Tensor, to: int) -> Work:
        with reporting(what := f"send over {self._axis}"):
            return Work([dist.isend(tensor, group=self._group, group_dst=to)], what=what)

    def receive(self, tensor: Tensor, source: int) -> Work:
        with reporting(what := f"receive over {self._axis}"):
            return Work([dist.irecv(tensor, group=self._group, group_src=source)], what=what)

    def gather_bytes(self, data: bytes) -> Sequence[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        received = [torch.empty_like(mine) for _ in range(self._size)]
        with reporting(f"gathering reports over {self._axis}"):
            dist.all_gather(received, mine, group=self._group)
        return [each.cpu().numpy().tobytes() for each in received]

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # the user's inference mode ends before the tensor's use
            return torch.empty(size, dtype=dtype, device=device)

    def abort(self, why: str) -> None:
        """Break off this group's operations. Others are told only where an operation waits for this rank, and
        not over MPI: each rank has to abort its own."""
        break_off(self._group)

    def close(self) -> None:
        """Do nothing, as the group holds all connections."""

    def bytes_of_all_reduce(self, nbytes: int) -> int:
        return 2 * (self._size - 1) * nbytes // self._size


def _whole(chunks: Sequence[Tensor]) -> Tensor:
    """Return the tensor of which these are consecutive chunks."""
    return chunks[0].as_strided([sum(chunk.numel() for chunk in chunks)], [1])


TIMEOUT, WITHIN = timedelta(minutes=10), timedelta(minutes=2)
"""How long an operation waits for other ranks (mesh.timeout), and how long ranks wait to meet
(launch.meet_timeout)."""


def join(timeout: timedelta = TIMEOUT, within: timedelta = WITHIN, backend: str = "auto") -> torch.device:
    """Open the process group that the environment describes, unless there is one; `backend` is one of
    `mesh.backend`. Returns this rank's device. Raises TransportError where the ranks do not meet `within`
    that time.

    Where a launcher lets each rank use all cores, each takes its share of them as threads, unless
    OMP_NUM_THREADS is set."""
    if not dist.is_initialized() and (environment := detect()).world_size > 1:
        os.environ.setdefault(LOCAL_RANK, str(environment.local_rank))
        _share_cores(environment)
        _open(environment, timeout, within, backend)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        speak_for(dist.get_rank(), dist.get_world_size())
    return _device_for(backend)


def _open(environment: Environment, timeout: timedelta, within: timedelta, backend: str) -> None:
    speak_for(environment.rank, environment.world_size)
    device = _device_for(backend).type
    opened = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    if backend == "mpi" or (backend == "auto" and device == "cpu" and mpi.usable(environment)):
        opened = "cpu:mpi"  # this form, unlike "mpi", gets torch's store, too
    open_group(opened, environment, timeout, within)
    by_mpi = opened == "cpu:mpi" and environment.name in BY_MPI  # only its waits let signal handlers run
    speak_for(environment.rank, environment.world_size, by_mpi)


def reopen(
    before: World,
    ranks: Sequence[int | None],
    address: tuple[str, int] | None = None,
    timeout: timedelta = TIMEOUT,
    within: timedelta = WITHIN,
    backend: str = "auto",
) -> bool:
    """Close the world `before` and the process group, and open those of other ranks. `ranks` lists who
    becomes rank 0, 1, ...: each by its number in the world before, or None for a new process, which joins as
    the variables of its environment say. Returns whether this process is among them. All must call with the
    same arguments.

    The ranks meet at `address`, a free port of the host of the first of them, where new ones find them.
    Without it they meet at the store of the world before, which ends with that world's rank 0, unless it is
    torchrun's. A process keeps its GPU, if it has one. MPI has only the ranks that its mpirun started: others
    exchange over gloo.

    Raises LaunchError where they need another address, and TransportError where they do not meet `within`
    that time, naming those that did not come."""
    global _kept_gpu
    if len(ranks) > 1 and not (address is None and by_agent()):
        _refuse_meeting(before, ranks, address)
    if torch.cuda.is_initialized():
        _kept_gpu = torch.cuda.current_device()
    if before is current() and dist.is_initialized():
        groups()  # sets the rank of a world without a mesh
    before.close()
    close()
    if before.rank not in ranks:
        return False
    if address is not None:
        forget(address)
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    size, rank, at = len(ranks), ranks.index(before.rank), address or before.address
    here = (rank, size) if at and at[0] == LOOPBACK else (0, 1)  # until ranks have exchanged host names
    environment = Environment(AGAIN, rank, size, *here, at)
    if size > 1:
        _open(environment, timeout, within, backend)
    else:
        announce(environment)
    return True


def _refuse_meeting(before: World, ranks: Sequence[int | None], address: tuple[str, int] | None) -> None:
    """Raise LaunchError where the ranks of a reopened world cannot meet at `address`."""
    known = before.address is not None and ranks[0] == 0
    if (known and address == before.address) or (address is None and (not known or None in ranks)):
        raise LaunchError(
            f"ranks {ranks} of the world before cannot meet at {address or before.address}: its rank 0 held "
            "a store there, which has to be the first of them and to be asked for without an address, and of "
            "which new ranks (None) know nothing; give the address of a free port of the first one's host"
        )


def _device_for(backend: str) -> torch.device:
    device = _device() if backend in ("auto", "nccl") else torch.device("cpu")
    if backend == "nccl" and device.type == "cpu":
        raise TransportError(
            'mesh.backend = "nccl" moves tensors of GPUs, of which this process has or can use none; '
            'set mesh.backend = "auto"'
        )
    return device


def _share_cores(environment: Environment) -> None:
    if environment.name == TORCHRUN or "OMP_NUM_THREADS" in os.environ or sys.platform != "linux":
        return
    cores = os.cpu_count() or 1
    if len(os.sched_getaffinity(0)) == cores:  # else the launcher has given each rank its own
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // environment.local_world_size)))


def open_group(
    backend: str | None, environment: Environment, timeout: timedelta, within: timedelta = WITHIN
) -> None:
    """Wait until all ranks have met, and open their process group, which ends with the world. Raises as
    `join`, and LaunchError as `meet`."""
    environment, store = meet(environment, within)
    try:
        dist.init_process_group(  # gloo waits up to five times this to connect
            backend, store=store, rank=environment.rank, world_size=environment.world_size, timeout=within / 5
        )
        if isinstance(group := dist.group.WORLD, MpiGroup):
            group.timeout = timeout
        else:
            dist.distributed_c10d._set_pg_timeout(timeout)
        store.set_timeout(timeout)
    except (RuntimeError, ValueError) as error:
        way = ", ".join(f"{name} = {os.environ.get(name)}" for name in INTERFACES)
        raise TransportError(
            f"the ranks could not meet: all came to {environment.address}, but could not connect to each "
            f"other ({error}); on rank {environment.rank} {way}: these are to lead to the other hosts, "
            "which must be let in at any port"
        ) from error
    groups().opened = True
    current().address = environment.address


def of_cpus(group: dist.ProcessGroup | None = None) -> str:
    """Return the backend, "gloo" or "mpi", that sends a group's CPU tensors from rank to rank; "" for any
    other."""
    return {"gloo": "gloo", "mpi": "mpi", "cpu:mpi": "mpi"}.get(dist.get_backend(group), "")


def other_backend(asked: str) -> str | None:
    """Return the backend of new groups where it differs from the process group's; None for its own. Raises
    TransportError where it cannot be had."""
    if asked == "auto" or asked == of_cpus() or asked in dist.get_backend_config():
        return None
    if asked == "gloo" and not has_store():
        raise TransportError(
            'mesh.backend = "gloo" needs a store, which init_process_group("mpi") does not open; '
            "let Polyreme open the process group, or open it with gloo"
        )
    return asked


def has_store() -> bool:
    """Return whether ranks met by a store; those of init_process_group("mpi") did not."""
    return dist.get_backend() != "mpi"


def world() -> tuple[int, int]:
    """Return (world size, rank) of the process group, or (1, 0) without one; before it is opened, as the
    environment says.

    Raises LaunchError where the environment does not tell."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    environment = detect()
    return environment.world_size, environment.rank


def close() -> None:
    """Leave the process group, if there is one, and close the world that was opened in it."""
    current().close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    """Return this rank's GPU, where there is one and the process group, if it exists, can use it; else the
    CPU."""
    if not torch.cuda.is_available() or (
        dist.is_initialized() and "cuda:nccl" not in dist.get_backend_config()
    ):
        return torch.device("cpu")
    chosen = torch.cuda.current_device() if dist.is_initialized() else 0  # set by whoever opened the group
    local, count = int(os.environ.get(LOCAL_RANK, chosen)), torch.cuda.device_count()
    if _kept_gpu is not None:
        local = _kept_gpu
    elif count == 1 and "SLURM_STEP_ID" in os.environ:  # srun --gpus-per-task shows each task its own alone
        local = 0
    if local >= count:
        raise TransportError(
            f"local rank {local} has no GPU of its own: this "
            f"host has {count}; start {count} ranks on it at most"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


_kept_gpu: int | None = None
"""The GPU of a process whose world was reopened, whichever rank it has become."""


class Groups(Resource):
    """The process groups that the meshes of a world made, by their ranks: a second engine uses the first
    one's connections and threads again. `opened` says that Polyreme opened the default process group."""

    def __init__(self) -> None:
        self._watch = current().of(Watch)
        self.world, self.opened = dist.group.WORLD, False
        current().rank = dist.get_rank()
        self._made: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}
        atexit.register(self._leave)

    def of(self, ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
        """Return a process group of `ranks`, with its own connections beside the default group, which is the
        user's. Groups with different `backend` are different groups, too."""
        if (of_cpus() or backend in ("gloo", "mpi")) and has_store():
            self._watch.begin(timeout)
        if (ranks, backend) not in self._made:
            self._made[ranks, backend] = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        return self._made[ranks, backend]

    def close(self) -> None:
        """Close the groups; a process group of the user's stays open."""
        if not self.opened:
            known = dist.distributed_c10d._world.pg_map  # the user may have destroyed them
            for each in reversed([each for each in self._made.values() if each in known]):
                dist.destroy_process_group(each)
        self._leave()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Stop the watch, and close the process group if Polyreme opened it. Also called when this process
        ends."""
        self._watch.close()
        if self.opened and self.world is dist.group.WORLD:
            dist.destroy_process_group()
        self._made.clear()


def groups() -> Groups:
    """Return the groups of the current world, after closing it if its process group is no longer the default
    one."""
    if current().of(Groups).world is not dist.group.WORLD:
        current().close()
    return current().of(Groups)
