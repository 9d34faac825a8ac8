"""The CPU as an accelerator: memory is the process's own, and nothing runs beside the caller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from polyreme.distributed.environment import detect
from polyreme.offload.host import available

_TENSORS = {
    torch.bfloat16: torch.BFloat16Tensor,
    torch.uint8: torch.ByteTensor,
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.float16: torch.HalfTensor,
    torch.int32: torch.IntTensor,
    torch.int64: torch.LongTensor,
}


class CPU_Accelerator(DeepSpeedAccelerator):
    """One rank's share of the host's cores. Streams and events are None, memory is resident memory."""

    _torch_pins_host_memory = False

    def __init__(self) -> None:
        self._name, self._communication_backend_name, self._compile_backend = "cpu", "gloo", "inductor"
        self.max_mem = 0
        self.get_rss()

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: Any = None) -> str:
        return "cpu"

    def device(self, device_index: Any = None) -> None:
        return None

    def set_device(self, device_index: Any) -> None:
        return None

    def current_device(self) -> int:
        return detect().local_rank

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """LOCAL_SIZE if it is set, else the number of memory nodes that have cores."""
        if (given := int(os.environ.get("LOCAL_SIZE", "0"))) > 0:
            return given
        nodes = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
        return max(1, sum(bool(node.read_text().strip()) for node in nodes))

    def synchronize(self, device_index: Any = None) -> None:
        return None

    def set_rng_state(self, new_state: Tensor, device_index: Any = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: Any = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: Any) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> None:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: Any = None) -> None:
        return None

    def default_stream(self, device_index: Any = None) -> None:
        return None

    @property
    def Event(self) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_rss(self) -> int:
        """Resident bytes of this process; 0 where the system does not tell."""
        told = Path("/proc/self/statm")
        now = int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0
        self.max_mem = max(self.max_mem, now)
        return now

    def memory_allocated(self, device_index: Any = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: Any = None) -> int:
        """The most that any of these functions saw since the last reset."""
        self.get_rss()
        return self.max_mem

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        self.max_mem = 0
        self.get_rss()

    reset_rss = reset_peak_memory_stats

    def memory_stats(self, device_index: Any = None) -> dict[str, Any]:
        now = self.get_rss()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self.max_mem}

    def memory_reserved(self, device_index: Any = None) -> int:
        return self.get_rss()

    def max_memory_reserved(self, device_index: Any = None) -> int:
        return self.max_memory_allocated()

    def total_memory(self, device_index: Any = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: Any = None) -> int:
        return available() or self.total_memory() - self.get_rss()

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def is_available(self) -> bool:
        return True

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        return None

    def range_pop(self, domain: Any = None) -> None:
        return None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def is_triton_supported(self) -> bool:
        return False

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        return None

    def _tensor_type(self, dtype: torch.dtype) -> Any:
        return _TENSORS[dtype]

    def export_envs(self) -> list[str]:
        return []
