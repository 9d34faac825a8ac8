"""One device, one rank: speed and memory of Polyreme beside plain torch, FSDP2 and DeepSpeed; and how large a
model it can train.

    python bench/gpu.py --size 160m,410m,1.3b --out bench/results/gpu.json python bench/gpu.py --size 1.3b
    --systems '*+host*,*+file*,*+cpu*' --largest 2048 --out bench/results/gpu-tiers.json python bench/gpu.py
    --device cpu --size tiny --batch 2 --sequence 64 --systems torch,polyreme2     # the same path without a
    GPU

At a world size of 1 nothing is communicated, so the floor is a plain torch loop (`systems/floor.py`: bf16
model, fp32 masters, fused AdamW, clipping), and what is measured is what each system adds to it. A system's
name is its kind, its ZeRO stage, where its states are (and with "+params" its parameters) and its options:
"polyreme3+host+params+recompute+compile". Each has a process of its own; one works at a time, a turn of
`--steps` steps, all in a new random order each round, the floor in every round. A process that waits holds
its weights and states and gives the rest of the device's memory back.

Time is between CUDA events at the ends of steps (the host's clock on a CPU). All systems start from the same
weights and see the same tokens; in the first steps every loss must be the floor's.

`--largest N` then looks for the deepest model of at most N blocks that each system trains on 1 sample (three
steps, in a process of their own): what memory one of them left says how deep the next is. One that leaves the
host less than RESERVE is ended."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "src")]

import torch  # noqa: E402

import systems  # noqa: E402
from cases import ADAMW, DTYPES, SIZES, Batch, Job, Llama, Outcome, build_batch, build_model  # noqa: E402
from report import TOLERANCE, spread  # noqa: E402

GIB = 2**30
ADAMW["lr"] = (
    # every system's: the larger models diverge at what the smaller ones take, and then each rounding shows
    3e-5
)
CHECKED_STEPS = 5
FLOOR = "torch"
RESERVE = 3 * GIB  # of the host's memory, left to what else runs there
COMPILED = 5  # factor on the tolerance of losses: fused kernels leave out roundings to bf16

# Sizes for a GPU, with the vocabulary that models of their time had.
SIZES |= {
    "160m": Llama(hidden=768, blocks=12, vocabulary=32000, heads=12, intermediate=3072),  # 162M
    "410m": Llama(hidden=1024, blocks=24, vocabulary=32000, heads=16, intermediate=3328),  # 411M
    "1.3b": Llama(hidden=2048, blocks=24, vocabulary=32000, heads=16, intermediate=5504),  # 1,345M
    "7b": Llama(hidden=4096, blocks=32, vocabulary=32000, heads=32, intermediate=11008),  # 6,738M
}
BATCH = {"160m": 16, "410m": 16, "1.3b": 8, "7b": 1}
"""Samples of a step: enough to keep an 80 GB device busy without recomputation."""

# In this order they are started, so that a run cut short has the most telling ones.
SYSTEMS = (
    FLOOR,
    "polyreme2",
    "polyreme3",
    "fsdp2",
    "deepspeed2",
    "deepspeed3",
    "torch+recompute",
    "polyreme2+recompute",
    "polyreme3+recompute",
    "fsdp2+recompute",
    "torch+compile",
    "polyreme2+compile",
    "polyreme3+compile",
    "fsdp2+compile",
    "torch+recompute+compile",
    "polyreme2+recompute+compile",
    "polyreme3+recompute+compile",
    "fsdp2+recompute+compile",
)
TIERS = (
    "polyreme2+host",
    "polyreme3+file+params",
    "deepspeed2+cpu",
    "fsdp2+cpu",
    "polyreme3+host+params",
    "deepspeed3+cpu+params",
    "polyreme2+file",
    "polyreme3+host",
    "deepspeed3+cpu",
    "polyreme3+file",
)
"""Those of which states are elsewhere; not among "all"."""

HOMES = {
    **{("polyreme", stage): ("host", "file") for stage in "0123"},
    ("deepspeed", "2"): ("cpu",),
    ("deepspeed", "3"): ("cpu",),
    ("fsdp2", ""): ("cpu",),
}
"""Where states of a kind and stage can be but on the device."""


@dataclass(frozen=True)
class System:
    """What a name such as "polyreme3+recompute+compile" stands for."""

    kind: str
    stage: int
    home: str  # "" is the device
    params: bool
    recompute: bool
    compile: bool

    @classmethod
    def parse(cls, name: str) -> System:
        """Raises ValueError for a name that is no system's."""
        match = re.fullmatch(
            r"(torch|fsdp2|polyreme|deepspeed)([0-3]?)(\+host|\+file|\+cpu)?(\+params)?(\+recompute)?(\+compile)?",
            name,
        )
        if match:
            kind, stage, home, *options = [group or "" for group in match.groups()]
            system = cls(kind, int(stage or 0), home.removeprefix("+"), *map(bool, options))
            staged = kind in ("polyreme", "deepspeed")
            placed = system.home in ("", *HOMES.get((kind, stage), ()))
            if (
                bool(stage) == staged
                and placed
                and (not system.params or (system.home and system.stage == 3))
            ):
                return system
        raise ValueError(
            f"{name!r} is no system: torch, fsdp2, polyreme0 to 3 or deepspeed0 "
            "to 3, then +host or +file of polyreme's, +cpu of fsdp2, "
            "deepspeed2 and deepspeed3, +params of those of stage 3, then +recompute, then +compile"
        )

    @property
    def floor(self) -> str:
        """Plain torch with the same options."""
        return FLOOR + "+recompute" * self.recompute + "+compile" * self.compile


