"""What one rank does in one optimizer step, as plain data: operators, collectives, transfers and memory, in
the order of the engine's own step (`dry_run`).

Invariant: all figures are those of a step in its steady state, with optimizer states; bytes of collectives
are counted as `Axis` counts them. No communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from polyreme.checkpoint.save import CheckpointBytes
from polyreme.config.schema import Category
from polyreme.pipeline.schedule import Action
from polyreme.planner.flops import Flops

CATEGORIES: tuple[Category, ...] = get_args(Category)


class Compute(NamedTuple):
    """One operator on the device. bytes: read and written. shape: (batch, m, n, k) of matrix products, else
    (). dtype: of its result, such as "bfloat16". causal: attention that leaves out the keys after a query,
    which `flops` count."""

    op: str
    flops: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    causal: bool = False


class Collective(NamedTuple):
    """A collective or a message begins. number: unique within the step, for its `Wait`. bytes: those that
    this rank sends; of a receive, those that it gets. ranks: the size of the axis."""

    number: int
    axis: str
    verb: str
    bytes: int
    ranks: int


class Transfer(NamedTuple):
    """A copy between the device and a tier begins."""

    number: int
    tier: Literal["host", "files"]
    direction: Literal["in", "out"]
    bytes: int


class Wait(NamedTuple):
    """The computation goes on only when the collective or transfer `number` is complete. Further waits for it
    are left out."""

    number: int


Event = Compute | Collective | Transfer | Wait


@dataclass(frozen=True)
class Segment:
    """What one action of the rank's row does; None: outside of the row, before and after it. A U has the end
    of the reduction and the update."""

    action: Action | None
    events: tuple[Event, ...]


class Moment(NamedTuple):
    """The live bytes on the device, by category in the order of CATEGORIES, just before an event of a
    segment."""

    segment: int
    event: int
    live: tuple[int, ...]


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of a rank in a step.

    peak: the most live bytes on the device, `by_category` at that moment. action, module: where the peak is;
    the module is the innermost one by name, "" outside of all. resting: bytes between steps, by category.
    host, files: bytes of tiers at their most. reserved: bytes that torch takes of a GPU for the peak, without
    the CUDA context; 0 on CPUs. timeline: every new extreme, in order, thin enough to draw."""

    peak: int
    by_category: Mapping[Category, int]
    action: Action | None
    module: str
    resting: Mapping[Category, int]
    host: int
    files: int
    timeline: tuple[Moment, ...]
    reserved: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The step of one rank.

    coordinates: its place on each mesh axis. axes: the global ranks of each axis of several ranks, by the
    axis' name, this rank's among them. row: its whole row of the schedule, of which `segments` has as many
    micro-batches as differ, in the order in which they ran. flops, traffic (by axis and verb: calls, bytes):
    of the whole step on this rank. tokens: of the whole step, over all ranks. checkpoint:
    None of a step that was recorded on a real rank."""

    rank: int
    coordinates: Mapping[str, int]
    axes: Mapping[str, tuple[int, ...]]
    row: tuple[Action, ...]
    segments: tuple[Segment, ...]
    memory: MemoryTrace
    flops: Flops
    traffic: Mapping[str, Mapping[str, tuple[int, int]]]
    tokens: int
    checkpoint: CheckpointBytes | None = None

    @cached_property
    def _by_action(self) -> dict[Action, Segment]:
        return {each.action: each for each in self.segments if each.action is not None}

    def segment(self, action: Action) -> Segment:
        """Return what an action of the row does. Where fewer micro-batches were run than the row has, the
        first ones and the last ones are those of the row, and one stands for all between."""
        there = [each.microbatch or 0 for each in self._by_action if each[:2] == action[:2]]
        if action.microbatch is None or not there:
            return self._by_action.get(action) or Segment(action, ())
        ran = 1 + max(each.microbatch or 0 for each in self._by_action)
        left, like = self._microbatches - action.microbatch, action.microbatch
        if ran < self._microbatches:
            like = ran - left if left < ran - ran // 2 else min(like, ran // 2)
        nearest = min(there, key=lambda each: abs(each - like))  # not each one has a W
        return self._by_action[action._replace(microbatch=nearest)]

    @cached_property
    def _microbatches(self) -> int:
        return 1 + max((each.microbatch or 0 for each in self.row), default=0)
