"""Show a config to people and programs. Rendering only: facts come from `polyreme.config`,
`polyreme.pipeline` and `polyreme.planner.meta_model`.

`python -m polyreme.cli.inspect docs/config.md` writes the key reference into that page again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from polyreme.cli import memory, translated
from polyreme.cli.cluster import save
from polyreme.cli.folding import Folded, count, some
from polyreme.config import MOST_RANKS, Config
from polyreme.config.describe import default, expects, toml
from polyreme.config.schema import LEAVES, SECTIONS
from polyreme.errors import ConfigError, Problem
from polyreme.layout.mesh_axes import lines
from polyreme.pipeline import timeline
from polyreme.pipeline.schedule import Schedule, build, check, stage_ranks
from polyreme.pipeline.simulate import Costs, Simulation, simulate

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.json_config import Note
    from polyreme.sequence.choice import Choice

BEGIN, END = "<!-- keys: begin, written by python -m polyreme.cli.inspect -->", "<!-- keys: end -->"
STYLES = {"user": "bold green", "derived": "cyan", "default": "dim"}
MOST_FORWARDS = 8192
"""Most forwards of a step whose timeline is drawn, as the time for that grows faster than their number."""


def render(config: Config, world_size: int, every: bool = False, describe: bool = False) -> Group:
    """Return the resolved config as a table of key, value and origin: keys that differ from the defaults, or
    with `every` all keys; with `describe` also what they mean. Raises ConfigError where it cannot run."""
    resolved = config.resolve(world_size)
    origins: dict[str, str] = dict(resolved.origins)
    shown = [key for key in LEAVES if every or origins[key] != "default"]
    table = Table(
        title=f"config for {count(world_size, 'rank')}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
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
    lines: list[RenderableType] = [table]
    if describe:
        for key, _, _, description in rows:
            lines += [Text(key, style="bold"), Padding(Text(description), (0, 0, 0, 4))]
    if len(shown) < len(LEAVES):
        lines.append(
            Text(
                f"{len(LEAVES) - len(shown)} other keys have their "
                "defaults: --all shows them, --describe what keys mean"
            )
        )
    return Group(*lines)


def axes(config: Config, world_size: int) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of each axis that has several, outermost axis first. Raises ConfigError
    where the config cannot run."""
    mesh = config.resolve(world_size).mesh
    sizes: dict[str, int] = {name: getattr(mesh, name) for name in mesh.order}
    return {name: lines(sizes, mesh.order, name) for name in mesh.order if sizes[name] > 1}


