"""Runs DeepSpeed scripts under the real DeepSpeed and through Polyreme's door, side by side.

    python bench/doors.py --deepspeed-python ../ds/bin/python --rounds 5 --out bench/results/NAME.json

The scripts of `doors/` are run unchanged, by `python -m deepspeed.launcher.runner --num_gpus 2` of the
interpreter that has DeepSpeed and by `polyreme deepspeed --num_gpus 2` of this one. Every step's loss must be
the same. One run at a time, both of a script in turns; a ratio is only ever taken within a round. Exit status
1 where a script fails or its losses differ. See README.md."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from report import spread, write
from step import environment, say

BENCH = Path(__file__).resolve().parent
DEEPSPEED, POLYREME = "deepspeed", "polyreme"
TARGET = 1.15
"""Times that a step is to be faster than DeepSpeed's."""
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2}
"""Largest relative difference of a loss."""


@dataclass(frozen=True)
class Case:
    """One script and its config."""

    script: str
    about: str
    config: str = ""
    dtype: str = "fp32"
    apart: str = ""
    """Why losses are not the same to the last digits, where they are not."""


CASES = {
    "cnn": Case("cnn.py", "CNN on synthetic images, ZeRO 0, DeepSpeed's loader"),
    "mlp-zero1": Case("mlp.py", "MLP, ZeRO 1", "zero1"),
    "mlp-zero2": Case("mlp.py", "MLP, ZeRO 2", "zero2"),
    "mlp-zero3": Case("mlp.py", "MLP, ZeRO 3", "zero3"),
    "accumulation": Case("mlp.py", "MLP, ZeRO 2, 4 micro-batches a step", "accumulation"),
    "clipping": Case("mlp.py", "MLP, ZeRO 2, gradients clipped to 0.1", "clipping"),
    "warmup": Case("mlp.py", "MLP, ZeRO 1, WarmupLR", "warmup"),
    "onecycle": Case("mlp.py", "MLP, ZeRO 1, OneCycle with momentum", "onecycle"),
    "bert": Case("bert.py", "BERT classification with dropout, ZeRO 1"),
    "llama-bf16": Case(
        "llama.py",
        "Llama pre-training, ZeRO 2, bf16",
        "llama-bf16",
        "bf16",
        "masters: DeepSpeed rounds the first weights to bf16 before it makes them, Polyreme does not; and "
        "DeepSpeed casts buffers (rotary frequencies), too",
    ),
    "llama-zero3": Case("llama.py", "Llama pre-training, ZeRO 3, clipping", "llama-zero3"),
    "lora": Case("lora.py", "LoRA on Llama (peft), ZeRO 2"),
    "zero-init": Case("zero_init.py", "transformer made under zero.Init, ZeRO 3"),
    "offload-optimizer": Case(
        "llama.py", "Llama, ZeRO 2, optimizer in host memory", "llama-offload-optimizer"
    ),
    "offload-all": Case(
        "llama.py", "Llama, ZeRO 3, optimizer and parameters in host memory", "llama-offload-all"
    ),
    "own-optimizer": Case("own_optimizer.py", "own AdamW of two groups, own LambdaLR, ZeRO 2"),
    "recompute": Case(
        "recompute.py",
        "deepspeed.checkpointing with dropout, ZeRO 2",
        apart="rounding, which AdamW lets grow: after 20 steps DeepSpeed's ZeRO 2 is 7e-7 from its stage 0, "
        "Polyreme (each stage, the same bits) 4e-7",
    ),
    "user-backward": Case("user_backward.py", "loss.backward(), rate set by hand, ZeRO 2"),
    "resume": Case("resume.py", "checkpoint saved and resumed by a new engine, ZeRO 2"),
    "trainer-zero2": Case("trainer.py", "Hugging Face Trainer, ZeRO 2, all by the JSON", "trainer-zero2"),
    "trainer-zero3": Case("trainer.py", "Hugging Face Trainer, ZeRO 3, its own optimizer", "trainer-zero3"),
    "accelerate": Case("accelerate_loop.py", "Accelerate's loop, ZeRO 2, accumulation"),
    "sft": Case("sft.py", "TRL's SFTTrainer with recomputation, ZeRO 2", "trainer-zero2"),
    "pipeline": Case("pipeline.py", "PipelineModule over two stages"),
}


