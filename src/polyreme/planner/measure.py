"""Finds out what a machine, or each machine of a run, can do: a description for `hardware`.

Invariant: ranks of one host measure at the same time, so that each finds its part of what they share; of all
ranks the slowest counts, as the others wait for it. No file is left. Communication: on the axes that are
given, whose ranks must all call."""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import LaunchError
from polyreme.files.direct_io import File, aligned
from polyreme.layout.mesh_axes import ROLES
from polyreme.offload import host
from polyreme.offload.host_allocator import keep_freed_memory
from polyreme.planner.flops import data_sheet, peak_flops
from polyreme.planner.hardware import CAUSAL, PRESETS, Cluster
from polyreme.step.memory.fit import own_memory
from polyreme.step.memory.kept import device_of_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CACHED, STREAMED = 2**20, 2**25
"""Bytes of each tensor of an operator whose tensors stay in a CPU's cache, and of one whose do not. As
many bytes lie between two runs on the same tensors, as in a step, which reads a weight once in a pass."""
SECONDS, LONGEST = 0.02, 0.5
"""The time in which one figure is measured, and the longest one of products."""
TIMES = frozenset({"launch", "dispatch", "latency"})
"""Figures of which the largest is the slowest rank's."""
OPERATORS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "mul": (lambda a, b: a * b, 3),
    "add": (lambda a, b: a + b, 3),
    "add_": (lambda a, b: a.add_(b), 3),
    "mul_": (lambda a, b: a.mul_(1.0), 2),
    "div": (lambda a, b: a / 3, 2),
    "neg": (lambda a, b: -a, 2),
    "pow": (lambda a, b: a.pow(2), 2),
    "sqrt": (lambda a, b: a.sqrt(), 2),
    "lerp_": (lambda a, b: a.lerp_(b, 0.1), 3),
    "addcmul_": (lambda a, b: a.addcmul_(b, b, value=0.1), 4),
    "addcdiv_": (lambda a, b: a.addcdiv_(b, b, value=0.1), 4),
    "copy_": (lambda a, b: a.copy_(b), 3),
    "_to_copy": (lambda a, b: a.to(torch.bfloat16), 1.5),
    "clone": (lambda a, b: a.clone(), 2),
    "cat": (lambda a, b: torch.cat((a, b)), 4),
    "sum": (lambda a, b: a.sum(0), 1),
    "mean": (lambda a, b: a.mean(1), 1),
    "silu": (lambda a, b: F.silu(a), 2),
    "gelu": (lambda a, b: F.gelu(a), 2),
    "silu_backward": (lambda a, b: torch.ops.aten.silu_backward(a, b), 3),
    "_softmax": (lambda a, b: a.softmax(1), 2),
    "_log_softmax": (lambda a, b: a.log_softmax(1), 2),
    "_log_softmax_backward_data": (
        lambda a, b: torch.ops.aten._log_softmax_backward_data(a, b, 1, torch.float32), 3,
    ),
}  # fmt: skip
"""Operators that are timed on two tensors, and how often each reads or writes one, as a dry run counts it."""


def measure_run(ranks: int, folder: str | Path | None = None) -> tuple[Cluster, bool]:
    """Describe the machines of all `ranks`, as many as were started, within a minute; and tell whether this
    rank is the first. Raises LaunchError for hosts with different numbers of ranks."""
    (data,) = ROLES["data"]
    mesh = Mesh.open({data: ranks})
    each, *others = {*Counter(mesh.host_of).values()}
    if others:
        told = ", ".join(f"{name}: {count}" for name, count in Counter(mesh.host_of).items())
        raise LaunchError(f"hosts have different numbers of ranks ({told}): start equally many on each")
    inside, between = mesh.split(data, each, ("inside", "between"))
    return measure(inside, between, folder), mesh.rank == 0


