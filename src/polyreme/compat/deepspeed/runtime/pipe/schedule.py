"""DeepSpeed's schedules of a pipeline as lists of instructions, for scripts that read them.

Polyreme's engine follows its own tables (`polyreme.pipeline.schedule`), which say the same of a 1F1B step.
Invariant: stages that take their steps at once, each in its order, find every message that they wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.utils import call_to_str

__getattr__ = lazily(__name__)


class PipeInstruction:
    """What a stage is to do; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the weights and drop the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Add up the gradients of modules that several stages have."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on the buffers of one micro-batch."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read a micro-batch."""


class ForwardPass(BufferOpInstruction):
    """Compute the stage's output."""


class BackwardPass(BufferOpInstruction):
    """Compute and add up gradients."""


class SendActivation(BufferOpInstruction):
    """Send the output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the input's gradient to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the output's gradient from the next stage."""


class PipeSchedule(ABC):
    """The steps of stage `stage_id` of `stages` for `micro_batches`; iterates over lists of instructions."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = self.num_micro_batches = micro_batches
        self.stages = self.num_stages = stages
        self.stage_id = self.stage = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Return the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches the stage has buffers for at once."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _if(self, holds: bool, kind: type[BufferOpInstruction], micro: int) -> list[PipeInstruction]:
        """Return the instruction for a micro-batch, whose buffers are taken in turns, if the condition holds
        and there is such a micro-batch."""
        there = holds and 0 <= micro < self.micro_batches
        return [kind(micro % self.num_pipe_buffers())] if there else []

    def _forward(self, micro: int) -> list[PipeInstruction]:
        reads = self.is_first_stage or self.is_last_stage
        return [*self._if(reads, LoadMicroBatch, micro), *self._if(True, ForwardPass, micro)]


class InferenceSchedule(PipeSchedule):
    """Forwards alone: a stage is as many steps behind the first as its number says."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro in range(-self.stage_id, self.micro_batches + self.stages - 1 - self.stage_id):
            send = self._if(not self.is_last_stage, SendActivation, micro - 1)
            receive = self._if(not self.is_first_stage, RecvActivation, micro)
            # neighbours wait for each other unless one of them sends first
            messages = receive + send if self.stage_id % 2 else send + receive
            yield [*messages, *self._forward(micro)]

    def num_pipe_buffers(self) -> int:
        """Return 2: while one buffer is sent, another one is computed."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: stage s has micro-batch m's forward in step s + 2m, and its backward in step
    2 stages - 1 - s + 2m."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        inner, outer, before = not self.is_first_stage, not self.is_last_stage, -1
        for step in range(count := 2 * (self.micro_batches + self.stages - 1)):
            if (step - self.stage_id) % 2 == 0:
                micro = (step - self.stage_id) // 2
                messages = [*self._if(inner, SendGrad, before), *self._if(inner, RecvActivation, micro)]
                computed = self._forward(micro)
            else:
                micro = (step + self.stage_id + 1) // 2 - self.stages
                messages = [*self._if(outer, RecvGrad, micro), *self._if(outer, SendActivation, before)]
                computed = self._if(True, BackwardPass, micro)
            ends = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == count - 1 else []
            yield [*messages, *computed, *ends]
            before = micro

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches' backward is yet to come, at most, and never fewer than two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """Accumulation on a single stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro in range(self.micro_batches):
            ends = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *ends]

    def num_pipe_buffers(self) -> int:
        """Return one: each micro-batch ends before the next begins."""
        return 1
