"""DeepSpeed's record of what collectives cost: calls and milliseconds of each operation, by message size.

Invariant: `comms_dict[name][bytes]` is `[calls, milliseconds, Gbit/s of the algorithm, Gbit/s of the bus]`,
the last three lists of a number per call, in their order. Bandwidths are those of NCCL's tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.compat.deepspeed.utils.timer import trim_mean

_SHARES: dict[str, Callable[[int], tuple[float, float]]] = {
    **dict.fromkeys(
        ("all_reduce", "all_reduce_coalesced", "inference_all_reduce"), lambda n: (2, 2 * (n - 1) / n)
    ),
    **dict.fromkeys(
        ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
        lambda n: (n, n - 1),
    ),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), lambda n: (1, (n - 1) / n)),
}
"""By operation, for the number of ranks: how often the algorithm, and how often the bus, moves a message."""
_COLUMNS = ("Comm. Op", "Message Size", "Count")
_LATENCY = ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER = ("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function so many calls above."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    """Return a number of bytes as a text, such as "1.5 MB", in units of powers of 1024."""
    size, units = float(size_bytes), iter("KMGTPEZY")
    unit = ""
    while size >= 1024:
        size, unit = size / 1024, next(units)
    return f"{round(size, 2)} {unit}B" if size_bytes else "0B"


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Return Gbit/s of the algorithm and of the bus, of an operation on `size` bytes of each rank in
    `duration` milliseconds; 0 where nothing was sent or no time passed."""
    n = dist.get_world_size() if dist.is_initialized() else 1
    if duration <= 0:
        return 0.0, 0.0
    rate = size / duration * 8 / 1e6
    algorithm, bus = _SHARES.get(comm_op, lambda n: (1, 1))(n)
    return algorithm * rate, bus * rate


class CommsLogger:
    """The record of this process's collectives. With `enabled` it takes those whose log name is in `prof_ops`
    and those that are called with prof=True; with `prof_all`, too, all of them."""

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """Set what is recorded by the section `comms_logger` of a config."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            section = comms_config.comms_logger
            self.verbose, self.debug = section.verbose, section.debug
            self.prof_ops, self.prof_all = section.prof_ops, section.prof_all

    def start_profiling_comms(self) -> None:
        """Record all operations from now on, if `enabled`."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Record those in `prof_ops` alone from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Add operations to `prof_ops`, each once."""
        self.prof_ops = [*dict.fromkeys([*self.prof_ops, *op_name_list])]

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Remove operations from `prof_ops`."""
        stopped = {*op_name_list}
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record a call of the operation `raw_name` under `record_name`, with its milliseconds and bytes."""
        algbw, busbw = calc_bw_log(raw_name, msg_size, latency)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for series, value in zip(record[1:], (latency, algbw, busbw), strict=True):
            series.append(value)
        if self.verbose:
            figures = f"{algbw:.2f} Gbps by the algorithm, {busbw:.2f} Gbps by the bus"
            log_dist(f"{record_name} of {convert_size(msg_size)} in {latency:.2f} ms: {figures}", [0])

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Return the record itself, in a dictionary of its own."""
        return self.comms_dict.copy()

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return calls, milliseconds and Gbit/s by message size; None of an operation without a call."""
        if operation_name not in self.comms_dict:
            return None
        return {
            size: _row(size, count, total_latency_ms=sum(latencies), avg_latency_ms=trim_mean(latencies, 0.1),
                       tput_avg_gbps=trim_mean(algbw, 0.1), busbw_avg_gbps=trim_mean(busbw, 0.1))
            for size, (count, latencies, algbw, busbw) in sorted(self.comms_dict[operation_name].items())
        }  # fmt: skip

    def _waiting(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """Return the milliseconds of an operation by message size, divided into those of communication (of
        the fastest rank) and those that this rank waited for others. Collective: a reduction per message
        size."""
        waits = {}
        for size, (count, latencies, _, _) in sorted(self.comms_dict[operation_name].items()):
            own = torch.tensor(latencies, device=get_accelerator().current_device_name())
            least = own.clone()
            if dist.is_initialized():
                dist.all_reduce(least, dist.ReduceOp.MIN)
            means = [trim_mean(each.tolist(), 0.1) for each in (least, own - least)]
            totals = least.sum().item(), (own - least).sum().item()
            waits[size] = _row(size, count, total_comm_lat_ms=totals[0], total_straggler_ms=totals[1],
                               avg_comm_lat_ms=means[0], avg_straggler_ms=means[1])  # fmt: skip
        return waits

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the record, and with `return_dict` return it: `summary` and `straggler_analysis` by operation
        and message size, and `metadata`. With `show_straggler` all ranks must call it, with records of the
        same operations."""
        names = list(self.comms_dict)
        summary = {name: self.get_operation_summary(name) or {} for name in names}
        waits = {name: self._waiting(name) for name in names} if show_straggler else None
        if print_log:
            _print_table(_LATENCY, summary)
        if print_log and waits is not None:
            print("\nOf which ranks waited for the slowest one")
            _print_table(_STRAGGLER, waits)
        if not return_dict:
            return None
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        metadata = {"timestamp": datetime.now().isoformat(), "rank": rank, "world_size": size}
        return {"metadata": metadata, "summary": summary, "straggler_analysis": waits}


def _row(size: int, count: int, **figures: float) -> dict[str, Any]:
    """Return the figures of the calls of one message size."""
    return {"count": count, **figures, "msg_size_bytes": size, "msg_size_str": convert_size(size)}


def _print_table(columns: Sequence[str], rows: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print a paragraph for each operation and a row for each message size. `columns` are the headings of the
    second to fifth figure of a row."""
    print("".join(f"{column:<20}" for column in (*_COLUMNS, *columns)))
    for name, sizes in rows.items():
        print(name)
        for size, row in sizes.items():
            figures = list(row.values())[1:5]
            print(
                f"{'':<20}{convert_size(size):<20}{row['count']:<20}"
                + "".join(f"{figure:<20.2f}" for figure in figures)
            )
