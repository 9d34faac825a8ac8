"""Times saving and loading of checkpoints beside what the disk can do, torch.distributed.checkpoint and
DeepSpeed.

    python bench/checkpoint.py --size 60m --rounds 7 --out bench/results/NAME.json

Two ranks of one thread train a Llama with AdamW; what they save is deleted when it was measured. The systems
take turns, in a new order each round, and a ratio is only ever taken between turns of the same round. What is
loaded must be what was saved, bit by bit. In the first rounds a load takes fresh memory, later what its
process has had before, as one does after some steps. Exit status: 0, 1 where a system failed or loaded
something else, 2 for bad usage. See README.md."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import SIZES
from checkpoint_rank import DISK, SYSTEMS, files_of, forget, remember, remove
from report import MIB, spread, write
from step import Pair, WorkerError, environment, say

Record = dict[str, dict[str, float]]
"""Of a round: by what was done (`polyreme save`), its numbers; `seconds` and `bytes` of most."""

SCRIPT = "checkpoint_rank.py"
ASIDE = ("polyreme", "dcp")
"""Those that can save in the background."""
DISK_WRITES = (
    "disk write",
    "disk write, 2 processes",
    "disk write, direct",
    "disk write, direct, 2 processes",
)
DISK_READS = ("disk read", "disk read, 2 processes", "disk read, direct", "disk read, direct, 2 processes")
DISK_KEPT = "disk read, direct, 2 processes, kept"
"""Not the disk's bandwidth, but what there is of it for whoever copies what is read to where it is kept."""
DISK_WARM = ("cache read", "cache read, 2 processes")
ACTIONS = {
    "save": DISK_WRITES,
    "load": DISK_READS,
    "load, fresh memory": DISK_READS,
    "load, cached": DISK_WARM,
}
"""What the systems do, and what the disk, or the page cache, is asked to do for comparison."""
AIMS = [
    ("polyreme save", "disk", 0.8),
    ("polyreme load", "disk", 0.8),
    ("polyreme load", DISK_KEPT, None),
    ("polyreme load, fresh memory", "disk", None),
    ("polyreme load, cached", "disk", None),
    *((f"polyreme {action}", f"dcp {action}", 1.0) for action in ACTIONS),
    ("polyreme save", "deepspeed save", None),
    ("polyreme save", "deepspeed save, synced", None),
    ("polyreme load", "deepspeed load", None),
    ("polyreme load, cached", "deepspeed load, cached", None),
]  # fmt: skip


def slowest(replies: Sequence[dict[str, Any]], key: str = "seconds") -> float:
    return float(max(reply[key] for reply in replies))


def measure_disk(ranks: Pair, folder: Path, nbytes: int, settle: float) -> Record:
    """The bandwidth of the disk: by one process and by several, through the page cache and around it."""
    found: Record = {}
    for kind, direct in (("", False), (", direct", True)):
        for count in (1, len(ranks.processes)):
            many = f", {count} processes" if count > 1 else ""
            path = folder / "disk"

            def note(name: str, replies: Sequence[dict[str, Any]]) -> None:
                found[name] = {"seconds": slowest(replies), "bytes": sum(reply["bytes"] for reply in replies)}

            note(
                f"disk write{kind}{many}",
                ranks.ask(do="write", path=str(path), nbytes=nbytes, ranks=count, direct=direct),
            )
            forget(path)
            note(f"disk read{kind}{many}", ranks.ask(do="read", path=str(path), ranks=count, direct=direct))
            if direct and many:
                note(DISK_KEPT, ranks.ask(do="read", path=str(path), ranks=count, direct=True, keep=True))
            if not direct:
                note(f"cache read{many}", ranks.ask(do="read", path=str(path), ranks=count, direct=False))
            remove(path)
            time.sleep(settle)
    return found