def command(system: str, case: Case, deepspeed_python: Path | None) -> list[str]:
    """What a user types."""
    script = [str(BENCH / "doors" / case.script)]
    if case.config:
        script += ["--deepspeed_config", str(BENCH / "doors" / "configs" / f"{case.config}.json")]
    if system == DEEPSPEED:
        launcher = [str(deepspeed_python), "-m", "deepspeed.launcher.runner"]
    else:
        launcher = [sys.executable, "-m", "polyreme", "deepspeed"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # another run may have the launchers' own
    return [*launcher, "--num_gpus", "2", "--master_port", str(port), *script]


def variables(system: str, steps: int) -> dict[str, str]:
    """The same environment for both, but for where Polyreme is found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "PYTHON"))}
    env |= {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo",
        "DOORS_STEPS": str(steps), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    if system == POLYREME:
        env["PYTHONPATH"] = str(BENCH.parent / "src")
    return env


def run(system: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One run of a script: its losses and the median time of a step, or an error."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder, tempfile.TemporaryFile("w+") as log:
        psutil.cpu_percent()  # starts the interval
        began = time.monotonic()
        process = subprocess.Popen(
            command(system, case, args.deepspeed_python),
            cwd=folder,
            env=variables(system, args.steps),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            status = f"no end in {args.timeout:g} s"
        finally:
            end(process)
        seconds = time.monotonic() - began
        log.seek(0)
        lines = log.read().splitlines()
    told = [json.loads(line) for line in lines if line.startswith(('{"step"', '{"steps"'))]
    losses = [line["loss"] for line in told if "loss" in line]
    medians = [line for line in told if "median_ms" in line]
    found: dict[str, Any] = {"losses": losses, "seconds": seconds}
    if status or not medians:
        found["error"] = f"exit status {status}\n" + "\n".join(lines[-args.lines :])
    else:
        found |= {name: medians[0][name] for name in ("median_ms", "cpu_ms")}
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of a run: its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference; infinity where a loss is missing or not finite."""
    if len(ours) != len(theirs) or not ours or not all(map(math.isfinite, [*ours, *theirs])):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def summarise(name: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table from all rounds of a script."""
    case, row = CASES[name], dict[str, Any]()
    failed = {s: r[s]["error"] for r in rounds for s in (DEEPSPEED, POLYREME) if "error" in r.get(s, {})}
    whole = [r for r in rounds if all("median_ms" in r.get(s, {}) for s in (DEEPSPEED, POLYREME))]
    if whole:
        row = {
            **{s: spread([r[s]["median_ms"] for r in whole]) for s in (DEEPSPEED, POLYREME)},
            "faster": spread([r[DEEPSPEED]["median_ms"] / r[POLYREME]["median_ms"] for r in whole]),
            "less_cpu": spread([r[DEEPSPEED]["cpu_ms"] / r[POLYREME]["cpu_ms"] for r in whole]),
            "whole_run": spread([r[DEEPSPEED]["seconds"] / r[POLYREME]["seconds"] for r in whole]),
            "apart": max(apart(r[POLYREME]["losses"], r[DEEPSPEED]["losses"]) for r in whole),
        }
        row["equal"] = row["apart"] <= TOLERANCE[case.dtype]
    return {**row, "errors": failed}


def markdown(result: Mapping[str, Any]) -> str:
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Scripts of DeepSpeed's through the door",
        "",
        f"{machine['date']}, commit {machine['commit']}; Python {machine['python']}, {versions}; DeepSpeed "
        f"{result['deepspeed']}; {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB.",
        "",
        f"    {machine['command']}",
        "",
        f"2 ranks x 1 thread, {result['steps']} steps, {result['rounds']} rounds. Other processes used "
        f"{result['foreign_cores']:.2f} cores before the rounds (median).",
        "",
        "| script | what it is | DeepSpeed ms | Polyreme ms | times faster | quartiles | aim | cpu | apart |",
        "|---|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    notes = []
    for name, row in result["summary"].items():
        case = CASES[name]
        if "apart" not in row:
            lines.append(f"| {name} | {case.about} | | | | | | | **no losses** |")
        else:
            faster = row["faster"]
            differs = "" if row["equal"] else " **DIFFER**"
            aim = f"{TARGET:.2f} {'met' if faster['median'] >= TARGET else 'missed'}"
            lines.append(
                f"| {name} | {case.about} | {row[DEEPSPEED]['median']:.1f} | {row[POLYREME]['median']:.1f} "
                f"| **{faster['median']:.2f}** | {faster['low']:.2f} to {faster['high']:.2f} | {aim} "
                f"| {row['less_cpu']['median']:.2f} | {row['apart']:.1e}{differs} |"
            )
        if case.apart:
            notes.append(f"- {name}: {case.apart}.")
        for system, error in row["errors"].items():
            notes.append(f"- **{name} failed under {system}**: {error.strip().splitlines()[-1][:300]}")
    return "\n".join([*lines, "", *notes, ""])


def table(result: Mapping[str, Any]) -> str:
    """The rows for a terminal, at most 80 columns wide."""
    lines = [
        f"{'':<18}{'ms a step':>20}  {'DeepSpeed / Polyreme':^26}  {'losses':>9}",
        f"{'script':<18}{'DeepSpeed':>10}{'Polyreme':>10}  "
        f"{'time':>5} {'quartiles':^12} {'cpu':>5}   {'apart':>9}",
        "-" * 78,
    ]
    for name, row in result["summary"].items():
        if "apart" not in row:
            failed = ", ".join(row["errors"]) or "nothing to compare"
            lines.append(f"{name:<18}{'-':>10}{'-':>10}  no times: {failed}"[:80])
            continue
        faster = row["faster"]
        lines.append(
            f"{name:<18}{row[DEEPSPEED]['median']:>10.1f}{row[POLYREME]['median']:>10.1f}  "
            f"{faster['median']:>5.2f} {faster['low']:>5.2f} - {faster['high']:<4.2f} "
            f"{row['less_cpu']['median']:>5.2f}   {row['apart']:>9.1e}{'' if row['equal'] else ' !'}"
        )
    whole = [row for row in result["summary"].values() if "apart" in row]
    met = [row for row in whole if row["faster"]["median"] >= TARGET]
    slower = [row for row in whole if row["faster"]["median"] < 1]
    lines += [
        "-" * 78,
        f"{len(met)} of {len(whole)} at least {TARGET:.2f} times as fast as DeepSpeed, {len(slower)} slower; "
        f"losses differ in {sum(not row['equal'] for row in whole)}",
        f"{result['foreign_cores']:.2f} cores were busy with others before the rounds: with more "
        "than 0.2, only",
        "the column cpu (processor time of rank 0 and its loader) can be compared",
    ]
    return "\n".join(lines)


def version(python: Path) -> str:
    """DeepSpeed's, of an interpreter. Raises CalledProcessError where it has none."""
    code = "from importlib.metadata import version; print(version('deepspeed'))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed-python",
        type=Path,
        default=Path(sys.executable),
        help="an interpreter that has DeepSpeed; by default this one",
    )
    parser.add_argument("--scripts", default="*", help="comma list of names or patterns, as 'mlp-*,bert'")
    parser.add_argument("--systems", default=f"{DEEPSPEED},{POLYREME}", help="to run one by itself")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script under each system")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a run")
    parser.add_argument("--lines", type=int, default=25, help="of what a run printed, kept if it failed")
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    args = parser.parse_args(argv)
    patterns = args.scripts.split(",")
    args.scripts = [name for name in CASES if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if not args.scripts:
        parser.error(f"--scripts {','.join(patterns)!r} names none of {', '.join(CASES)}")
    args.systems = args.systems.split(",")
    if not set(args.systems) <= {DEEPSPEED, POLYREME}:
        parser.error(f"--systems {args.systems}: choose from {DEEPSPEED}, {POLYREME}")
    for option in ("rounds", "steps"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: must be at least 1")
    args.deepspeed_python = args.deepspeed_python.absolute()  # not resolved: a venv's is a link
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no run is left
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.scripts}
    result: dict[str, Any] = {
        "environment": environment(),
        "deepspeed": version(args.deepspeed_python) if DEEPSPEED in args.systems else "none",
        "steps": args.steps,
        "rounds": args.rounds,
        "runs": found,
    }
    order, busy = random.Random(args.seed), []
    for name in args.scripts:
        for _ in range(args.rounds):
            systems = list(args.systems)
            order.shuffle(systems)
            busy.append(psutil.cpu_percent(0.5) / 100 * (os.cpu_count() or 1))
            record = {system: run(system, CASES[name], args) for system in systems}
            found[name].append(record)
            for system in sorted(record):
                told = record[system]
                say(f"  {name} {system}: {told.get('median_ms', math.nan):.1f} ms, {told['seconds']:.0f} s")
                if "error" in told:
                    say(told["error"])
        result["foreign_cores"] = sorted(busy)[len(busy) // 2]
        result["summary"] = {each: summarise(each, rounds) for each, rounds in found.items() if rounds}
        row = result["summary"][name]
        say(f"{name}: losses apart {row.get('apart', math.nan):.1e}")
        if args.out:  # after every script: a run cut short keeps what it has
            write(result, markdown(result), args.out)
    print(table(result))
    rows = result["summary"].values()
    return int(any(row["errors"] or not row.get("equal", len(args.systems) < 2) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
