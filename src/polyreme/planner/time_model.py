"""Simulates the timeline of one optimizer step from what its ranks do (`trace`) on a described cluster
(`hardware`).

Invariant: pure arithmetic. A rank's operators follow each other on its device, and its host issues them
ahead. The collectives of each axis, and the transfers of each tier and direction, follow each other on a
stream of their own, each from when the computation comes to it; those under way on one link share its
bandwidth. A wait joins. Ranks of a pipeline wait for each other's messages (`pipeline.simulate`); those of
other axes do the same at the same time. Communication: none."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from polyreme.errors import ModelError
from polyreme.pipeline.schedule import MESSAGES, Action, Schedule, other_end
from polyreme.pipeline.simulate import RECEIVED, Cell, Costs, Simulation, simulate
from polyreme.planner.hardware import CAUSAL, Cluster
from polyreme.planner.trace import Collective, Compute, Event, RankTrace, Transfer, Wait

PRODUCTS, ATTENTION, MEMORY, ISSUE = "matrix products", "attention", "memory traffic", "issuing operators"
WAITING, BUBBLE, SHARING = "waiting for ", "bubble", "sharing with collectives"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


class Part(NamedTuple):
    """A stretch of the critical path: what a rank of the pipeline does, how often, and its seconds."""

    name: str
    times: int
    seconds: float


class Stretch(NamedTuple):
    """What a stream of a rank does from `start` to `end`. stream: "compute", an axis, or a tier with its
    direction. name: what limits the operators, the operation, or "waiting for" another stream."""

    stream: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step in simulated time.

    seconds: of the whole step. tokens_per_second: of all ranks. tflops: model TFLOP/s of a device, and mfu
    the part of its peak that is; hfu counts recomputation, too. bubble: the part of the step in which a rank
    waits for other stages, as a mean. exposed: seconds in which the computation waits, by axis, and transfers
    those in which it waits for tiers, on the rank that ends last. spent: all seconds of that rank, by what
    takes them. path: the longest chain of actions. limit: what takes most of the step, in words."""

    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float
    hfu: float
    bubble: float
    exposed: Mapping[str, float]
    transfers: float
    spent: Mapping[str, float]
    path: tuple[Part, ...]
    limit: str
    simulation: Simulation


def step_time(
    traces: Sequence[RankTrace],
    schedule: Schedule,
    cluster: Cluster,
    *,
    fused: bool = False,
    overlapped: Sequence[str] = (),
) -> Timeline:
    """Simulate the step of `schedule`. traces: of one rank of each kind, at least one; a pipeline rank
    without its own does what the nearest one does that has as many neighbours.

    fused: consecutive operators that are no products are one kernel, as with `compile`; it moves as much as
    the largest of them. overlapped: axes ("tp"), or operations on one ("dp all_gather"), that another system
    hides behind computation where ours does not."""
    ranks = [
        _Rank(_like(traces, place, len(schedule)), row, cluster, fused, overlapped)
        for place, row in enumerate(schedule)
    ]
    simulation = _simulation(ranks, schedule)
    seconds = max((cells[-1].end for cells in simulation.cells), default=0.0)
    slowest = ranks[max(range(len(ranks)), key=lambda row: simulation.cells[row][-1].end)]
    model = sum(rank.trace.flops.model for rank in ranks) / len(ranks)
    hardware = sum(rank.trace.flops.hardware for rank in ranks) / len(ranks)
    peak = cluster.device.rate(slowest.dtype)
    spent = dict(sorted(slowest.spent.items(), key=lambda each: -each[1]))
    spent[BUBBLE] = max(0.0, seconds - sum(spent.values()))
    waits = {
        name.removeprefix("waiting for "): each for name, each in spent.items() if name.startswith("waiting")
    }
    return Timeline(
        seconds=seconds,
        tokens_per_second=traces[0].tokens / seconds if seconds else math.inf,
        tflops=model / seconds / 1e12 if seconds else math.inf,
        mfu=model / seconds / peak if seconds else math.inf,
        hfu=hardware / seconds / peak if seconds else math.inf,
        bubble=simulation.bubble_fraction,
        exposed={name: each for name, each in waits.items() if name in slowest.trace.axes},
        transfers=sum(each for name, each in waits.items() if name in ("host", "files")),
        spent=spent,
        path=_path(simulation),
        limit=_limit(spent, seconds),
        simulation=simulation,
    )


