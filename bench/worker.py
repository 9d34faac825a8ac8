"""One rank of one system: builds it, then does what the conductor says, one JSON line in, one JSON line out.

Invariant: between two commands it waits in `read` on its standard input and uses no processor. Replies go to
the original standard output; all that the systems print goes to standard error."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Job, build_batch, build_model
from polyreme.launch.processes import die_with_parent
from systems import FLOOR, SUITES

MIB = 2**20


class CollectiveCounter(TorchDispatchMode):
    """Counts the c10d operations of a step and the bytes of the whole tensor (the larger side) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            if not name.startswith("wait"):
                self.calls[name] += 1
                self.bytes[name] += max(sum(t.nbytes for t in tensors_in(side)) for side in args)
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# Kinds of operation by name. What matches none, and lies inside none, is computation.
KINDS = {
    "collectives": re.compile(
        r"gloo|c10d|bench::wait|all_?gather|all_?reduce|reduce_?scatter|broadcast|ProcessGroup"
    ),
    "optimizer and clip": re.compile(
        r"_fused_|Optimizer\.|_foreach_(?!copy)|vector_norm|clip|addcdiv|addcmul|lerp"
    ),
    "copies and fills": re.compile(r"copy|clone|aten::(cat|contiguous|zero_|zeros|fill_|to)$"),
}


def kind_of(event: Any) -> str:
    """The kind of an operation: by its own name, else by that of the nearest operation around it that has a
    kind."""
    while event is not None:
        for kind, pattern in KINDS.items():
            if pattern.search(event.name):
                return kind
        event = event.cpu_parent
    return "compute"


def live_bytes() -> int:
    """Bytes of all tensor storages that Python can see, so not of those that only C++ holds (DDP's
    buckets)."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.layout == torch.strided and item.device.type == "cpu":
            tensor = getattr(item, "_local_tensor", item)  # of a DTensor
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def peak_rss() -> int:
    """The peak resident bytes since `reset_peak` (or since the start, where the kernel cannot reset it)."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def reset_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # so that the peak is the step's, not the construction's
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the kernel does not reset the peak: it includes construction", file=sys.stderr)


def loopback_bytes() -> int:
    """Bytes that the machine has sent over the loopback interface."""
    return int(re.search(r"lo:\s*(.*)", Path("/proc/net/dev").read_text())[1].split()[8])  # type: ignore[index]


def counters() -> dict[str, float]:
    """What only grows: page faults, processor seconds of the main thread and of all others (gloo's), bytes
    sent."""
    main = time.thread_time()
    return {
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        "main_cpu_seconds": main,
        "other_cpu_seconds": time.process_time() - main,
        "loopback_bytes": loopback_bytes(),
    }


class Rank:
    """The commands that a rank understands, by name."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.next_step = 0
        if job.system != FLOOR:
            dist.init_process_group("gloo", rank=job.rank, world_size=job.world)
        system = SUITES[job.suite][job.system]
        # whose samples this one gets
        self.ranks = list(range(job.world)) if system.divides_model else [job.rank]
        self.train_step = system.build(build_model(job.size), job)
        self.rest()

    def rest(self) -> None:
        """Notes the time at which the rank has nothing to do."""
        self.idle_since = (time.monotonic(), time.process_time())

    def step(self, ranks: list[int] | None = None) -> tuple[float, Any]:
        """Trains one step and returns its seconds and its outcome."""
        batch = build_batch(self.job, self.next_step, ranks or self.ranks)
        self.next_step += 1
        started = time.perf_counter()
        outcome = self.train_step(batch)
        return time.perf_counter() - started, outcome

    def check(self, steps: int) -> dict[str, Any]:
        """Trains the first steps and tells the losses. The floor's rank takes the whole global batch: the
        reference."""
        ranks = list(range(self.job.world)) if self.job.system == FLOOR else None
        outcomes = [self.step(ranks)[1] for _ in range(steps)]
        counter = CollectiveCounter()
        with counter:
            outcomes.append(self.step(ranks)[1])
        live = live_bytes()
        reset_peak()
        return {
            "losses": [o.loss for o in outcomes],
            "norms": [o.grad_norm for o in outcomes],
            "collectives": dict(counter.calls),
            "collective_bytes": dict(counter.bytes),
            "live_bytes": live,
        }

    def run(self, steps: int, settle: int) -> dict[str, Any]:
        """Trains `settle` untimed steps and then `steps` timed ones."""
        idle_wall, idle_cpu = time.monotonic() - self.idle_since[0], time.process_time() - self.idle_since[1]
        started = (time.monotonic(), time.process_time())
        losses = [self.step()[1].loss for _ in range(settle)]
        before = counters()
        timed = [self.step() for _ in range(steps)]
        spent = {name: (after - before[name]) / steps for name, after in counters().items()}
        return {
            "seconds": [seconds for seconds, _ in timed],
            "losses": losses + [outcome.loss for _, outcome in timed],
            "per_step": spent,
            "cores_used": (time.process_time() - started[1]) / (time.monotonic() - started[0]),
            "peak_rss": peak_rss(),
            "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "idle_seconds": idle_wall,
            "idle_cpu_seconds": idle_cpu,
        }

    def profile(self, steps: int) -> dict[str, Any]:
        """Trains `steps` under torch.profiler and splits the wall time of a step by kind of operation."""
        from torch.autograd.profiler import record_function
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as torch_profile

        wait = dist.Work.wait

        def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            with record_function("bench::wait"):
                return wait(work, *args, **kwargs)

        dist.Work.wait = recorded_wait  # type: ignore[method-assign,assignment]
        before = counters()
        with torch_profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("bench::steps"):
            seconds = [self.step()[0] for _ in range(steps)]
        other_cpu = counters()["other_cpu_seconds"] - before["other_cpu_seconds"]
        dist.Work.wait = wait  # type: ignore[method-assign]

        events = list(profiler.events() or [])
        main = next(event.thread for event in events if event.name == "bench::steps")
        split: defaultdict[str, float] = defaultdict(float)
        operations: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in events:
            if event.name == "bench::steps":
                continue
            kind = kind_of(event) if event.thread == main else "background threads"
            spent = event.self_cpu_time_total / 1e3 / steps
            split[kind] += spent
            operations[kind, event.name][0] += spent
            operations[kind, event.name][1] += 1 / steps
        wall = sum(seconds) / steps * 1e3
        split["outside operations"] = wall - sum(
            ms for kind, ms in split.items() if kind != "background threads"
        )
        top = sorted(operations.items(), key=lambda item: -item[1][0])[:30]
        return {
            "wall_ms": wall,
            "split_ms": dict(split),
            "other_cpu_ms": other_cpu / steps * 1e3,
            "top": [{"kind": kind, "name": name, "ms": ms, "calls": n} for (kind, name), (ms, n) in top],
        }


def serve(replies: IO[str]) -> None:
    """Answers each command on standard input until it ends."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    SUITES[job.suite][job.system].load()
    imported = psutil.Process().memory_info().rss
    rank = Rank(job)
    print(json.dumps({"ready": job.system, "rss_imported": imported}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(rank, command.pop("do"))(**command)
        reply["rss"] = psutil.Process().memory_info().rss
        print(json.dumps(reply), file=replies, flush=True)
        rank.rest()


if __name__ == "__main__":
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(replies)
