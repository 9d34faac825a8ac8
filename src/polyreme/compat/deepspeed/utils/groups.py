"""DeepSpeed's questions about groups of ranks in data, model and sequence parallelism, answered by the `mpu`
or the device mesh that a script gave, else by the world of all ranks.

Invariant: without an `mpu`, data parallelism spans all ranks and every other axis has one. Groups of experts
do not exist: `names.REFUSED` has what asks for one. An `mpu` may have Megatron's names or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import OrderError, refused
from polyreme.compat.deepspeed.utils.helpers import DeprecatedException

mpu: Any = None
"""The model-parallel unit that `deepspeed.initialize` was given."""

mesh_device: Any = None
"""The device mesh that `deepspeed.initialize` was given."""

_world: Any = None
_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(unit: Any, what: str, kinds: tuple[str, ...], without: Any) -> Any:
    """Return a unit's answer, by the first of these names that it has; `without` one."""
    asked = (getattr(unit, f"get_{kind}_{what}", None) for kind in kinds)
    return next((answer() for answer in asked if answer is not None), without)


def _asker(what: str, kinds: tuple[str, ...], without: Any) -> Callable[..., Any]:
    """Return a function that asks an mpu; it returns `without` where there is none or it does not say."""
    return lambda mpu=None: _ask(mpu, what, kinds, without)


bwc_tensor_model_parallel_rank = _asker("rank", _TENSOR, 0)
bwc_tensor_model_parallel_world_size = _asker("world_size", _TENSOR, 1)
bwc_tensor_model_parallel_group = _asker("group", _TENSOR, None)
bwc_pipeline_parallel_world_size = _asker("world_size", _PIPELINE, 1)
bwc_pipeline_parallel_group = _asker("group", _PIPELINE, None)


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    """Raise DeprecatedException, as DeepSpeed has removed this call."""
    raise DeprecatedException(
        f"groups.initialize(ep_size={ep_size}): DeepSpeed has no such call any more; leave it out, as no "
        "experts are divided between ranks"
    )


def _release_process_group_references(group: Any = None) -> None:
    """Forget `group`, or all groups, once it is destroyed."""
    global _world, mpu, mesh_device
    if group is None:
        mpu = mesh_device = None
    if group is None or group is _world:
        _world = None


def _clone_world_group() -> Any:
    """Return a group of all ranks that is not the default one. Collective at its first call."""
    global _world
    if _world is None or not _is_open(_world):
        _world = dist.new_group(range(dist.get_world_size()))
    return _world


def _is_open(group: Any) -> bool:
    """Return whether torch still knows the group, which a script may have destroyed by torch itself."""
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def _divides_sequences() -> bool:
    """Return whether the mpu knows sequences alone, and not who has which part of the model."""
    return hasattr(mpu, "initialize_sequence_parallel")


def _of_mesh(axis: str) -> Any:
    """Return the group of an axis of the device mesh; None without a mesh."""
    return None if mesh_device is None else mesh_device.get_group(mesh_dim=axis)


def _get_data_parallel_group() -> Any:
    """Return the ranks that have the same part of the model, and other samples."""
    if mesh_device is None and mpu is not None:
        return None if _divides_sequences() else mpu.get_data_parallel_group()
    return _clone_world_group() if mesh_device is None else mesh_device.get_group("data_parallel")


def _get_data_parallel_group_ranks() -> Any:
    """Return the numbers of the ranks of the data-parallel group."""
    return range(dist.get_world_size()) if mpu is None else mpu.get_data_parallel_group_ranks()


def _get_data_parallel_world_size() -> int | None:
    """Return how many ranks are data-parallel; None where the mpu knows sequences alone."""
    if mesh_device is None and mpu is not None:
        return None if _divides_sequences() else mpu.get_data_parallel_world_size()
    return dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    """Return this rank's place in the data-parallel group."""
    return dist.get_rank(_get_data_parallel_group())


def get_tensor_model_parallel_group() -> Any:
    """Return the ranks that divide a layer between them. Raises OrderError without an mpu that says so."""
    if (group := bwc_tensor_model_parallel_group(mpu)) is None:
        raise OrderError("no mpu says which ranks divide a layer: pass mpu= to deepspeed.initialize")
    return group


def get_tensor_model_parallel_world_size() -> int:
    """Return how many ranks divide a layer between them: 1 without an mpu."""
    return bwc_tensor_model_parallel_world_size(mpu)


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's place among those that divide a layer between them."""
    return bwc_tensor_model_parallel_rank(mpu)


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of this rank's tensor-parallel group, whose ranks follow each other."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


def _get_model_parallel_world_size() -> int:
    """Return how many ranks have parts of one model: 1 without an mpu."""
    return 1 if mpu is None or _divides_sequences() else mpu.get_model_parallel_world_size()


def _of_sequences(what: str) -> Any:
    """Return the mpu's answer about the ranks that share one sequence, or their group in the mesh, or
    None."""
    answer = _ask(mpu, what, ("sequence_parallel",), None)
    return _of_mesh("sequence_parallel") if answer is None else answer


def _get_sequence_parallel_world_size() -> int:
    """Return how many ranks share one sequence: 1 without an mpu or a mesh that says so."""
    found = _of_sequences("world_size")
    return found if isinstance(found, int) else 1 if found is None else dist.get_world_size(found)


def _get_sequence_parallel_rank() -> int:
    """Return this rank's place among them."""
    found = _of_sequences("rank")
    return found if isinstance(found, int) else 0 if found is None else dist.get_rank(found)


def _get_sequence_parallel_group() -> Any:
    """Return those ranks. Raises UnsupportedError without an mpu or a mesh that says so."""
    if (found := _of_sequences("group")) is None:
        raise refused(
            "a sequence-parallel group",
            "through this door no sequences are divided",
            "set sequence_parallel_size (sp_size) to 1",
        )
    return found


def _of_both(what: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that asks the mpu about the ranks that have the same part of the model, whatever
    their samples."""
    return lambda: getattr(mpu, f"get_sequence_data_parallel_{what}", otherwise)()


_get_sequence_data_parallel_world_size = _of_both("world_size", _get_data_parallel_world_size)
_get_sequence_data_parallel_rank = _of_both("rank", _get_data_parallel_rank)
_get_sequence_data_parallel_group = _of_both("group", _get_data_parallel_group)


def _get_broadcast_src_rank() -> int:
    """Return the rank whose weights the others begin with."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
get_data_parallel_group, get_data_parallel_rank = _get_data_parallel_group, _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_sequence_parallel_world_size = _get_sequence_parallel_world_size
get_sequence_parallel_rank = _get_sequence_parallel_rank
get_sequence_parallel_group = _get_sequence_parallel_group
get_sequence_data_parallel_world_size = _get_sequence_data_parallel_world_size
get_sequence_data_parallel_rank = _get_sequence_data_parallel_rank
get_sequence_data_parallel_group = _get_sequence_data_parallel_group
__getattr__ = lazily(__name__)