def stretches(
    traces: Sequence[RankTrace], schedule: Schedule, cluster: Cluster
) -> Sequence[tuple[tuple[Stretch, ...], Sequence[Cell]]]:
    """Simulate the same step, and return of the rank of each trace what its streams do, in the order of their
    starts, and its actions."""
    ranks = [
        _Rank(_like(traces, place, len(schedule)), row, cluster, False, ())
        for place, row in enumerate(schedule)
    ]
    shown = [trace.coordinates.get("pp", 0) for trace in traces]
    for row in shown:
        ranks[row].watched = []
    cells = _simulation(ranks, schedule).cells
    return [(ranks[row].stretches(cells[row]), cells[row]) for row in shown]


def _simulation(ranks: Sequence[_Rank], schedule: Schedule) -> Simulation:
    rows = {a.stage: row for row, actions in enumerate(schedule) for a in actions if a.op != "U"}
    return simulate(schedule, _Streams({}, max(rank.message for rank in ranks), ranks=ranks, rows=rows))


def _like(traces: Sequence[RankTrace], place: int, size: int) -> RankTrace:
    """Return the trace of the rank at this place of the pipeline, or of one like it."""
    if not traces:
        raise ModelError("a step is timed from what a rank does: give the trace of one rank or more")

    def distance(trace: RankTrace) -> tuple[bool, int]:
        other = trace.coordinates.get("pp", 0)
        ends = (place in (0, size - 1) or other in (0, size - 1)) and other != place
        return ends, abs(other - place)

    return min(traces, key=distance)


# ---- one rank


class _Work:
    """A collective or transfer that is under way or waits its turn."""

    __slots__ = ("end", "left", "link", "on_units", "start")

    def __init__(self, link: str, seconds: float, on_units: bool) -> None:
        self.link, self.left, self.on_units = link, seconds, on_units
        self.start: float | None = None
        self.end: float | None = None


class _Links:
    """The streams of a rank and what is under way on them. The first of each stream is; those on one link
    share it equally."""

    def __init__(self) -> None:
        self.now = 0.0
        self._streams: dict[str, deque[_Work]] = {}

    def begin(self, stream: str, work: _Work, when: float) -> None:
        self.advance(when)
        self._streams.setdefault(stream, deque()).append(work)

    def advance(self, until: float) -> float:
        """Let time pass. Returns the seconds in which a collective was under way."""
        busy = 0.0
        while self.now < until and (firsts := [queue[0] for queue in self._streams.values() if queue]):
            busy += self._pass(firsts, until)
        self.now = max(self.now, until)
        return busy

    def finish(self, work: _Work) -> float:
        """Let time pass until `work` is complete, and return when that is."""
        while work.end is None:
            self._pass([queue[0] for queue in self._streams.values() if queue], math.inf)
        return work.end

    def _pass(self, firsts: Sequence[_Work], until: float) -> float:
        sharing = Counter(work.link for work in firsts)
        passed = min(until - self.now, *(work.left * sharing[work.link] for work in firsts))
        for work in firsts:
            work.start = self.now if work.start is None else work.start
        self.now += passed
        for work in firsts:
            left = work.left - passed / sharing[work.link]
            work.left = left if left > 1e-12 else 0.0
            if not work.left:
                work.end = self.now
        for queue in self._streams.values():
            if queue and queue[0].end is not None:
                queue.popleft()
        return passed if any(work.on_units for work in firsts) else 0.0


@dataclass
class _Block:
    """Operators between two events of other kinds. device: their seconds, one after another. behind: the
    seconds from when the host begins to issue them until the last ends, if none waits for one before the
    block. host: until all are issued."""

    device: float = 0.0
    behind: float = 0.0
    host: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: str, seconds: float, issue: float, calls: int) -> None:
        """Append an operator that is issued in `calls` operators."""
        self.host += issue * calls
        self.device += seconds
        self.behind = max(self.behind, self.host) + seconds
        self.spent[kind] += seconds