# ---- in a system's process


Interval = tuple[float, float]


@dataclass(frozen=True)
class Trained:
    """A system's train step (batch on the host -> outcome), and what it says of its memory."""

    step: Callable[[Batch], Outcome]
    memory: Callable[[], dict[str, int]] = dict


def build(system: System, job: Job, device: torch.device, whole: bool = True) -> Trained:
    """The system around the model of this size, whose weights are the same for every system; unless not
    `whole`: then the model is never on the device as a whole, where a system can do without, and its weights
    are others."""
    if system.kind == "polyreme":
        return _polyreme(system, job, device, whole)
    with device if whole or not system.home else torch.device("cpu"):
        model: Any = made(job) if whole else build_model(job.size)
    if system.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if system.compile:
        for block in model.model.layers:
            block.compile()
    peer = {FLOOR: "floor", "deepspeed": f"deepspeed{system.stage}"}.get(system.kind, system.kind)
    peer += f"+{system.home}" * bool(system.home) + "+params" * system.params
    step = systems.SYSTEMS[peer].build(model, job)
    return Trained(
        lambda batch: step({key: value.to(device, non_blocking=True) for key, value in batch.items()})
    )


def made(job: Job) -> Any:
    """The model with fp32 weights which its dtype holds: DeepSpeed makes its masters of the rounded ones."""
    model = build_model(job.size)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[job.dtype]).float()
    return model


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Weights of a model that is built are all one number: to draw billions of them takes a minute."""

    def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.fill_(1e-2)

    with mock.patch.object(torch.Tensor, "normal_", fill), mock.patch.object(torch.Tensor, "uniform_", fill):
        yield


def _polyreme(system: System, job: Job, device: torch.device, whole: bool) -> Trained:
    from systems import polyreme_zero

    def model() -> Any:
        with device if whole else nullcontext():
            return made(job) if whole else build_model(job.size)

    home = {"file": polyreme_zero.FILES}.get(system.home, system.home)
    memory = polyreme_zero.homes(job, {"states": home} if home else {}) | (
        {"activations": "recompute"} if system.recompute else {}
    )
    if system.params:
        memory["params"] = memory["states"]
    engine = polyreme_zero.initialize(
        model() if whole else model, job, stage=system.stage, memory=memory, compile=system.compile
    )
    return Trained(polyreme_zero.step_of(engine), engine.memory)


class Gauge:
    """Time and memory of one device. Moments are CUDA events, which the host does not wait for, or the host's
    clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Between each mark and the next."""
        if not self.cuda:
            return [after - before for before, after in pairwise(marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def begin(self) -> None:
        """Before what `peak` is to be the peak of."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        from worker import reset_peak

        reset_peak()

    def memory(self) -> dict[str, int]:
        """Bytes: of live tensors now, at the peak, what the process takes from the device at the peak; and
        free on it. (On a CPU the first three are the process' resident memory.)"""
        if self.cuda:
            gc.collect()
            live = torch.cuda.memory_allocated()
            peak = torch.cuda.max_memory_allocated()
            taken = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            return {"live": live, "peak": peak, "taken": taken, "free": torch.cuda.mem_get_info()[0]}
        from worker import peak_rss

        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"live": resident, "peak": peak_rss(), "taken": peak_rss(), "free": host_free()}


