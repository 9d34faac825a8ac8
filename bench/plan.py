"""Compares the planner's seconds of a step with steps that really run on the CPU ranks of this machine.

    python bench/plan.py --write docs/plan-time.md
    python bench/plan.py --groups 'llama, 2 ranks' --rounds 1       # one group, printed

A group is a model on a number of ranks and its layouts. Its ranks first measure the machine, at the same
time, as `polyreme plan --measure` does; then each round trains every layout for some steps, in a new random
order, so that what the machine does meanwhile meets all. The dry runs and the time model then say what each
should have taken on the machine as it was measured. Timings need a machine that does nothing else: the spread
of the rounds says whether it was so. Takes six minutes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.cli.trial import timed_steps
from polyreme.config import Config
from polyreme.pipeline.schedule import build
from polyreme.planner import measure
from polyreme.planner.dry_run import run_kinds
from polyreme.planner.hardware import Cluster
from polyreme.planner.time_model import Timeline, step_time

VOCABULARY, SEQUENCE, BATCH = 2048, 64, 8
KEEP, AGAIN = {"memory": {"activations": "keep"}}, {"memory": {"activations": "recompute"}}


def llama(blocks: int = 4, hidden: int = 256) -> nn.Module:
    """A Llama of 4.2 million parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=704, num_hidden_layers=blocks,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt() -> nn.Module:
    """A GPT-2 of 4.2 million parameters."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=256, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens(samples: int) -> dict[str, Tensor]:
    """Random ones, the same on every call."""
    ids = torch.randint(3, VOCABULARY, (samples, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Group:
    """Layouts of one model on so many ranks. layouts: sections of the config, by name."""

    model: Callable[[], nn.Module]
    ranks: int
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, name: str) -> Config:
        """The resolved config of a layout."""
        sections = {key: dict(value) for key, value in self.layouts[name].items()}
        batch = {"size": BATCH, **sections.pop("batch", {})}
        tree = {"batch": batch, "data": {"sequence": SEQUENCE}, **sections}
        return Config.load(tree).resolve(self.ranks)


def stage(number: int, **more: Any) -> dict[str, Any]:
    """All ranks on different samples."""
    return {"zero": {"stage": number}, **more}


def mesh(micro: int = BATCH, **sizes: int) -> dict[str, Any]:
    """These axes, and the rest of the ranks on different samples."""
    return {"mesh": sizes, "batch": {"micro": micro}}


ONE: dict[str, dict[str, Any]] = {
    "one micro-batch": {"batch": {"micro": 8}},
    "2 micro-batches": {"batch": {"micro": 4}},
    "8 micro-batches": {"batch": {"micro": 1}},
    "recomputed": {"batch": {"micro": 8}, **AGAIN},
    "states in host memory": {"batch": {"micro": 8}, "memory": {"states": "host"}},
}
TWO: dict[str, dict[str, Any]] = {
    "dp 2, stage 0": stage(0),
    "dp 2, stage 1": stage(1),
    "dp 2, stage 3": stage(3),
    "dp 2, recomputed": stage(1, **AGAIN),
    "tp 2": mesh(tp=2),
    "pp 2, 2 micro-batches": mesh(4, pp=2),
    "pp 2, 8 micro-batches": mesh(1, pp=2),
}
FOUR: dict[str, dict[str, Any]] = {
    "dp 4, stage 1": stage(1),
    "dp 4, stage 3": stage(3),
    "dp 2, tp 2": mesh(4, tp=2),
    "dp 2, pp 2": mesh(1, pp=2),
    "tp 4": mesh(tp=4),
    "tp 2, pp 2": mesh(2, tp=2, pp=2),
    "pp 4, 8 micro-batches": mesh(1, pp=4),
}
GROUPS: dict[str, Group] = {
    "llama, 1 rank": Group(llama, 1, ONE),
    "gpt, 1 rank": Group(gpt, 1, ONE),
    "llama, 2 ranks": Group(llama, 2, TWO),
    "gpt, 2 ranks": Group(gpt, 2, TWO),
    "wide llama, 2 ranks": Group(partial(llama, 2, 512), 2, TWO),
    "llama, 4 ranks": Group(llama, 4, FOUR),
    "gpt, 4 ranks": Group(gpt, 4, FOUR),
}
TINY: dict[str, Group] = {
    "tiny, 2 ranks": Group(partial(llama, 1, 64), 2, {"dp 2": stage(1), "tp 2": mesh(tp=2)})
}
"""To try the benchmark itself."""


def rank(name: str, rounds: int, steps: int, file: Path) -> None:
    """Measure the machine and all layouts of a group, on each of the ranks."""
    group = (GROUPS | TINY)[name]
    if name in TINY:
        measure.SECONDS, measure.LONGEST, measure.STREAMED = 0.0, 1e-9, 2**20
    cluster, first = measure.measure_run(group.ranks, file.parent)
    taken: dict[str, list[float]] = {name: [] for name in group.layouts}
    for number in range(rounds):
        for name in random.Random(number).sample([*group.layouts], len(group.layouts)):
            seconds = timed_steps(group.model, group.config(name), tokens, steps=steps)
            taken[name].append(statistics.median(seconds))
    if first:
        file.write_text(json.dumps({"taken": taken, "cluster": cluster.to_toml()}), "utf-8")


@dataclass(frozen=True)
class Compared:
    """A layout: the medians of its rounds, and its predicted step."""

    name: str
    rounds: Sequence[float]
    predicted: Timeline

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.rounds)

    @property
    def ratio(self) -> float:
        """Predicted seconds to measured ones."""
        return self.predicted.seconds / self.measured

    @property
    def spread(self) -> float:
        """The range of the rounds, as a part of their median."""
        return (max(self.rounds) - min(self.rounds)) / self.measured


def compare(name: str, rounds: int, steps: int, keep: Path | None) -> list[Compared]:
    """Run a group on ranks of this machine, and predict its layouts."""
    group = (GROUPS | TINY)[name]
    with tempfile.TemporaryDirectory() as folder:
        file = (keep or Path(folder)).absolute() / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            job = json.dumps([name, rounds, steps, str(file)])
            launch = [sys.executable, "-m", "polyreme", "launch", "-n", str(group.ranks), "--threads", "1"]
            command = [*launch, __file__, "--job", job]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text("utf-8"))
        (description := Path(folder) / "cluster.toml").write_text(found["cluster"], "utf-8")
        cluster = Cluster.load(description)
    return [*predicted(group, found["taken"], cluster)]


def predicted(group: Group, taken: Mapping[str, Sequence[float]], cluster: Cluster) -> Iterator[Compared]:
    """Yield each layout with its predicted step."""
    for name, rounds in taken.items():
        config = group.config(name)
        traces = [*run_kinds(group.model, config, device="cpu", batch=tokens).values()]
        schedule = build(config.schedule, config.mesh.pp, config.accumulation, config.pipeline.virtual)
        yield Compared(name, rounds, step_time(traces, schedule, cluster))


HEAD = "| group | layout | measured | spread | predicted | predicted / measured | what takes most |"


def lines(name: str, found: Sequence[Compared]) -> Iterator[str]:
    """Yield the rows of a group, the fastest measured one first."""
    best = sorted(found, key=lambda each: each.predicted.seconds)
    for each in sorted(found, key=lambda each: each.measured):
        place = best.index(each) + 1
        yield (
            f"| {name} | {each.name} | {1e3 * each.measured:.0f} ms | {each.spread:.0%} | "
            f"{1e3 * each.predicted.seconds:.0f} ms ({place}.) | {each.ratio:.2f} | {each.predicted.limit} |"
        )


def summary(groups: Mapping[str, Sequence[Compared]]) -> str:
    """Say how well the choices were predicted."""
    tops = {
        name: min(found, key=lambda each: each.predicted.seconds).ratio - 1 for name, found in groups.items()
    }
    among = []
    for name, found in groups.items():
        two = sorted(found, key=lambda each: each.predicted.seconds)[:2]
        among += [name] * (min(found, key=lambda each: each.measured) in two)
    every = [abs(each.ratio - 1) for found in groups.values() for each in found]
    told = ", ".join(f"{name} {error:+.0%}" for name, error in tops.items())
    return (
        f"Error of the step time of the layout that would be chosen: median "
        f"{statistics.median(map(abs, tops.values())):.0%} ({told}). The fastest measured layout is among "
        f"the two predicted to be fastest in {len(among)} of {len(groups)} groups. Over all {len(every)} "
        f"layouts the median error is {statistics.median(every):.0%}, the largest {max(every):.0%}."
    )


INTRODUCTION = (
    "What `polyreme.planner` says of the seconds of a step on CPU ranks, beside steps that ran. The machine "
    "was described by `polyreme plan --measure` in the same processes just before; no figure was fitted "
    "to the steps. spread: the range over the rounds, each a median of some steps, beside their median. "
    "(1.): the place among the group's predictions."
)


FOUR_RANKS = (
    "Ranks have one thread each. This machine has {cores} cores: of more ranks than that each one is "
    "described by the part of a core that it had while all measured at once. Pipeline ranks that wait leave "
    "their part to others, which the model of time does not follow."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", default=";".join(GROUPS), help="names, apart by ;")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--keep", type=Path, help="a folder for measurements, which are not made again")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.job:
        name, rounds, steps, file = json.loads(given.job)
        rank(name, rounds, steps, Path(file))
        return
    groups = {}
    for name in given.groups.split(";"):
        groups[name] = compare(name, given.rounds, given.steps, given.keep)
        print("\n".join(lines(name, groups[name])), flush=True)
    cores = len(os.sched_getaffinity(0))
    where = f"{platform.processor() or platform.machine()}, {cores} cores, torch {torch.__version__}"
    parts = (
        "<!-- Written by bench/plan.py. -->\n# Predicted and measured seconds of a step",
        INTRODUCTION,
        summary(groups),
        f"{time.strftime('%Y-%m-%d')}, {where}, {given.rounds} rounds of {given.steps} steps.",
        FOUR_RANKS.format(cores=cores),
        "\n".join(
            [
                HEAD,
                "|---" * (HEAD.count("|") - 1) + "|",
                *(row for name, found in groups.items() for row in lines(name, found)),
            ]
        ),
    )
    page = "\n\n".join(parts) + "\n"
    if given.write:
        given.write.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
