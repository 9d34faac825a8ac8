"""What collectives cost: calls, bytes and milliseconds of each operation, kept per message size.

Invariant: `comms_dict[name][bytes]` is `[calls, milliseconds, Gbit/s of the algorithm, Gbit/s of the bus]`,
the last three lists of a number per call, in their order. Bandwidths are those of NCCL's tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.compat.deepspeed.utils.timer import trim_mean

_SUMS = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_WHOLES = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_COLUMNS = ("Comm. Op", "Message Size", "Count")
_LATENCY = ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER = ("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


def get_caller_func(frame: int = 3) -> str:
    """The name of the function so many calls above."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    """Bytes in words, in powers of 1024."""
    if not size_bytes:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    power = int(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**power, 2)} {units[power]}"


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Gbit/s of the algorithm and of the bus, of an operation on `size` bytes of each rank in `duration`
    milliseconds; 0 where nothing was sent or no time passed."""
    n = dist.get_world_size() if dist.is_initialized() else 1
    if duration <= 0:
        return 0.0, 0.0
    rate = size / duration * 8 / 1e6
    if comm_op in _SUMS:
        return 2 * rate, rate * (2 * (n - 1) / n)
    if comm_op in _WHOLES:
        return n * rate, rate * (n - 1)
    if comm_op in _EXCHANGES:
        return rate, rate * ((n - 1) / n)
    return rate, rate


class CommsLogger:
    """The record of this process's collectives, and which of them are recorded: with `enabled`, all
    (`prof_all`), or those whose log name is in `prof_ops`, or that are called with prof=True."""

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """Take over a config's `comms_logger` section."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            section = comms_config.comms_logger
            self.verbose, self.debug = section.verbose, section.debug
            self.prof_ops, self.prof_all = section.prof_ops, section.prof_all

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = list({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        stopped = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add a call of operation `raw_name` of so many milliseconds and bytes to `record_name`."""
        algbw, busbw = calc_bw_log(raw_name, msg_size, latency)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for series, value in zip(record[1:], (latency, algbw, busbw), strict=True):
            series.append(value)
        if self.verbose:
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}",
                [0],
            )

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
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
        """Calls, milliseconds and Gbit/s per message size; None of an operation without a call."""
        if operation_name not in self.comms_dict:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(algbw, 0.1),
                "busbw_avg_gbps": trim_mean(busbw, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, algbw, busbw) in sorted(self.comms_dict[operation_name].items())
        }

    def _waiting(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """How much of the milliseconds was communication (the fastest rank's), and how much this rank's
        waiting for others. Collective: a reduction per message size."""
        waits = {}
        for size, (count, latencies, _, _) in sorted(self.comms_dict[operation_name].items()):
            own = torch.tensor(latencies, device=get_accelerator().current_device_name())
            least = own.clone()
            if dist.is_initialized():
                dist.all_reduce(least, dist.ReduceOp.MIN)
            waits[size] = {
                "count": count,
                "total_comm_lat_ms": least.sum().item(),
                "total_straggler_ms": (own - least).sum().item(),
                "avg_comm_lat_ms": trim_mean(least.tolist(), 0.1),
                "avg_straggler_ms": trim_mean((own - least).tolist(), 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
        return waits

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print what was recorded, and return it if asked: `summary` and `straggler_analysis` by operation
        and message size, `metadata`. With `show_straggler` all ranks call it together, with the same
        records."""
        names = list(self.comms_dict)
        summary = {name: self.get_operation_summary(name) or {} for name in names}
        waits = {name: self._waiting(name) for name in names} if show_straggler else None
        if print_log:
            _print_table(_LATENCY, summary)
        if print_log and waits is not None:
            print("\nBreakdown with straggler effect")
            _print_table(_STRAGGLER, waits)
        known = dist.is_initialized()
        place = {
            "world_size": dist.get_world_size() if known else 1,
            "rank": dist.get_rank() if known else 0,
            "timestamp": datetime.now().isoformat(),
        }
        result = {"summary": summary, "straggler_analysis": waits, "metadata": place}
        return result if return_dict else None


def _print_table(columns: Sequence[str], rows: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print an operation per paragraph and a message size per row, whose second to fifth figure these columns
    are."""
    print("".join(f"{column:<20}" for column in (*_COLUMNS, *columns)))
    for name, sizes in rows.items():
        print(name)
        for size, row in sizes.items():
            figures = list(row.values())[1:5]
            print(
                f"{'':<20}{convert_size(size):<20}{row['count']:<20}"
                + "".join(f"{figure:<20.2f}" for figure in figures)
            )
