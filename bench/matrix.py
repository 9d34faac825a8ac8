"""Trains every family of the parity tests in every layout on up to four ranks, with every ZeRO stage,
schedule and sequence parallelism on and off, beside plain PyTorch: the whole matrix, of which the tests run a
pairwise cover.

    python bench/matrix.py --out bench/results/NAME.json                     # what NAME.json does not have
    yet python bench/matrix.py --out bench/results/NAME.json --seconds 600       # a part; the next run goes
    on

Invariant: a run passes if the loss and gradient norm of each step with clipping, an evaluation and every
final weight are those of one process in float64 to 1e-10. Exit status: 0, 1 where a run is wrong, 2 for bad
usage."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH.parent / "tests"), str(BENCH.parent / "tests/parity")]

from examples import ALL  # noqa: E402

os.environ[ALL] = "1"  # whose steps are more

from test_engine_parity_mesh import EACH, MODELS, STEPS, Case, cases_of, compare, train  # noqa: E402

from pool import Ranks, RanksFailed  # noqa: E402

Item = TypeVar("Item")
HEADS = {"llama of 6 heads": 6}  # of the others 4


def every_case() -> Iterator[Case]:
    """Each family in every layout that divides its heads; the one of six heads only where no other goes."""
    for family, world in itertools.product((*EACH, *HEADS), (1, 2, 3, 4)):
        for case in cases_of(family, world):
            if (
                case.microbatches == "several"
                and HEADS.get(family, 4) % case.sizes[1] == 0
                and (family in EACH or case.sizes[1] == 3)
            ):
                yield case


def key(case: Case) -> str:
    """What a run is known by in the result."""
    dp, tp, pp = case.sizes
    parts = [
        case.family,
        f"{dp}x{tp}x{pp}",
        f"stage {case.stage}",
        case.schedule or "",
        "sequence" if case.sequence else "",
    ]
    return ", ".join(part for part in parts if part)


def attempt(ranks: Ranks, case: Case) -> str:
    """What is wrong with a run; nothing, if it passes."""
    each = [case.settings()]
    try:
        compare(ranks(math.prod(case.sizes), train, case.family, each, timeout=100), case.family, each)
    except (AssertionError, RanksFailed) as error:
        return " ".join(str(error).split())[-400:]
    return ""


def markdown(result: Mapping[str, Any], cases: int) -> str:
    """The whole result as a page."""
    env, runs = result["environment"], result["runs"]
    layouts = sorted({name.split(", ")[1] for name in runs}, key=lambda layout: (ranks_of(layout), layout))
    counts: Counter[tuple[str, str]] = Counter()
    for name, problem in runs.items():
        family, layout, *_ = name.split(", ")
        counts[family, layout] += not problem
        counts[family, layout + " all"] += 1
    wrong = {name: problem for name, problem in runs.items() if problem}
    lines = [
        "# The parity matrix", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}, transformers "
        f"{env['versions']['transformers']}.", "", f"    {env['command']}", "",
        f"{len(runs)} of {cases} runs of {STEPS} steps with clipping, in "
        "float64: every loss, gradient norm, evaluation and final weight "
        f"against one plain PyTorch process, to 1e-10. {len(runs) - len(wrong)} "
        f"pass, {len(wrong)} are wrong. A layout is dp x tp x pp; "
        "each is run with ZeRO 0 to 3, with pp > 1 in every schedule "
        "that the 5 blocks have stages for, with tp > 1 with and without "
        "sequence parallelism (ViT, whose 17 positions cannot be divided, without).", "",
        "| passed | " + " | ".join(layouts) + " |", "|---|" + "--:|" * len(layouts),
    ]  # fmt: skip
    for family in [name for name in MODELS if any(each == name for each, _ in counts)]:
        row = [(counts[family, layout], counts[family, layout + " all"]) for layout in layouts]
        lines.append(
            f"| {family} | "
            + " | ".join(f"{passed}/{total}" if total else "" for passed, total in row)
            + " |"
        )
    lines += ["", *(f"- **{name}**: {problem}" for name, problem in wrong.items())]
    return "\n".join([*lines, ""])


def ranks_of(layout: str) -> int:
    """The ranks of a layout such as 2x1x2."""
    return math.prod(map(int, layout.split("x")))


def sweep(
    cases: Mapping[str, Item],
    attempt: Callable[[Ranks, Item], str],
    page: Callable[[Mapping[str, Any], int], str],
    argv: Sequence[str] | None,
    description: str,
) -> int:
    """Try each of `cases` that the result does not have yet, keep what `attempt` says is wrong with it, and
    write the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the page goes beside it as .md")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other run after so long"
    )
    args = parser.parse_args(argv)
    from step import environment

    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", "--out", str(args.out)])
    result["environment"] = environment() | {"command": command}
    began, ranks = time.monotonic(), Ranks()
    try:
        for name, case in cases.items():
            if name in result["runs"]:
                continue
            if time.monotonic() - began > args.seconds:
                break
            result["runs"][name] = problem = attempt(ranks, case)
            print(name, problem or "pass", sep=" | ", flush=True)
            args.out.write_text(json.dumps(result, indent=0) + "\n")
    finally:
        ranks.close()
    args.out.with_suffix(".md").write_text(page(result, len(cases)))
    return int(any(result["runs"].values()))


def main(argv: Sequence[str] | None = None) -> int:
    return sweep(
        {key(case): case for case in every_case()}, attempt, markdown, argv, (__doc__ or "").split("\n\n")[0]
    )


if __name__ == "__main__":
    sys.exit(main())