def measure_system(name: str, ranks: Pair, folder: Path, steps: int, settle: float, fresh: bool) -> Record:
    """Save, load, load again, and save in the background. `fresh`: see `Rank.save`. Raises WorkerError where
    what was loaded is not what was saved."""
    found: Record = {}
    path = folder / f"{name}-saved"
    saved = ranks.ask(do="save", path=str(path), fresh=fresh)
    nbytes = sum(file.stat().st_size for file in files_of(path))
    found[f"{name} save"] = {"seconds": slowest(saved), "bytes": nbytes}
    if fresh:
        found[f"{name} save"]["extra"] = slowest(saved, "extra")
    if name == "deepspeed":
        found[f"{name} save, synced"] = {"seconds": slowest(saved, "synced"), "bytes": nbytes}
    forget(path)
    for action in ("load, fresh memory" if fresh else "load", "load, cached"):
        if action == "load, cached":
            remember(path)
        loaded = ranks.ask(do="load", path=str(path))
        found[f"{name} {action}"] = {"seconds": slowest(loaded), "bytes": nbytes}
        if [reply["digest"] for reply in loaded] != [reply["digest"] for reply in saved]:
            raise WorkerError(f"{name} loaded something else than it had saved")
    remove(path)
    time.sleep(settle)
    if name in ASIDE:
        replies = ranks.ask(do="aside", path=str(path), steps=steps)
        found[f"{name} save aside"] = {
            key: statistics.fmean(reply[key] for reply in replies) for key in replies[0]
        }
        remove(path)
        time.sleep(settle)
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds of all systems, in memory together."""
    job = {
        "size": args.size,
        "dtype": args.dtype,
        "batch": args.batch,
        "sequence": args.sequence,
        "world": 2,
        "threads": 1,
        "suite": "checkpoint",
    }
    pairs: dict[str, Pair] = {}
    rounds: list[Record] = []
    order = random.Random(args.seed)
    errors: dict[str, str] = {}
    began = time.monotonic()
    try:
        for name in (DISK, *args.systems):
            say(f"  starting {name}")
            pairs[name] = Pair(name, job, job["world"], "default", args.timeout, SCRIPT)
        for name in tuple(pairs):
            try:
                pairs[name].replies()
            except WorkerError as error:
                errors[name] = str(error)
                say(f"  failed: {error}")
                pairs.pop(name).close()
        nbytes = 0
        for number in range(args.rounds):
            if rounds and time.monotonic() - began > args.seconds:
                break
            record: Record = {}
            names = [name for name in pairs if name != DISK]
            order.shuffle(names)
            names.insert(order.randrange(len(names) + 1) if nbytes else len(names), DISK)
            for name in names:
                try:
                    if name == DISK:
                        record |= measure_disk(pairs[DISK], folder, nbytes, args.settle)
                    else:
                        record |= measure_system(
                            name, pairs[name], folder, args.steps, args.settle, number < args.fresh
                        )
                except WorkerError as error:
                    errors[name] = str(error)
                    say(f"  failed: {error}")
                    pairs.pop(name).close()
                nbytes = nbytes or int(record.get("polyreme save", {"bytes": 0})["bytes"])
            say(
                f"  {number}: "
                + "; ".join(
                    f"{what} {each['seconds']:.2f} s" for what, each in record.items() if "seconds" in each
                )
            )
            rounds.append(record)
    finally:
        for started in pairs.values():
            started.close()
    return {"job": job, "steps": args.steps, "fresh": args.fresh, "rounds": rounds, "errors": errors}


def speeds(rounds: Sequence[Record], what: str) -> list[float]:
    """Bytes per second in each round that had it."""
    return [record[what]["bytes"] / record[what]["seconds"] for record in rounds if what in record]


def disk_of(rounds: Sequence[Record], action: str) -> str:
    """The way to ask the disk that is fastest by the median: what `action` is measured against."""
    return max(ACTIONS[action], key=lambda way: statistics.median(speeds(rounds, way)))


def ratios(rounds: Sequence[Record], ours: str, theirs: str) -> list[float]:
    """How many times as fast: against the disk by bytes per second, against others by time."""
    shared = [record for record in rounds if ours in record and theirs in record]
    if theirs in (*DISK_WRITES, *DISK_READS, *DISK_WARM, DISK_KEPT):
        return [a / b for a, b in zip(speeds(shared, ours), speeds(shared, theirs), strict=True)]
    return [record[theirs]["seconds"] / record[ours]["seconds"] for record in shared]


def stalls(rounds: Sequence[Record], name: str, key: str, base: str) -> list[float]:
    """What a save in the background costs the training thread (`call`, `slower`), or the processor (`cpu`),
    over a `step`, or over a `save` that is waited for."""
    found = []
    for record in rounds:
        if f"{name} save aside" in record:
            aside = record[f"{name} save aside"]
            found.append(
                aside[key] / (aside["step"] if base == "step" else record[f"{name} save"]["seconds"])
            )
    return found


def shown(values: Sequence[float], form: str = ".2f") -> str:
    each = spread(values)
    return f"{each['median']:{form}} | {each['low']:{form}} to {each['high']:{form}}"


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a page."""
    env, rounds, job = result["environment"], result["rounds"], result["job"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    lines = [
        "# Saving and loading checkpoints",
        "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"{versions}; {env['cpu']}, {env['cores']} cores, "
        f"{env['memory_gib']} GiB; {result['file_system']}.",
        "",
        f"    {env['command']}",
        "",
        f"{job['size']} {job['dtype']} and its AdamW states, {job['world']} "
        f"ranks x {job['threads']} thread, {len(rounds)} rounds. In the "
        f"first {result['fresh']}, memory that a process kept for later "
        "goes back to the kernel before the save, to show how much that "
        "takes: the load after it takes fresh memory.",
        "",
        "| | seconds | quartiles | GB | GB/s | over the fastest of the disk | quartiles | extra MiB a rank |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    fastest = {action: disk_of(rounds, action) for action in ACTIONS}
    for action, ways in ACTIONS.items():
        for what in (
            *(() if action == "load, fresh memory" else ways),
            *([DISK_KEPT] if action == "load" else []),
            *(name for system in SYSTEMS for name in (f"{system} {action}", f"{system} {action}, synced")),
        ):
            have = [record[what] for record in rounds if what in record]
            if have:
                extra = (
                    f"{max(extras) / MIB:.0f}"
                    if (extras := [each["extra"] for each in have if "extra" in each])
                    else ""
                )
                lines.append(
                    f"| {what} | {shown([each['seconds'] for each in have], '.3f')} "
                    f"| {have[0]['bytes'] / 1e9:.3f} "
                    f"| {statistics.median(speeds(rounds, what)) / 1e9:.2f} | "
                    f"{shown(ratios(rounds, what, fastest[action]))} | {extra} |"
                )
    lines += ["", "| | as fast as | median | quartiles | aim |", "|---|---|--:|--:|--:|"]
    for ours, theirs, aim in AIMS:
        base = fastest[ours.partition(" ")[2]] if theirs == "disk" else theirs
        if values := ratios(rounds, ours, base):
            met = (
                "" if aim is None else f"{aim:.2f} {'met' if statistics.median(values) >= aim else 'missed'}"
            )
            lines.append(f"| {ours} | {base} | {shown(values)} | {met} |")
    lines += ["", f"A save in the background, and {result['steps']} steps meanwhile:", "",
              "| | | of a step | quartiles "
              "| of a save | quartiles |", "|---|---|--:|--:|--:|--:|"]  # fmt: skip
    words = {"call": "the call", "slower": "steps longer by", "cpu": "processor time of other threads"}
    for name in ASIDE:
        for key, word in words.items() if stalls(rounds, name, "call", "step") else ():
            lines.append(f"| {name} | {word} | {shown(stalls(rounds, name, key, 'step'), '.3f')} "
                         f"| {shown(stalls(rounds, name, key, 'save'), '.3f')} |")  # fmt: skip
    for name, error in result["errors"].items():
        lines += ["", f"**{name} failed**: {error.strip().splitlines()[-1]}"]
    return "\n".join(lines) + "\n"


def file_system(folder: Path) -> str:
    """Its kind, by the longest mount point above the folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(mount[1], mount[2]) for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(above, key=lambda each: len(each[0]))[1]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="60m", choices=tuple(SIZES))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        help=f"comma list of {', '.join(SYSTEMS)}; polyreme must be among them",
    )
    parser.add_argument("--rounds", type=int, default=9, help="more than --fresh")
    parser.add_argument("--fresh", type=int, default=2, help="at least 1: of the rounds, so "
                                                             "many take fresh memory. They come "
                        "first, as what the machine gave just before is slower for some seconds")  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="no round is begun later than this after the start"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="training steps during a save in the background, and before it"
    )
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sample")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk to be measured; all that is made there is removed",
    )
    parser.add_argument("--disk", default="", help="what there is to say of that disk, for the page")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of rest after files were removed")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer of a rank")
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    args = parser.parse_args(argv)
    args.systems = args.systems.split(",")
    for name in args.systems:
        if name not in SYSTEMS:
            parser.error(f"--systems {name!r}: choose from {', '.join(SYSTEMS)}")
    if "polyreme" not in args.systems or not 1 <= args.fresh < args.rounds or args.steps < 1:
        parser.error(
            "--systems must name polyreme, --rounds must be more "
            "than --fresh, which must be at least 1, as must --steps"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        result = {
            "environment": environment(),
            "file_system": "; ".join(filter(None, (file_system(Path(folder)), args.disk))),
            **measure(args, Path(folder)),
        }
    os.sync()
    page = markdown(result)
    print(page)
    if args.out:
        write(result, page, args.out)
    return int(bool(result["errors"]))


if __name__ == "__main__":
    sys.exit(main())
