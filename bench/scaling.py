"""Draws how the planner says jobs scale to 16,384 ranks: weak scaling, with samples in proportion to ranks,
and strong scaling, with a batch that stays.

    python bench/scaling.py --write docs/images/scaling.svg --table docs/plan-scaling.md

Each point is a dry run of the engine's own step on simulated ranks and the time model on the preset `h100`.
Needs matplotlib; takes five minutes."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from polyreme.config import Config
from polyreme.pipeline.schedule import build
from polyreme.planner.dry_run import run_kinds
from polyreme.planner.hardware import Cluster
from polyreme.planner.time_model import Timeline, step_time
from published import llama

SEQUENCE = 4096


@dataclass(frozen=True)
class Curve:
    """A model and its layout on more and more ranks. batch: samples of a step on so many ranks."""

    name: str
    model: Callable[[], nn.Module]
    sections: dict[str, Any]
    batch: Callable[[int], int]
    ranks: Sequence[int]


def weak(ranks: int) -> int:
    """One sample of each rank."""
    return ranks


def strong(ranks: int) -> int:
    """4 million tokens."""
    return 1024


RECOMPUTED = {"memory": {"activations": "recompute", "recompute_every": 2}}
TP8 = {"mesh": {"tp": 8, "sequence_parallel": True}}
ALL = (8, 64, 512, 2048, 16384)
CURVES = (
    Curve("1B, ZeRO-3, weak", partial(llama, "1B"), {"zero": {"stage": 3}}, weak, ALL),
    Curve("1B, ZeRO-1, weak", partial(llama, "1B"), {"zero": {"stage": 1}}, weak, ALL),
    Curve("8B, ZeRO-3, weak", partial(llama, "8B"), {"zero": {"stage": 3}, **RECOMPUTED}, weak, ALL),
    Curve("8B, ZeRO-1, weak", partial(llama, "8B"), {"zero": {"stage": 1}, **RECOMPUTED}, weak, ALL[1:]),
    Curve(
        "8B, ZeRO-3, 1,024 samples",
        partial(llama, "8B"),
        {"zero": {"stage": 3}, **RECOMPUTED},
        strong,
        (8, 64, 512, 1024),
    ),
    Curve(
        "70B, ZeRO-3, tp 8, weak",
        partial(llama, "70B"),
        {"zero": {"stage": 3}, **TP8, **RECOMPUTED},
        weak,
        ALL[1:],
    ),
)


def points(curve: Curve, keep: Path | None) -> Iterator[tuple[int, Timeline, int]]:
    """Yield the step on each number of ranks, and the memory of a rank."""
    for ranks in curve.ranks:
        tree = {
            "batch": {"size": curve.batch(ranks), "micro": 1},
            "precision": {"compute": "bf16"},
            "data": {"sequence": SEQUENCE},
            **curve.sections,
        }
        config = Config.load(tree).resolve(ranks)
        name = "".join(each if each.isalnum() else "-" for each in curve.name)
        file = (keep or Path()) / f"scaling-{name}-{ranks}.pickle"
        if keep is not None and file.exists():
            traces = pickle.loads(file.read_bytes())  # our own
        else:
            traces = [*run_kinds(curve.model, config, device="cuda").values()]
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                file.write_bytes(pickle.dumps(traces))
        schedule = build(config.schedule, config.mesh.pp, config.accumulation, config.pipeline.virtual)
        yield ranks, step_time(traces, schedule, Cluster.load("h100")), max(t.memory.peak for t in traces)


def draw(found: dict[str, list[tuple[int, Timeline, int]]], file: Path) -> None:
    """Write MFU over ranks as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "polyreme"  # the same bytes on every call
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, line in found.items():
        axes.plot([each[0] for each in line], [100 * each[1].mfu for each in line], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ALL, [f"{each:,}" for each in ALL])
    axes.set(xlabel="H100 GPUs", ylabel="predicted MFU, %", ylim=(0, 60))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


INTRODUCTION = (
    "What the planner says of Llama 3 in bf16 on DGX H100 hosts (preset `h100`), 4,096 tokens a sample, "
    "micro-batches of one sample, of 8B and 70B every second block recomputed, nothing compiled. *weak*: one "
    "sample of each rank, so that with tp 8 a group of eight has eight. Collectives are rings between hosts, "
    "whose latency grows with the ranks; libraries that have trees for gathers, too, fare better at the "
    "right. This is a prediction, not a measurement: "
    "[published jobs](plan-published.md) say how far off such are. The last column is what to look at first."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, default=Path("docs/images/scaling.svg"), help="the picture")
    parser.add_argument("--table", type=Path, help="the page")
    parser.add_argument("--keep", type=Path, help="a folder for dry runs, which are not run again")
    parser.add_argument("--curves", default="", help="those whose names begin so")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[tuple[int, Timeline, int]]] = {}
    rows = [
        "| model and layout | GPUs | step | tokens/s of a GPU | MFU | memory | what takes most |",
        "|---" * 7 + "|",
    ]
    for curve in (each for each in CURVES if each.name.startswith(given.curves)):
        for ranks, step, memory in points(curve, given.keep):
            found.setdefault(curve.name, []).append((ranks, step, memory))
            rows.append(
                f"| {curve.name} | {ranks:,} | {step.seconds:.3g} s | "
                f"{step.tokens_per_second / ranks:,.0f} | {step.mfu:.1%} | {memory / 1e9:.0f} GB | "
                f"{step.limit} |"
            )
            print(rows[-1], flush=True)
    draw(found, given.write)
    if given.table:
        parts = (
            "<!-- Written by bench/scaling.py. -->\n# Predicted scaling to 16,384 GPUs",
            INTRODUCTION,
            f"![MFU over GPUs](images/{given.write.name})",
            "\n".join(rows),
        )
        given.table.write_text("\n\n".join(parts) + "\n", "utf-8")


if __name__ == "__main__":
    main()
