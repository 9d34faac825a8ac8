"""DeepSpeed's schedules of a pipeline as lists of instructions, for scripts that read them.

Polyreme's engine follows its own tables (`polyreme.pipeline.schedule`), which say the same of a 1F1B step.
Invariant: stages that take their steps at once, each in its order, find every message that they wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from polyreme.compat.deepspeed.refusal import absent
from polyreme.compat.deepspeed.runtime.utils import call_to_str


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
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches the stage has buffers for at once."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch: they are taken in turns."""
        return micro_batch_id % self.num_pipe_buffers()

    def _if(self, holds: bool, kind: type[BufferOpInstruction], micro: int) -> list[PipeInstruction]:
        """The instruction for a micro-batch, if the condition holds and there is such a micro-batch."""
        return [kind(self._buffer_idx(micro))] if holds and self._valid_micro_batch(micro) else []


class InferenceSchedule(PipeSchedule):
    """Forwards alone: a stage is as many steps behind the first as its number says."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            send = self._if(not self.is_last_stage, SendActivation, micro - 1)
            receive = self._if(not self.is_first_stage, RecvActivation, micro)
            yield [
                *self._if(self.is_first_stage or self.is_last_stage, LoadMicroBatch, micro),
                # neighbours wait for each other unless one of them sends first
                *(receive + send if self.stage_id % 2 else send + receive),
                *self._if(True, ForwardPass, micro),
            ]

    def num_pipe_buffers(self) -> int:
        """One that is sent, and one that is computed."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: stage s has micro-batch m's forward in step s + 2m, and its backward in step
    2 stages - 1 - s + 2m."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        count = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for step in range(count):
            micro, forward = self._step_to_micro_batch(step)
            if forward:
                done: list[PipeInstruction] = [
                    *self._if(not self.is_first_stage, SendGrad, before),
                    *self._if(not self.is_first_stage, RecvActivation, micro),
                    *self._if(self.is_first_stage or self.is_last_stage, LoadMicroBatch, micro),
                    *self._if(True, ForwardPass, micro),
                ]
            else:
                done = [
                    *self._if(not self.is_last_stage, RecvGrad, micro),
                    *self._if(not self.is_last_stage, SendActivation, before),
                    *self._if(True, BackwardPass, micro),
                ]
            if step == count - 1:
                done += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield done

    def num_pipe_buffers(self) -> int:
        """Micro-batches whose backward is yet to come, at most, and never fewer than two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The micro-batch of a step, which may not be there, and whether the step is its forward."""
        since = step_id - self.stage_id
        if since % 2 == 0:
            return since // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False


class DataParallelSchedule(PipeSchedule):
    """Accumulation on a single stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches):
            ends = [ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *ends]

    def num_pipe_buffers(self) -> int:
        return 1


DualPipeVSchedule = absent(
    "deepspeed.runtime.pipe.schedule.DualPipeVSchedule",
    "no schedule has two stages in a V on each rank",
    'use PipelineModule, or write pipeline.schedule = "interleaved" or "zb-h1" in a config of ours',
)
