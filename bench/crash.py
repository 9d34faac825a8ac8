"""Kills `polyreme train` at random instants, again and again, and compares how it ends with a run that
nothing disturbed. And changes checkpoints by chance, and loads them.

    python bench/crash.py --out bench/results/NAME.json --kills 100                # what NAME.json does not
    have yet python bench/crash.py --out bench/results/NAME.json --kills 100 --seconds 600  # a part; the next
    run goes on python bench/crash.py --out bench/results/NAME.json --corruptions 1000

Two ranks train a small GPT-2 with dropout and save every few steps; SIGKILL ends a rank, the launcher or all
of them, at an instant from the start of the command on, in training, or while a checkpoint is being written.
Each time the same command is run again.
Invariants: a command whose rank was killed ends within END_WITHIN seconds, with status 1 and nothing left of
it; the next one goes on from the newest complete checkpoint; a run that is through has the weights, optimizer
states, random numbers, place in the data and log of one that was never killed, bit by bit. Exit status: 0, 1
where something is otherwise, 2 for bad usage."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH.parent / each) for each in ("tests", "tests/ranks", "tests/pure")]

from test_checkpoint_corruption import fuzz  # noqa: E402
from test_job_resume_ranks import numbers, said  # noqa: E402

from command import Command, write_text  # noqa: E402
from polyreme.checkpoint.run_directory import RunDirectory  # noqa: E402

END_WITHIN = 15.0  # seconds
STEPS = 120
CONFIG = f"""
[model.config]
model_type = "gpt2"
n_positions = 32
n_embd = 32
n_layer = 2
n_head = 2
resid_pdrop = 0.1
embd_pdrop = 0.1
attn_pdrop = 0.1
[data]
path = "text.txt"
sequence = 16
vocab_size = 300
[batch]
size = 4
micro = 1
[precision]
compute = "bf16"
[optimizer]
lr = 1e-3
[lr_schedule]
name = "cosine"
warmup = 3
total = {STEPS}
[train]
length = {STEPS}
validate_every = 50
validate_batches = 2
[checkpoint]
every = 3
keep = 2
keep_every = "30 steps"
[monitor]
plot = false
[launch]
ranks = 2
"""
CASES = {
    f"stage {stage}, {'in the background' if background else 'waiting'}": {
        "zero.stage": stage,
        "checkpoint.background": background,
    }
    for stage in (1, 3)
    for background in (False, True)
}
TARGETS = ("rank 0", "rank 1", "launcher", "all")
MOMENTS = {"start": 1, "training": 3, "writing": 5, "deleting": 1}
"""When a process is killed, and how often: from the start of the command on; once training goes on; when the
folder of a checkpoint that is being written is there, or that of one that is being deleted."""
KILLS = 12  # in a run, at most


class Job:
    """One run of a case in `folder`, of as many commands as it takes."""

    def __init__(self, folder: Path, case: str) -> None:
        write_text(folder)
        (folder / "run.toml").write_text(CONFIG)
        sets = [
            word for key, value in CASES[case].items() for word in ("--set", f"{key}={str(value).lower()}")
        ]
        self._folder, self._words = folder, ["train", "run.toml", *sets]
        self.run = RunDirectory(folder / "run")
        self.problems: list[str] = []

    def command(self) -> Command:
        return Command(self._folder, *self._words)

    def to_the_end(self) -> None:
        """Run the command, which must succeed."""
        newest = self.run.newest()
        command = self.command()
        try:
            status, _, errors = command.end()
        finally:
            self._clear(command)
        if status != 0:
            self.problems.append(f"status {status}: {errors[-2000:]}")
        self._check_beginning(newest)

    def killed(self, random_: random.Random) -> dict[str, Any] | None:
        """Run the command and kill it. None where it came to its end."""
        moment, target = random_.choices(list(MOMENTS), list(MOMENTS.values()))[0], random_.choice(TARGETS)
        newest = self.run.newest()
        command = self.command()
        try:
            pids = self._wait(command, moment, target, random_)
            step = self._step()
            seen = [path.suffix for path in self.run.path.glob("step-*.*") if moment != "start"]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            status, _, errors = command.end(60)
            seconds = time.monotonic() - began
            self._check_end(target, status, errors, seconds)
        except ProcessLookupError:
            status, _, errors = command.end(120)
            if status != 0:
                self.problems.append(f"not killed, but status {status}: {errors[-2000:]}")
            return None
        finally:
            self._clear(command)
        if moment != "start":
            self._check_beginning(newest)
        now = self.run.newest()
        return {
            "moment": moment,
            "target": target,
            "writing": ".tmp" in seen,
            "deleting": ".old" in seen,
            "step": step,
            "seconds": round(seconds, 2),
            "newest": now.name if now else None,
        }

    def _wait(self, command: Command, moment: str, target: str, random_: random.Random) -> list[int]:
        """Wait for the instant. Returns whom to kill. Raises ProcessLookupError where the command ended
        before."""
        deadline, runs = time.monotonic() + 120, self._runs()

        def until(condition: Callable[[], bool], pause: float = 0.0005) -> None:
            while not condition():
                if command.process.poll() is not None or time.monotonic() > deadline:
                    raise ProcessLookupError
                time.sleep(pause)

        if moment == "start":
            time.sleep(random_.uniform(0, 6))
        else:
            until(lambda: self._runs() > runs, 0.02)
        pids = self._pids(command, target)
        if moment == "training":
            time.sleep(random_.uniform(0, 1))
        elif moment != "start":
            ending = ".tmp" if moment == "writing" else ".old"
            for _ in range(random_.randrange(1, 6)):
                until(lambda: not any(self.run.path.glob(f"step-*{ending}")))
                until(lambda: any(self.run.path.glob(f"step-*{ending}")))
            time.sleep(random_.choice([0, random_.uniform(0, 0.02)]))
        if command.process.poll() is not None:
            raise ProcessLookupError
        return pids

    def _pids(self, command: Command, target: str) -> list[int]:
        ranks = {rank: pid for pid, rank in command.descendants().items() if rank is not None}
        if target.startswith("rank"):
            # where there are none yet, the launcher
            return [ranks.get(int(target.split()[1]), command.process.pid)]
        return [command.process.pid, *(ranks.values() if target == "all" else ())]

    def _runs(self) -> int:
        """Commands that have begun to train."""
        log = self.run.path / "log.jsonl"
        return log.read_text(errors="replace").count('"kind": "run"') if log.exists() else 0

    def _step(self) -> int:
        log = self.run.path / "log.jsonl"
        steps = (
            re.findall(r'"kind": "step", "step": (\d+)', log.read_text(errors="replace"))
            if log.exists()
            else []
        )
        return int(steps[-1]) if steps else 0

    def _check_end(self, target: str, status: int, errors: str, seconds: float) -> None:
        if seconds > END_WITHIN:
            self.problems.append(f"{target} killed: the command ended {seconds:.1f} s later")
        if status not in (1, -signal.SIGKILL) or (status == 1 and "was ended by SIGKILL" not in errors):
            self.problems.append(f"{target} killed: status {status}, {errors[-2000:]}")

    def _check_beginning(self, newest: Path | None) -> None:
        """Whether the last command went on from what was the newest checkpoint when it began, if that was not
        the last of the run."""
        if newest is not None and newest.name == f"step-{STEPS}":
            return
        resumed = [line for line in said(self.run.path) if line.startswith("resumed from ")]
        if newest is not None and (
            not resumed or not resumed[-1].startswith(f"resumed from run/{newest.name}: ")
        ):
            self.problems.append(f"{newest.name} was the newest, but: {resumed[-1:] or 'begun anew'}")

    def _clear(self, command: Command) -> None:
        """Wait until no process of it is left; and kill those that are."""
        deadline = time.monotonic() + END_WITHIN
        while (left := command.descendants()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            self.problems.append(f"processes outlived the command: {left}")
        for pid in (*left, *([command.process.pid] if command.process.poll() is None else [])):
            os.kill(pid, signal.SIGKILL)
        command.process.communicate()


def differences(run: Path, whole: Path) -> list[str]:
    """What of a run that is through is not as in the one that nothing disturbed."""
    found = [
        f"{name} is another"
        for name, content in contents(whole).items()
        if contents(run).get(name) != content
    ]
    if names(run) != names(whole):
        found.append(f"there are {names(run)}, not {names(whole)}")
    if numbers(run) != numbers(whole):
        found.append("the logs differ")
    return found


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def contents(run: Path) -> dict[str, Any]:
    """All files of the checkpoints; of resume.json what is not of the time that it took."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in run.glob("step-*/**/*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if path.name == "resume.json":
            tree = json.loads(path.read_text())
            tree["extra"].pop("seconds")
            tree.pop("self")
            found[name] = tree
        else:
            found[name] = path.read_bytes()
    return found


