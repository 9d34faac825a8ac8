"""One rank of one system of `checkpoint.py`: trains, saves and loads as it is told, one JSON line in, one
JSON line out.

Invariant: all ranks of a system begin what is timed together, and it has lasted as long as on the slowest of
them."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from cases import Batch, Job, Outcome, build_batch, build_model
from polyreme.launch.processes import die_with_parent
from worker import peak_rss, reset_peak

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

BLOCK = 4 << 20  # bytes that the disk is given at once
DISK = "disk"


class System(Protocol):
    """What is measured. `held`: all tensors that this rank has to save. `save_aside` returns what is called
    to wait for its end."""

    train_step: Callable[[Batch], Outcome]

    def held(self) -> Iterable[Tensor]: ...
    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...
    def save_aside(self, path: Path) -> Callable[[], None]: ...


class Polyreme:
    """`engine.save`, ZeRO-2: all synced, and a CRC-32 of every file, which `engine.load` compares before it
    changes anything."""

    def __init__(self, job: Job) -> None:
        from systems import polyreme_zero

        self.engine = polyreme_zero.initialize(build_model(job.size), job, stage=2)
        self.train_step = polyreme_zero.step_of(self.engine)

    def held(self) -> Iterable[Any]:
        import probe

        regions = probe.saved(self.engine).regions
        # states have no order
        return [region.data for region in sorted(regions, key=lambda region: (region.kind, region.names))]

    def save(self, path: Path) -> None:
        self.engine.save(path)

    def load(self, path: Path) -> None:
        self.engine.load(path)

    def save_aside(self, path: Path) -> Callable[[], None]:
        self.engine.save(path, wait=False)
        return self.engine.wait


class DCP:
    """`torch.distributed.checkpoint` of FSDP2's state dict, its own defaults: each rank one file, synced."""

    def __init__(self, job: Job) -> None:
        from systems import fsdp2

        self.model = build_model(job.size)
        self.optimizer = fsdp2.initialize(self.model, job, reshard=False)
        self.train_step = fsdp2.step_of(self.model, self.optimizer)
        self.group = dist.new_group()  # training has the other

    def held(self) -> Iterable[Tensor]:
        tensors = [
            *self.model.parameters(),
            *(state for each in self.optimizer.state.values() for state in each.values()),
        ]
        return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def save_aside(self, path: Path) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(self._state(), checkpoint_id=path, process_group=self.group)
        assert isinstance(future, Future)
        return lambda: future.result() and None


class DeepSpeed:
    """`save_checkpoint`, ZeRO-2, its own defaults: each rank its states, rank 0 the weights, by `torch.save`.
    Nothing is synced."""

    def __init__(self, job: Job) -> None:
        from systems import deepspeed_zero

        self.engine = deepspeed_zero.initialize(build_model(job.size), job, stage=2)
        self.train_step = deepspeed_zero.step_of(self.engine)

    def held(self) -> Iterable[Tensor]:
        optimizer = self.engine.optimizer
        states = [
            state
            for each in optimizer.optimizer.state.values()
            for state in each.values()
            if isinstance(state, Tensor)
        ]
        return [*self.engine.module.parameters(), *optimizer.single_partition_of_fp32_groups, *states]

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path.parent), tag=path.name, save_latest=False)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(str(path.parent), tag=path.name)

    def save_aside(self, path: Path) -> Callable[[], None]:
        raise NotImplementedError


SYSTEMS: dict[str, Callable[[Job], System]] = {"polyreme": Polyreme, "dcp": DCP, "deepspeed": DeepSpeed}


