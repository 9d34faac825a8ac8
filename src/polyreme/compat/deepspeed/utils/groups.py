"""Which ranks share what: answers about data, model and sequence parallelism, from the `mpu` that a script
gave, else from the world of all ranks.

Invariant: without an `mpu`, data parallelism spans all ranks and every other axis has one. Groups of experts
do not exist, and what asks for one raises UnsupportedError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.refusal import OrderError, refused
from polyreme.compat.deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from polyreme.compat.deepspeed.utils.exceptions import DeprecatedException

mpu: Any = None
"""The model-parallel unit that `deepspeed.initialize` was given."""

mesh_device: Any = None
"""The device mesh that `deepspeed.initialize` was given."""

expert_tensor_parallel_world_size = 1
_world: Any = None
_tensor_world_size: int | None = None
_tensor_rank: int | None = None


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    """Raise DeprecatedException: DeepSpeed removed this call."""
    raise DeprecatedException("groups.initialize() is deprecated: pass ep_size to deepspeed.moe.layer.MoE")


def _release_process_group_references(group: Any = None) -> None:
    """Forget `group`, or all groups, once it is destroyed."""
    global _world, mpu, mesh_device, _tensor_world_size, _tensor_rank
    if group is None:
        mpu = mesh_device = _tensor_world_size = _tensor_rank = None
    if group is None or group is _world:
        _world = None


def _open() -> None:
    if not dist.is_initialized():
        raise OrderError("dist is not initialized: call deepspeed.init_distributed() first")


def _of_mpu(question: str) -> Callable[[], Any] | None:
    return getattr(mpu, question, None)


def _clone_world_group() -> Any:
    """A group of all ranks that is not the default one. Collective at its first call."""
    global _world
    _open()
    if _world is None or not _is_open(_world):
        _world = dist.new_group(range(dist.get_world_size()))
    return _world


def _is_open(group: Any) -> bool:
    """Whether torch still knows the group, which a script may have destroyed by torch's own function."""
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def _get_data_parallel_group() -> Any:
    """The ranks that have the same part of the model, and other samples."""
    _open()
    if mesh_device is not None:
        return mesh_device.get_group(mesh_dim="data_parallel")
    if mpu is None:
        return _clone_world_group()
    return None if hasattr(mpu, "initialize_sequence_parallel") else mpu.get_data_parallel_group()


def _get_data_parallel_group_ranks() -> Any:
    """Those ranks' numbers."""
    _open()
    return range(dist.get_world_size()) if mpu is None else mpu.get_data_parallel_group_ranks()


def _get_data_parallel_world_size() -> int | None:
    """How many they are."""
    _open()
    if mesh_device is None and mpu is not None:
        return None if hasattr(mpu, "initialize_sequence_parallel") else mpu.get_data_parallel_world_size()
    return dist.get_world_size(_get_data_parallel_group())


def _get_data_parallel_rank() -> int:
    """This rank's place among them."""
    return dist.get_rank(_get_data_parallel_group())


def get_data_parallel_group() -> Any:
    return _get_data_parallel_group()


def get_data_parallel_world_size() -> int | None:
    return _get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    return _get_data_parallel_rank()


def get_tensor_model_parallel_group() -> Any:
    """The ranks that divide a layer between them. Raises OrderError without an mpu that says so."""
    if (group := bwc_tensor_model_parallel_group(mpu)) is None:
        raise OrderError("model parallel group is not initialized: pass mpu= to deepspeed.initialize")
    return group


