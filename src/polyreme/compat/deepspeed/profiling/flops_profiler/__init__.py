"""Operations, parameters and seconds of each module of a model."""

from polyreme.compat.deepspeed.profiling.flops_profiler.profiler import *  # noqa: F403
