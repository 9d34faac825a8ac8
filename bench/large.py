"""Trains a model whose states do not fit: a Llama of 1.1 billion parameters (or another size), with what
`--memory` says in files.

    python bench/large.py --folder /nvme/run --ranks 2 --steps 3 --out bench/results/NAME.json

The model is built by `polyreme.initialize` from a function, so it is never whole on a rank. After the first
step each rank says what memory and traffic `Engine.working_set` and the sizes of its records make it expect;
then come the measured steps. Prediction of memory: what the process has resident after a step of a tiny
model, the working set, and what the operators of the last block's backward or of the loss hold for a moment
(`operators`). Measured: VmHWM, reset after the first step. Exit status: 0, 1 where a rank exceeds its
prediction by more than 10%, or moves other bytes than predicted, 2 for bad usage."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
SHAPES = {  # hidden, blocks, heads, key-value heads, intermediate, vocabulary
    "tiny": (64, 4, 4, 2, 176, 512),
    "125m": (768, 12, 12, 12, 2048, 32000),
    "1.1b": (2048, 22, 32, 4, 5632, 32000),  # TinyLlama's
}
MARGIN = 1.1


def rank_main(args: argparse.Namespace) -> None:
    """One rank: trains, and writes what it saw to its file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import polyreme
    import probe
    from polyreme.files.direct_io import padded
    from worker import peak_rss, reset_peak

    hidden, blocks, heads, groups, intermediate, vocabulary = SHAPES[args.size]
    shape = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    home = {"device": "device", "host": "host", "files": args.folder}
    config = {
        "batch": {"size": args.ranks, "micro": 1},
        "zero": {"stage": 3},
        "memory": {
            "states": home[args.states],
            "params": home[args.params],
            "gradients": {**home, "auto": "auto"}[args.gradients],
            "activations": "recompute",
        },
        "precision": {"compute": args.dtype},
        "optimizer": {"name": "adamw", "lr": 1e-4},
    }
    rank = int(os.environ.get("RANK", "0"))
    small = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        intermediate_size=512,
        use_cache=False,
    )
    ids = torch.zeros(1, 8, dtype=torch.int64)
    # what libraries, threads and compiling take once
    warm = polyreme.initialize(lambda: LlamaForCausalLM(small), config)
    warm.train_step({"input_ids": ids, "labels": ids})
    warm.close()
    del warm
    reset_peak()
    base = peak_rss()
    began = time.perf_counter()
    engine = polyreme.initialize(lambda: LlamaForCausalLM(shape), config)
    built = time.perf_counter() - began
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(vocabulary, (1, args.tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    losses = [engine.train_step(batch).loss]
    logits = args.tokens * vocabulary * 4
    inside = args.tokens * (4 * intermediate + 8 * hidden) * 4 + heads * args.tokens**2 * 4
    # the head's gradient, which is summed in float32 before it is rounded
    wide = vocabulary * hidden * 4 if args.dtype == "bf16" else 0
    working = engine.working_set()
    expected = {"base": base, **working, "operators": max(3 * logits + wide, 3 * inside)}
    reset_peak()
    steps = []
    for _ in range(args.steps):
        before, began = engine.tiers(), time.perf_counter()
        losses.append(engine.train_step(batch).loss)
        seconds = time.perf_counter() - began
        moved = {
            name: {key: after[key] - before[name][key] for key in ("read", "written", "waited")}
            for name, after in engine.tiers().items()
        }
        steps.append({"seconds": seconds, "tiers": moved})
    extents = probe.offloaded_states(engine)
    states = sum(padded(extent.nbytes) for extent in extents)
    size = engine.config.precision.compute
    itemsize = {"fp32": 4, "bf16": 2}[size]
    units = probe.units(engine)
    shard = {bucket: padded(bucket.layout.shard_size * itemsize) for unit in units for bucket in unit}
    stay = sum(shard[bucket] for bucket in (*units[0], *units[-1]))
    traffic: dict[str, tuple[int, int]] = {}
    if args.states == "files":
        traffic["states"] = (states, states)
    if engine.config.memory.gradients not in ("device", "host"):
        reduced = probe.trainable(engine)[0].gradients.sums.reduce.itemsize
        gradients = sum(padded(extent.interval.size * reduced) for extent in extents)
        traffic["gradients"] = (gradients, gradients)
    if args.params == "files":
        traffic["params"] = (2 * sum(shard.values()) - stay, sum(shard.values()))
    found = {
        "rank": rank,
        "parameters": engine.parameter_count,
        "built": built,
        "losses": losses,
        "expected": expected,
        "peak": peak_rss(),
        "traffic": traffic,
        "steps": steps,
        "tiers": engine.tiers(),
    }
    Path(args.report, f"{rank}.json").write_text(json.dumps(found))
    engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="1.1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after one that is not")
    parser.add_argument("--tokens", type=int, default=64, help="per rank and step")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--states", choices=["device", "host", "files"], default="files")
    parser.add_argument("--params", choices=["device", "host", "files"], default="files")
    parser.add_argument(
        "--gradients",
        choices=["auto", "host", "files"],
        default="auto",
        help="auto: in files where all else is",
    )
    parser.add_argument(
        "--folder", help="of a local disk, for files; by default a new one in the current folder"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        rank_main(args)
        return 0
    sys.path[:0] = [str(BENCH)]
    from step import environment, say

    with tempfile.TemporaryDirectory() as report, tempfile.TemporaryDirectory(dir=".") as made:
        folder = args.folder or made
        launch = [sys.executable, "-m", "polyreme", "launch", "-n", str(args.ranks)]
        command = [*launch, str(Path(__file__)), *sys.argv[1:], "--report", report]
        command += [] if args.folder else ["--folder", folder]
        paths = [BENCH, *(BENCH.parent / each for each in ("src", "tests"))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        if subprocess.run(command, env=env, check=False).returncode:
            say("a rank failed")
            return 1
        ranks = [json.loads(Path(report, f"{rank}.json").read_text()) for rank in range(args.ranks)]
    lines, good = table(ranks)
    known = environment()
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    where = (
        f"{known['date']}, commit {known['commit']}; Python {known['python']}, "
        f"{versions}; {known['cpu']}, {known['cores']} cores, "
    )
    where += f"{known['memory_gib']} GiB."
    shown = (
        f"# A model whose states are in files\n\n{where}\n\n    {shlex.join(['python', *sys.argv])}\n\n"
        + "\n".join(lines)
    )
    print(shown)
    if args.out:
        args.out.write_text(json.dumps(ranks, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(shown + "\n")
    return 0 if good else 1


def table(ranks: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What was predicted and seen, by rank; and whether all is as predicted."""
    lines = [f"{ranks[0]['parameters'] / 1e9:.3f} billion parameters; "
             f"built in {max(r['built'] for r in ranks):.0f} s; losses "
             + ", ".join(f"{loss:.4f}" for loss in ranks[0]["losses"]) + ".", ""]  # fmt: skip
    good = True
    lines += ["| rank | predicted MiB | of it | peak MiB | peak over predicted |", "|--:|--:|---|--:|--:|"]
    for each in ranks:
        total = sum(each["expected"].values())
        parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in each["expected"].items())
        lines.append(
            f"| {each['rank']} | {total / 2**20:.0f} | {parts} | "
            f"{each['peak'] / 2**20:.0f} | {each['peak'] / total:.3f} |"
        )
        good &= each["peak"] <= MARGIN * total
    lines += ["", "| rank | step | seconds | tier | read GB | "
                  "predicted | written GB | predicted | waited s |",
              "|--:|--:|--:|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for each in ranks:
        for i, step in enumerate(each["steps"]):
            for name, moved in step["tiers"].items():
                if name in each["traffic"]:
                    read, written = each["traffic"][name]
                    good &= (moved["read"], moved["written"]) == (read, written)
                    bytes_moved = " | ".join(
                        f"{size / 1e9:.3f}" for size in (moved["read"], read, moved["written"], written)
                    )
                    lines.append(
                        f"| {each['rank']} | {i + 2} | {step['seconds']:.1f} "
                        f"| {name} | {bytes_moved} | {moved['waited']:.1f} |"
                    )
    return lines, good


if __name__ == "__main__":
    sys.exit(main())