class _Rank:
    """What one rank does, with the time that its device, its host and its streams have come to."""

    def __init__(
        self,
        trace: RankTrace,
        row: Sequence[Action],
        cluster: Cluster,
        fused: bool,
        overlapped: Sequence[str],
    ) -> None:
        self.trace, self.cluster, self.fused, self.overlapped = trace, cluster, fused, {*overlapped}
        self.last = row[-1]
        own, its = (sorted({a.stage for a in actions if a.op != "U"}) for actions in (row, trace.row))
        self._stages = dict(zip(own, its, strict=True))
        self._end = trace.row[-1]
        self.links, self.host = _Links(), 0.0
        self.spent: dict[str, float] = defaultdict(float)
        self.watched: list[Stretch | tuple[str, str, _Work]] | None = None  # only if stretches are asked for
        self._kinds: dict[int, tuple[str, str]] = {}
        self._open: dict[tuple[str, str], dict[int, _Work]] = {}
        self._known: dict[int, tuple[tuple[Event, ...], list[_Block | Event]]] = {}
        device = cluster.device
        self._slowed = device.collective_units / max(1, device.units - device.collective_units)
        actions = [index for index, each in enumerate(trace.segments) if each.action is not None]
        first, last = (actions[0], actions[-1]) if actions else (0, -1)
        self.before = [event for each in trace.segments[:first] for event in each.events]
        self.after = [event for each in trace.segments[last + 1 :] for event in each.events]
        for each in trace.segments:
            for event in each.events:
                if isinstance(event, Collective):
                    self._kinds[event.number] = event.axis, event.verb
                elif isinstance(event, Transfer):
                    self._kinds[event.number] = event.tier, event.direction

    @cached_property
    def dtype(self) -> str:
        """The dtype of most operations."""
        flops = Counter[str]()
        for segment in self.trace.segments:
            for event in segment.events:
                if isinstance(event, Compute):
                    flops[event.dtype] += event.flops
        return SHORT.get(flops.most_common(1)[0][0], "fp32") if flops else "fp32"

    @property
    def message(self) -> float:
        """The seconds of the largest message to another stage."""
        sent = [
            self.cluster.collective("send", event.bytes, self.trace.axes[event.axis])[1]
            for segment in self.trace.segments
            for event in segment.events
            if isinstance(event, Collective) and event.verb == "send"
        ]
        return max(sent, default=0.0)

    def run(self, action: Action, start: float) -> float:
        """Do what an action does from `start` on, and return when it ends."""
        done = self._end if action.op == "U" else action._replace(stage=self._stages[action.stage])
        now = start
        for item in self._items(self.trace.segment(done).events, fuses=action.op in "FBW"):
            now = self._do(item, now)
        return now

    def rest(self, events: Sequence[Event], start: float) -> float:
        """Do what is outside of the row."""
        now = start
        for item in self._items(tuple(events), fuses=False):
            now = self._do(item, now)
        return now

    def _do(self, item: _Block | Event, now: float) -> float:
        if isinstance(item, _Block):
            issued = self.host + item.behind
            end = max(now + item.device, issued)
            for kind, seconds in item.spent.items():
                self.spent[kind] += seconds
            self.spent[ISSUE] += end - now - item.device
            self.host += item.host
            slowed = self.links.advance(end) * self._slowed
            self.spent[SHARING] += slowed
            if self.watched is not None and end + slowed > now:
                kind = max(item.spent, key=lambda each: item.spent[each])
                self.watched.append(Stretch("compute", kind, now, end + slowed))
            return end + slowed
        if isinstance(item, Wait):
            work = self._waited(item.number)
            if work is None:
                return now
            self.links.advance(now)
            end = max(now, self.links.finish(work))
            self.spent[WAITING + self._kinds[item.number][0]] += end - now
            if self.watched is not None and end > now:
                self.watched.append(Stretch("compute", WAITING + self._kinds[item.number][0], now, end))
            return end
        if isinstance(item, Collective):
            if item.verb in ("send", "receive") or {item.axis, f"{item.axis} {item.verb}"} & self.overlapped:
                return now
            ranks = self.trace.axes.get(item.axis) or range(item.ranks)  # a product of axes begins at rank 0
            link, seconds = self.cluster.collective(item.verb, item.bytes, ranks)
            work = _Work(link, seconds, True)
            stream = item.axis
        else:
            assert isinstance(item, Transfer)
            stream = f"{item.tier} {item.direction}"
            work = _Work(stream, self.cluster.transfer(item.tier, item.direction, item.bytes), False)
        self._open.setdefault(self._kinds[item.number], {})[item.number] = work
        self.links.begin(stream, work, now)
        if self.watched is not None:
            self.watched.append((stream, self._kinds[item.number][1], work))
        return now

    def stretches(self, cells: Sequence[Cell]) -> tuple[Stretch, ...]:
        """Return what was watched, with the messages of the actions of its row, in the order of starts."""
        found = [
            Stretch("pp", "send" if cell.action.op[0] == "S" else "receive", cell.start, cell.end)
            for cell in cells
            if cell.action.op in MESSAGES and cell.end > cell.start
        ]
        for each in self.watched or ():
            if isinstance(each, Stretch):
                found.append(each)
                continue
            stream, name, work = each
            end = self.links.finish(work)
            found.append(Stretch(stream, name, end if work.start is None else work.start, end))
        return tuple(sorted(found, key=lambda each: each.start))

    def _waited(self, number: int) -> _Work | None:
        """Return the work of this number, or in a micro-batch that was not traced the first of its kind."""
        works = self._open.get(self._kinds.get(number, ("", "")), {})
        if number not in works:
            number = next(iter(works), number)
        return works.pop(number, None)

    def _items(self, events: tuple[Event, ...], fuses: bool) -> list[_Block | Event]:
        """Join the operators between events of other kinds. Of equal events the result is remembered."""
        known = self._known.get(id(events))
        if known is None:
            known = self._known[id(events)] = events, [*self._blocks(events, fuses and self.fused)]
        return known[1]

    def _blocks(self, events: Sequence[Event], fused: bool) -> Iterator[_Block | Event]:
        block, device = _Block(), self.cluster.device
        chain: list[float] = []

        def close() -> None:
            if chain:
                block.add(MEMORY, max(chain) + device.launch, device.dispatch, 1)
                chain.clear()

        for event in events:
            if not isinstance(event, Compute):
                close()
                if block.host or block.device:
                    yield block
                    block = _Block()
                yield event
                continue
            kind, seconds = _seconds(event, self.cluster)
            if fused and kind == MEMORY:
                chain.append(seconds)
                continue
            close()
            block.add(kind, seconds + device.launch * (seconds > 0), device.dispatch, 1)
        close()
        if block.host or block.device:
            yield block


