"""Times one training step of every system, side by side, and prints each as a ratio to the floor.

    python bench/step.py --size 12m,60m --dtype fp32,bf16 --rounds 5 --steps 4 --out bench/results/NAME.json

Invariant: at any moment at most one system computes, and a ratio is only ever taken between turns of the same
round. Exit status: 0, 1 where a system failed or its losses differ, 2 for bad usage. See README.md for how
and why."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from report import compare_losses, markdown, summarise
from systems import BEFORE, FLOOR, SUITES

BENCH = Path(__file__).resolve().parent
MODELS = ("tiny", "12m", "60m")
SIZES = {"step": MODELS, "tensor": ("h64", "h256", "h512", "h1024"), "pipeline": MODELS}
KEEP = str(2**34)  # glibc: never mmap an allocation, never give pages back
CHECKED_STEPS = 3  # and one more, whose collectives are counted


class WorkerError(Exception):
    """A rank that ended, or did not answer in time; says which and shows the end of what it printed."""


class Pair:
    """The ranks of one system: started once, then asked to do things, all ranks at the same time."""

    def __init__(
        self,
        system: str,
        job: dict[str, Any],
        world: int,
        malloc: str,
        timeout: float,
        script: str = "worker.py",
        source: Path = BENCH.parent,
    ) -> None:
        """`source`: the checkout whose Polyreme is imported."""
        self.system, self.timeout = system, timeout
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.logs: list[IO[bytes]] = []
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(world):
            log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the pair)
            self.logs.append(log)
            self.processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        str(BENCH / script),
                        json.dumps({**job, "system": system, "rank": rank}),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the conductor, which ends the ranks
                    env=worker_environment(rank, world, port, job["threads"], malloc, source),
                )
            )

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Sends a command to every rank and returns their replies."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                print(json.dumps(command), file=process.stdin, flush=True)
            except BrokenPipeError:
                break  # the reply will say so
        return self.replies()

    def replies(self) -> list[dict[str, Any]]:
        """One line of every rank. Raises WorkerError where one ends or `timeout` seconds pass."""
        watchdog = threading.Timer(self.timeout, self.close)
        watchdog.start()
        started = time.monotonic()
        try:
            lines = [process.stdout.readline() for process in self.processes if process.stdout]
        finally:
            watchdog.cancel()
        for rank, line in enumerate(lines):
            if not line:
                late = time.monotonic() - started >= self.timeout
                why = f"gave no answer in {self.timeout:g} s" if late else "ended"
                raise WorkerError(f"{self.system}: rank {rank} {why}\n{self.tail(rank)}")
        return [json.loads(line) for line in lines]

    def tail(self, rank: int, size: int = 2000) -> str:
        """The end of what a rank printed."""
        log = self.logs[rank]
        log.seek(max(0, log.seek(0, os.SEEK_END) - size))
        return log.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def worker_environment(
    rank: int, world: int, port: int, threads: int, malloc: str, source: Path = BENCH.parent
) -> dict[str, str]:
    """The environment of a rank, the same for every system but for the checkout `source` whose Polyreme it
    imports."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    env |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
        "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(BENCH), str(source / "src")]),
    }  # fmt: skip
    if malloc == "keep":
        env |= {"MALLOC_MMAP_THRESHOLD_": KEEP, "MALLOC_TRIM_THRESHOLD_": KEEP}
    return env


@contextmanager
def pair(*args: Any, **kwargs: Any) -> Iterator[Pair]:
    started = Pair(*args, **kwargs)
    try:
        started.replies()
        yield started
    finally:
        started.close()


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


