"""NVIDIA's and AMD's GPUs as accelerators: torch.cuda by DeepSpeed's names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator


class CUDA_Accelerator(DeepSpeedAccelerator):
    """torch.cuda. It can be made without a GPU, and answers then what needs none."""

    def __init__(self) -> None:
        self._name, self._communication_backend_name, self._compile_backend = "cuda", "nccl", "inductor"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version()

    def device(self, device_index: Any = None) -> torch.device:
        return torch.device("cuda", device_index)

    def set_device(self, device_index: Any) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: Any = None) -> None:
        torch.cuda.synchronize(device_index)

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: Any) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: Any = None) -> Any:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: Any = None) -> Any:
        return torch.cuda.default_stream(device_index)

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: Any = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: Any = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: Any = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def memory_reserved(self, device_index: Any = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def total_memory(self, device_index: Any = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: Any = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """From compute capability 7; from 6 with the variable DS_ALLOW_DEPRECATED_FP16=1."""
        if not torch.cuda.is_available():
            return True
        major, _ = torch.cuda.get_device_capability()
        return major >= (6 if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" else 7)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback)

    def is_triton_supported(self) -> bool:
        return self.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def _tensor_type(self, dtype: torch.dtype) -> Any:
        return functools.partial(torch.tensor, dtype=dtype, device="cuda")

    def export_envs(self) -> list[str]:
        return ["NCCL"]
