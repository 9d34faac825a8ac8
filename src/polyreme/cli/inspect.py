"""A config, or a checkpoint, as people and programs read it. Rendering only: facts come from
`polyreme.config`, `polyreme.pipeline`, `polyreme.planner.meta_model` and `polyreme.checkpoint`.

`python -m polyreme.cli.inspect docs/config.md` writes the key reference into that page again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from polyreme.cli.folding import Folded
from polyreme.config import MOST_RANKS, Config
from polyreme.config.describe import default, expects, toml
from polyreme.config.schema import LEAVES, SECTIONS
from polyreme.errors import ConfigError, Problem, printable
from polyreme.layout.mesh_axes import lines
from polyreme.pipeline.schedule import Schedule, build, check, stage_ranks
from polyreme.pipeline.simulate import Costs, Simulation, simulate

if TYPE_CHECKING:  # it needs torch, and most of what is shown does not
    from polyreme.checkpoint.contents import Contents, Row

BEGIN, END = "<!-- keys: begin, written by python -m polyreme.cli.inspect -->", "<!-- keys: end -->"
STYLES = {"user": "bold green", "derived": "cyan", "default": "dim"}
SHOWN = 8
"""Lines of an axis, and ranks of a line, that the terminal gets to see; JSON has all."""
MOST_FORWARDS = 8192
"""The most micro-batches of a step whose timeline is drawn: the time that takes grows faster than they do."""
SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
OF_LOSS_SCALE = ("loss_scale", "good_steps", "overflows", "hint")
"""What of a checkpoint's state only JSON has where losses are not scaled."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots


def render(config: Config, world_size: int, every: bool = False, describe: bool = False) -> Group:
    """The resolved config as a table of key, value and origin: what differs from the defaults, or with
    `every` all keys; with `describe` what each of them means is below it. Raises ConfigError where it cannot
    run."""
    resolved = config.resolve(world_size)
    origins: dict[str, str] = dict(resolved.origins)
    shown = [key for key in LEAVES if every or origins[key] != "default"]
    table = Table(
        title=f"config for {_count(world_size, 'rank')}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin", no_wrap=True)
    rows = []
    for key in shown:
        rows.append((key, toml(resolved.value(key)), origins[key], LEAVES[key].description or ""))
        if key == "batch.micro":
            rows.append(
                (
                    "(accumulation)",
                    str(resolved.accumulation),
                    "derived",
                    "Micro-batches of one step on one rank.",
                )
            )
    for key, value, origin, _ in rows:
        # Text, not str: a value may hold brackets, which rich would take for markup.
        table.add_row(Text(key), Text(value, style=STYLES[origin]), origin)
    parts: list[RenderableType] = [table]
    if describe:
        for key, _, _, description in rows:
            parts += [Text(key, style="bold"), Padding(Text(description), (0, 0, 0, 4))]
    if len(shown) < len(LEAVES):
        parts.append(
            Text(
                f"{len(LEAVES) - len(shown)} other keys have their "
                "defaults: --all shows them, --describe what keys mean"
            )
        )
    return Group(*parts)


def axes(config: Config, world_size: int) -> dict[str, list[list[int]]]:
    """The ranks that form each axis which has several, outermost axis first. Raises ConfigError where the
    config cannot run."""
    mesh = config.resolve(world_size).mesh
    sizes: dict[str, int] = {name: getattr(mesh, name) for name in mesh.order}
    return {name: lines(sizes, mesh.order, name) for name in mesh.order if sizes[name] > 1}


def rank_stages(config: Config) -> tuple[tuple[int, ...], ...]:
    """The pipeline stages of each rank of axis pp, in its order: first stages first."""
    pipeline, pp = config.pipeline, config.mesh.pp
    rank_of = stage_ranks(config.schedule, pp, pipeline.virtual) if pp > 1 else (0,)
    return tuple(tuple(stage for stage, at in enumerate(rank_of) if at == rank) for rank in range(pp))