def host_free() -> int:
    """Bytes of the host's memory that can be had without swapping."""
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]


class Worker:
    """A system in its process; each public method is a command of the conductor's."""

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device, self.gauge = job, torch.device(device), Gauge(torch.device(device))
        self.at = 0
        if job.threads:
            torch.set_num_threads(job.threads)

    def describe(self) -> dict[str, Any]:
        """The device, and what turns tokens per second into MFU."""
        from polyreme.planner.flops import count_flops, peak_flops

        ids = torch.zeros(1, self.job.sequence, dtype=torch.long, device="meta")
        with torch.device("meta"):
            twin = build_model(self.job.size)
        dtype = DTYPES[self.job.dtype]
        flops = count_flops(twin, {"input_ids": ids, "labels": ids}, dtype=dtype)
        peak = peak_flops(self.device, dtype)
        return {
            "device": torch.cuda.get_device_name()
            if self.gauge.cuda
            else platform.processor() or platform.machine(),
            "parameters": sum(p.numel() for p in twin.parameters()),
            "flops_per_token": flops.model / self.job.sequence,
            "peak_flops": peak.flops,
            "peak_source": peak.source,
        }

    def check(self) -> dict[str, Any]:
        """Build the system and train the first steps, whose losses are compared."""
        began = time.perf_counter()
        self.trained = build(System.parse(self.job.system), self.job, self.device)
        built = time.perf_counter()
        outcomes = [self.trained.step(self._batch())]
        first = time.perf_counter()
        self.gauge.begin()
        outcomes += [self.trained.step(self._batch()) for _ in range(CHECKED_STEPS - 1)]
        return {
            "losses": [outcome.loss for outcome in outcomes],
            "norms": [outcome.grad_norm for outcome in outcomes],
            "build_seconds": built - began,
            "first_step_seconds": first - built,
            "categories": self.trained.memory(),
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]
            if "torch._dynamo" in sys.modules
            else 0,
            **self.gauge.memory(),
        }

    def turn(self, steps: int, settle: int) -> dict[str, Any]:
        """Train `settle` untimed steps (memory that was given back is taken again) and `steps` timed ones."""
        batches = [self._batch() for _ in range(settle + steps)]
        losses = [self.trained.step(batch).loss for batch in batches[:settle]]
        self.gauge.begin()
        began, marks = time.perf_counter(), [self.gauge.mark()]
        for batch in batches[settle:]:
            losses.append(self.trained.step(batch).loss)
            marks.append(self.gauge.mark())
        seconds = self.gauge.seconds(marks)
        return {
            "seconds": seconds,
            "host_seconds": time.perf_counter() - began,
            "losses": losses,
            **self.gauge.memory(),
        }

    def profile(self, steps: int) -> dict[str, Any]:
        """Per step, under torch.profiler: how long the device computes, in how many kernels, how often the
        host waits for it, how long copies between it and the host take, how much of that passes beside a
        kernel, and what takes longest. On a CPU its operators are the kernels."""
        from torch.profiler import ProfilerActivity, profile

        batches = [self._batch() for _ in range(steps + 1)]
        self.trained.step(batches.pop())
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.gauge.cuda
        self.gauge.begin()
        began = time.perf_counter()
        with profile(activities=activities) as profiler:
            for batch in batches:
                self.trained.step(batch)
            if self.gauge.cuda:
                torch.cuda.synchronize()
        wall = time.perf_counter() - began
        busy: Counter[str] = Counter()
        waits, kernels = 0, 0
        computing: list[Interval] = []
        copying: list[Interval] = []
        for event in profiler.events() or []:
            on_device = str(event.device_type).endswith("CUDA")
            waits += event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
            if on_device == self.gauge.cuda and not event.is_user_annotation:
                kernels += 1
                busy[event.name] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
                copy = "HtoD" in event.name or "DtoH" in event.name
                (copying if copy else computing).append((event.time_range.start, event.time_range.end))
        top = [[name[:80], microseconds / 1e3 / steps] for name, microseconds in busy.most_common(15)]
        copying, computing = merged(copying), merged(computing)
        return {
            "wall_ms": wall / steps * 1e3,
            "busy_ms": sum(busy.values()) / 1e3 / steps,
            "kernels": kernels / steps,
            "waits": waits / steps,
            "copy_ms": length(copying) / 1e3 / steps,
            "hidden_ms": shared(copying, computing) / 1e3 / steps,
            "top": top,
            **self.gauge.memory(),
        }

    def fits(self, blocks: int) -> dict[str, Any]:
        """Build the system around a model of so many blocks and train three steps."""
        disk = shutil.disk_usage(self.job.folder).free
        with suppress(OSError):  # where host memory ends, this process is to go, and not the conductor
            Path("/proc/self/oom_score_adj").write_text("1000")
        SIZES[self.job.size] = replace(SIZES[self.job.size], blocks=blocks)
        with drawing_nothing():
            trained = build(System.parse(self.job.system), self.job, self.device, whole=False)
        trained.step(self._batch())
        self.gauge.begin()
        marks = [self.gauge.mark()]
        for _ in range(2):
            trained.step(self._batch())
            marks.append(self.gauge.mark())
        seconds = self.gauge.seconds(marks)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build_model(self.job.size).parameters())
        used = disk - shutil.disk_usage(self.job.folder).free
        return {"parameters": parameters, "seconds": seconds[-1], "disk": (used, disk), **self.gauge.memory()}

    def _batch(self) -> Batch:
        batch = build_batch(self.job, self.at, [0])
        self.at += 1
        return {key: value.pin_memory() for key, value in batch.items()} if self.gauge.cuda else batch


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Those that touch joined, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def shared(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """How long something of both passes; each is merged."""
    return length(one) + length(other) - length(merged([*one, *other]))


def serve(job: Job, device: str) -> None:
    """Answer each command on standard input, a JSON line, by a JSON line, until it ends. What systems print
    goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(job, device)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(reply), file=replies, flush=True)


# ---- the conductor


class SystemFailed(Exception):
    """A system could not be built, or failed in a step."""


class Process:
    """A system's process: starts at once, imports while others work, and answers commands."""

    def __init__(self, job: Job, device: str, timeout: float) -> None:
        self.timeout = timeout
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).resolve()),
                "--worker",
                json.dumps(asdict(job)),
                "--device",
                device,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment_of(device),
            start_new_session=True,  # Ctrl-C is for the conductor, which ends them
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command. Raises SystemFailed with the reason where there is none."""
        watchdog = threading.Timer(self.timeout, self.process.kill)
        watchdog.start()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            raise SystemFailed(f"ended, or gave no answer in {self.timeout:g} s: {self._tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            print(self._tail(3000), file=sys.stderr)
            raise SystemFailed(reply["error"])
        return reply

    def _tail(self, size: int = 300) -> str:
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - size))
        return self.log.read().decode(errors="replace").strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


class Guard(threading.Thread):
    """Ends a process that leaves the host less than RESERVE of its memory, while it is entered; `used` is the
    most that was taken."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.process, self.done = process, threading.Event()
        self.free = host_free()
        self.used, self.ended = 0, False

    def run(self) -> None:
        while not self.done.wait(0.05):
            left = host_free()
            self.used = max(self.used, self.free - left)
            if left < RESERVE:
                self.ended = True
                self.process.kill()
                return

    def __enter__(self) -> Guard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


