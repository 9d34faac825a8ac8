"""DeepSpeed's accelerators: `get_accelerator()` returns the CPU or the GPUs of this process, with torch's
functions for them under DeepSpeed's names."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.distributed.environment import detect
from polyreme.offload.host import available

_TENSORS = (
    "BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor",
)  # fmt: skip
_OF_TORCH_CUDA = (
    "current_device", "current_stream", "default_stream", "device_count", "empty_cache", "initial_seed",
    "is_available", "is_current_stream_capturing", "manual_seed", "manual_seed_all", "max_memory_allocated",
    "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats", "reset_peak_memory_stats",
    "set_device", "stream", "synchronize",
)  # fmt: skip
"""Methods of CUDA_Accelerator that are torch.cuda's functions of the same name."""
_OF_CPU = {
    "create_graph": None,
    "current_device_name": "cpu",
    "current_stream": None,
    "default_stream": None,
    "device": None,
    "device_name": "cpu",
    "empty_cache": None,
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "is_triton_supported": False,
    "range_pop": None,
    "range_push": None,
    "replay_graph": None,
    "set_device": None,
    "synchronize": None,
}
"""Methods of CPU_Accelerator that do nothing, as nothing runs beside the caller, and what each returns."""


class DeepSpeedAccelerator:
    """The base of the accelerators, each of which is one kind of device. `device_index` None is the current
    device."""

    supports_nvtx_domain = False
    _name: str
    _communication_backend_name: str
    _compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return self._tensors(getattr(torch, name))
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def _tensors(self, kind: Any) -> Any:
        """Return the function that makes tensors of the dtype of `kind` on the device."""
        return kind

    def is_synchronized_device(self) -> bool:
        """Return whether the device's functions return only when their work is done."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def random(self) -> Any:
        return torch.random

    def reset_max_memory_allocated(self, device_index: Any = None) -> None:
        self.reset_peak_memory_stats(device_index)

    reset_max_memory_cached = reset_max_memory_allocated

    def memory_cached(self, device_index: Any = None) -> int:
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: Any = None) -> int:
        return self.max_memory_reserved(device_index)

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = ((torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float32, *(dtype for dtype, supported in halves if supported)]

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def pin_memory(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `tensor` in page-locked memory; as it is if the accelerator is the CPU."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Return an operation's builder by the name of its class; None if there is none. Its `load` raises,
        as nothing is compiled here."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        from polyreme.compat.deepspeed.ops import op_builder

        return getattr(op_builder, class_name, None)

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        return ["NCCL"] if self._name == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Any) -> None:
        ids = ",".join(map(str, local_accelerator_ids))
        current_env.update(dict.fromkeys(self.visible_devices_envs(), ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend that `get_compile_backend` returns. Raises ArgumentError for one that torch does
        not know."""
        if backend not in (known := torch._dynamo.list_backends(())):
            raise ArgumentError(
                f"set_compile_backend({backend!r}): torch has no such backend; take one of {', '.join(known)}"
            )
        self._compile_backend = backend


class CPU_Accelerator(DeepSpeedAccelerator):
    """The accelerator that is one rank's share of the host's cores. Its streams and events are None, and its
    memory is the process's resident memory."""

    _name, _communication_backend_name = "cpu", "gloo"
    Stream = Event = None
    max_mem = 0

    def current_device(self) -> int:
        return detect().local_rank

    def device_count(self) -> int:
        """Return the variable LOCAL_SIZE if it is set, else the number of memory nodes that have cores."""
        if (given := int(os.environ.get("LOCAL_SIZE", "0"))) > 0:
            return given
        nodes = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
        return max(1, sum(bool(node.read_text().strip()) for node in nodes))

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: Any) -> torch.Generator:
        return torch.default_generator

    def stream(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    capture_to_graph = stream

    def memory_allocated(self, device_index: Any = None) -> int:
        """Return the resident bytes of this process; 0 if the system does not tell."""
        told = Path("/proc/self/statm")
        now = int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0
        self.max_mem = max(self.max_mem, now)
        return now

    get_rss = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: Any = None) -> int:
        """Return the most bytes that one of these methods has seen since the last reset."""
        self.memory_allocated()
        return self.max_mem

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        self.max_mem = 0

    def memory_stats(self, device_index: Any = None) -> dict[str, Any]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self.max_mem}

    def total_memory(self, device_index: Any = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: Any = None) -> int:
        return available() or self.total_memory() - self.memory_allocated()

    def is_fp16_supported(self) -> bool:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()


class CUDA_Accelerator(DeepSpeedAccelerator):
    """The accelerator that is NVIDIA's or AMD's GPUs, by torch.cuda. It can be made without one; then methods
    that need none work."""

    _name, _communication_backend_name = "cuda", "nccl"

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def device_name(self, device_index: Any = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version()

    def device(self, device_index: Any = None) -> torch.device:
        return torch.device("cuda", device_index)

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def default_generator(self, device_index: Any) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: Any = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: Any = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return whether the GPU's compute capability is at least 7, or 6 with the variable
        DS_ALLOW_DEPRECATED_FP16=1."""
        least = 6 if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" else 7
        return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= least

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback)

    def is_triton_supported(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def _tensors(self, kind: Any) -> Any:
        return functools.partial(torch.tensor, dtype=kind.dtype, device="cuda")


def _of_torch_cuda(name: str) -> Callable[..., Any]:
    def call(self: CUDA_Accelerator, *given: Any, **named: Any) -> Any:
        return getattr(torch.cuda, name)(*given, *named.values())  # whose arguments are called otherwise

    return call


def _always(answer: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: answer


for _each in _OF_TORCH_CUDA:
    setattr(CUDA_Accelerator, _each, _of_torch_cuda(_each))
for _each, _answer in _OF_CPU.items():
    setattr(CPU_Accelerator, _each, _always(_answer))

_KINDS: dict[str, type[DeepSpeedAccelerator]] = {"cuda": CUDA_Accelerator, "cpu": CPU_Accelerator}
SUPPORTED_ACCELERATOR_LIST = list(_KINDS)
ds_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Return this process's accelerator: the one that was set, or that the variable DS_ACCELERATOR names, or
    that torch finds. Raises ArgumentError if the variable names one that Polyreme does not run on."""
    global ds_accelerator
    if ds_accelerator is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in _KINDS:
            raise ArgumentError(
                f"DS_ACCELERATOR={name}: Polyreme runs on {' and '.join(_KINDS)}; name one of these, or "
                "unset it to take the one that torch finds"
            )
        ds_accelerator = _KINDS[name]()
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Make `get_accelerator` return `accel_obj` from now on; None: the one that is found. Raises OrderError
    for an object that is no accelerator."""
    global ds_accelerator
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise OrderError(
            f"set_accelerator({accel_obj!r}): give an object whose class derives from DeepSpeedAccelerator"
        )
    ds_accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return whether this process's accelerator is one that Polyreme runs on."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
