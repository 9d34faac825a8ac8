"""Tries tensor parallelism on every family of transformers that declares a plan for it or that our own table
knows: forward and backward of a tiny model on two ranks, beside the undivided model.

    # all that NAME.json does not have yet
    python bench/families.py --out bench/results/NAME.json
    # these, again
    python bench/families.py --out bench/results/NAME.json llama gemma2
    # a part; the next run goes on
    python bench/families.py --out bench/results/NAME.json --seconds 120
    # context parallelism (`context_families`)
    python bench/families.py --cp --out bench/results/NAME.json

Invariant: "pass" means that the loss and every gradient, joined, are those of the undivided model in float64
to 1e-10, on both ranks, and that some parameter was divided. What raises anything but a PolyremeError once
the undivided model has run is "wrong", not "refused". Exit status: 0, 1 where a family is wrong, 2 for bad
usage."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from polyreme.distributed.mesh import Mesh
from polyreme.errors import PolyremeError
from polyreme.tensor import plan
from polyreme.tensor.parallelize import parallelize

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH.parent / "tests"), str(BENCH.parent / "tests/ranks")]

import context_families as context  # noqa: E402
from models import Wide  # noqa: E402
from pool import Ranks, RanksFailed  # noqa: E402
from tiny_families import LARGEST, batch_for, build, declared, skeleton, tiny  # noqa: E402

WAYS = 2
TOLERANCE = 1e-10
LIBRARIES = str(Path(transformers.__file__).parents[1]) + "/"
"""What is left out of messages: where packages are on this machine."""
MODES = ("tp", "sequence")  # without and with sequence parallelism

# ---- one family on one rank

Outcome = tuple[str, str]
"""pass, refused, wrong or "not built"; and why."""


def job(rank: int, world: int, kind: str) -> dict[str, Any]:
    """What comes of a family: its model, how much of it was divided, and an outcome for each mode."""
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning)
    config = transformers.CONFIG_MAPPING[kind]
    whole: nn.Module | None = None
    try:
        small = tiny(config, experts_implementation="eager")
        try:
            model = skeleton(small)
        except Exception:  # its building reads numbers
            model = build(small)
    except Exception as error:  # even so, a plan may say that it would be refused
        small, why = None, _one_line(error)
        try:
            model = skeleton(config())
        except Exception:
            return {"model": "", "outcomes": dict.fromkeys(MODES, ("not built", why))}
    found: dict[str, Any] = {"model": type(model).__name__, "outcomes": {}}
    for mode in MODES:
        try:
            plan.plan(model, world, sequence_parallel=mode == "sequence")
        except PolyremeError as error:
            found["outcomes"][mode] = ("refused", _problems(error))
    waiting = [mode for mode in MODES if mode not in found["outcomes"]]
    if not waiting:
        return found
    try:
        if small is None:
            raise LookupError(why)
        if (numel := sum(p.numel() for p in model.parameters())) > LARGEST:
            raise LookupError(f"has {numel:,} parameters at its smallest")
        whole = build(small)
        divided = {mode: copy.deepcopy(whole) for mode in waiting}
        batch = batch_for(whole, kind)
        with Wide():
            expected = loss_of(whole, batch)
            expected.backward()
    except Exception as error:
        return found | {
            "outcomes": found["outcomes"] | dict.fromkeys(waiting, ("not built", _one_line(error)))
        }
    axis = Mesh.open({"tp": world}).tp
    for mode, model in divided.items():
        try:
            cuts = parallelize(
                model, axis, plan.plan(model, world, sequence_parallel=mode == "sequence"), mode == "sequence"
            )
            with Wide():
                loss = loss_of(model, batch)
                loss.backward()
        except PolyremeError as error:
            found["outcomes"][mode] = ("refused", _one_line(error))
            continue
        total = sum(p.numel() for p in whole.parameters())
        found["divided"] = (
            sum(p.numel() for name, p in whole.named_parameters() if not cuts[name].is_whole) / total
        )
        wrong = _differences(rank, whole, model, cuts, float(loss.detach() - expected.detach()))
        wrong += [] if found["divided"] else ["nothing was divided"]
        found["outcomes"][mode] = ("wrong", "; ".join(wrong[:4])) if wrong else ("pass", "")
    return found


def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The model's own loss; of one without a head, a weighted sum of what it returns."""
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    hidden = output[0]
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)).sum()


def _differences(
    rank: int, whole: nn.Module, divided: nn.Module, cuts: Mapping[str, Any], loss: float
) -> list[str]:
    """What `rank` has otherwise than the undivided model."""
    wrong = [] if abs(loss) <= TOLERANCE else [f"the loss by {loss:g}"]
    for (name, mine), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            wrong.append(f"{name} {'has no' if mine.grad is None else 'has a'} gradient")
        elif mine.grad is not None and theirs.grad is not None:
            size = float(theirs.grad.abs().max())
            apart = float((cuts[name].put(mine.grad, rank, theirs.grad.clone()) - theirs.grad).abs().max())
            if not apart <= TOLERANCE * max(size, 1):
                wrong.append(f"gradient of {name} by {apart:.2g}, of {size:.2g}")
    if not any(p.grad is not None and p.grad.any() for p in whole.parameters()):
        wrong.append("no gradient to compare")
    return wrong