def rank_stages(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the pipeline stages of each rank of axis pp."""
    pipeline, pp = config.pipeline, config.mesh.pp
    rank_of = stage_ranks(config.schedule, pp, pipeline.virtual) if pp > 1 else (0,)
    return tuple(tuple(stage for stage, at in enumerate(rank_of) if at == rank) for rank in range(pp))


@dataclass(frozen=True)
class StageSummary:
    """A pipeline stage: its rank on axis pp, its blocks by name, the parameters of these and of what comes
    before and after all blocks (a parameter that several stages have counts on each), and their share of the
    model's."""

    stage: int
    rank: int
    blocks: list[str]
    parameters: int
    share: float


def stage_summaries(config: Config) -> list[StageSummary]:
    """Return a summary of each pipeline stage, in their order; none without a pipeline, or where the config's
    model is not known on this machine.

    Raises ConfigError for a model that cannot be built, and ModelError for one that the mesh cannot
    divide."""
    if config.mesh.tp * config.mesh.pp == 1:
        return []
    # only here: most configs are shown without torch
    from polyreme.planner.meta_model import divide, expected

    model = expected(config.model, config.data)
    partition = divide(model, config.mesh, config.pipeline, config.schedule) if model is not None else None
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


def context_choice(config: Config) -> Choice | None:
    """Return how attention is computed over context-parallel ranks, and why, under a resolved config; None
    without them, or where the config's model is not known on this machine. Ranks are on the hosts of
    plan.cluster, and without one on a single host. Raises ConfigError for one that they cannot divide."""
    if config.mesh.cp == 1:
        return None
    from polyreme.planner.hardware import Cluster
    from polyreme.planner.meta_model import attention, expected

    model, cluster = expected(config.model, config.data), config.plan.cluster
    each = None if cluster is None else Cluster.load(cluster).ranks_per_host
    return None if model is None else attention(model, config.mesh, config.context, each)


def _stage_table(stages: list[StageSummary], measured: bool) -> Table:
    title = "pipeline stages on the ranks of a pp line" + (
        ", by parameters until blocks are measured" if measured else ""
    )
    table = Table(title=title, title_justify="left")
    for column in ("rank", "stage"):
        table.add_column(column, justify="right")
    table.add_column("blocks")
    for column in ("parameters", "share"):
        table.add_column(column, justify="right")
    for stage in sorted(stages, key=lambda stage: (stage.rank, stage.stage)):
        blocks = stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"
        table.add_row(
            str(stage.rank), str(stage.stage), Folded(blocks), f"{stage.parameters:,}", f"{stage.share:.1%}"
        )
    return table


def render_axes(config: Config, world_size: int) -> Group:
    """Return the ranks of each axis as a table, and the stages of a pipeline's ranks, with their contents
    where the model is known; nothing for a single rank.

    Raises ConfigError where the config cannot run, and what `stage_summaries` raises."""
    found = axes(config, world_size)
    if not found:
        return Group()
    table = Table(title="ranks that form each axis, outermost first", title_justify="left")
    table.add_column("axis")
    table.add_column("size", justify="right")
    table.add_column("ranks", overflow="fold")
    for name, members in found.items():
        shown = [some([str(rank) for rank in line], " ") for line in members]
        table.add_row(name, str(len(members[0])), some(shown, "  |  "))
    parts: list[RenderableType] = [table]
    if choice := context_choice(config):
        hosts = "" if config.plan.cluster else " (on one host: there is no plan.cluster that says how many)"
        parts.append(f"attention over cp: {choice}: {choice.reason}{hosts}")
    stages = stage_summaries(config)
    if stages:
        return Group(*parts, _stage_table(stages, config.pipeline.blocks == "time"))
    if config.mesh.pp == 1:
        return Group(*parts)
    each = [some([str(stage) for stage in own], " ") for own in rank_stages(config)]
    return Group(*parts, f"pipeline stages on the ranks of a pp line: {some(each, '  |  ')}")


def config_as_json(config: Config, world_size: int, more: Mapping[str, Any] | None = None) -> str:
    """Return the same as a JSON object: world_size, accumulation, axes (for each axis of several ranks, the
    lists of ranks that form it), stages (of each rank of axis pp), pipeline (the `stage_summaries`), context
    (the `context_choice`), config, origins by dotted key, and `more`."""
    resolved = config.resolve(world_size)
    facts: dict[str, Any] = {
        "world_size": world_size,
        "accumulation": resolved.accumulation,
        "axes": axes(config, world_size),
        "stages": rank_stages(resolved),
        "pipeline": [asdict(stage) for stage in stage_summaries(resolved)],
        "context": asdict(choice) if (choice := context_choice(resolved)) else None,
        "memory": [asdict(rank) for rank in memory.of_ranks(resolved)],
        "config": resolved.model_dump(mode="json"),
        "origins": resolved.origins,
        **(more or {}),
    }
    return json.dumps(facts, indent=2, ensure_ascii=False)


def step_table(config: Config, world_size: int | None = None) -> tuple[str, Schedule, Simulation]:
    """Return a title, the table of one step of one pipeline, and its simulation with the same time for every
    stage.

    `world_size`: None takes the smallest that the mesh fits. Raises ConfigError where the config cannot run
    on it."""
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
        f"{name}: {count(stages, 'stage')} on {count(mesh.pp, 'rank')}, {count(microbatches, 'micro-batch')}"
    )
    return title, schedule, simulate(schedule, Costs.even(schedule))


def schedule_as_json(schedule: Schedule, simulation: Simulation) -> str:
    """Return a table as a JSON object: rows (each rank's actions, separated by spaces), and of the simulation
    total (in forwards of a stage), bubble (of all ranks), bubbles and peak_activations (of each)."""
    facts: dict[str, Any] = {
        "rows": [" ".join(map(str, row)) for row in schedule],
        "total": simulation.total,
        "bubble": simulation.bubble_fraction,
        "bubbles": simulation.bubble,
        "peak_activations": simulation.peak,
    }
    return json.dumps(facts, indent=2)


def show(
    config: Config, ranks: int, notes: Sequence[Note], as_json: bool, every: bool, describe: bool
) -> None:
    """Print a config for a number of ranks, and the translation of a DeepSpeed JSON's keys."""
    config, fits = memory.fitted(config.resolve(ranks))
    if as_json:
        more: dict[str, Any] = {"micro": fits}
        more |= {"deepspeed": [asdict(note) for note in notes]} if notes else {}
        typer.echo(config_as_json(config, ranks, more))
    else:
        said = f"batch.micro = {config.batch.micro} is derived: {fits}" if fits is not None else ""
        shown = render(config, ranks, every, describe), Text(said)
        tables = (*shown, render_axes(config, ranks), memory.render(config))
        Console().print(translated.render(notes), *tables, sep="")


def draw(config: Config, ranks: int | None, svg: Path | None, as_json: bool) -> None:
    """Print the timeline of a pipeline's step, and write it to `svg` if that is given."""
    title, table, simulation = step_table(config, ranks)
    if svg:
        save("--svg", svg, timeline.svg(simulation, title))
    if as_json:
        typer.echo(schedule_as_json(table, simulation))
    else:
        console = Console()
        console.print(timeline.text(simulation, title, console.width), soft_wrap=True)


def reference() -> str:
    """Return every key in Markdown: a table for each section, with what the key takes, its default and its
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
    """Return `page` with the key reference between its two marks renewed."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{reference()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_reference(target.read_text(encoding="utf-8")), encoding="utf-8")
