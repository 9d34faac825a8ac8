"""The stages of one rank in a pipeline, and its row of the schedule.

Communication: none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from polyreme.distributed.mesh import Axis
from polyreme.pipeline.schedule import Action, Name, arrivals, build, check, halves, stage_ranks


@dataclass(frozen=True)
class PipelineRank:
    """This rank's place in the pipeline. rank_of: the rank of every stage; mine: the stages of this rank;
    row: its actions in a step; arrived: the sends in it that have arrived, by the F or B that shows it
    (`schedule.arrivals`); forward_row: its actions in an evaluation; halved: its backwards in two halves."""

    rank_of: Sequence[int]
    mine: Sequence[int]
    row: Sequence[Action]
    arrived: Mapping[Action, Sequence[Action]]
    forward_row: Sequence[Action]
    halved: AbstractSet[Action]

    @classmethod
    def of(cls, schedule: Name, virtual: int, microbatches: int, pp: Axis) -> PipelineRank:
        """The place of this rank of `pp` in a step of so many micro-batches; without a pipeline it has the
        only stage. virtual: stages on each rank of an interleaved schedule."""
        name = schedule if pp.size > 1 else "1f1b"
        rank_of = stage_ranks(name, pp.size, virtual)
        table = build(name, pp.size, microbatches, virtual)
        check(table, microbatches)
        row = table[pp.rank]
        one = build(name, pp.size, 1, virtual)[pp.rank]
        return cls(
            rank_of,
            [stage for stage, rank in enumerate(rank_of) if rank == pp.rank],
            row,
            arrivals(table, pp.rank, rank_of),
            [action for action in one if action.op in ("F", "SA", "RA")],
            halves([row]),
        )

    def counts(self, pp: Axis) -> float:
        """The weight of this rank's loss in a sum over `pp`: 1 on the rank of the last stage, else 0. A
        simulated rank stands for that one."""
        return pp.alone(self.rank_of[-1])

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return len(self.rank_of) - 1 in self.mine
