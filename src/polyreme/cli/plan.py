"""Show a plan to people and programs: figures come from `polyreme.planner`, and measured ones from
`measured`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from polyreme.cli import report, translated
from polyreme.cli.folding import Folded, binary, count, decimal
from polyreme.cli.goals import Goals
from polyreme.cli.measured import Tried, run_best
from polyreme.config import Config
from polyreme.errors import PolyremeError
from polyreme.pipeline import timeline as drawing
from polyreme.planner import over_time
from polyreme.planner.plan import Details, Plan, expectations, plan, taken
from polyreme.planner.price import Offer, cheapest, counts, offers
from polyreme.planner.search import BEST, GROWTH, Judged, shown
from polyreme.planner.trace import CATEGORIES, RankTrace

COLOURS = dict(
    zip(CATEGORIES, ("blue", "cyan", "magenta", "green", "white", "white", "white", "yellow"), strict=True)
)
LETTERS = {name: name[0].upper() if name != "buffers" else "u" for name in CATEGORIES}
BAR = 34
"""Columns of a device's memory."""
STREAM = 36
"""Columns of a step."""
NEAR = 3
"""Layouts that do not fit, of which a plan says why."""


@dataclass(frozen=True)
class Request:
    """What the user asks for: the config, as loaded from `path`, on `ranks` ranks of a cluster. tries: the
    most layouts that are run dry."""

    path: Path
    config: Config
    ranks: int
    cluster: str
    tries: int
    goals: Goals


@dataclass(frozen=True)
class Answer:
    """The plan that is shown; with the offers that it was chosen among, and layouts that were run."""

    made: Plan
    meets: bool
    offers: Sequence[Offer] = ()
    tried: Sequence[Tried] = ()


def show(request: Request, as_json: bool) -> bool:
    """Print the plan that was asked for, and write the config with what was chosen. Returns whether it fits,
    and meets the deadline. Raises PolyremeError, before it begins, where there is something at the path to
    write to."""
    write = request.goals.write
    if write is not None:
        translated.refuse_existing(write)
    for option, file in (
        ("--write", write),
        ("--html", request.goals.html),
        ("--trace", request.goals.trace),
    ):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise PolyremeError(f"cannot write {option} {file}: name a file in a folder that is there")
    answer = _answer(request)
    made = answer.made
    if as_json:
        print(json.dumps(_plain(answer), indent=1))
    else:
        Console().print(render(answer, bool(request.config.searched)))
    if write is not None and answer.meets:
        expected = made.details.config.chosen(expectations(made.details))
        translated.write(expected.resolve(made.ranks), write, request.path)
    report.save(made, request.goals.html, request.goals.trace)
    return answer.meets


