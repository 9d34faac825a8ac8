"""Times the file tier beside what the disk can do.

    python bench/tiers.py --record 32 --records 24 --rounds 7 --out bench/results/NAME.json

One process streams records of a FileStore, which is made for it and removed, without computing on them.
Beside it fio moves as many bytes in blocks of the same size (and of 4 MiB), in several ways, and so does a
plain loop over O_DIRECT transfers, for machines without fio. All take turns, in a new order each round, and a
ratio is only ever taken between turns of the same round. Exit status: 0, or 2 for bad usage. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint import file_system, shown
from polyreme.files.direct_io import File, aligned
from polyreme.offload.file import FileStore
from report import MIB, write
from step import environment, say

AIM = 0.9
"""Of the fastest of the other ways."""
MODES = {"read": "read", "write": "written", "update": "read and written back"}
SMALL = 4 * MIB
FIO = {"read": "read", "write": "write", "update": "rw"}
ENGINES = (("psync", 1), ("libaio", 4), ("io_uring", 4))
"""Of fio, and how many transfers are under way at a time."""
THREADS = (1, 2, 4)
"""Of the loop."""
OURS = "FileTier.stream"
Round = dict[str, dict[str, float]]
"""Bytes per second, by mode and by name."""
Turn = Callable[[], float]
"""Returns bytes per second; of an update, those of both directions."""


def stream(store: FileStore, mode: str) -> float:
    """All records once."""
    began = time.perf_counter()
    extents = range(len(store.sizes))
    if mode == "write":
        for extent in extents:
            opened = store.open(extent, read=False, write=True)
            opened.wait()
            opened.close(None)
    else:
        for _ in store.stream(extents, write=mode == "update"):
            pass
    store.settle()
    return store.nbytes * (2 if mode == "update" else 1) / (time.perf_counter() - began)


def loop(file: File, mode: str, buffers: Sequence[Tensor]) -> float:
    """A thread for each buffer goes through the file, with as many others between its blocks."""
    size, count = buffers[0].nbytes, len(buffers)

    def work(thread: int) -> None:
        for at in range(thread * size, file.nbytes, count * size):
            if mode != "write":
                file.read(buffers[thread], at)
            if mode != "read":
                file.write(buffers[thread], at)

    with ThreadPoolExecutor(count) as pool:
        began = time.perf_counter()
        list(pool.map(work, range(count)))
        return file.nbytes * (2 if mode == "update" else 1) / (time.perf_counter() - began)


def fio(path: Path, mode: str, nbytes: int, block: int, engine: str, depth: int) -> float:
    """As it counts itself, with its buffers in huge pages, without which it reads half as fast here."""
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--size={nbytes}",
        f"--bs={block}",
        f"--rw={FIO[mode]}",
        "--direct=1",
        f"--ioengine={engine}",
        f"--iodepth={depth}",
        "--fallocate=posix",
        "--thread",
        "--output-format=json",
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(ended.stdout)["jobs"][0]
    return (
        sum(job[each]["io_bytes"] for each in ("read", "write"))
        / max(job[each]["runtime"] for each in ("read", "write"))
        * 1e3
    )


def turns(store: FileStore, file: File, path: Path) -> Iterator[tuple[str, str, Turn]]:
    """Mode, name and turn of each way; `store` and `file` hold as much, which has been written; fio's file
    goes to `path`."""
    size = store.sizes[0]
    buffers = [aligned(size).random_() for _ in range(max(THREADS))]
    if shutil.which("fio"):
        fio(path, "write", file.nbytes, size, "psync", 1)
    for mode in MODES:
        yield mode, OURS, partial(stream, store, mode)
        for threads in THREADS:
            yield mode, f"loop, threads: {threads}", partial(loop, file, mode, buffers[:threads])
        for engine, depth in ENGINES if shutil.which("fio") else ():
            for block in {size, min(SMALL, size)} if depth > 1 else {size}:
                yield (
                    mode,
                    f"fio {engine}, {block // MIB} MiB x {depth}",
                    partial(fio, path, mode, file.nbytes, block, engine, depth),
                )


def measure(args: argparse.Namespace, folder: Path) -> list[Round]:
    """All rounds."""
    size = args.record * MIB
    rounds: list[Round] = []
    store, file = FileStore([folder], 0, "bench"), File(folder, size * args.records)
    for _ in range(args.records):
        store.reserve(size)
    store.commit()
    for number, memory in enumerate(store.stream(range(args.records))):
        file.write(memory.random_(), number * size)
    ways = list(turns(store, file, folder / "fio"))
    order, began = random.Random(args.seed), time.monotonic()
    while len(rounds) < args.rounds and (not rounds or time.monotonic() - began < args.seconds):
        order.shuffle(ways)
        record: Round = {mode: {} for mode in MODES}
        for mode, name, turn in ways:
            record[mode][name] = turn()
        rounds.append(record)
        say(f"  {len(rounds)}: " + ", ".join(f"{mode} {record[mode][OURS] / 1e9:.2f} GB/s" for mode in MODES))
    store.close()
    return rounds


def speeds(rounds: Sequence[Round], mode: str, name: str) -> list[float]:
    return [record[mode][name] / 1e9 for record in rounds]


def ratios(rounds: Sequence[Round], mode: str, ours: str, theirs: str) -> list[float]:
    return [record[mode][ours] / record[mode][theirs] for record in rounds]


def fastest(rounds: Sequence[Round], mode: str) -> str:
    """The way, other than ours, that is fastest by the median."""
    return max(
        (name for name in rounds[0][mode] if name != OURS),
        key=lambda name: statistics.median(speeds(rounds, mode, name)),
    )


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a page."""
    env, rounds = result["environment"], result["rounds"]
    lines = [
        "# The file tier and the disk",
        "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}; {env['cpu']}, "
        f"{env['cores']} cores, {env['memory_gib']} GiB; {result['file_system']}; {result['fio']}.",
        "",
        f"    {env['command']}",
        "",
        f"{result['records']} records of {result['record']} MiB, "
        f'{len(rounds)} rounds. "Over" is of turns of one round.',
    ]
    for mode, title in MODES.items():
        best = fastest(rounds, mode)
        lines += ["", f"| {title} | GB/s | quartiles | over {best} | quartiles |", "|---|--:|--:|--:|--:|"]
        for name in sorted(rounds[0][mode], key=lambda name: -statistics.median(speeds(rounds, mode, name))):
            lines.append(
                f"| {name} | {shown(speeds(rounds, mode, name))} "
                f"| {shown(ratios(rounds, mode, name, best))} |"
            )
        median = statistics.median(ratios(rounds, mode, OURS, best))
        lines += ["", f"Aim: {AIM:.2f} of {best}; {'met' if median >= AIM else 'missed'}."]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=int, default=32, help="MiB")
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="no round is begun later than this after the start"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk to be measured; all that is made there is removed",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    args = parser.parse_args(argv)
    if min(args.record, args.records, args.rounds) < 1:
        parser.error("--record, --records and --rounds must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    version = (
        subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        if shutil.which("fio")
        else "no fio"
    )
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=args.folder) as folder:
        result = {
            "environment": environment(),
            "file_system": file_system(Path(folder)),
            "fio": version,
            "record": args.record,
            "records": args.records,
            "rounds": measure(args, Path(folder)),
        }
    page = markdown(result)
    print(page)
    if args.out:
        write(result, page, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