class Group:
    """The systems that are in memory together: the floor and as many others as fit."""

    def __init__(
        self, args: argparse.Namespace, job: dict[str, Any], found: dict[str, dict[str, Any]]
    ) -> None:
        self.args, self.job, self.found = args, job, found
        self.started: list[Pair] = []
        self.pairs: dict[str, Pair] = {}  # those that still run
        self.largest = 0

    def fits_another(self) -> bool:
        """Whether half as much again as the largest pair so far, and 1 GiB, are free, and --at-once allows
        it. Nothing is swapped."""
        if self.args.at_once is not None and len(self.pairs) > self.args.at_once:
            return False
        return len(self.pairs) < 2 or psutil.virtual_memory().available > 1.5 * self.largest + 2**30

    def start(self, system: str) -> None:
        """Starts a system and trains its first steps; a failure is written down and the others go on."""
        say(f"  starting {system}")
        record = self.found.setdefault(system, {"turns": {}})
        source = self.args.before if system.endswith(BEFORE) else BENCH.parent
        started = Pair(system, self.job, self.args.ranks, self.args.malloc, self.args.timeout, source=source)
        self.started.append(started)
        try:
            ready = started.replies()
            checked = started.ask(do="check", steps=CHECKED_STEPS)
        except WorkerError as error:
            record["error"] = str(error)
            say(f"  failed: {error}")
            started.close()
            return
        self.pairs[system] = started
        self.largest = max(self.largest, sum(reply["rss"] for reply in checked))
        record["rss_imported"] = max(reply["rss_imported"] for reply in ready)
        record["checked"] = checked

    def turn(self, system: str, turn: str) -> None:
        """Lets one system run its steps of a round."""
        psutil.cpu_percent()  # starts the interval
        try:
            replies = self.pairs[system].ask(do="run", steps=self.args.steps, settle=self.args.settle)
        except WorkerError as error:
            self.found[system]["error"] = str(error)
            say(f"  failed: {error}")
            self.pairs.pop(system).close()
            return
        busy = psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
        replies[0]["foreign_cores"] = max(0.0, busy - sum(r["cores_used"] for r in replies))
        self.found[system]["turns"][turn] = replies
        say(f"    {turn} {system}: {sum(replies[0]['seconds']) / self.args.steps * 1e3:.1f} ms")

    def close(self) -> None:
        for started in self.started:
            started.close()


def job_of(args: argparse.Namespace, size: str, dtype: str) -> dict[str, Any]:
    """What all ranks of all systems are told; see `cases.Job`."""
    options = ("suite", "batch", "sequence", "threads", "microbatches")
    chosen = {name: getattr(args, name) for name in options}
    return {"size": size, "dtype": dtype, "world": args.ranks, "folder": str(args.folder), **chosen}


def measure(args: argparse.Namespace, size: str, dtype: str, systems: Sequence[str]) -> dict[str, Any]:
    """All rounds of all systems at one size and dtype, in as few groups as memory allows; each has the floor
    in it."""
    job = job_of(args, size, dtype)
    systems_of = SUITES[args.suite]
    found: dict[str, dict[str, Any]] = {}
    chosen = [
        name for name in systems_of if name in systems and name != FLOOR and dtype in systems_of[name].dtypes
    ]
    waiting = chosen * args.starts
    order, began = random.Random(args.seed), time.monotonic()
    groups: list[list[str]] = []
    while waiting or not groups:
        group = Group(args, job, found)
        try:
            group.start(FLOOR)
            if FLOOR not in group.pairs:
                break
            while waiting and waiting[0] not in group.pairs and group.fits_another():
                group.start(waiting.pop(0))
            for number in range(args.rounds):
                if number and time.monotonic() - began > args.seconds:
                    break
                names = list(group.pairs)
                order.shuffle(names)
                for name in names:
                    group.turn(name, f"{len(groups)}.{number}")
            groups.append(list(group.pairs))
        finally:
            group.close()
    return {"job": job | {"folder": ""}, "groups": groups, "systems": found}


def show_profiles(args: argparse.Namespace, size: str, dtype: str, systems: Sequence[str]) -> None:
    """Prints, for each system, where a step's time goes on rank 0."""
    job = job_of(args, size, dtype)
    for system in systems:
        source = args.before if system.endswith(BEFORE) else BENCH.parent
        with pair(system, job, args.ranks, args.malloc, args.timeout, source=source) as started:
            started.ask(do="check", steps=1)
            profile = started.ask(do="profile", steps=args.steps)[-1]
        print(
            f"\n{system}, {size} {dtype}: {profile['wall_ms']:.1f} "
            "ms a step on the last rank, under the profiler; "
            f"other threads (gloo) used {profile['other_cpu_ms']:.1f} ms of processor time"
        )
        for kind, ms in sorted(profile["split_ms"].items(), key=lambda item: -item[1]):
            print(f"  {ms:9.1f} ms  {ms / profile['wall_ms']:6.1%}  {kind}")
        print("  of which, by operation:")
        for row in profile["top"]:
            print(f"  {row['ms']:9.1f} ms  {row['calls']:6.0f} calls  {row['name'][:60]}  [{row['kind']}]")


