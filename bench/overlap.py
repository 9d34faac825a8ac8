"""How well an update from files hides the disk behind the computation, or the computation behind the disk.

    python bench/overlap.py --numbers 64 --rounds 7 --out bench/results/NAME.json

One rank trains a stack of linear layers with AdamW. What is timed is `Engine.step` (norm, clipping and
update) with the states in files. Beside it, by turns in a new order each round: the same of an engine whose
states are in host memory, which is the computation alone, and a FileStore that streams as many records of the
same size without computing, which is the disk alone. A ratio is of turns of one round. Exit status: 0, or 1
where both engines do not have the same norms. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polyreme
from checkpoint import file_system, shown
from optimizer import clock, others_cores
from polyreme.offload.file import FileStore
from polyreme.offload.optimizer_states import EXTENT
from report import MIB, spread, write
from step import environment, say

AIM = 1.1
"""Of the longer of both."""
WIDTH = 2048
STATES = 12
"""Bytes of an element: master and two moments."""
UPDATE, COMPUTE, DISK = "update from files", "update from host memory", "the disk"


def engine_of(numbers: int, dtype: str, states: str) -> polyreme.Engine:
    """An engine of `numbers` million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range((numbers << 20) // WIDTH**2)))
    config = {
        "batch": {"size": 1, "micro": 1},
        "zero": {"stage": 2},
        "memory": {"states": states},
        "precision": {"compute": dtype},
        "optimizer": {"name": "adamw", "lr": 1e-4, "clip": 1.0},
    }
    return polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)


def step_of(engine: polyreme.Engine, norms: list[float]) -> Callable[[], float]:
    """Seconds of a step's end."""
    inputs = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))

    def turn() -> float:
        engine.backward(engine(inputs).float().square().mean(), weight=1.0)
        began = time.perf_counter()
        norms.append(engine.step().grad_norm)
        return time.perf_counter() - began

    return turn


def disk(folder: Path, numbers: int) -> Callable[[], float]:
    """Seconds in which a tier reads and writes as much."""
    store = FileStore([folder], 0, "overlap")
    for _ in range((numbers << 20) // EXTENT):
        store.reserve(STATES * EXTENT)
    store.commit()

    def turn() -> float:
        began = time.perf_counter()
        for _ in store.stream(range(len(store.sizes))):
            pass
        return time.perf_counter() - began

    return turn


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds, on this process's threads."""
    norms: dict[str, list[float]] = {UPDATE: [], COMPUTE: []}
    homes = {UPDATE: str(args.folder / "states"), COMPUTE: "host"}
    engines = {name: engine_of(args.numbers, args.dtype, home) for name, home in homes.items()}
    turns = {name: step_of(engine, norms[name]) for name, engine in engines.items()} | {
        DISK: disk(args.folder / "disk", args.numbers)
    }
    order, generator = list(turns), random.Random(0)
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds + 1):
        generator.shuffle(order)
        before = engines[UPDATE].tiers()["states"]
        seconds = {name: turns[name]() for name in order}
        after = engines[UPDATE].tiers()["states"]
        seconds["waited"] = after["waited"] - before["waited"]
        if number:  # the first compiles, and touches its memory
            rounds.append(seconds)
        else:
            began = clock()
    moved = sum(after[way] - before[way] for way in ("read", "written"))
    return {
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "moved": moved,
        "same": norms[UPDATE] == norms[COMPUTE],
        "others_cores": others_cores(began),
    }


def ratios(run: Mapping[str, Any]) -> list[float]:
    return [each[UPDATE] / max(each[COMPUTE], each[DISK]) for each in run["rounds"]]


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    env = result["environment"]
    lines = [
        "# Updates from files", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}; {env['cpu']}, "
        f"{env['cores']} cores, {env['memory_gib']} "
        f"GiB; {result['file_system']}.", "", f"    {env['command']}", "",
        f"AdamW on {result['numbers']}M parameters, {result['dtype']}: "
        f"{result['runs'][0]['moved'] / MIB:,.0f} MiB read and written in "
        f"each update, in extents of {STATES * EXTENT // MIB} "
        f"MiB; {len(result['runs'][0]['rounds'])} rounds.", "",
        "| threads | | ms | quartiles |", "|--:|---|--:|--:|",
    ]  # fmt: skip
    for run in result["runs"]:
        for name, title in {
            UPDATE: UPDATE,
            "waited": "of which it waited for the disk",
            COMPUTE: COMPUTE,
            DISK: DISK,
        }.items():
            lines.append(
                f"| {run['threads']} | {title} | "
                f"{shown([each[name] * 1e3 for each in run['rounds']], '.0f')} |"
            )
    lines += [
        "",
        "| threads | over the longer of both | quartiles | aim | cores of other processes |",
        "|--:|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        median = spread(ratios(run))["median"]
        verdict = f"{AIM:.2f} {'met' if median <= AIM else 'missed'}"
        lines.append(f"| {run['threads']} | {shown(ratios(run))} | {verdict} | {run['others_cores']:.2f} |")
    if not all(run["same"] for run in result["runs"]):
        lines += ["", "**The norms DIFFER.**"]
    return "\n".join([*lines, ""])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=64, help="millions of parameters: a multiple of 4")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, each in a process of its own")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk to be measured; all that is made there is removed",
    )
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.numbers < 4 or args.numbers % 4 or args.rounds < 1:
        parser.error("--numbers must be a multiple of 4, and --rounds at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        args.worker.write_text(json.dumps(measure(args)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    runs = []
    with tempfile.TemporaryDirectory(prefix="overlap-", dir=args.folder) as folder:
        system = file_system(Path(folder))
        for threads in args.threads.split(","):
            answer = Path(folder, "answer.json")
            passed = (
                "--numbers",
                str(args.numbers),
                "--rounds",
                str(args.rounds),
                "--dtype",
                args.dtype,
                "--folder",
                folder,
            )
            command = [sys.executable, __file__, *passed, "--worker", str(answer)]
            if subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": threads}, check=False
            ).returncode:
                return 1
            runs.append(json.loads(answer.read_text()))
            say(f"  {threads} threads: {spread(ratios(runs[-1]))['median']:.2f} of the longer of both")
    result = {
        "environment": environment(),
        "file_system": system,
        "numbers": args.numbers,
        "dtype": args.dtype,
        "runs": runs,
    }
    page = markdown(result)
    print(page)
    if args.out:
        write(result, page, args.out)
    return int(not all(run["same"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
