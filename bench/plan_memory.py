"""Compares the memory and the traffic of dry runs with those of real ranks on this machine.

    python bench/plan_memory.py --keep /tmp/plan-memory.jsonl --write docs/plan-memory.md
    python bench/plan_memory.py --only llama --only "pp 2"

Every pair of values of what `tests/planned.py` varies (layout, ZeRO stage, tier, recomputation, format,
micro-batches, family) is in a configuration, and more are added up to --least. Each is trained for two steps
on real ranks, whose second step is recorded: the bytes of all live tensors of the rank, from operator to
operator. Then processes are measured: their resident memory in the configurations of `planned.RESIDENT`.
Exit status 1 where bytes between steps or traffic differ, a peak by more than 2%, or a process by more than
10%."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path.append(str(BENCH.parent / "tests"))

import torch  # noqa: E402

import planned  # noqa: E402
from cover import cover  # noqa: E402
from planned import Case  # noqa: E402
from pool import Ranks  # noqa: E402

MOST, MOST_RESIDENT = 0.02, 0.1
Row = dict[str, Any]


def cases(least: int) -> list[Case]:
    """Every pair of values, then triples, at least so many."""
    everything = planned.cases()
    found = cover(everything, lambda case: planned.values(case, 2))
    if len(found) < least:
        more = cover([each for each in everything if each not in found], lambda each: planned.values(each, 3))
        found += more[: least - len(found)]
    return found


def of_tensors(case: Case, ranks: Ranks, folder: str) -> Row:
    found = planned.compared(case, ranks, folder)
    for each in found:
        if each.states or each.traffic or each.tiers or abs(each.peak) > MOST:
            print("   ", each, flush=True)
    return {
        "measured": max(each.measured for each in found),
        "peaks": [each.peak for each in found],
        "states": not any(each.states for each in found),
        "traffic": not any(each.traffic for each in found),
        "tiers": not any(each.tiers for each in found),
    }


def of_processes(case: Case, ranks: Ranks, folder: str) -> Row:
    ranks.close()  # a process keeps memory that an earlier case has freed
    real = ranks(case.world, planned.resident, case, folder)
    said = [planned.predicted(case, rank, folder).memory for rank in range(case.world)]
    sums = [before + each.peak + each.host for (before, _), each in zip(real, said, strict=True)]
    return {
        "before": max(before for before, _ in real),
        "said": max(each.peak + each.host for each in said),
        "measured": max(most for _, most in real),
        "errors": [total / most - 1 for total, (_, most) in zip(sums, real, strict=True)],
    }


class Kept:
    """Rows by the names of cases; those in a file are not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
        self.rows: dict[str, Row] = {each.pop("name"): each for each in map(json.loads, lines)}

    def fill(
        self, todo: Sequence[Case], measure: Callable[[Case, Ranks, str], Row], until: float
    ) -> list[Case]:
        """Measure what is missing, until it is so late. Returns the cases that have a row."""
        ranks = Ranks()
        try:
            for case in todo:
                if case.name in self.rows or time.monotonic() > until:
                    continue
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    row = self.rows[case.name] = measure(case, ranks, folder)
                print(case.name, row, f"{time.monotonic() - began:.0f} s", flush=True)
                if self._path is not None:
                    with self._path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"name": case.name, **row}) + "\n")
        finally:
            ranks.close()
        return [case for case in todo if case.name in self.rows]


def _case(case: Case) -> list[object]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in case.mesh).replace(" True", "") or "1 rank"
    return [
        case.family.removeprefix("large "),
        mesh.replace("_", " "),
        case.stage,
        case.tier,
        case.activations,
        case.compute,
        case.count,
    ]


CASE = "| family | ranks | stage | states | activations | format | micro-batches |"