def environment() -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "polyreme", "numpy", "numba"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=BENCH, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or "none",
        "python": platform.python_version(),
        "versions": versions,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "libc": " ".join(platform.libc_ver()),
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def choose(patterns: str, suite: str, parser: argparse.ArgumentParser) -> list[str]:
    """The systems that the patterns name; "all" is each that is not a variant."""
    chosen: list[str] = []
    for pattern in patterns.split(","):
        before = pattern.endswith(BEFORE)  # these are never meant by a shorter pattern
        names = [
            n
            for n, s in SUITES[suite].items()
            if (
                not s.variant
                if pattern == "all"
                else fnmatch.fnmatch(n, pattern) and n.endswith(BEFORE) == before
            )
        ]
        if not names:
            parser.error(f"--systems {pattern!r} names no system; there are all, {', '.join(SUITES[suite])}")
        chosen += [name for name in names if name not in chosen]
    return chosen


def parse(
    suite: str, description: str | None, defaults: Mapping[str, Any], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="12m", help="comma list of " + ", ".join(SIZES[suite]))
    parser.add_argument("--dtype", default="fp32", help="comma list of fp32, bf16")
    parser.add_argument(
        "--systems", default="all", help="comma list of names or patterns, such as 'ddp,polyreme*'"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="no round but the first is begun so long after a case was",
    )
    parser.add_argument(
        "--starts", type=int, default=1, help="times that the ranks are started anew, for as many rounds each"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn")
    parser.add_argument("--settle", type=int, default=1, help="untimed steps at the start of a turn")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sample")
    if suite == "pipeline":
        parser.add_argument("--microbatches", type=int, default=8, help="of the batch of all ranks")
    parser.add_argument(
        "--before", type=Path, help=f"another checkout, whose Polyreme the systems that end in {BEFORE} are"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="default", help="glibc settings of all ranks"
    )
    parser.add_argument(
        "--at-once", type=int, help="systems in memory beside the floor; as many as seem to fit"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer of a rank")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk for files of systems; all that is made there is removed",
    )
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    parser.add_argument(
        "--profile", action="store_true", help="time nothing; show where each system's time goes"
    )
    parser.set_defaults(suite=suite, **({} if suite == "pipeline" else {"microbatches": 1}), **defaults)
    args = parser.parse_args(argv)
    args.systems = choose(args.systems, suite, parser)
    args.before = args.before and args.before.resolve()
    if any(name.endswith(BEFORE) for name in args.systems) and not (
        args.before and (args.before / "src" / "polyreme").is_dir()
    ):
        parser.error(
            f"--before {args.before}: give the checkout that systems ending in {BEFORE} are to be of"
        )
    args.size, args.dtype = args.size.split(","), args.dtype.split(",")
    for option, allowed in (("size", SIZES[suite]), ("dtype", ("fp32", "bf16"))):
        for value in getattr(args, option):
            if value not in allowed:
                parser.error(f"--{option} {value!r}: choose from {', '.join(allowed)}")
    for option in ("rounds", "starts", "steps", "batch", "sequence", "ranks", "threads", "microbatches"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: must be at least 1")
    if (args.batch * args.ranks) % args.microbatches:
        parser.error(
            f"--microbatches {args.microbatches} does not divide "
            f"the {args.batch * args.ranks} samples of all ranks"
        )
    return args


def main(
    suite: str = "step", description: str | None = __doc__, argv: Sequence[str] | None = None, **defaults: Any
) -> int:
    """Measure what the arguments say of `suite`; `defaults` are those of the options."""
    args = parse(suite, description, defaults, argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    with tempfile.TemporaryDirectory(prefix="step-", dir=args.folder) as folder:
        args.folder = Path(folder).resolve()
        return run(suite, args)


def run(suite: str, args: argparse.Namespace) -> int:
    """Measure, print and write all that `args` ask for; returns the exit status."""
    started = time.monotonic()
    result: dict[str, Any] = {
        "suite": suite,
        "environment": environment(),
        "malloc": args.malloc,
        "cases": [],
    }
    failed = False
    for size in args.size:
        for dtype in args.dtype:
            if args.profile:
                show_profiles(args, size, dtype, args.systems)
                continue
            say(f"{size} {dtype}")
            case = measure(args, size, dtype, args.systems)
            case["losses"] = compare_losses(case)
            case["summary"] = summarise(case)
            failed |= any("error" in record for record in case["systems"].values())
            failed |= any(not verdict["equal"] for verdict in case["losses"].values())
            result["cases"].append(case)
            result["minutes"] = round((time.monotonic() - started) / 60, 1)
            if args.out:  # after every case: a run cut short keeps what it has
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(result))
    if not args.profile:
        print(markdown(result))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