def _answer(request: Request) -> Answer:
    goals, config = request.goals, request.config
    found: list[Offer] = []
    if goals.cheapest:
        tries = max(1, request.tries // len(counts(request.ranks)))

        def plan_on(ranks: int) -> Plan:
            return plan(None, config, ranks, request.cluster, tries=tries, grow=False)

        found = [*offers(plan_on, config, request.ranks, goals.tokens)]
        best = cheapest(found, goals.deadline or math.inf)
        meets, chosen = best is not None, best or min(found, key=lambda each: each.hours)
        if chosen.plan is None:
            raise PolyremeError(f"on no number of ranks up to {request.ranks}: {chosen.why}")
        made = chosen.plan
    else:
        made = plan(None, config, request.ranks, request.cluster, tries=request.tries)
        meets = made.fits
    return Answer(made, meets, found, run_best(made, goals.measure_top) if goals.measure_top else ())


def render(answer: Answer, searched: bool) -> Group:
    """Return a plan as text and tables, for a terminal of 80 columns. searched: whether keys were open."""
    made = answer.made
    parts: list[RenderableType] = [*_details(made, made.details)]
    if searched or not made.fits:
        parts += [*_choice(made)]
    if answer.offers:
        parts += [*_offers(answer)]
    elif not (made.fits or made.tier or made.grown):
        most = f"{made.ranks << GROWTH:,}"
        none = f"it fits no number of ranks up to {most} that the config allows, whatever leaves the device"
        parts.append(Text(none))
    if answer.tried:
        parts.append(_tried(answer.tried))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    """Return a table with these columns of figures and a last one of words."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns[:-1]:
        table.add_column(name, justify="right")
    table.add_column(columns[-1])
    return table


def _offers(answer: Answer) -> Iterator[RenderableType]:
    cluster = answer.made.cluster
    priced = f"price: {cluster.price:g} an hour of a device ({cluster.priced or 'of the description'})"
    title = f"\nthe whole job, of {decimal(max(each.tokens for each in answer.offers))} tokens"
    table = _table(title, "ranks", "hours", "device hours", "price", "layout")
    for each in answer.offers:
        if each.hours == math.inf or each.plan is None:
            table.add_row(f"{each.ranks:,}", "", "", "", Text(f"not: {each.why}"))
            continue
        chosen = "-> " if answer.meets and each.plan is answer.made else ""
        price = f"{each.cost:,.2f}" if cluster.price else ""
        table.add_row(
            f"{chosen}{each.ranks:,}", f"{each.hours:.3g}", f"{each.device_hours:,.4g}", price,
            Text(shown(each.plan.found.best[0])),
        )  # fmt: skip
    yield table
    yield Text(priced if cluster.price else "the description has no price: the fewest device hours count")
    if not answer.meets:
        yield Text("none of them ends by the deadline; the fastest is shown", style="bold")


def _tried(tried: Sequence[Tried]) -> Table:
    table = _table("run on this machine", "step, measured", "predicted", "error", "layout")
    for each in tried:
        if each.why:
            table.add_row("", f"{each.judged.seconds:.3g} s", "", Text(f"{shown(each.judged)}: {each.why}"))
            continue
        step, spread = statistics.median(each.seconds), (max(each.seconds) - min(each.seconds)) / 2
        table.add_row(
            f"{step:.3g} s ± {spread:.1g}", f"{each.judged.seconds:.3g} s",
            f"{each.judged.seconds / step - 1:+.0%}", Text(shown(each.judged)),
        )  # fmt: skip
    return table


def _details(made: Plan, details: Details) -> Iterator[RenderableType]:
    axes = " x ".join(f"{name} {size}" for name, size in details.config.axes.items() if size > 1)
    name = made.cluster.name or made.cluster.device.name or "this cluster"
    how = "" if made.fits else ", which does not fit; it is the layout that lacks least"
    yield Text(f"{count(made.ranks, 'rank')} of {name}: {axes or 'one rank'}{how}\n", style="bold")
    yield _memory(made, details)
    step, line = details.timeline, Text()
    line.append(f"a step takes {step.seconds:.3g} s: {decimal(step.tokens_per_second)} tokens/s, ")
    line.append(f"{step.tflops:.3g} TFLOP/s a device, MFU {step.mfu:.1%}\n")
    line.append(f"most of it: {step.limit}\n")
    waits = {f"axis {axis}": each for axis, each in step.exposed.items() if each > 0.001 * step.seconds}
    waits |= {"tiers": step.transfers} if step.transfers else {}
    if step.bubble:
        waits["other stages"] = step.bubble * step.seconds
    if waits:
        told = ", ".join(f"{what} {each / step.seconds:.1%}" for what, each in waits.items())
        line.append(f"waits for {told}\n")
    yield line
    yield _traffic(details.worst)
    yield _checkpoints(details.traces)
    if step.seconds:
        yield _streams(over_time.kinds(details, made.cluster))
    if details.config.mesh.pp > 1 and len(details.worst.row) <= 256:
        yield drawing.text(step.simulation, "\nthe step", 80)


def _memory(made: Plan, details: Details) -> Table:
    """Return a bar of the memory of each kind of rank, as wide as that of the device."""
    gpu = any(each.memory.reserved for each in details.traces)
    room, width = int(made.cluster.device.memory), BAR - 8 * gpu
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = (
        ("rank", "right"),
        (f"memory, of {binary(room)}".ljust(width), "left"),
        ("peak", "right"),
        *([("taken", "right")] if gpu else []),
        ("in", "left"),
    )
    for name, justify in names:
        table.add_column(name, justify=justify, min_width=width if "," in name else None)  # type: ignore[arg-type]
    for trace in details.traces:
        memory, bar = trace.memory, Text()
        for category in CATEGORIES:
            size = memory.by_category.get(category, 0)
            bar.append(LETTERS[category] * round(width * size / max(room, memory.peak)), COLOURS[category])
        bar.append("." * (width - len(bar)), "dim")
        where = f"{memory.action or 'outside'} {memory.module}".strip()
        all_of_it = [binary(taken(memory, details.device))] if gpu else []
        table.add_row(str(trace.rank), bar, binary(memory.peak), *all_of_it, Folded(where))
    used = [name for name in CATEGORIES if any(t.memory.by_category.get(name) for t in details.traces)]
    table.caption = ", ".join(f"{LETTERS[name]} {name}" for name in used)
    if gpu:
        context = binary(int(details.device.context))
        table.caption += f"\ntaken: as torch's allocator does, with {context} of driver and libraries"
    table.caption_justify = "left"
    return table


@dataclass(frozen=True)
class Shades:
    """How busy something is, from left to right: a character for each part, darker for more."""

    parts: Sequence[float]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(self.parts), len(self.parts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scale = " .:=#" if options.ascii_only else " ░▒▓█"
        last = len(scale) - 1
        yield Text("".join(scale[max(round(each * last), int(each > 0.01))] for each in self.parts))


def _streams(each_kind: Sequence[over_time.Kind]) -> Table:
    """Return what is under way over the step, on a rank of each kind."""
    title = f"the step by streams, {each_kind[0].seconds:.3g} s from left to right"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = (("rank", "right"), ("stream", "left"), ("", "left"), ("busy", "right"), ("waits", "right"))
    for name, justify in names:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for kind in each_kind:
        rank = str(kind.trace.rank)
        for stream in kind.streams:
            parts = kind.busy(stream, STREAM)
            if stream != over_time.COMPUTE and sum(parts) < 0.0005 * STREAM:
                continue
            waited = kind.waits.get(stream.removesuffix(" in"), 0.0) / kind.seconds
            name = f"axis {stream}" if stream in kind.trace.axes else stream
            table.add_row(
                rank, name, Shades(parts), f"{sum(parts) / len(parts):.1%}",
                f"{waited:.1%}" if waited else "",
            )  # fmt: skip
            rank = ""
    return table


def _traffic(trace: RankTrace) -> Table:
    table = Table(title="what a rank sends in a step", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("axis", "left"), ("operation", "left"), ("calls", "right"), ("bytes", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for axis, verbs in trace.traffic.items():
        for verb, (calls, nbytes) in verbs.items():
            table.add_row(axis, verb, f"{calls:,}", binary(nbytes))
    return table


def _checkpoints(traces: Sequence[RankTrace]) -> Table:
    """Return what checkpoints take of each kind of rank."""
    took = {each.rank: each.checkpoint for each in traces if each.checkpoint is not None}
    title = f"checkpoints of {binary(next(iter(took.values())).files)}: memory for them, at most"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "save, host", "in the background", "load, host", "device"):
        table.add_column(name, justify="right")
    for rank, each in took.items():
        table.add_row(str(rank), *map(binary, (each.save, each.background, each.load, each.load_device)))
    return table


def _choice(made: Plan) -> Iterator[RenderableType]:
    found = made.found
    if found.best:
        table = _table("layouts that fit", "step", "tokens/s", "MFU", "memory", "layout")
        for each in found.best[:BEST]:
            assert each.cost is not None
            step = each.cost.details.timeline
            table.add_row(
                f"{each.seconds:.3g} s", decimal(step.tokens_per_second), f"{step.mfu:.1%}",
                binary(each.cost.memory), shown(each),
            )  # fmt: skip
        yield table
    for each in found.failed[: NEAR if found.best else BEST]:
        yield Text(f"not {shown(each)}: {each.why}")
    yield from (Text(line, style="bold") for line in report.helps(made))
    tried = len(found.best) + len(found.failed)
    rest = f"; {found.left_out} others cannot be better" if found.left_out else ""
    rest += f"; {found.unjudged} were not tried: --tries" if found.unjudged else ""
    yield Text(f"{count(tried, 'layout')} tried{rest}", style="dim")


def _plain(answer: Answer) -> dict[str, Any]:
    made = answer.made

    def judged(each: Judged) -> dict[str, Any]:
        cost = each.cost
        told: Mapping[str, Any] = {} if cost is None else cost._replace(details=None)._asdict()
        return {"values": dict(each.layout.values), **told, "why": each.why}

    found: dict[str, Any] = {
        "ranks": made.ranks, "fits": made.fits, "best": [judged(each) for each in made.found.best[:BEST]],
        "failed": [judged(each) for each in made.found.failed],
    }  # fmt: skip
    if made.grown is not None:
        found["grown"] = {"ranks": made.grown[0], **judged(made.grown[1])}
    if made.tier is not None:
        found["tier"] = judged(made.tier)
    if answer.offers:
        found["meets"] = answer.meets
        found["offers"] = [
            {"ranks": each.ranks, "why": each.why}
            if each.hours == math.inf
            else {
                "ranks": each.ranks, "hours": each.hours, "device_hours": each.device_hours,
                "price": each.cost, "tokens": each.tokens, "why": "",
            }
            for each in answer.offers
        ]  # fmt: skip
    if answer.tried:
        found["measured"] = [
            {**judged(each.judged), "measured": [*each.seconds], "why": each.why} for each in answer.tried
        ]
    step = asdict(made.details.timeline)
    step.pop("simulation")
    found["step"] = step
    found["ranks_of_each_kind"] = [
        {
            "rank": each.rank, "peak": each.memory.peak,
            "taken": taken(each.memory, made.details.device), "by_category": each.memory.by_category,
            "module": each.memory.module, "host": each.memory.host, "files": each.memory.files,
            "traffic": each.traffic, "flops": asdict(each.flops),
            "checkpoint": each.checkpoint and each.checkpoint._asdict(),
        }
        for each in made.details.traces
    ]  # fmt: skip
    return found