def tensors_table(done: Sequence[Case], rows: dict[str, Row]) -> str:
    lines = [
        f"{CASE} peak, MiB | predicted | between steps | traffic | tiers |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in done:
        row = rows[case.name]
        told = ["equal" if row[key] else "**differs**" for key in ("states", "traffic", "tiers")]
        cells = [*_case(case), f"{row['measured'] / 2**20:.2f}", f"{max(row['peaks'], key=abs):+.3%}", *told]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def processes_table(done: Sequence[Case], rows: dict[str, Row]) -> str:
    lines = [
        f"{CASE} before, MiB | predicted | peak | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in done:
        row = rows[case.name]
        sizes = [f"{row[key] / 2**20:.0f}" for key in ("before", "said", "measured")]
        cells = [*_case(case), *sizes, f"{max(row['errors'], key=abs):+.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def report(
    tensors: Sequence[Case], first: dict[str, Row], processes: Sequence[Case], second: dict[str, Row]
) -> str:
    mine = [first[case.name] for case in tensors]
    peaks = [abs(each) for row in mine for each in row["peaks"]] or [0.0]
    within = sum(max(map(abs, row["peaks"])) <= MOST for row in mine)
    near = sum(max(map(abs, second[case.name]["errors"])) <= MOST_RESIDENT for case in processes)
    equal = {key: sum(row[key] for row in mine) for key in ("states", "traffic", "tiers")}
    return f"""# Predicted and measured memory

Dry runs ([the planner](plan.md)) beside real ranks. {datetime.now(UTC):%Y-%m-%d}, torch
{torch.__version__}, {platform.machine()}, `python bench/plan_memory.py --write docs/plan-memory.md`.

## Tensors

{len(tensors)} configurations, each for two steps on real ranks of this machine. Of them

- {equal["states"]} have the same bytes of parameters, gradients, states and buffers between steps,
- {within} have a peak within 2% of the prediction; over {len(peaks)} ranks the median error is
  {statistics.median(peaks):.4%}, the largest {max(peaks):.3%},
- {equal["traffic"]} have the same traffic: calls and bytes, by axis and operation,
- {equal["tiers"]} have the same bytes in host memory and in files,

on every rank. peak: the most bytes of live tensors on one of the ranks in its second step. predicted: by how
much the dry run says more, on the rank where it is worst.

{tensors_table(tensors, first)}

## Processes

{near} of {len(processes)} configurations have processes with a resident peak within 10% of what is predicted:
what the process has before the model, with the peak of tensors and of host tiers that the dry run says. Pages
that several ranks read count for each in equal parts. Models of 14 to 30 million parameters, three steps; of
several ranks the one that has most, and the largest error.

{processes_table(processes, second)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--least", type=int, default=48, help="configurations")
    parser.add_argument("--only", action="append", default=[], help="those whose name has this text")
    parser.add_argument("--keep", type=Path, help="a file of rows, to go on with later")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no configuration after so long")
    parser.add_argument("--write", type=Path, help="the file for the table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen, processes = cases(args.least), planned.RESIDENT
    if args.only:
        chosen = [case for case in planned.cases() if all(text in case.name for text in args.only)][:20]
        processes = [case for case in processes if all(text in case.name for text in args.only)]
    kept, until = Kept(args.keep), time.monotonic() + args.seconds
    tensors = kept.fill(chosen, of_tensors, until)
    processes = kept.fill(processes, of_processes, until)
    text = report(tensors, kept.rows, processes, kept.rows)
    if args.write:
        args.write.write_text(text, "utf-8")
    print(text.partition("\npeak:")[0])
    failed = [
        case.name
        for case in (*tensors, *processes)
        if max(map(abs, kept.rows[case.name].get("peaks", [0.0]))) > MOST
        or max(map(abs, kept.rows[case.name].get("errors", [0.0]))) > MOST_RESIDENT
        or not all(kept.rows[case.name].get(key, True) for key in ("states", "traffic", "tiers"))
    ]
    sys.exit("\n".join(["these differ:", *failed]) if failed else 0)


if __name__ == "__main__":
    main()
