"""Measures the bubble of pipelines that run, beside the one that `pipeline.simulate` predicts and the
published formula.

    python bench/bubble.py --out bench/results/NAME.json

`sleep`: 4 ranks train 8 blocks that sleep in forward, in backward and in the gradients of their weights, as
long in each. So all ranks overlap, however few the cores, and what the formula takes for granted is so. A
size of `cases.py` such as 12m: that Llama really computes, on 2 ranks, balanced by time.

Each rank notes when the actions of its row begin and end, and how long an F or B waits for what arrives;
clocks of one host agree. The simulations get more and more of what was noted, so that their differences tell
what makes the bubble larger than the formula says.
Invariant: all bubbles of a step are 1 - computing / (ranks x length), with the same computing. The update,
which comes after the pipeline, is left out. Exit status: 0, 2 for bad usage."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import Function

import polyreme
from cases import SIZES, Job, build_batch, build_model
from polyreme.models.huggingface import pipeline_list
from polyreme.pipeline.schedule import MESSAGES, NAMES, Action, Name, Schedule, build, halves, other_end
from polyreme.pipeline.simulate import RECEIVED, Costs, simulate
from polyreme.pipeline.weight_gradients import now_or_later
from report import spread
from step import environment, say

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import probe
from pool import Ranks

SLEEP, BLOCKS, VIRTUAL, TOKENS = "sleep", 8, 2, 256
COMPUTES = ("F", "B", "W")
KINDS = ("simulated", "own times", "with messages", "measured")
"""Of a step's bubble: simulated from the mean time of each stage's F, B and W; from each action's own; with
messages, too; as it ran."""


class Case(NamedTuple):
    """A pipeline to measure: `steps` of them, after one that is not timed. `seconds`: of one part of a
    sleeping block."""

    model: str
    schedule: Name
    microbatches: int
    steps: int
    seconds: float

    @property
    def ranks(self) -> int:
        return 4 if self.model == SLEEP else 2

    @property
    def table(self) -> Schedule:
        return build(self.schedule, self.ranks, self.microbatches, VIRTUAL)


class Span(NamedTuple):
    """An action as it ran; `waited` of its time for what arrives."""

    action: Action
    began: float
    ended: float
    waited: float


Step = Sequence[Sequence[Span]]
"""One step: the spans of each rank."""


# ---- on a rank


class Sleeper(nn.Module):
    """A block that sleeps as long in forward, in backward and for its weights, and computes next to
    nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(8)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.seconds)


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, seconds = ctx.weight, ctx.seconds
        time.sleep(seconds)

        def gradient(into: Tensor | None) -> Tensor:
            time.sleep(seconds)
            return grad.sum(0) if into is None else into.add_(grad.sum(0))

        return grad, now_or_later(weight, gradient), None


class Watch:
    """A row that notes the spans of its actions while it is performed."""

    def __init__(self, row: Sequence[Action]) -> None:
        self.row, self.waited = row, 0.0
        self.spans: list[Span] = []

    def __iter__(self) -> Iterator[Action]:
        for action in self.row:
            self.waited, began = 0.0, time.perf_counter()
            yield action
            self.spans.append(Span(action, began, time.perf_counter(), self.waited))

    def wait(self, wait: Callable[[], None]) -> None:
        """Wait for messages, and note how long."""
        began = time.perf_counter()
        wait()
        self.waited += time.perf_counter() - began