class Rank:
    """The commands that a rank understands, by name. All but `finish` and `sizes` are of all ranks
    together."""

    def __init__(self, job: Job) -> None:
        self.job, self.steps = job, 0
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world)
        if job.system != DISK:
            self.system = SYSTEMS[job.system](job)
            self.step()
            self.step()

    def step(self) -> float:
        """The seconds of a training step."""
        batch = build_batch(self.job, self.steps, [self.job.rank])
        self.steps += 1
        return timed(lambda: self.system.train_step(batch))

    def save(self, path: str, fresh: bool) -> dict[str, Any]:
        """`synced`: seconds with an fsync of all that was written, for a system that has none of its own.
        `fresh`: what memory the process keeps for later goes back to the kernel before, so that its peak
        (`extra`) shows what a save takes; a load has to take it anew."""
        if fresh:
            reset_peak()
        before = psutil.Process().memory_info().rss
        dist.barrier()
        began = time.perf_counter()
        self.system.save(Path(path))
        seconds = time.perf_counter() - began
        peak = {"extra": peak_rss() - before} if fresh else {}
        dist.barrier()
        if self.job.rank == 0:
            for file in Path(path).rglob("*"):
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        dist.barrier()
        return {"seconds": seconds, "synced": time.perf_counter() - began, "digest": self.digest(), **peak}

    def load(self, path: str) -> dict[str, Any]:
        """After a step, so that there is something to be undone."""
        self.step()
        dist.barrier()
        seconds = timed(lambda: self.system.load(Path(path)))
        return {"seconds": seconds, "digest": self.digest()}

    def aside(self, path: str, steps: int) -> dict[str, Any]:
        """Saves in the background of `steps` steps. `slower`: seconds that they took more than as many
        before, all in all; `cpu`: of the processor, in the threads that do not train, beyond those that they
        had before."""
        dist.barrier()
        before, busy_before = self._steps(steps)
        began = time.perf_counter()
        wait = self.system.save_aside(Path(path))
        call = time.perf_counter() - began
        during, busy = self._steps(steps)
        waited = timed(wait)
        return {
            "call": call,
            "slower": sum(during) - sum(before),
            "step": statistics.median(before),
            "waited": waited,
            "cpu": busy - busy_before,
        }

    def _steps(self, steps: int) -> tuple[list[float], float]:
        began = time.process_time() - time.thread_time()
        seconds = [self.step() for _ in range(steps)]
        return seconds, time.process_time() - time.thread_time() - began

    def digest(self) -> int:
        """Of all that the rank holds."""
        value = 0
        for tensor in self.system.held():
            value = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy().data, value)
        return value

    def write(self, path: str, nbytes: int, ranks: int, direct: bool) -> dict[str, Any]:
        """The disk alone: as many processes write a file each."""
        share = max(nbytes // ranks // BLOCK, 1) * BLOCK if self.job.rank < ranks else 0
        memory = block()
        memory.write(os.urandom(BLOCK))
        dist.barrier()
        began = time.perf_counter()
        if share:
            descriptor = os.open(
                f"{path}-{self.job.rank}", os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0)
            )
            for at in range(0, share, BLOCK):
                os.pwrite(descriptor, memory, at)
            os.fsync(descriptor)
            os.close(descriptor)
        return {"seconds": time.perf_counter() - began, "bytes": share}

    def read(self, path: str, ranks: int, direct: bool, keep: bool = False) -> dict[str, Any]:
        """What `write` wrote. keep: copy it to memory that is there, instead of reading all into the same
        block, which the processor's cache may have."""
        memory, done = block(), 0
        memory.write(bytes(BLOCK))
        data, file = torch.frombuffer(memory, dtype=torch.uint8), Path(f"{path}-{self.job.rank}")
        kept = torch.ones(file.stat().st_size if keep else 0, dtype=torch.uint8)
        dist.barrier()
        began = time.perf_counter()
        if self.job.rank < ranks:
            descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            while count := os.preadv(descriptor, [memory], done):
                if keep:
                    kept[done : done + count].copy_(data[:count])
                done += count
            os.close(descriptor)
        return {"seconds": time.perf_counter() - began, "bytes": done}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def block() -> mmap.mmap:
    """Memory at a page's beginning, as O_DIRECT wants it; of huge pages, with which the disk is faster: it is
    told of fewer of them."""
    memory = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def remember(path: Path) -> None:
    """Have the system keep the files in memory."""
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK):
                pass


def forget(path: Path) -> None:
    """Have the system forget what it keeps of the files in memory."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_of(path: Path) -> Sequence[Path]:
    """Those in the folder, or whose names begin with the path's."""
    found = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}-*")
    return [file for file in found if file.is_file()]


def remove(path: Path) -> None:
    for file in files_of(path):
        file.unlink()
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


def serve() -> None:
    """Answers each command on standard input until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    rank = Rank(job)
    print(json.dumps({"ready": job.system}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(rank, command.pop("do"))(**command)), file=replies, flush=True)


if __name__ == "__main__":
    die_with_parent()
    serve()