def _seconds(event: Compute, cluster: Cluster) -> tuple[str, float]:
    """Return what limits an operator, and its seconds on the device, without those of its launch."""
    device = cluster.device
    moved = device.moved(event.bytes, event.op)
    if not event.flops:
        return MEMORY, moved
    dtype = SHORT.get(event.dtype, "fp32")
    if "attention" in event.op:
        part = device.attention_backward if "backward" in event.op else device.attention
        done = event.flops * (CAUSAL if event.causal else 1)
        return ATTENTION, max(moved, done / (device.rate(dtype) * part))
    if len(event.shape) == 4:
        batch, m, n, k = event.shape
        worked = device.product(event.shape, dtype) * event.flops / (2 * batch * m * n * k)
    else:
        worked = event.flops / (device.rate(dtype) * device.sustained)
    return (PRODUCTS, worked) if worked >= moved else (MEMORY, moved)


# ---- the pipeline


@dataclass(frozen=True)
class _Streams(Costs):
    """Costs of actions as they come out of the streams of each rank, of which each action goes on."""

    ranks: Sequence[_Rank] = ()
    rows: Mapping[int, int] = field(default_factory=dict)

    def end(self, action: Action, start: float) -> float:
        row = action.stage if action.op == "U" else self.rows[action.stage]
        rank = self.ranks[row]
        if action.op in MESSAGES:
            return start
        if rank.before:
            start = rank.rest(rank.before, start)
            rank.before = []
        start = rank.run(action, start)
        return rank.rest(rank.after, start) if action == rank.last else start


def _path(simulation: Simulation) -> tuple[Part, ...]:
    """Return the chain of actions, from the start, of which each began when the one before it ended."""
    lines = [[cell for cell in line if cell.action.op not in MESSAGES] for line in simulation.cells]
    at = {cell.action: (row, index) for row, line in enumerate(lines) for index, cell in enumerate(line)}
    row = max(range(len(lines)), key=lambda each: lines[each][-1].end)
    index, chain = len(lines[row]) - 1, list[Cell]()
    while index >= 0:
        chain.append(cell := lines[row][index])
        sender = _source(cell.action)
        if sender in at and (index == 0 or lines[row][index - 1].end < cell.start - 1e-12):
            row, index = at[sender]
        else:
            index -= 1
    parts: list[Part] = []
    for cell in reversed(chain):
        name, seconds = f"stage {cell.action.stage} {cell.action.op}", cell.end - cell.start
        if parts and parts[-1].name == name:
            parts[-1] = Part(name, parts[-1].times + 1, parts[-1].seconds + seconds)
        else:
            parts.append(Part(name, 1, seconds))
    return tuple(parts)


def _source(action: Action) -> Action | None:
    """Return the action of another stage whose result this one receives."""
    if action.op not in RECEIVED:
        return None
    return other_end(action._replace(op=RECEIVED[action.op]))._replace(op=action.op)


def _limit(spent: Mapping[str, float], seconds: float) -> str:
    if not seconds:
        return "nothing takes any time"
    name, most = max(spent.items(), key=lambda each: each[1])
    return f"{name}: {most / seconds:.0%} of the step"