def get_tensor_model_parallel_world_size() -> int:
    """How many they are: 1 without an mpu."""
    return bwc_tensor_model_parallel_world_size(mpu) if _tensor_world_size is None else _tensor_world_size


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among them."""
    return bwc_tensor_model_parallel_rank(mpu) if _tensor_rank is None else _tensor_rank


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Have the question above answered so."""
    global _tensor_world_size
    _tensor_world_size = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Have the question above answered so."""
    global _tensor_rank
    _tensor_rank = rank


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this rank's tensor-parallel group, whose ranks follow each other."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def _get_model_parallel_world_size() -> int:
    """How many ranks have parts of one model: 1 without an mpu."""
    divides = mpu is not None and not hasattr(mpu, "initialize_sequence_parallel")
    return mpu.get_model_parallel_world_size() if divides else 1


def _get_sequence_parallel_world_size() -> int:
    """How many ranks share one sequence: 1 without an mpu or a mesh that says so."""
    _open()
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="sequence_parallel"))
    asked = _of_mpu("get_sequence_parallel_world_size")
    return 1 if asked is None else asked()


def _get_sequence_parallel_rank() -> int:
    """This rank's place among them."""
    if (asked := _of_mpu("get_sequence_parallel_rank")) is not None:
        return asked()
    if mesh_device is not None:
        return dist.get_rank(mesh_device.get_group(mesh_dim="sequence_parallel"))
    return 0


def _get_sequence_parallel_group() -> Any:
    """Those ranks. Raises UnsupportedError without an mpu or a mesh that says so."""
    if (asked := _of_mpu("get_sequence_parallel_group")) is not None:
        return asked()
    if mesh_device is not None:
        return mesh_device.get_group(mesh_dim="sequence_parallel")
    raise refused(
        "a sequence-parallel group",
        "Polyreme does not divide sequences between ranks yet",
        "set sequence_parallel_size (sp_size) to 1",
    )


def _get_sequence_data_parallel_world_size() -> int | None:
    """How many ranks have the same part of the model, whatever samples or parts of them."""
    asked = _of_mpu("get_sequence_data_parallel_world_size")
    return _get_data_parallel_world_size() if asked is None else asked()


def _get_sequence_data_parallel_rank() -> int:
    """This rank's place among them."""
    asked = _of_mpu("get_sequence_data_parallel_rank")
    return _get_data_parallel_rank() if asked is None else asked()


def _get_sequence_data_parallel_group() -> Any:
    """Those ranks."""
    asked = _of_mpu("get_sequence_data_parallel_group")
    return _get_data_parallel_group() if asked is None else asked()


def _get_broadcast_src_rank() -> int:
    """The rank whose weights the others begin with."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


get_sequence_parallel_world_size = _get_sequence_parallel_world_size
get_sequence_parallel_rank = _get_sequence_parallel_rank
get_sequence_parallel_group = _get_sequence_parallel_group
get_sequence_data_parallel_world_size = _get_sequence_data_parallel_world_size
get_sequence_data_parallel_rank = _get_sequence_data_parallel_rank
get_sequence_data_parallel_group = _get_sequence_data_parallel_group


def _get_zero_param_intra_parallel_group() -> None:
    """None: parameters have no second partition within a host (hpZ)."""


def _zero_param_parallel_is_initialized() -> bool:
    """Whether parameters have a second partition."""
    return False


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """No groups of experts."""
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """No groups of experts."""
    return {}


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size


def _get_max_expert_size() -> None:
    """None: there are no experts."""


def _no_experts(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise UnsupportedError: experts are not there yet."""
    raise refused(
        "expert parallelism",
        "Polyreme has no experts that are divided between ranks yet",
        "train a model with experts as an ordinary one, without deepspeed.moe",
    )


_create_expert_and_data_parallel = _create_expert_data_and_model_parallel = _no_experts
_get_expert_parallel_group = _get_expert_parallel_group_ranks = _get_expert_parallel_world_size = _no_experts
_get_expert_parallel_rank = _get_expert_parallel_src_rank = _get_expert_broadcast_src_rank = _no_experts
_get_expert_data_parallel_group = _get_expert_data_parallel_group_ranks = _no_experts
_get_expert_data_parallel_world_size = _get_expert_data_parallel_rank = _no_experts
_get_max_expert_parallel_group = _get_max_expert_size_name = _get_local_all_to_all_group = _no_experts