@dataclass(frozen=True)
class StageSummary:
    """What a pipeline stage has: its rank on axis pp, its blocks by name, the parameters of these and of what
    comes before and after all blocks (a parameter that several stages have counts on each), and their share
    of the model's."""

    stage: int
    rank: int
    blocks: list[str]
    parameters: int
    share: float


def stage_summaries(config: Config) -> list[StageSummary]:
    """What each pipeline stage has, in their order; nothing without a pipeline, or where the config's model
    is not known on this machine.

    Raises ConfigError for a model that cannot be built, and ModelError for one that the mesh cannot
    divide."""
    if config.mesh.tp * config.mesh.pp == 1:
        return []
    # only here: most configs are shown without torch
    from polyreme.planner.meta_model import divide, expected

    model = expected(config)
    partition = divide(model, config) if model is not None else None
    if model is None or partition is None:
        return []
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rank_of = {stage: rank for rank, own in enumerate(rank_stages(config)) for stage in own}
    found = []
    for stage in range(partition.stages):
        numel = sum(size for name, size in sizes.items() if stage in partition.stages_of[name])
        blocks = list(partition.blocks[partition.bounds[stage] : partition.bounds[stage + 1]])
        found.append(StageSummary(stage, rank_of[stage], blocks, numel, numel / sum(sizes.values())))
    return found


def _stage_table(parts: list[StageSummary], measured: bool) -> Table:
    title = "pipeline stages on the ranks of a pp line" + (
        ", by parameters until blocks are measured" if measured else ""
    )
    table = Table(title=title, title_justify="left")
    for column in ("rank", "stage"):
        table.add_column(column, justify="right")
    table.add_column("blocks")
    for column in ("parameters", "share"):
        table.add_column(column, justify="right")
    for part in sorted(parts, key=lambda part: (part.rank, part.stage)):
        blocks = part.blocks[0] if len(part.blocks) == 1 else f"{part.blocks[0]} to {part.blocks[-1]}"
        table.add_row(
            str(part.rank), str(part.stage), Folded(blocks), f"{part.parameters:,}", f"{part.share:.1%}"
        )
    return table


def render_axes(config: Config, world_size: int) -> Group:
    """Which ranks form which axis, as a table, and which of a pipeline's ranks has which stages, with what is
    in them where the model is known; nothing for a single rank.

    Raises ConfigError where the config cannot run, and what `stage_summaries` raises."""
    found = axes(config, world_size)
    if not found:
        return Group()
    table = Table(title="ranks that form each axis, outermost first", title_justify="left")
    table.add_column("axis")
    table.add_column("size", justify="right")
    table.add_column("ranks", overflow="fold")
    for name, members in found.items():
        shown = [_some([str(rank) for rank in line], " ") for line in members]
        table.add_row(name, str(len(members[0])), _some(shown, "  |  "))
    parts = stage_summaries(config)
    if parts:
        return Group(table, _stage_table(parts, config.pipeline.blocks == "time"))
    if config.mesh.pp == 1:
        return Group(table)
    each = [_some([str(stage) for stage in own], " ") for own in rank_stages(config)]
    return Group(table, f"pipeline stages on the ranks of a pp line: {_some(each, '  |  ')}")


def _some(names: list[str], between: str) -> str:
    """The words joined; of many, the first and the last."""
    return between.join(names if len(names) <= SHOWN else [*names[: SHOWN - 1], "...", names[-1]])


def as_json(config: Config, world_size: int, more: Mapping[str, Any] | None = None) -> str:
    """The same as a JSON object: world_size, accumulation, axes (each axis of several ranks: the lists of
    ranks that form it), stages (of each rank of axis pp), pipeline (what `stage_summaries` tells of each
    stage), config, origins by dotted key, and `more`."""
    resolved = config.resolve(world_size)
    told: dict[str, Any] = {
        "world_size": world_size,
        "accumulation": resolved.accumulation,
        "axes": axes(config, world_size),
        "stages": rank_stages(resolved),
        "pipeline": [asdict(part) for part in stage_summaries(resolved)],
        "config": resolved.model_dump(mode="json"),
        "origins": resolved.origins,
        **(more or {}),
    }
    return json.dumps(told, indent=2, ensure_ascii=False)


