"""A plan as a page for a browser (`report.html.jinja`), in one file that loads nothing, and as a trace for
Perfetto. Rendering only: figures come from `polyreme.planner`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from polyreme.cli.cluster import save as save_text
from polyreme.cli.folding import binary, count, decimal
from polyreme.cli.translated import as_toml
from polyreme.config.describe import toml
from polyreme.pipeline.schedule import Action
from polyreme.pipeline.timeline import MEANING
from polyreme.planner.over_time import COMPUTE, Kind, kinds, trace_events
from polyreme.planner.plan import Details, Plan
from polyreme.planner.search import BEST, shown
from polyreme.planner.trace import CATEGORIES

COLUMNS = 480
"""Parts of the step that pictures tell apart."""
SHOWN = 30
"""Layouts that do not fit, of which the page says why."""


def save(made: Plan, html: Path | None, trace: Path | None) -> None:
    """Write the page and the trace that are asked for. Raises PolyremeError where one cannot be written."""
    if html is None and trace is None:
        return
    each_kind = kinds(made.details, made.cluster)
    if html is not None:
        save_text("--html", html, page(made, made.details, each_kind))
    if trace is not None:
        save_text("--trace", trace, json.dumps(trace_events(each_kind)) + "\n")


def page(made: Plan, details: Details, each_kind: Sequence[Kind]) -> str:
    """Return the page."""
    loader = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    loader.filters |= {"binary": binary, "decimal": decimal, "toml": toml}
    template = resources("polyreme.cli").joinpath("report.html.jinja").read_text("utf-8")
    room = max([made.cluster.device.memory, *(kind.trace.memory.peak for kind in each_kind)])
    return loader.from_string(template).render(
        made=made, details=details, step=details.timeline, cluster=made.cluster, room=room,
        categories=CATEGORIES, best=made.found.best[:BEST],
        failed=made.found.failed[:SHOWN], values=shown, helps=[*helps(made)], told=_told,
        config=as_toml(details.config),
        kinds=[_drawn(kind) for kind in each_kind], ranks=count(made.ranks, "rank"),
        layout=" × ".join(f"{name} {size}" for name, size in details.config.axes.items() if size > 1),
        hardware=json.dumps(made.cluster.model_dump(mode="json", exclude_unset=True), indent=1),
    )  # fmt: skip


def helps(made: Plan) -> Iterator[str]:
    """Say with what a job that does not fit would: other values on as many ranks, and more ranks."""
    if made.tier is not None:
        values = made.tier.layout.values.items()
        other = [f"{k} = {toml(v)}" for k, v in values if made.details.config.value(k) != v]
        yield f"it fits {count(made.ranks, 'rank')} with {', '.join(other)}"
    if made.grown is not None:
        ranks, judged = made.grown
        yield f"it fits {ranks} ranks: {shown(judged)}"


def _told(action: Action | None) -> str:
    if action is None:
        return "what comes before and after the actions"
    of = "" if action.microbatch is None else f" of micro-batch {action.microbatch},"
    return f"the {MEANING.get(action.op, action.op)}{of} stage {action.stage}"


def _drawn(kind: Kind) -> dict[str, Any]:
    """Return what the page draws of a rank: paths in a picture of COLUMNS x 100."""
    levels, memory = kind.highest(COLUMNS), kind.trace.memory
    top = max(memory.peak, *(sum(level) for level in levels), 1)
    used = [place for place in range(len(CATEGORIES)) if any(level[place] for level in levels)]
    below, areas = [0] * COLUMNS, []
    for place in used:
        above = [low + level[place] for low, level in zip(below, levels, strict=True)]
        areas.append((CATEGORIES[place], _steps([100 - 100 * each / top for each in above], below, top)))
        below = above
    ran = sum(each.action is not None and each.action.op == "F" for each in kind.trace.segments)
    highest = max(range(COLUMNS), key=lambda column: sum(levels[column]))
    return {
        "name": kind.name, "trace": kind.trace, "memory": memory, "areas": areas, "top": top,
        "peak_at": (highest + 0.5) / COLUMNS, "streams": [*_streams(kind)], "cells": [*_cells(kind)],
        "ran": ran, "whole": sum(each.op == "F" for each in kind.trace.row),
        "data": json.dumps([[level[place] for place in used] for level in levels], separators=(",", ":")),
        "used": [CATEGORIES[place] for place in used],
    }  # fmt: skip


def _steps(tops: Sequence[float], below: Sequence[int], top: int) -> str:
    """Return a path around the area between two lines of steps."""
    there = "".join(f"V{y:.4g}H{x}" for x, y in enumerate(tops, 1))
    back = "".join(f"V{100 - 100 * below[x - 1] / top:.4g}H{x - 1}" for x in range(COLUMNS, 0, -1))
    return f"M0 {tops[0]:.4g}{there}{back}Z"


def _streams(kind: Kind) -> Iterator[dict[str, Any]]:
    for stream in kind.streams:
        parts = kind.busy(stream, COLUMNS)
        if stream != COMPUTE and sum(parts) < 0.0005 * COLUMNS:
            continue
        yield {
            "name": f"axis {stream}" if stream in kind.trace.axes else stream,
            "path": _steps([100 - 100 * part for part in parts], [0] * COLUMNS, 1),
            "busy": sum(parts) / COLUMNS,
            "waited": kind.waits.get(stream.removesuffix(" in"), 0.0) / kind.seconds,
        }


def _cells(kind: Kind) -> Iterator[tuple[str, float, float, str]]:
    """Yield the actions of a rank that take time: the operation, from where, how wide, and its name."""
    for cell in kind.cells:
        if cell.end - cell.start > 1e-6 * kind.seconds and cell.action.op in "FBWRU":
            takes, scale = cell.end - cell.start, COLUMNS / kind.seconds
            yield cell.action.op, scale * cell.start, scale * takes, f"{cell.action}, {takes:.3g} s"
