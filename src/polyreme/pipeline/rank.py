"""What one rank does in a pipeline: its stages, and its row of the schedule.

Communication: none."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from polyreme.distributed.mesh import Axis
from polyreme.pipeline.schedule import Action, Name, build, check, halves, stage_ranks


@dataclass(frozen=True)
class PipelineRank:
    """This rank's part of the pipeline. rank_of: the rank of every stage; mine: the stages of this rank; row:
    its actions in a step; forward_row: those of an evaluation; halved: backwards in two halves."""

    rank_of: Sequence[int]
    mine: Sequence[int]
    row: Sequence[Action]
    forward_row: Sequence[Action]
    halved: AbstractSet[Action]

    @classmethod
    def of(cls, schedule: Name, virtual: int, microbatches: int, pp: Axis) -> PipelineRank:
        """The part of this rank of `pp` in a step of so many micro-batches; the whole model where there is no
        pipeline. virtual: stages of a rank, where the schedule has several."""
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
            [action for action in one if action.op in ("F", "SA", "RA")],
            halves([row]),
        )

    def counts(self, pp: Axis) -> float:
        """How much this rank's loss counts in a sum over those of the pipeline, `pp`; a simulated rank tells
        it in the place of the one that has it."""
        return pp.alone(self.rank_of[-1])

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return len(self.rank_of) - 1 in self.mine