def step_table(config: Config, world_size: int | None = None) -> tuple[str, Schedule, Simulation]:
    """The table of one step of one pipeline, simulated with the same time for every stage, and a title for
    it.

    world_size: None takes the smallest that the mesh fits. Raises ConfigError where the config cannot run on
    it."""
    mesh = config.mesh
    others = mesh.tp * mesh.pp * mesh.cp * mesh.ep
    ranks = world_size or others * (1 if mesh.dp == "auto" else mesh.dp)
    dp = ranks // others if mesh.dp == "auto" else mesh.dp
    if dp * others != ranks:
        reason = f"tp x pp x cp x ep is {others}, and x dp not the world size, {ranks}"
        raise ConfigError([Problem("mesh.dp", mesh.dp, reason, f"start {max(dp, 1) * others} ranks")])
    if ranks > MOST_RANKS:
        raise ConfigError(config.problems(ranks))
    # Every pipeline has the same table; how many micro-batches it has depends on dp alone.
    alone = [f"mesh.{axis}=1" for axis in ("tp", "pp", "cp", "ep")]
    microbatches = Config.load(config, [*alone, "mesh.sequence_parallel=false"]).resolve(dp).accumulation
    name, virtual = config.schedule, config.pipeline.virtual
    forwards = microbatches * len(stage_ranks(name, mesh.pp, virtual))
    if forwards > MOST_FORWARDS:
        reason = f"a step of {forwards:,} forwards of stages is too much to draw, more than {MOST_FORWARDS:,}"
        raise ConfigError(
            [
                Problem(
                    "batch.size",
                    config.batch.size,
                    reason,
                    "draw a step of fewer micro-batches: add --set batch.size=...",
                )
            ]
        )
    schedule = build(name, mesh.pp, microbatches, virtual)
    check(schedule, microbatches)
    stages = len(stage_ranks(name, mesh.pp, virtual))
    title = (
        f"{name}: {_count(stages, 'stage')} on "
        f"{_count(mesh.pp, 'rank')}, {_count(microbatches, 'micro-batch')}"
    )
    return title, schedule, simulate(schedule, Costs.even(schedule))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def schedule_as_json(schedule: Schedule, simulation: Simulation) -> str:
    """A table as a JSON object: rows (each rank's actions, with spaces between), and of the simulation total
    (in forwards of a stage), bubble (of all ranks), bubbles and peak_activations (of each)."""
    told: dict[str, Any] = {
        "rows": [" ".join(map(str, row)) for row in schedule],
        "total": simulation.total,
        "bubble": simulation.bubble_fraction,
        "bubbles": simulation.bubble,
        "peak_activations": simulation.peak,
    }
    return json.dumps(told, indent=2)


def render_checkpoint(found: Contents) -> Group:
    """What is in a checkpoint: how it came about, sizes by kind, and tensors; those of blocks that differ by
    numbers alone in one line."""
    top = Table.grid(padding=(0, 2))
    for label, text in _summary(found):
        style = "bold red" if label == "damaged" else ""
        top.add_row(Text(label, style=style or "dim"), Text(printable(text), style=style, overflow="fold"))
    kinds = Table(title="by kind", title_justify="left")
    kinds.add_column("kind")
    for column in ("tensors", "elements", "size"):
        kinds.add_column(column, justify="right")
    kinds.add_column("dtype")
    for kind in found.kinds:
        dtypes = ", ".join(SHORT.get(dtype, dtype) for dtype in kind.dtypes)
        kinds.add_row(
            Text(printable(kind.name)), f"{kind.tensors:,}", f"{kind.elements:,}", _binary(kind.bytes), dtypes
        )
    tensors = Table(title="tensors", title_justify="left")
    tensors.add_column("count", justify="right")
    tensors.add_column("name")
    tensors.add_column("shape", overflow="fold")
    tensors.add_column("dtype", overflow="fold")
    tensors.add_column("states", overflow="fold")
    every = [kind.name for kind in found.kinds if kind.name != "model"]
    for rows in _alike(found.tensors):
        first = rows[0].kinds.get("model") or next(iter(rows[0].kinds.values()))
        states = [kind for kind in rows[0].kinds if kind != "model"]
        told = "all" if states == every else ", ".join(states) or "none"
        dtype = str(first.dtype).removeprefix("torch.")
        name = _common_name([row.name for row in rows]) + (f" = {rows[0].same_as}" if rows[0].same_as else "")
        shape = "x".join(map(str, first.shape)) or "()"
        tensors.add_row(
            str(len(rows)),
            Folded(printable(name)),
            shape,
            SHORT.get(dtype, dtype),
            *([Text(printable(told))] if every else []),
        )
    if not every:
        tensors.columns.pop()
    return Group(top, kinds, tensors)


