"""Measuring for `polyreme plan`: describe this machine or this cluster, and run the best layouts."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from polyreme.cli import translated
from polyreme.distributed.environment import detect
from polyreme.distributed.process_group import close
from polyreme.errors import LaunchError, shortened
from polyreme.launch.options import RanksFailedError
from polyreme.launch.torchrun import launch
from polyreme.offload import host
from polyreme.planner.measure import measure_run
from polyreme.planner.plan import Details, Plan
from polyreme.planner.search import Judged
from polyreme.step.memory.fit import USED


@dataclass(frozen=True)
class Tried:
    """A layout that was planned and run: the seconds of its steps, or the reason `why` there are none."""

    judged: Judged
    seconds: Sequence[float] = ()
    why: str = ""


def describe(file: Path, ranks: int) -> bool:
    """Write a description of the machines of all ranks into a new file; of this one with `ranks` ranks, which
    are started, where none were. Returns whether this process is the first of them, which goes on.

    Raises PolyremeError where there is something at the path."""
    translated.refuse_existing(file, "--measure")
    started = detect().world_size
    if started == 1 and ranks > 1:
        launch(["-m", "polyreme", "plan", "--measure", str(file)], ranks)
        return True
    found, first = measure_run(started, file.absolute().parent)
    if first:
        file.write_text(found.to_toml(), "utf-8")
        print(f"wrote {shortened(str, file)}", file=sys.stderr)
    close()
    return first


def run_best(made: Plan, most: int) -> list[Tried]:
    """Run a few steps of the best layouts of a plan on ranks of this machine.

    Raises LaunchError where it has not enough devices, or memory."""
    best = made.found.best[:most]
    _check_room(made, best)
    return [_run(each, made.ranks) for each in best]


def _check_room(made: Plan, best: Sequence[Judged]) -> None:
    there = torch.cuda.device_count()
    if there and made.ranks > there:
        raise LaunchError(
            f"--measure-top runs {made.ranks} ranks here, but this machine has {there} GPUs: "
            f"plan with -n {there}"
        )
    taken = max((each.cost.memory + each.cost.host for each in best if each.cost is not None), default=0)
    if not there and taken * made.ranks > host.total() * USED:
        raise LaunchError(
            f"--measure-top runs {made.ranks} ranks of {taken:,} bytes here, but this machine has "
            f"{host.total():,}: run it on one that has more, or plan a smaller job"
        )


def _run(judged: Judged, ranks: int) -> Tried:
    assert judged.cost is not None and isinstance(judged.cost.details, Details)
    config = judged.cost.details.config
    with tempfile.TemporaryDirectory(prefix="polyreme-") as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)), "utf-8")
        try:
            launch(["-m", "polyreme.cli.trial", str(file)], ranks)
        except RanksFailedError as error:
            return Tried(judged, why=" ".join(str(error).split()))
        return Tried(judged, json.loads(file.with_suffix(".times").read_text("utf-8")))