def _one_line(error: BaseException) -> str:
    kind = (
        ""
        if isinstance(error, PolyremeError | LookupError) and not isinstance(error, KeyError)
        else f"{type(error).__name__}: "
    )
    return kind + " ".join(str(error).replace(LIBRARIES, "").split())[:300]


def _problems(error: PolyremeError) -> str:
    """The first of a refusal's problems, and how many more there are."""
    lines = [" ".join(line.split())[2:] for line in str(error).splitlines() if line.startswith("  - ")]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return (lines[0] if lines else _one_line(error)) + more


# ---- all of them


def attempt(ranks: Ranks, kind: str) -> dict[str, Any]:
    """One family on all ranks: wrong where any rank is."""
    try:
        answers = ranks(WAYS, job, kind, timeout=40, deprecations="default")
    except RanksFailed as failed:
        lines = [line for line in str(failed).strip().splitlines() if line.strip()]
        error = next(iter(failed.exceptions.values()), None)
        return {
            "model": "",
            "outcomes": dict.fromkeys(MODES, ("wrong", _one_line(error) if error else lines[-1][:300])),
        }
    found = answers[0]
    for mode in MODES:
        outcomes = [tuple(answer["outcomes"][mode]) for answer in answers]
        found["outcomes"][mode] = next(
            (outcome for outcome in outcomes if outcome[0] == "wrong"), outcomes[0]
        )
        if len({outcome[0] for outcome in outcomes}) > 1 and found["outcomes"][mode][0] != "wrong":
            found["outcomes"][mode] = ("wrong", f"ranks disagree: {outcomes}")
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    env, rows = result["environment"], dict(sorted(result["families"].items()))
    counts = {mode: Counter(row["outcomes"][mode][0] for row in rows.values()) for mode in MODES}
    kinds = ("pass", "refused", "wrong", "not built")
    lines = [
        "# Families of transformers under tensor parallelism", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}, transformers "
        f"{env['versions']['transformers']}.", "", f"    {env['command']}", "",
        "Every family that declares a tensor-parallel plan (itself or "
        "in a part of its config) or that is in our own table, tiny, in "
        f"float64, over {WAYS} ranks: loss and every gradient against "
        f"the undivided model's, to {TOLERANCE:g}. Families of images "
        "or sounds and texts get texts only.", "",
        "| | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds),
        *(f"| {name} | " + " | ".join(str(counts[mode][kind]) for kind in kinds) + " |"
          for mode, name in zip(MODES, ("tp = 2", "tp = 2, sequence_parallel"), strict=True)),
    ]  # fmt: skip
    first = {name: row["outcomes"][MODES[0]][0] for name, row in rows.items()}
    if wrong := [
        (name, mode, row)
        for name, row in rows.items()
        for mode in MODES
        if row["outcomes"][mode][0] == "wrong"
    ]:
        lines += [
            "",
            "## Wrong",
            "",
            *(f"- **{name}** ({mode}): {row['outcomes'][mode][1]}" for name, mode, row in wrong),
        ]
    lines += ["", "## Pass", "", "| family | model | divided | sequence_parallel |", "|---|---|--:|---|"]
    for name, row in rows.items():
        if first[name] == "pass":
            outcome, why = row["outcomes"]["sequence"]
            lines.append(
                f"| {name} | {row['model']} | {row['divided']:.0%} "
                f"| {outcome}{': ' + context.cell(why) if why else ''} |"
            )
    for kind, title in (("refused", "Refused"), ("not built", "Not built")):
        lines += ["", f"## {title}", "", "| family | model | why |", "|---|---|---|"]
        chosen = {name: row for name, row in rows.items() if first[name] == kind}
        lines += [
            f"| {name} | {row['model']} | {context.cell(row['outcomes'][MODES[0]][1])} |"
            for name, row in chosen.items()
        ]
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "families", nargs="*", metavar="MODEL_TYPE", help="which; all that --out does not have yet"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the page goes beside it as .md")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other family after so long"
    )
    parser.add_argument("--cp", action="store_true", help="context parallelism, in place of tensor's")
    args = parser.parse_args(argv)
    known, modes = (context.families(), context.MODES) if args.cp else (declared(), MODES)
    if unknown := set(args.families) - set(transformers.CONFIG_MAPPING):
        parser.error(f"transformers has no model_type {', '.join(sorted(unknown))}")
    from step import environment

    result = json.loads(args.out.read_text()) if args.out.exists() else {"families": {}}
    result["environment"] = environment() | {
        "command": shlex.join(["python", "bench/families.py", *["--cp"] * args.cp, "--out", str(args.out)])
    }
    todo = args.families or [kind for kind in known if kind not in result["families"]]
    began, ranks = time.monotonic(), Ranks()
    try:
        for kind in todo:
            if time.monotonic() - began > args.seconds:
                break
            result["families"][kind] = row = context.attempt(kind) if args.cp else attempt(ranks, kind)
            print(
                kind,
                *(": ".join(filter(None, row["outcomes"][mode]))[:150] for mode in modes),
                sep=" | ",
                flush=True,
            )
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        ranks.close()
    args.out.with_suffix(".md").write_text((context.markdown if args.cp else markdown)(result))
    left = [kind for kind in known if kind not in result["families"]]
    print(f"{len(result['families'])} families, {len(left)} not tried yet")
    return int(
        any(row["outcomes"][mode][0] == "wrong" for row in result["families"].values() for mode in modes)
    )


if __name__ == "__main__":
    sys.exit(main())
