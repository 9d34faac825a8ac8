"""What an accelerator of DeepSpeed answers: everything that does not depend on the kind of device, and the
names that each kind has to answer itself."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.refusal import ArgumentError


class DeepSpeedAccelerator(abc.ABC):
    """One kind of device and torch's functions for it. `device_index` None is the current device."""

    supports_nvtx_domain = False
    _torch_pins_host_memory = True

    def __init__(self) -> None:
        self._name: str | None = None
        self._communication_backend_name: str | None = None
        self._compile_backend: str | None = None

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether a call of the device returns after its work is done."""

    def use_host_timers(self) -> bool:
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        return self.is_synchronized_device()

    @abc.abstractmethod
    def device_name(self, device_index: Any = None) -> str: ...

    @abc.abstractmethod
    def device(self, device_index: Any = None) -> Any: ...

    @abc.abstractmethod
    def set_device(self, device_index: Any) -> None: ...

    @abc.abstractmethod
    def current_device(self) -> int: ...

    @abc.abstractmethod
    def current_device_name(self) -> str: ...

    @abc.abstractmethod
    def device_count(self) -> int: ...

    @abc.abstractmethod
    def synchronize(self, device_index: Any = None) -> None: ...

    def random(self) -> Any:
        return torch.random

    @abc.abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None: ...

    @abc.abstractmethod
    def get_rng_state(self, device_index: Any = None) -> Tensor: ...

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any: ...

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> Any: ...

    @abc.abstractmethod
    def initial_seed(self) -> int: ...

    @abc.abstractmethod
    def default_generator(self, device_index: Any) -> torch.Generator: ...

    @property
    @abc.abstractmethod
    def Stream(self) -> Any: ...

    @abc.abstractmethod
    def stream(self, stream: Any) -> Any: ...

    @abc.abstractmethod
    def current_stream(self, device_index: Any = None) -> Any: ...

    @abc.abstractmethod
    def default_stream(self, device_index: Any = None) -> Any: ...

    @property
    @abc.abstractmethod
    def Event(self) -> Any: ...

    @abc.abstractmethod
    def empty_cache(self) -> None: ...

    @abc.abstractmethod
    def memory_allocated(self, device_index: Any = None) -> int: ...

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: Any = None) -> int: ...

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: Any = None) -> None: ...

    @abc.abstractmethod
    def memory_stats(self, device_index: Any = None) -> dict[str, Any]: ...

    @abc.abstractmethod
    def memory_reserved(self, device_index: Any = None) -> int: ...

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: Any = None) -> int: ...

    @abc.abstractmethod
    def total_memory(self, device_index: Any = None) -> int: ...

    @abc.abstractmethod
    def available_memory(self, device_index: Any = None) -> int: ...

    def reset_max_memory_allocated(self, device_index: Any = None) -> None:
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: Any = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: Any = None) -> int:
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: Any = None) -> None:
        self.reset_peak_memory_stats(device_index)

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool: ...

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool: ...

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = ((torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float32, *(dtype for dtype, supported in halves if supported)]

    @abc.abstractmethod
    def is_available(self) -> bool: ...

    @abc.abstractmethod
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any: ...

    @abc.abstractmethod
    def range_pop(self, domain: Any = None) -> Any: ...

    @abc.abstractmethod
    def lazy_call(self, callback: Callable[[], Any]) -> Any: ...

    def communication_backend_name(self) -> str | None:
        return self._communication_backend_name

    @abc.abstractmethod
    def is_triton_supported(self) -> bool: ...

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    @abc.abstractmethod
    def create_graph(self) -> Any: ...

    @abc.abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any: ...

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None: ...

    @abc.abstractmethod
    def _tensor_type(self, dtype: torch.dtype) -> Any:
        """What makes a tensor of this dtype on the device."""

    @property
    def BFloat16Tensor(self) -> Any:
        return self._tensor_type(torch.bfloat16)

    @property
    def ByteTensor(self) -> Any:
        return self._tensor_type(torch.uint8)

    @property
    def DoubleTensor(self) -> Any:
        return self._tensor_type(torch.float64)

    @property
    def FloatTensor(self) -> Any:
        return self._tensor_type(torch.float32)

    @property
    def HalfTensor(self) -> Any:
        return self._tensor_type(torch.float16)

    @property
    def IntTensor(self) -> Any:
        return self._tensor_type(torch.int32)

    @property
    def LongTensor(self) -> Any:
        return self._tensor_type(torch.int64)

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """`tensor` in page-locked memory; without `make_copy` memory of its size (and shape) alone."""
        if not self._torch_pins_host_memory:
            return tensor
        if make_copy:
            return tensor.pin_memory()
        shape = tensor.shape if match_shape else (tensor.numel(),)
        return tensor.new_empty(shape, pin_memory=True)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        """Page-locked memory of this shape, of the host. Raises ArgumentError for a device."""
        if torch.device(device).type != "cpu":
            raise ArgumentError(f"pin_empty allocates host memory; device must be cpu, got {device!r}")
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        return torch.empty(shape, dtype=dtype, pin_memory=self._torch_pins_host_memory)

    def pin_empty_like(self, tensor: Tensor, device: Any = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: Tensor) -> None:
        """Do nothing: torch gives pinned memory back with the tensor."""
        return

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return False

    def unregister_host_memory(self, address: int) -> None:
        return None

    def pin_memory_alignment(self) -> int:
        return 1

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """A builder by its class's name, None if there is none. Its `load` raises: nothing is compiled."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        from polyreme.compat.deepspeed.ops import op_builder

        return getattr(op_builder, class_name, None)

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    @abc.abstractmethod
    def export_envs(self) -> list[str]: ...

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Any) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str | None:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set what `torch.compile` is to use. Raises ArgumentError for a backend that torch does not know."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ArgumentError(
                f"{backend} not supported by {self.device_name()}: torch.compile knows {', '.join(known)}"
            )
        self._compile_backend = backend