def measure(
    inside: Axis | None = None, between: Axis | None = None, folder: str | Path | None = None
) -> Cluster:
    """Describe this machine by the seconds that short runs take, within a minute.

    inside, between: the ranks of this host, and the ranks at the same place of each host. folder: on the
    disks of the tier of files. What is not measured (links without an axis, disks without a folder, and on
    accelerators blocks of a result) is that of the preset for this device, or for CPUs."""
    device, ranks = device_of_ranks(), inside.size if inside else 1
    sheet = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    base = {str(data_sheet(each["device"].get("name", ""))): name for name, each in PRESETS.items()}.get(
        str(sheet), "cpu"
    )
    keep_freed_memory()  # as training does
    found: dict[str, Any] = {"device": _measured_device(device, sheet[1] if sheet else None, ranks)}
    found["host"] = {**PRESETS[base]["host"], **_measured_host(device, folder, ranks)}
    for axis, name in ((inside, "inside"), (between, "between")):
        if axis is not None and axis.size > 1:
            found[name] = _measured_link(axis, device)
            found = _slowest(axis.gather_objects(found))
    for key in ("read", "write"):
        found["host"][key] = min(found["host"][key], found["host"]["bandwidth"])
    found["name"] = f"{platform.node()}, measured {time.strftime('%Y-%m-%d')}"
    return Cluster.load({"base": base, "ranks_per_host": ranks, **found, "price": 0})


