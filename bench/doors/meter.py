"""What `doors.py` reads of a script: the loss of each step and the median time of one, printed by rank 0."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time

import psutil

STEPS = int(os.environ.get("DOORS_STEPS", "16"))
SETTLE = 4
"""Steps that are not timed: caches are cold, gathers are not planned yet."""


class Meter:
    """Called after each step."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.others = _children()
        self.pause()

    def step(self, loss: float) -> None:
        """Print the loss of a step that has just ended."""
        now = time.perf_counter()
        self.losses.append(float(loss))
        self.seconds.append(now - self.began)
        self.processor.append(time.process_time() - self.used)
        if self.rank == 0:
            print(json.dumps({"step": len(self.losses), "loss": self.losses[-1]}), flush=True)
        self.pause()

    def pause(self) -> None:
        """What was done since the last step is no part of the next one."""
        self.began, self.used = time.perf_counter(), time.process_time()

    def done(self) -> None:
        """Print the median time of a step, by the wall and of the processor, to which the mean is added of
        the processes that this one started, as those of a loader."""
        if self.rank == 0:
            others = 1e3 * (_children() - self.others) / len(self.losses)
            wall, cpu = (
                1e3 * statistics.median(times[SETTLE:] or times) for times in (self.seconds, self.processor)
            )
            print(
                json.dumps({"steps": len(self.losses), "median_ms": wall, "cpu_ms": cpu + others}), flush=True
            )


def _children() -> float:
    """Seconds of processor time of this process' children, those that have ended and those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return ended.ru_utime + ended.ru_stime + sum(each.user + each.system for each in times)