def environment_of(device: str) -> dict[str, str]:
    """The variables of a system's process: one rank, and no GPU in sight where none is to be used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(BENCH), str(BENCH.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cpu = (
        {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        if device == "cpu"
        else {}
    )
    return {**os.environ, **rank, **cpu, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


class Case:
    """All rounds of all systems at one size and dtype, as many in memory together as fit, the floor with
    each."""

    def __init__(self, args: argparse.Namespace, size: str, dtype: str, deadline: float) -> None:
        self.args, self.deadline = args, deadline
        batch = args.batch or BATCH.get(size, 4)
        self.job = Job(FLOOR, size, dtype, batch, args.sequence, 0, 1, args.threads, folder=str(args.folder))
        self.names = [FLOOR, *(name for name in args.systems if name != FLOOR)]
        self.found: dict[str, dict[str, Any]] = {name: {"turns": {}} for name in self.names}
        self.running: dict[str, Process] = {}
        self.ahead: dict[str, Process] = {}  # importing
        self.free = self.largest = 0
        self.order = random.Random(0)

    def measure(self) -> dict[str, Any]:
        about = self.compare() if self.args.rounds else {}
        names = self.names if self.args.rounds else self.args.systems
        for name in names if self.args.largest else ():
            if "skipped" not in self.found[name]:
                self.found[name]["largest"] = self.largest_of(name)
        case = {"job": asdict(self.job), "about": about, "systems": self.found}
        return case | {"summary": summarise(case)}

    def compare(self) -> dict[str, Any]:
        """All rounds. Gives what the table says of the device and the model; nothing if the floor failed."""
        waiting = self.names[1:]
        about: dict[str, Any] = {}
        number = 0
        try:
            if not self.start(FLOOR):
                return about
            about = self.ask(FLOOR, None, do="describe")
            while FLOOR in self.running:
                while waiting and self.fits_another():
                    self.start(waiting.pop(0), waiting)
                for at in range(self.args.rounds):
                    for name in self.order.sample(list(self.running), len(self.running)):
                        if not self.late():
                            self.turn(name, f"{number}.{at}")
                for name in [*self.running] if self.args.profile else []:
                    self.ask(name, "profile", do="profile", steps=3)
                number += 1
                for name in [n for n in self.running if n != FLOOR]:
                    self.running.pop(name).close()
                if not waiting:
                    break
            for name in waiting:
                self.found[name]["skipped"] = "the floor failed, with which it would be compared"
        finally:
            for process in (*self.running.values(), *self.ahead.values()):
                process.close()
        return about

    def largest_of(self, name: str) -> dict[str, Any]:
        """What the deepest model told that a system trains, and why none is deeper."""
        told: dict[int, dict[str, Any]] = {}
        why = f"--largest {self.args.largest}"

        def fits(blocks: int) -> int:
            nonlocal why
            job = Job(**{**asdict(self.job), "system": name, "batch": 1})
            process = Process(
                job, self.args.device, min(self.args.timeout, max(1.0, self.deadline - time.monotonic()))
            )
            guard = Guard(process.process)
            began = time.monotonic()
            try:
                with guard:
                    told[blocks] = reply = process.ask(do="fits", blocks=blocks)
                reply["host"] = (guard.used, guard.free - RESERVE)
            except SystemFailed as error:
                full = f"the host's memory was full ({guard.free / GIB:.0f} GiB were free)"
                why = f"{blocks} blocks: {full if guard.ended else ' '.join(str(error).split())[:160]}"
            finally:
                process.close()
            say(
                f"    {name}, {blocks} blocks, {time.monotonic() - began:.0f} "
                f"s: {json.dumps(told.get(blocks, why))}"
            )
            return guess(blocks, told[blocks]) if blocks in told else 0

        blocks = deepest(fits, self.args.first or SIZES[self.job.size].blocks, self.args.largest, self.late)
        return {
            "blocks": blocks,
            "why": f"the time was up; before: {why}" if self.late() else why,
            **told.get(blocks, {}),
        }

    def fits_another(self) -> bool:
        """Whether what the largest system took at its peak is free, and a fifth more."""
        return len(self.running) < 2 or self.free > 1.2 * self.largest + GIB

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def start(self, name: str, waiting: Sequence[str] = ()) -> bool:
        """Build a system and train its first steps; a failure is noted and the others go on."""
        record = self.found[name]
        if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            record["skipped"] = "deepspeed is not installed"
        elif self.late():
            record["skipped"] = f"the time was up (--minutes {self.args.minutes:g})"
        if "skipped" in record:
            return False
        for each in (name, *waiting[: (os.cpu_count() or 1) // 4]):
            if each not in self.ahead and not (
                each.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None
            ):
                self.ahead[each] = Process(
                    Job(**{**asdict(self.job), "system": each}), self.args.device, self.args.timeout
                )
        self.running[name] = self.ahead.pop(name)
        if not self.ask(name, "checked", do="check"):
            return False
        self.largest = max(self.largest, record["checked"]["taken"])
        return True

    def turn(self, name: str, turn: str) -> None:
        reply = self.ask(name, None, do="turn", steps=self.args.steps, settle=self.args.settle)
        if reply:
            self.found[name]["turns"][turn] = reply
            say(f"    {turn} {name}: {statistics.median(reply['seconds']) * 1e3:.1f} ms")

    def ask(self, name: str, key: str | None, **command: Any) -> dict[str, Any]:
        """The answer of a system that runs, kept under `key`; {} where it failed, and then it runs no
        more."""
        if key:
            say(f"  {command['do']} {name}")
        try:
            reply = self.running[name].ask(**command)
        except SystemFailed as error:
            self.found[name]["error"] = str(error)
            say(f"  {name} failed: {error}")
            self.running.pop(name).close()
            return {}
        self.free = reply.get("free", self.free)
        if key:
            self.found[name][key] = reply
        return reply


def guess(blocks: int, told: dict[str, Any]) -> int:
    """How many blocks use up the memory that runs out first, if each takes as much as each of these did,
    which fit."""
    uses = [(told["peak"], told["live"] + told["free"]), told["host"], told["disk"]]
    return max(blocks, int(blocks * min(there / max(used, 1) for used, there in uses)))


def deepest(
    fits: Callable[[int], int], first: int, most: int, late: Callable[[], bool] = lambda: False
) -> int:
    """The largest number up to `most` that fits, to an eighth, as far as it was found before it was `late`: 0
    if none. `fits` gives 0 for one that does not, or else how many may: these are tried next, if they are not
    known to be too many."""
    good, bad, at = 0, most + 1, min(first, most)
    while not late():
        may = fits(at)
        good, bad = (at, bad) if may else (good, at)
        if bad - good <= max(1, good // 8):
            break
        # the least that, if it fails, ends the search
        at = max(may, good + max(1, good // 8)) if may else bad
        if at >= bad:
            at = most if may and bad > most else (good + bad) // 2
    return good


def seconds_of(record: dict[str, Any]) -> dict[str, float]:
    """A step's time in each turn: the median over its steps."""
    return {turn: statistics.median(reply["seconds"]) for turn, reply in record["turns"].items()}