def _once(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _seconds(*turns: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of calls of `turns`, one after another, after a first round. In it is the time in
    which other ranks had this one's core."""
    for each in turns:
        each()
    taken: list[float] = []
    while sum(taken) < SECONDS or (len(taken) < 3 and sum(taken) < LONGEST):
        taken.append(_once(turns[len(taken) % len(turns)], device))
    return statistics.mean(taken)


def _measured_device(device: torch.device, sheet: Mapping[str, float] | None, ranks: int) -> dict[str, Any]:
    cuda, timed = device.type == "cuda", partial(_seconds, device=device)
    found: dict[str, Any] = {"memory": own_memory() // (1 if cuda else ranks), "streaming": 1.0}
    found["products"] = _measured_products(device)
    fastest = {name: max(shapes.values()) for name, shapes in found["products"].items()}
    fastest["fp64"] = peak_flops(device, torch.float64).flops
    flops = found["flops"] = {**{name: _rounded(each) for name, each in fastest.items()}, **(sheet or {})}
    if cuda:
        found["units"] = torch.cuda.get_device_properties(device).multi_processor_count
    dtype, length = ("bf16", 4096) if cuda else ("fp32", 512)
    q = torch.randn(1, 16, length, 128 if cuda else 64, dtype=DTYPES[dtype], device=device).requires_grad_()
    attend = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    result, scores = attend(), 4 * q.numel() * length * CAUSAL
    backward = partial(torch.autograd.grad, result, q, result.detach(), retain_graph=True)
    for key, work, run in (("attention", scores, attend), ("attention_backward", 2.5 * scores, backward)):
        found[key] = min(1.0, _rounded(work / timed(run) / flops[dtype]))  # backward: five products, not two
    if not cuda:
        for key, nbytes in (("cached", CACHED), ("operators", STREAMED)):
            pairs = [[torch.ones(nbytes // 4096, 1024) for _ in range(2)] for _ in range(STREAMED // nbytes)]
            found[key] = {
                name: _rounded(times * nbytes / timed(*(partial(run, *pair) for pair in pairs)))
                for name, (run, times) in OPERATORS.items()
            }
        found["cached"]["all"], found["cache"] = statistics.median(found["cached"].values()), 4 * CACHED
    source = torch.zeros(2**30 if cuda else STREAMED, dtype=torch.uint8, device=device)
    target, tiny = torch.empty_like(source), torch.zeros(1, 8, device=device)
    found["bandwidth"] = _rounded(2 * source.nbytes / timed(lambda: target.copy_(source)))
    layers = nn.Sequential(*(each for _ in range(10) for each in (nn.Linear(8, 8), nn.GELU()))).to(device)
    # two operators and four of the backward each
    found["dispatch" if cuda else "launch"] = _rounded(timed(lambda: layers(tiny).sum().backward()) / 60)
    if cuda:
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            for _ in range(200):
                tiny.add_(1)
        found["launch"] = _rounded(timed(graph.replay) / 200)
    return found


def _measured_products(device: torch.device) -> dict[str, dict[str, float]]:
    """Return the operations per second of products of several shapes, by dtype: a mean over what a layer
    multiplies in its forward and in its backward, where one matrix or the other is transposed."""
    found: dict[str, dict[str, float]] = {}
    sizes = (512, 2048, 8192) if device.type == "cuda" else (64, 256, 1024)
    for (name, dtype), m, n, k in product(DTYPES.items(), sizes, sizes, sizes):
        known = [*found.setdefault(name, {}).values()]
        if known and 6 * m * n * k / known[-1] > LONGEST:
            continue
        turns = 1 + STREAMED // ((m + n) * k * dtype.itemsize)
        a, b = (torch.ones(turns, each * k, dtype=dtype, device=device) for each in (m, n))
        forms = (
            [(x.view(m, k), y.view(k, n)) for x, y in zip(a, b, strict=True)],
            [(x.view(m, k), y.view(n, k).t()) for x, y in zip(a, b, strict=True)],
            [(x.view(k, m).t(), y.view(k, n)) for x, y in zip(a, b, strict=True)],
        )
        seconds = sum(_seconds(*(partial(torch.mm, *each) for each in form), device=device) for form in forms)
        found[name][f"{m}x{n}x{k}"] = _rounded(2 * m * n * k * len(forms) / seconds)
    return found


def _measured_host(device: torch.device, folder: str | Path | None, ranks: int) -> dict[str, Any]:
    memory = aligned(2**26, pin=device.type == "cuda")
    target = torch.empty(len(memory), dtype=torch.uint8, device=device)
    bus = _rounded(len(memory) / _seconds(lambda: target.copy_(memory), device=device))
    found = {"memory": host.total(), "bus": bus, "bandwidth": bus * ranks}
    if folder is not None:
        file = File(folder, len(memory))
        for key, run in (("write", file.write), ("read", file.read)):
            seconds = _seconds(partial(run, memory, 0), device=torch.device("cpu"))
            found[key] = _rounded(len(memory) / seconds * ranks)
        file.close()
    return found


def _measured_link(axis: Axis, device: torch.device) -> dict[str, float]:
    """Return the bandwidth and latency of an axis, from gathers of many bytes and of few, and what sums reach
    of it. Each figure is of as many exchanges on every rank."""
    many, few, sums = (
        _exchanged(axis, device, *each) for each in ((2**22, False), (4, False), (2**22, True))
    )
    steps, moved = axis.size - 1, max(many - few, many / 10)
    found = {
        "bandwidth": steps * 2**24 / moved,
        "latency": few / steps,
        "sums": min(1.0, moved / max(sums - few, sums / 10)),
    }
    return {"efficiency": 1.0, **{key: _rounded(each) for key, each in found.items()}}


def _exchanged(axis: Axis, device: torch.device, size: int, sums: bool) -> float:
    """Return the median seconds of a gather, or of a sum, of `size` numbers of each rank."""
    part = axis.empty(size, torch.float32, device).fill_(1)
    full = torch.ones(size * axis.size, device=device)
    run = partial(axis.reduce_scatter, part, full) if sums else partial(axis.all_gather, full, part)
    return statistics.median([_once(lambda: run().settle(), device) for _ in range(9)][1:])


def _slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the least of every rate, and the most of all times; of what all ranks have measured."""
    found = {}
    for key, value in ranks[0].items():
        if not all(key in each for each in ranks):
            continue
        worst = max if key in TIMES else min
        found[key] = (_slowest if isinstance(value, Mapping) else worst)([each[key] for each in ranks])
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