def train(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Spans of each timed step on this rank, its blocks, and its processor time."""
    began = time.process_time()
    config: dict[str, Any] = {
        "mesh": {"pp": world},
        "batch": {"size": case.microbatches, "micro": 1},
        "pipeline": {"schedule": case.schedule, "virtual": VIRTUAL},
        "optimizer": {"name": "sgd"},
    }
    if case.model == SLEEP:
        model = nn.Sequential(*(Sleeper(case.seconds) for _ in range(BLOCKS)))
        batch: Any = (torch.zeros(case.microbatches, 8), torch.zeros(case.microbatches))
        engine = polyreme.initialize(model, config, loss_fn=lambda output, target: output.mean())
    else:
        config |= {"pipeline": {**config["pipeline"], "blocks": "time"}, "data": {"sequence": TOKENS}}
        batch = build_batch(Job("", case.model, "fp32", case.microbatches, TOKENS, rank, 1, 1), 0, [0])
        engine = polyreme.initialize(build_model(case.model), config)
    watch = probe.replace_row(engine, Watch)
    steps = []
    with probe.at_waits(watch.wait):
        for _ in range(1 + case.steps):
            engine.mesh.pp.barrier()
            watch.spans = []
            engine.train_step(batch)
            steps.append(watch.spans)
    blocks = engine.module.get_submodule(pipeline_list(engine.module)).children()
    own = sum(any(True for _ in block.parameters()) for block in blocks)
    return {"steps": steps[1:], "blocks": own, "cpu_seconds": time.process_time() - began}


# ---- from spans to numbers


def extent(step: Step) -> tuple[float, float]:
    """When the first action of any rank begins, and when the last one but for the update ends."""
    spans = [span for row in step for span in row if span.action.op != "U"]
    return min(span.began for span in spans), max(span.ended for span in spans)


def durations(step: Step, ops: Sequence[str]) -> dict[Any, float]:
    """By action, how long each action took, but for its waiting."""
    return {
        span.action: span.ended - span.began - span.waited
        for row in step
        for span in row
        if span.action.op in ops
    }


def means(step: Step) -> dict[Any, float]:
    """Of every F, B and W the mean of all of its kind at its stage: a B with a W is of another kind than a
    whole one."""
    spent = durations(step, COMPUTES)
    halved, found = halves([[*spent]]), defaultdict(list)
    for action, seconds in spent.items():
        found[action.op, action.stage, action in halved].append(seconds)
    return {action: statistics.fmean(found[action.op, action.stage, action in halved]) for action in spent}


def transfers(step: Step) -> list[float]:
    """How long messages passed for which a rank waited before they were sent: from then to the end of
    waiting."""
    spans = {span.action: span for row in step for span in row}
    found = []
    for action, span in spans.items():
        receive = action._replace(op=RECEIVED.get(action.op, action.op))
        if receive != action and receive in spans and span.began <= (sent := spans[other_end(receive)].began):
            found.append(span.began + span.waited - sent)
    return found


def bubbles(table: Schedule, step: Step, transfer: float) -> dict[str, float]:
    """The bubble of a step as it ran, and as it is simulated from what is known of it: see `KINDS`."""
    computing = durations(step, COMPUTES)
    start, end = extent(step)
    totals = {
        "simulated": simulate(table, Costs(means(step))).total,
        "own times": simulate(table, Costs(computing)).total,
        "with messages": simulate(table, Costs(computing | durations(step, tuple(MESSAGES)), transfer)).total,
        "measured": end - start,
    }
    return {kind: 1 - sum(computing.values()) / (len(table) * total) for kind, total in totals.items()}


def published(name: Name, p: int, m: int) -> float:
    """The bubble for stages that all take the same time, F as long as B and as W (docs/pipeline.md); of
    interleaved, if p divides m."""
    work, total = {
        "gpipe": (m, m + p - 1),
        "1f1b": (m, m + p - 1),
        "1f1b-w": (3 * m, 3 * (m + p - 1) - (1 if m > 1 else p - 1)),
        "interleaved": (VIRTUAL * m, VIRTUAL * m + p - 1),
        "zb-h1": (3 * m, max(3 * m + p - 1, 2 * m + 2 * p - 1)),
        "zb-v": (6 * m, max(6 * m + p - 1, 4 * m + 4 * p - 2)),
    }[name]
    return 1 - work / total


def measure(ranks: Ranks, case: Case) -> dict[str, Any]:
    """All that is found out about a case."""
    psutil.cpu_percent()  # starts the interval
    began = time.monotonic()
    answers = ranks(case.ranks, train, case, timeout=600, deprecations="default")
    busy = psutil.cpu_percent() / 100 * psutil.cpu_count()
    own = sum(answer["cpu_seconds"] for answer in answers) / (time.monotonic() - began)
    steps: list[Step] = list(zip(*(answer["steps"] for answer in answers), strict=True))
    transfer = statistics.median([seconds for step in steps for seconds in transfers(step)] or [0.0])
    each = [bubbles(case.table, step, transfer) for step in steps]
    return {
        **case._asdict(),
        "ranks": case.ranks,
        "blocks": [answer["blocks"] for answer in answers],
        "formula": published(case.schedule, case.ranks, case.microbatches),
        **{kind: spread([found[kind] for found in each]) for kind in KINDS},
        "milliseconds": spread([(end - start) * 1e3 for start, end in map(extent, steps)]),
        "means": [{str(action): seconds * 1e3 for action, seconds in means(step).items()} for step in steps],
        "transfer": transfer * 1e3,
        "foreign_cores": max(0.0, busy - own),
    }


# ---- all of them


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a page."""
    env = result["environment"]
    lines = [
        "# The bubble of pipelines: published, simulated, measured", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}; {env['cpu']}, {env['cores']} "
        "cores, gloo.", "", f"    {env['command']}", "",
        "The bubble in percent of ranks x length of a step. The columns are explained in bench/README.md.",
    ]  # fmt: skip
    for model in dict.fromkeys(case["model"] for case in result["cases"]):
        cases = [case for case in result["cases"] if case["model"] == model]
        foreign = statistics.median(case["foreign_cores"] for case in cases)
        lines += [
            "", f"## {model}, {cases[0]['ranks']} ranks", "",
            f"Median of {cases[0]['steps']} steps. Processes that were "
            f"not of the benchmark used {foreign:.2f} cores (median).", "",
            "| schedule | micro-batches | formula | simulated | own times "
            "| with messages | measured | quartiles | ms | transfer ms "
            "| blocks |",
            "|---|" + "--:|" * 10,
        ]  # fmt: skip
        for case in cases:
            found = [case["formula"], *(case[kind]["median"] for kind in KINDS[:-1])]
            measured = {key: 100 * value for key, value in case["measured"].items()}
            lines.append(
                f"| {case['schedule']} | {case['microbatches']} | "
                f"{' | '.join(f'{100 * bubble:.1f}' for bubble in found)} "
                f"| **{measured['median']:.1f}** | {measured['low']:.1f} to {measured['high']:.1f} "
                f"| {case['milliseconds']['median']:.0f} | "
                f"{case['transfer']:.2f} | {' '.join(map(str, case['blocks']))} |"
            )
    return "\n".join([*lines, ""])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="sleep,12m", help="comma list of sleep, " + ", ".join(SIZES))
    parser.add_argument("--schedules", default=",".join(NAMES), help="comma list of " + ", ".join(NAMES))
    parser.add_argument("--microbatches", default="4,8,16", help="comma list of numbers")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=10.0,
        help="of a sleeping block's forward, and of each half of its backward",
    )
    parser.add_argument("--out", type=Path, help="the JSON result; a table is written beside it as .md")
    args = parser.parse_args(argv)
    args.models, args.schedules = args.models.split(","), args.schedules.split(",")
    for option, allowed in (("models", (SLEEP, *SIZES)), ("schedules", get_args(Name))):
        for value in getattr(args, option):
            if value not in allowed:
                parser.error(f"--{option} {value!r}: choose from {', '.join(allowed)}")
    try:
        args.microbatches = [int(number) for number in args.microbatches.split(",")]
    except ValueError:
        parser.error(f"--microbatches {args.microbatches!r}: give a comma list of numbers")
    if min(args.steps, args.milliseconds, *args.microbatches) <= 0:
        parser.error("--steps, --milliseconds and --microbatches must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    result: dict[str, Any] = {"environment": environment(), "cases": []}
    ranks = Ranks()
    try:
        for model in args.models:
            for schedule in args.schedules:
                for microbatches in args.microbatches:
                    case = measure(
                        ranks, Case(model, schedule, microbatches, args.steps, args.milliseconds / 1e3)
                    )
                    say(
                        f"{model} {schedule} {microbatches}: {case['formula']:.1%}, "
                        f"measured {case['measured']['median']:.1%}"
                    )
                    result["cases"].append(case)
                    if args.out:  # after every case: a run cut short keeps what it has
                        args.out.parent.mkdir(parents=True, exist_ok=True)
                        args.out.write_text(json.dumps(result, indent=1) + "\n")
                        args.out.with_suffix(".md").write_text(markdown(result))
    finally:
        ranks.close()
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
