"""A planned step over simulated time: what each kind of rank does and keeps, to be drawn, and as the events
of a trace that Perfetto and Chrome read.

Invariant: times are those of `time_model.stretches`; memory is that of the dry run. Where the step has more
micro-batches than were run dry, one between the others adds the activations of as many micro-batches as it
has more under way than the one that stands for it. No communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from polyreme.pipeline.schedule import MESSAGES, Action, halves
from polyreme.pipeline.simulate import Cell
from polyreme.planner.hardware import Cluster
from polyreme.planner.plan import Details, schedule_of
from polyreme.planner.time_model import BUBBLE, WAITING, Stretch, stretches
from polyreme.planner.trace import CATEGORIES, Moment, RankTrace

COMPUTE = "compute"


class Level(NamedTuple):
    """The live bytes on the device from `when` on, by category in the order of CATEGORIES."""

    when: float
    live: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """The step of one rank, which stands for those of its kind. seconds: of the step. cells: the actions of
    its row. stretches: what its streams do."""

    trace: RankTrace
    seconds: float
    cells: Sequence[Cell]
    stretches: Sequence[Stretch]

    @property
    def name(self) -> str:
        """The rank and its place on the pipeline."""
        stage = self.trace.coordinates.get("pp", 0)
        return f"rank {self.trace.rank}" + (f", stage {stage}" if "pp" in self.trace.axes else "")

    @cached_property
    def streams(self) -> Mapping[str, Sequence[Stretch]]:
        """What is under way, by stream: the computation, then axes and tiers, then the waits for other
        stages."""
        found: dict[str, list[Stretch]] = {COMPUTE: []}
        idle: list[Stretch] = []
        now = 0.0
        for stretch in self.stretches:
            if stretch.stream != COMPUTE:
                found.setdefault(stretch.stream, []).append(stretch)
                continue
            if stretch.start > now + 1e-6 * self.seconds:
                idle.append(Stretch(BUBBLE, BUBBLE, now, stretch.start))
            now = stretch.end
            if not stretch.name.startswith(WAITING):
                found[COMPUTE].append(stretch)
        if self.seconds > now + 1e-6 * self.seconds:
            idle.append(Stretch(BUBBLE, BUBBLE, now, self.seconds))
        others = {stream: found[stream] for stream in sorted(found) if stream != COMPUTE}
        return {COMPUTE: found[COMPUTE], **others} | ({BUBBLE: idle} if idle else {})

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """The seconds in which the computation waits, by axis or tier."""
        found: dict[str, float] = defaultdict(float)
        for stretch in self.stretches:
            if stretch.stream == COMPUTE and stretch.name.startswith(WAITING):
                found[stretch.name.removeprefix(WAITING)] += stretch.end - stretch.start
        return found

    def busy(self, stream: str, columns: int) -> list[float]:
        """Return the part of each of `columns` equal parts of the step in which a stream is busy."""
        found, width = [0.0] * columns, self.seconds / columns
        last = 0.0
        for stretch in self.streams.get(stream, ()):
            start, last = (
                max(stretch.start, last),
                max(stretch.end, last),
            )  # messages may be under way together
            for column in range(int(start / width), min(int(last / width), columns - 1) + 1):
                part = min(last, (column + 1) * width) - max(start, column * width)
                found[column] += max(part, 0.0) / width
        return [min(each, 1.0) for each in found]

    @cached_property
    def memory(self) -> Sequence[Level]:
        """The memory of the device over the step."""
        trace = self.trace
        moments: dict[int, list[Moment]] = defaultdict(list)
        for moment in trace.memory.timeline:
            moments[moment.segment].append(moment)
        place = {id(each): index for index, each in enumerate(trace.segments)}
        ran = [each.action for each in trace.segments if each.action is not None]
        before, whole = _under_way(ran), _under_way(trace.row)
        one = self._of_one_micro_batch(moments)
        activations, now = CATEGORIES.index("activations"), 0.0
        first = moments[0] or [Moment(0, 0, (0,) * len(CATEGORIES))]
        found = [Level(0.0, max((each.live for each in first), key=sum)), Level(0.0, first[-1].live)]
        for cell in self.cells:
            segment = trace.segment(cell.action)
            like = segment.action
            if like is None or id(segment) not in place:
                continue
            more = sum(
                (count - before[like][stage]) * one.get(stage, 0)
                for stage, count in whole[cell.action].items()
            )
            seconds = 0.0 if cell.action.op in MESSAGES else cell.end - cell.start
            now = cell.start if seconds else now
            for moment in moments[place[id(segment)]]:
                live = [*moment.live]
                live[activations] = max(0, live[activations] + more)
                when = now + seconds * min(1.0, moment.event / max(1, len(segment.events)))
                found.append(Level(when, tuple(live)))
            now += seconds
        end = len(trace.segments) - 1
        if end and trace.segments[end].action is None:
            found += [Level(self.seconds, moment.live) for moment in moments[end]]
        return found

    def highest(self, columns: int) -> list[tuple[int, ...]]:
        """Return the highest level within each of `columns` equal parts of the step."""
        found: list[tuple[int, ...]] = [()] * columns
        at, now = 0, self.memory[0].live
        for level in (*self.memory, Level(self.seconds, self.memory[-1].live)):
            column = min(int(level.when / self.seconds * columns), columns - 1)
            for between in range(at, column + 1):
                found[between] = max(found[between], now, key=sum)
            at, now = column, level.live
            found[at] = max(found[at], now, key=sum)
        return found

    def _of_one_micro_batch(self, moments: Mapping[int, Sequence[Moment]]) -> dict[int, int]:
        """Return the bytes of activations that a forward leaves, by stage."""
        index, level = CATEGORIES.index("activations"), 0
        left: dict[int, list[int]] = defaultdict(list)
        for place, segment in enumerate(self.trace.segments):
            after = moments[place][-1].live[index] if moments[place] else level
            if segment.action is not None and segment.action.op == "F":
                left[segment.action.stage].append(after - level)
            level = after
        return {stage: int(median(each)) for stage, each in left.items()}


def kinds(details: Details, cluster: Cluster) -> list[Kind]:
    """Return the step of each kind of rank."""
    found = stretches(details.traces, schedule_of(details.config), cluster)
    return [
        Kind(trace, details.timeline.seconds, cells, its)
        for trace, (its, cells) in zip(details.traces, found, strict=True)
    ]


def _under_way(row: Sequence[Action]) -> dict[Action, Counter[int]]:
    """Return the micro-batches of each stage whose activations are kept when each action begins."""
    halved, now = halves([row]), Counter[int]()
    found: dict[Action, Counter[int]] = {}
    for action in row:
        found[action] = now.copy()
        if action.op == "F":
            now[action.stage] += 1
        elif action.op == "W" or (action.op == "B" and action not in halved):
            now[action.stage] -= 1
    return found


# ---- a trace for Perfetto


def trace_events(each_kind: Sequence[Kind]) -> dict[str, Any]:
    """Return the step as an object of the Trace Event Format, which Perfetto and chrome://tracing read: a
    process for each kind of rank, a thread for its actions, its computation and each axis and tier, and a
    counter of memory."""
    return {"traceEvents": [*_events(each_kind)], "displayTimeUnit": "ms"}


def _events(each_kind: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    for kind in each_kind:
        process = {"pid": kind.trace.rank}
        yield {"ph": "M", "name": "process_name", "tid": 0, **process, "args": {"name": kind.name}}
        actions = [
            Stretch("actions", str(each.action), each.start, each.end)
            for each in kind.cells
            if each.action.op not in MESSAGES
        ]
        computes = [stretch for stretch in kind.stretches if stretch.stream == COMPUTE]
        streams = {"actions": actions, **kind.streams, COMPUTE: computes}
        streams.pop(BUBBLE, None)
        for thread, (stream, its) in enumerate(streams.items(), 1):
            where = {**process, "tid": thread}
            name = {"name": f"axis {stream}" if stream in kind.trace.axes else stream}
            yield {"ph": "M", "name": "thread_name", **where, "args": name}
            yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}}
            last = 0
            for stretch in its:  # in nanoseconds; one thread's follow each other
                start, last = (max(round(each * 1e9), last) for each in stretch[2:])
                if last > start + 1:  # a reader cuts off fractions of either: one apart, they never overlap
                    times = {"ts": start / 1000, "dur": (last - start - 1) / 1000}
                    yield {"ph": "X", "name": stretch.name, "cat": stream, **where, **times}
        for level in kind.memory:
            live = dict(zip(CATEGORIES, level.live, strict=True))
            times = {"ts": round(level.when * 1e6, 3)}
            yield {"ph": "C", "name": "memory (bytes)", **process, **times, "args": live}