def _summary(found: Contents) -> list[tuple[str, str]]:
    lines = [("checkpoint", str(found.path)), ("format", found.format)]
    if found.mesh:
        axes = [f"{name} {size}" for name, size in found.mesh.items() if size > 1 and name != "ranks"]
        ranks = f"{_count(prod(found.mesh.values()), 'rank')}{': ' if axes else ''}{' x '.join(axes)}"
        lines.append(
            (
                "written by",
                ranks + (f", ZeRO stage {found.zero_stage}" if found.zero_stage is not None else ""),
            )
        )
    scaled = found.state.get("loss_scale", 1) != 1  # else what counts for it says nothing
    state = {name: value for name, value in found.state.items() if scaled or name not in OF_LOSS_SCALE}
    lines += [
        (label, _values(values))
        for label, values in (("state", state), ("versions", found.versions))
        if _values(values)
    ]
    if found.others:
        lines.append(("not read", _some(list(found.others), ", ")))
    if found.problem:
        lines.append(("damaged", found.problem))
    elif found.checksums:
        lines.append(("integrity", f"whole: all {found.checksums:,} checksums are as written"))
    else:
        lines.append(("integrity", "the files have their sizes; there are no checksums"))
    return lines


def _values(values: Mapping[str, Any]) -> str:
    """What of them is one number or word."""
    told = []
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            told.append(f"{name} {value:,}")
        elif isinstance(value, float | str):
            told.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(told)


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Tensors that differ in the numbers of their names alone, together, in the order of the first of
    each."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        kinds = tuple((kind, info.shape, info.dtype) for kind, info in row.kinds.items())
        groups.setdefault((NUMBER.sub("#", row.name), kinds, row.same_as), []).append(row)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    """One name for names that differ in numbers alone: "layers.{0-31}.weight"."""
    columns = iter(
        sorted({int(number) for number in numbers})
        for numbers in zip(*map(NUMBER.findall, names), strict=True)
    )

    def told(_: re.Match[str]) -> str:
        numbers = next(columns)
        if len(numbers) == 1:
            return str(numbers[0])
        dense = numbers[-1] - numbers[0] == len(numbers) - 1
        return (
            "{"
            + (f"{numbers[0]}-{numbers[-1]}" if dense else _some([str(number) for number in numbers], ","))
            + "}"
        )

    return NUMBER.sub(told, names[0])


def _binary(size: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1000 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}"


def reference() -> str:
    """Every key in Markdown: a table for each section, of what the key takes, its default and its
    description."""
    root = [key for key in LEAVES if "." not in key]
    lines = ["### Top level", "", *_rows(root)]
    for name, section in SECTIONS.items():
        lines += ["", f"### [{name}]", "", section.__doc__ or "", ""]
        lines += _rows([key for key in LEAVES if key.startswith(f"{name}.")])
    return "\n".join(lines)


def _rows(keys: list[str]) -> list[str]:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        field = LEAVES[key]
        cells = (f"`{key}`", expects(field), f"`{toml(default(field))}`", field.description or "")
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return rows


def with_reference(page: str) -> str:
    """`page` with the key reference between its two marks renewed."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{reference()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_reference(target.read_text(encoding="utf-8")), encoding="utf-8")