def run(case: str, number: int, kills: int, whole: Path) -> dict[str, Any]:
    """One run that is killed at most `kills` times, and then comes to its end."""
    random_ = random.Random(f"{case} {number}")
    with tempfile.TemporaryDirectory(prefix="polyreme-crash-") as folder:
        job, done = Job(Path(folder), case), list[Any]()
        while len(done) < kills and (killed := job.killed(random_)) is not None:
            done.append(killed)
        if len(done) == kills:
            job.to_the_end()
        return {"case": case, "kills": done, "problems": job.problems + differences(job.run.path, whole)}


def undisturbed(folder: Path, case: str) -> Path:
    """The folder of a run that is never killed."""
    folder.mkdir()
    job = Job(folder, case)
    job.to_the_end()
    if job.problems:
        raise SystemExit("\n".join(job.problems))
    return job.run.path


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    env, runs = result["environment"], result["runs"]
    kills = [kill for each in runs for kill in each["kills"]]
    lost = [max(0, kill["step"] - int((kill["newest"] or "step-0").removeprefix("step-"))) for kill in kills]
    wrong = [f"{each['case']}: {problem}" for each in runs for problem in each["problems"]]
    lines = [
        "# Killed at random", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}, transformers "
        f"{env['versions']['transformers']}; "
        f"{env['cpu']}, {env['cores']} cores.", "", f"    {env['command']}", "",
    ]  # fmt: skip
    if kills:
        lines += [
            f"`polyreme train` of {STEPS} steps on two ranks, bf16, with "
            "dropout, a checkpoint every 3 steps, was killed by SIGKILL "
            f"{len(kills)} times in {len(runs)} runs, and run again as "
            f"often: {sum(kill['writing'] for kill in kills)} times while a "
            f"checkpoint was being written, {sum(kill['deleting'] for kill in kills)} "
            "times while one was being deleted. The command whose "
            f"rank was killed ended after {max(kill['seconds'] for kill in kills):.1f} "
            f"s at most. Steps done again: {sum(lost)}, at most "
            f"{max(lost)} after one kill. {sum(not each['problems'] for each in runs)} "
            f"of {len(runs)} runs ended with the checkpoints "
            "(weights, masters, optimizer states, random numbers, place in "
            "the data) and the log of the run that nothing disturbed, bit by "
            "bit.", "",
            "| case | runs | kills "
            "| while writing | " + " | ".join(TARGETS) + " |", "|---|--:|--:|--:|" + "--:|" * len(TARGETS),
        ]  # fmt: skip
        for case in CASES:
            there = [kill for each in runs if each["case"] == case for kill in each["kills"]]
            count = Counter(kill["target"] for kill in there)
            row = [
                sum(each["case"] == case for each in runs),
                len(there),
                sum(kill["writing"] for kill in there),
            ]
            lines.append(
                f"| {case} | " + " | ".join(map(str, [*row, *(count[target] for target in TARGETS)])) + " |"
            )
        lines += ["", *(f"- **{problem}**" for problem in wrong)]
    if corruptions := result.get("corruptions"):
        kinds = sorted({what.split()[1] for what in corruptions})
        lines += [
            "", f"{sum(corruptions.values())} random changes of an engine's "
                "checkpoint, each then loaded: none was loaded wrongly, "
            "and none refused with another error than CheckpointError, or after anything had changed.", "",
            "| change | found | harmless |", "|---|--:|--:|",
            *(f"| {kind} | {corruptions.get(f'found {kind}', 0)} "
              f"| {corruptions.get(f'harmless {kind}', 0)} |" for kind in kinds),
        ]  # fmt: skip
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the page goes beside it as .md")
    parser.add_argument("--kills", type=int, default=0, help="in all runs together")
    parser.add_argument("--corruptions", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other run after so long"
    )
    args = parser.parse_args(argv)
    from step import environment

    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    result["environment"] = environment()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polyreme-crash-") as folder:
        wholes: dict[str, Path] = {}
        while (
            done := sum(len(each["kills"]) for each in result["runs"])
        ) < args.kills and time.monotonic() - began < args.seconds:
            number = len(result["runs"])
            case = list(CASES)[number % len(CASES)]
            if case not in wholes:
                wholes[case] = undisturbed(Path(folder, f"whole-{len(wholes)}"), case)
            result["runs"].append(run(case, number, min(KILLS, args.kills - done), wholes[case]))
            print(
                case,
                f"{len(result['runs'][-1]['kills'])} kills",
                result["runs"][-1]["problems"] or "pass",
                sep=" | ",
                flush=True,
            )
            args.out.write_text(json.dumps(result, indent=0) + "\n")
        if args.corruptions:
            sizes = {
                "one": (10**9, args.corruptions // 2),
                "several": (1000, args.corruptions - args.corruptions // 2),
            }
            result["corruptions"] = dict(
                sum(
                    (fuzz(Path(folder, name), count, limit) for name, (limit, count) in sizes.items()),
                    Counter(),
                )
            )
            args.out.write_text(json.dumps(result, indent=0) + "\n")
    counts = [
        str(sum(len(each["kills"]) for each in result["runs"])),
        str(sum(result.get("corruptions", {}).values())),
    ]
    words = [
        "python",
        "bench/crash.py",
        "--out",
        str(args.out),
        "--kills",
        counts[0],
        "--corruptions",
        counts[1],
    ]
    result["environment"]["command"] = shlex.join(words)  # for all that is there, whichever runs it took
    args.out.write_text(json.dumps(result, indent=0) + "\n")
    args.out.with_suffix(".md").write_text(markdown(result))
    return int(any(each["problems"] for each in result["runs"]))


if __name__ == "__main__":
    sys.exit(main())