def summarise(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A row of the table for each system that ran. `over_torch` is speed relative to plain torch with the
    same options, both taken over the floor's turns of their rounds."""
    found, job, about = case["systems"], case["job"], case["about"]
    tokens = job["batch"] * job["sequence"]
    floor = seconds_of(found[FLOOR])
    over_floor = {
        name: statistics.median(
            floor[turn] / seconds for turn, seconds in seconds_of(record).items() if turn in floor
        )
        for name, record in found.items()
        if any(turn in floor for turn in record["turns"])
    }
    rows = {}
    for name, speed in over_floor.items():
        record, system = found[name], System.parse(name)
        milliseconds = spread([seconds * 1e3 for seconds in seconds_of(record).values()])
        rate = tokens / milliseconds["median"] * 1e3
        apart = losses_apart(record["checked"]["losses"], found[FLOOR]["checked"]["losses"])
        rows[name] = {
            "tokens_per_second": rate,
            "milliseconds": milliseconds,
            "over_torch": speed / over_floor[system.floor] if system.floor in over_floor else None,
            "mfu": about["flops_per_token"] * rate / about["peak_flops"],
            "live_gib": min(reply["live"] for reply in record["turns"].values()) / GIB,
            "peak_gib": max(reply["peak"] for reply in record["turns"].values()) / GIB,
            "losses_apart": apart,
            "equal": apart <= TOLERANCE[job["dtype"]] * (COMPILED if system.compile else 1),
        }
    return rows


def losses_apart(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference; infinite where a loss is no number."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(apart) if all(a == a for a in apart) else float("inf")


# ---- the report


def table(case: dict[str, Any]) -> list[str]:
    """The short table of one size."""
    job, about = case["job"], case["about"]
    lines = [f"## {job['size']} {job['dtype']}", ""]
    if about:
        peak = f"{about['peak_flops'] / 1e12:.4g} TFLOP/s ({about['peak_source']})"
        lines += [f"{about['device']}, peak {peak}; {about['parameters'] / 1e6:,.4g}M parameters, "
                  f"{job['batch']} x {job['sequence']} tokens a step.", ""]  # fmt: skip
    if case["summary"]:
        lines += ["| system | tokens/s | ms a step | quartiles | speed "
                  "over torch, same options | MFU | live GiB | peak GiB "
                  "| losses apart |", "|---|" + "--:|" * 8]  # fmt: skip
    for name, row in case["summary"].items():
        ms, over = row["milliseconds"], row["over_torch"]
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | "
            f"{ms['median']:.1f} | {ms['low']:.1f} to {ms['high']:.1f} "
            f"| {'' if over is None else f'**{over:.3f}**'} | "
            f"{row['mfu']:.1%} | {row['live_gib']:.2f} | {row['peak_gib']:.2f} "
            f"| {row['losses_apart']:.1e}{'' if row['equal'] else ' **DIFFER**'} |"
        )
    for name, record in case["systems"].items():
        for outcome in ("skipped", "error"):
            if outcome in record:
                lines += [
                    "",
                    f"**{name}** {'not run' if outcome == 'skipped' else 'failed'}: {record[outcome]}",
                ]
    largest = {name: record["largest"] for name, record in case["systems"].items() if "largest" in record}
    if largest:
        lines += ["", "| deepest model that trains, 1 sample a step | blocks "
                      "| parameters | tokens/s | peak GiB | host GiB | disk GiB "
                  "| why not deeper |", "|---|" + "--:|" * 6 + "---|"]  # fmt: skip
        for name, found in largest.items():
            numbers = "| | | | |"
            if found["blocks"]:
                rate, size = job["sequence"] / found["seconds"], found["parameters"] / 1e9
                numbers = f"| {size:,.2f}B | {rate:,.0f} | {found['peak'] / GIB:.2f}"
                numbers += f" | {found['host'][0] / GIB:.1f} | {found['disk'][0] / GIB:.1f}"
            lines.append(f"| {name} | {found['blocks']} {numbers} | {found['why'].replace('|', '/')} |")
    profiled = {name: record["profile"] for name, record in case["systems"].items() if "profile" in record}
    if profiled:
        lines += ["", "| under the profiler | ms a step | busy ms | kernels | "
                      "host waits | copies to and from host, ms | beside kernels |",
                  "|---|" + "--:|" * 6]  # fmt: skip
        for name, p in profiled.items():
            hidden = f"{p['hidden_ms'] / p['copy_ms']:.0%}" if p["copy_ms"] else ""
            lines.append(f"| {name} | {p['wall_ms']:.1f} | {p['busy_ms']:.1f} "
                         f"| {p['kernels']:.0f} | {p['waits']:.0f} "
                         f"| {p['copy_ms']:.1f} | {hidden} |")  # fmt: skip
    return [*lines, ""]


def markdown(result: dict[str, Any]) -> str:
    env = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    lines = ["# Polyreme on one device", "", f"{env['date']}, commit {env['commit']}; Python "
                                             f"{env['python']}, {versions}; {env['device']}.",
             "", f"    {env['command']}", ""]  # fmt: skip
    return "\n".join(lines + [line for case in result["cases"] for line in table(case)])


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    versions = {}
    for name in ("torch", "triton", "transformers", "deepspeed", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    described = f"{platform.machine()}, {os.cpu_count()} cores"
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        described = f"{output_of(query) or torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": output_of(["git", "describe", "--always", "--dirty"]) or "none",
        "python": platform.python_version(),
        "versions": versions,
        "device": described,
        "command": shlex.join(["python", "bench/gpu.py", *sys.argv[1:]]),
    }


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or nothing where it cannot be run."""
    try:
        return subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def choose(patterns: str) -> list[str]:
    """The systems that the comma list of names and patterns means; a name need not be among those of
    "all"."""
    chosen: list[str] = []
    for pattern in patterns.split(","):
        names = [name for name in SYSTEMS if pattern == "all" or fnmatch.fnmatch(name, pattern)]
        names += [name for name in TIERS if fnmatch.fnmatch(name, pattern)]
        if not names:
            System.parse(pattern)
            names = [pattern]
        chosen += [name for name in names if name not in chosen]
    return chosen


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", default="160m", help="comma list of " + ", ".join(SIZES))
    parser.add_argument("--dtype", default="bf16", help="comma list of fp32, bf16")
    parser.add_argument(
        "--systems",
        default="all",
        help="comma list of names or patterns, such as 'polyreme*,fsdp2'; torch runs always",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each system; 0 times nothing, for --largest alone"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a turn")
    parser.add_argument("--settle", type=int, default=2, help="untimed steps at the start of a turn")
    parser.add_argument("--batch", type=int, help="samples of a step; by default what suits the size")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0 leaves torch's default")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="no system and no turn is begun after so long"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer of a system")
    parser.add_argument(
        "--largest", type=int, default=0, help="look for the deepest model of at most so many blocks, too"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the number of blocks with which that begins; by default the size's",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk for files of systems; all that is made there is removed",
    )
    parser.add_argument(
        "--profile", action="store_true", help="three more steps of each system under torch.profiler"
    )
    parser.add_argument("--out", type=Path, help="the JSON result; the tables are written beside it as .md")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.size, args.dtype = args.size.split(","), args.dtype.split(",")
    for option, allowed in (("size", SIZES), ("dtype", DTYPES)):
        for value in getattr(args, option):
            if value not in allowed:
                parser.error(f"--{option} {value!r}: choose from {', '.join(allowed)}")
    for option, least in (("rounds", 0), ("steps", 1), ("batch", 1), ("sequence", 1)):
        if getattr(args, option) is not None and getattr(args, option) < least:
            parser.error(f"--{option} {getattr(args, option)}: must be at least {least}")
    try:
        args.systems = choose(args.systems)
    except ValueError as error:
        parser.error(f"--systems: {error}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no CUDA device here; --device cpu takes the same path without one"
        )
    return args


def main() -> int:
    args = parse()
    if args.worker:
        serve(Job(**args.worker), args.device)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=args.folder) as folder:
        args.folder = Path(folder).resolve()
        return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write all that `args` ask for; returns the exit status."""
    deadline = time.monotonic() + args.minutes * 60
    result: dict[str, Any] = {"environment": environment(args.device), "cases": []}
    for size in args.size:
        for dtype in args.dtype:
            say(f"{size} {dtype}")
            result["cases"].append(Case(args, size, dtype, deadline).measure())
            if args.out:  # after every case: a run cut short keeps what it has
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    failed = any("error" in record for case in result["cases"] for record in case["systems"].values())
    return int(
        failed or any(not row["equal"] for case in result["cases"] for row in case["summary"].values())
    )


if __name__ == "__main__":
    sys.exit(main())
