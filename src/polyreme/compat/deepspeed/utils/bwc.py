"""Answers of a model-parallel unit (`mpu`), whichever names of Megatron's or DeepSpeed's it has."""

from __future__ import annotations

from typing import Any

from polyreme.compat.deepspeed.refusal import OrderError


def _ask(mpu: Any, what: str, kinds: tuple[str, ...]) -> Any:
    """The answer to the first of the questions that `mpu` knows."""
    for kind in kinds:
        if (method := getattr(mpu, f"get_{kind}_{what}", None)) is not None:
            return method()
    raise OrderError(
        f"mpu does not support {' or '.join(kinds)}: {type(mpu).__name__} has no get_{kinds[0]}_{what}()"
    )


_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank's place in its tensor-parallel group; 0 without one."""
    return 0 if mpu is None else _ask(mpu, "rank", _TENSOR)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Ranks of the tensor-parallel group; 1 without one."""
    return 1 if mpu is None else _ask(mpu, "world_size", _TENSOR)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """The tensor-parallel group; None without one."""
    return None if mpu is None else _ask(mpu, "group", _TENSOR)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Stages of the pipeline; 1 without one."""
    knows = any(hasattr(mpu, f"get_{kind}_world_size") for kind in _PIPELINE)
    return _ask(mpu, "world_size", _PIPELINE) if knows else 1


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The group of a pipeline's stages; None without an mpu."""
    return None if mpu is None else _ask(mpu, "group", _PIPELINE)
