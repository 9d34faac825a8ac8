"""Trains with states, parameters and gradients in every home (device, host memory, files, shared out) under
every ZeRO stage, optimizer, accumulation, precision and number of ranks: the whole product, of which the
tests run a cover.

    python bench/homes.py --out bench/results/NAME.json                     # what NAME.json does not have yet
    python bench/homes.py --out bench/results/NAME.json --seconds 600       # a part; the next run goes on

Invariant: a run passes if the loss and gradient norm of each step and every final weight have the same bits
in all homes, and if in fp16, whose loss scale begins too high, some steps overflow and some do not. Exit
status: 0, 1 where a run is wrong, 2 for bad usage."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix import BENCH, sweep

sys.path += [str(BENCH.parent / "tests/ranks")]

from test_offload_training import ALL_CASES, OPTIMIZERS, PRECISIONS, Case, assert_equal, homes

from pool import Ranks, RanksFailed

STEPS = 4


def name_of(case: Case) -> str:
    sums = f"accumulation {case.accumulation}, each {case.reduce_every}"
    return f"{case.world} ranks, stage {case.stage}, {case.optimizer}, {case.precision}, {sums}"


CASES = {name_of(case): case for case in ALL_CASES}


def attempt(ranks: Ranks, case: Case) -> str:
    """What is wrong with a run; nothing, if it passes."""
    with tempfile.TemporaryDirectory(prefix="homes-", dir=".") as folder:
        try:
            records, weights = assert_equal(
                ranks, case.world, "llama", case.settings(), Path(folder).resolve(), STEPS
            )
        except (AssertionError, RanksFailed) as error:
            return " ".join(str(error).split())[-400:]
    overflows = sum(not (math.isfinite(loss) and math.isfinite(norm)) for loss, norm in records)
    if (0 < overflows < STEPS) != (case.precision == "fp16") or not all(
        t.isfinite().all() for t in weights.values()
    ):
        return f"{overflows} of {STEPS} steps overflow, or a weight is not finite"
    return ""


def markdown(result: Mapping[str, Any], cases: int) -> str:
    """The whole result as a page."""
    env = result["environment"]
    runs = {name: problem for name, problem in result["runs"].items() if name in CASES}
    wrong = {name: problem for name, problem in runs.items() if problem}
    counts: Counter[tuple[Any, ...]] = Counter()
    for name, problem in runs.items():
        case = CASES[name]
        counts[case.stage, case.world, case.optimizer, case.precision] += not problem
        counts[case.stage, case.world, case.optimizer, case.precision, "all"] += 1
    columns = list(itertools.product(OPTIMIZERS, PRECISIONS))
    lines = [
        "# The same bits in every home",
        "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}, transformers "
        f"{env['versions']['transformers']}.",
        "",
        f"    {env['command']}",
        "",
        f"{len(runs)} of {cases} runs of {STEPS} steps of a small Llama "
        "with clipping, with one micro-batch and with two, each in "
        f"{len(homes(2))} homes (states on the device, in host memory, "
        "in files of two folders, half in host memory; of these the last "
        f"three with gradients in files, too), at stage 3 in {len(homes(3))} "
        "(and parameters in host memory, in files, with states in "
        "files or host memory), but without gradients in files where "
        "several ranks add up micro-batches before they reduce: every loss, "
        "gradient norm and final weight has the bits that it has on the "
        f"device. {len(runs) - len(wrong)} pass, {len(wrong)} are wrong. In "
        "fp16 some of the steps overflow and are skipped, and some are not.",
        "",
        "| passed | " + " | ".join(" ".join(column) for column in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for stage, world in itertools.product(range(4), (1, 2, 4)):
        row = [(counts[stage, world, *column], counts[stage, world, *column, "all"]) for column in columns]
        title = f"stage {stage}, {world} rank{'s' * (world > 1)}"
        lines.append(
            f"| {title} | " + " | ".join(f"{passed}/{total}" if total else "" for passed, total in row) + " |"
        )
    lines += ["", *(f"- **{name}**: {problem}" for name, problem in wrong.items())]
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left on the disk
    return sweep(CASES, attempt, markdown, argv, (__doc__ or "").split("\n\n")[0])


if __name__ == "__main__":
    sys.exit(main())
