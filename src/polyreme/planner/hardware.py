"""A description of the devices, links, memory and disks that a job runs on, and the seconds that single
operators, collectives and transfers take there (`time_model` puts them together).

Invariant: a `Cluster` has no unknown key, no value out of range and no two values that contradict each other.
All rates are per second, in FLOP/s or bytes. `PRESETS` name the source of every figure; none was fitted to a
training run. No communication (`measure` has what finds a machine's own figures)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ByteSize, Field, ValidationError

from polyreme.config.describe import example, expects, toml
from polyreme.config.duration import real
from polyreme.config.loading import plain, read
from polyreme.config.schema import Count, DType, NotNegative, Positive, Section, Size
from polyreme.errors import ConfigError, Problem
from polyreme.planner.flops import data_sheet

Share = Annotated[float, BeforeValidator(real), Field(gt=0, le=1)]
Shape = Annotated[str, Field(pattern=r"^[1-9]\d*(x[1-9]\d*){2}$")]
"""Of a matrix product: "512x1024x256" multiplies 512 x 256 and 256 x 1024 numbers."""
TILES = ((1, 1), (1, 0.5), (0.5, 0.5), (0.5, 0.25), (0.25, 0.25))
"""The blocks of a product's result that a kernel library chooses from, as parts of the largest."""
CAUSAL = 0.5
"""The part of the square of scores that fused attention computes where it is causal."""
LEAST_DEPTH = 512
"""The fewest numbers of the inner dimension for which a product is split along it."""
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class Device(Section):
    """What computes: one rank's accelerator, or the cores of a CPU that one rank has."""

    name: str = Field(default="", description="As its driver gives it; that of a known one gives `flops`.")
    flops: dict[DType, Positive] = Field(
        default={},
        description="The dense peak of matrix products by dtype, in operations per second.",
        examples=[{"bf16": 9.9e14}],
    )
    sustained: Share = Field(
        default=1.0,
        description="The part of the peak that large matrix products keep up, under the power limit.",
    )
    attention: Share = Field(default=0.35, description="The part of the peak that fused attention reaches.")
    attention_backward: Share = Field(default=0.3, description="The same of its backward.")
    units: Count = Field(
        default=1, description="Multiprocessors, which compute blocks of a result at once; 1: a CPU."
    )
    tile: tuple[Count, Count] = Field(
        default=(1, 1), description="The largest block of a result that one of `units` computes."
    )
    fill: NotNegative = Field(
        default=0.0, description="Seconds in which a unit waits for the first numbers of a block."
    )
    products: dict[DType, dict[Shape, Positive]] = Field(
        default={},
        description='Measured operations per second by dtype and shape, "512x1024x256".',
        examples=[{"bf16": {"512x1024x256": 1e14}}],
    )
    memory: Annotated[Size, Field(gt=0)] = Field(
        default=ByteSize(2**34), description="Bytes of its memory.", examples=["80 GiB"]
    )
    context: Annotated[Size, Field(ge=0)] = Field(
        default=ByteSize(0), description="Bytes of its memory that the driver and libraries take for a rank."
    )
    bandwidth: Positive = Field(default=1e10, description="Bytes per second to and from its memory.")
    streaming: Share = Field(default=1.0, description="The part of `bandwidth` that operators reach.")
    cache: Annotated[Size, Field(ge=0)] = Field(
        default=ByteSize(0), description="Bytes of the largest cache.", examples=["32 MiB"]
    )
    cached: dict[str, Positive] = Field(
        default={},
        description='Bytes per second within the cache, by operator; "all" for those not named.',
        examples=[{"all": 1e11}],
    )
    operators: dict[str, Positive] = Field(
        default={},
        description="Bytes per second of operators that are slower than the memory.",
        examples=[{"sum": 1e10}],
    )
    launch: NotNegative = Field(default=0.0, description="Seconds from one operator to the next on it.")
    dispatch: NotNegative = Field(
        default=0.0, description="Seconds that the host takes to issue an operator, ahead of the device."
    )
    collective_units: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Of `units`, those that collectives take while they are under way."
    )

    @property
    def is_accelerator(self) -> bool:
        """Whether it has memory of its own, beside the host's."""
        return self.units > 1 or data_sheet(self.name) is not None

    def product(self, shape: Sequence[int], dtype: str) -> float:
        """Return the seconds of a batch of matrix products, of `shape` (batch, m, n, k).

        Where products of this dtype were measured, at the rate of the one of the nearest shape. Else from the
        blocks of the result that the units compute one after another: the last ones at the edges and in the
        last round cost as much as whole ones (tile and wave quantisation, "Matrix Multiplication Background
        User's Guide" of NVIDIA). A block smaller than the largest reads more for each operation, and is
        slower by that, as the largest is just fed. Each block begins with a wait for its first numbers and
        ends with the store of its result."""
        batch, m, n, k = shape
        if known := self.products.get(dtype):  # type: ignore[call-overload]
            place = _place(f"{m}x{n}x{k}")
            return 2 * batch * m * n * k / known[min(known, key=lambda each: math.dist(place, _place(each)))]
        most, best, largest = self.rate(dtype) * self.sustained, math.inf, _intensity(*self.tile)
        for one, other in {pair for a, b in TILES for pair in ((a, b), (b, a))}:
            rows, columns = max(1, int(self.tile[0] * one)), max(1, int(self.tile[1] * other))
            blocks = batch * math.ceil(m / rows) * math.ceil(n / columns)
            splits = max(1, min(self.units // blocks, k // LEAST_DEPTH))
            slower = largest / _intensity(rows, columns)
            block = 2 * rows * columns * k / splits * slower * self.units / most
            if self.fill:
                stored = rows * columns * WIDTHS.get(dtype, 4)
                block += self.fill + stored * self.units / (self.bandwidth * self.streaming)
            best = min(best, math.ceil(blocks * splits / self.units) * block)
        return best

    def rate(self, dtype: str) -> float:
        """Return the peak in `dtype`, or in the next wider one that the description has."""
        wider = ("fp16", "bf16", "fp32", "fp64")
        name = dtype if dtype in wider else "fp32"
        for each in (*wider[wider.index(name) :], *self.flops):
            if each in self.flops:
                return self.flops[each]
        raise _refused("device.flops", {}, "there is no rate of computing", "write flops = {bf16 = 1e12}")

    def moved(self, nbytes: int, op: str = "") -> float:
        """Return the seconds in which an operator reads and writes `nbytes`."""
        if nbytes <= self.cache and self.cached:
            return nbytes / self.cached.get(op, self.cached.get("all", self.bandwidth))
        return nbytes / min(self.bandwidth * self.streaming, self.operators.get(op, math.inf))


@cache
def _place(shape: str) -> tuple[float, ...]:
    """Return the logarithms of a shape's sizes."""
    return tuple(math.log2(max(1, int(size))) for size in shape.split("x"))


def _intensity(rows: int, columns: int) -> float:
    """Return the operations per number read of a block of a product's result."""
    return rows * columns / (rows + columns)


class Link(Section):
    """What connects ranks."""

    bandwidth: Positive = Field(default=1e9, description="Bytes per second of one rank, each way.")
    efficiency: Share = Field(default=1.0, description="The part of it that large collectives reach.")
    latency: NotNegative = Field(default=0.0, description="Seconds from one rank to the next.")
    sums: Share = Field(default=1.0, description="Of the rate, the part that collectives with sums reach.")

    @property
    def rate(self) -> float:
        """Bytes per second of one rank that it really sends."""
        return self.bandwidth * self.efficiency


class Host(Section):
    """The memory and disks of one host, which its ranks share."""

    memory: Annotated[Size, Field(ge=0)] = Field(
        default=ByteSize(0), description="Bytes of its memory.", examples=["1 TiB"]
    )
    bandwidth: Positive = Field(default=5e10, description="Bytes per second to and from its memory.")
    bus: Positive = Field(default=5e10, description="Bytes per second between a device and it, each way.")
    read: Positive = Field(default=1e9, description="Bytes per second from its fast disks.")
    write: Positive = Field(default=1e9, description="Bytes per second to its fast disks.")


class Cluster(Section):
    """Hosts of equal ranks. Build it with `Cluster.load`."""

    name: str = Field(default="", description="How reports call it.")
    device: Device = Field(default_factory=Device)
    inside: Link = Field(default_factory=Link, description="Between the ranks of a host.")
    between: Link = Field(
        default_factory=Link, description="Between hosts: what each rank has of its host's network."
    )
    host: Host = Field(default_factory=Host)
    ranks_per_host: Count = Field(default=8, description="Devices of a host, with one rank on each.")
    start: NotNegative = Field(default=0.0, description="Seconds before a collective sends its first byte.")
    price: NotNegative = Field(default=0.0, description="Of one device for an hour; 0 where it is not known.")
    priced: str = Field(default="", description="Who asks that price, in what currency, and when.")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Cluster) -> Self:
        """Read a description: the name of a preset, a .toml, .yaml or .json file, a mapping, or another one.
        Its key `base` names the preset whose values it has where it gives no others.

        Raises ConfigError that lists every unknown key, wrong value and contradiction."""
        if isinstance(source, Cluster):
            return source  # type: ignore[return-value]
        where = str(source) if isinstance(source, str | Path) else None
        known = f"write one of {', '.join(PRESETS)}"
        if isinstance(source, Mapping):
            tree = plain(source)
        elif str(source).lower() in PRESETS:
            tree = {"base": str(source)}
        elif isinstance(source, str) and not Path(source).suffix and not Path(source).exists():
            fix = f"{known}, or the path of a file such as cluster.toml"
            raise _refused("cluster", source, "there is no preset of this name", fix)
        else:
            tree = read(source, "cluster")
        if (base := tree.pop("base", None)) is not None:
            if str(base).lower() not in PRESETS:
                raise _refused("base", base, "there is no preset of this name", known)
            tree = _over(PRESETS[str(base).lower()], tree)
        device = tree.get("device")
        if isinstance(device, Mapping) and (sheet := data_sheet(str(device.get("name", "")))):
            tree["device"] = {"flops": sheet[1], **device}
        try:
            cluster = cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError([*_problems_of(error)], where) from None
        if problems := [*cluster.contradictions()]:
            raise ConfigError(problems, where)
        return cluster

    def contradictions(self) -> Iterator[Problem]:
        """Report values that cannot both be true."""
        device, host = self.device, self.host
        if not device.flops:
            fix = "write flops = {bf16 = 1e12}, or the name of a known device"
            yield Problem("device.flops", {}, "there is no rate of computing", fix)
        for dtype, most in (data_sheet(device.name) or ("", {}))[1].items():
            if (given := device.flops.get(dtype, 0)) > 1.001 * most:  # type: ignore[call-overload]
                reason = f"the data sheet of {device.name} has {most:.4g} without sparsity"
                yield Problem(f"device.flops.{dtype}", given, reason, f"write {most:.4g}, or another name")
        if device.cache > device.memory:
            fix = "write device.cache in bytes of the cache"
            yield Problem("device.cache", device.cache, "a cache is not larger than the memory", fix)
        if device.collective_units >= device.units > 1 or (device.units == 1 < device.collective_units):
            reason = f"of {device.units} units none would be left to compute"
            yield Problem("device.collective_units", device.collective_units, reason, "write fewer")
        if host.memory and max(host.read, host.write) > host.bandwidth:
            key = "read" if host.read > host.write else "write"
            reason = f"disks are not faster than the memory, host.bandwidth = {host.bandwidth:g}"
            yield Problem(f"host.{key}", getattr(host, key), reason, "write bytes per second of each")

    def collective(self, verb: str, nbytes: int, ranks: Sequence[int]) -> tuple[str, float]:
        """Return the link that a collective among global `ranks` takes longest on, "inside" or "between", and
        its seconds. nbytes: what this rank sends, as `Axis` counts it.

        Members of one host share what each of them has of the network. In a ring each rank sends to the next
        n - 1 times; an all-reduce goes round twice, or along a tree of depth log2 n where that is faster."""
        size, hosts = len(ranks), len({rank // self.ranks_per_host for rank in ranks})
        members = size / hosts
        inside, between = self.inside, self.between
        wait = (size - hosts) * inside.latency + (hosts - 1) * between.latency
        if verb == "all_reduce":
            depth = math.log2(hosts) * between.latency + (members - 1) * inside.latency
            wait = 2 * min(wait, depth)
        elif verb in ("send", "receive", "broadcast"):
            wait = between.latency if hosts > 1 else inside.latency
            members = 1 if verb != "broadcast" else members
        if verb in ("reduce_scatter", "all_reduce"):
            inside, between = (
                each.model_copy(update={"efficiency": each.efficiency * each.sums})
                for each in (inside, between)
            )
        if hosts == 1:
            return "inside", self.start + wait + nbytes / inside.rate
        if verb == "all_to_all":  # straight to each: those in other hosts over this rank's own share
            sent = nbytes * (size - members) / (size - 1)
            across, within = sent / between.rate, (nbytes - sent) / inside.rate
        else:
            across, within = nbytes / (members * between.rate), nbytes / inside.rate * (members > 1)
        return "between" if across >= within else "inside", self.start + wait + max(across, within)

    def transfer(self, tier: str, direction: str, nbytes: int) -> float:
        """Return the seconds in which one rank moves `nbytes` between its device and a tier, while every rank
        of the host does the same. in: to the device."""
        rate = min(self.host.bus, self.host.bandwidth / self.ranks_per_host)
        if tier == "files":
            disk = self.host.read if direction == "in" else self.host.write
            rate = min(rate, disk / self.ranks_per_host)
        return nbytes / rate

    def to_toml(self) -> str:
        """Return the description as the text of a file that `load` takes."""
        given = self.model_dump(exclude_defaults=True)
        tables = {key: value for key, value in given.items() if key in SECTIONS}
        lines = [f"{key} = {toml(value)}" for key, value in given.items() if key not in SECTIONS]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {toml(_exact(value))}" for key, value in table.items())]
        return "\n".join(lines).strip() + "\n"


SECTIONS: dict[str, type[Section]] = {"device": Device, "inside": Link, "between": Link, "host": Host}


def _exact(value: object) -> object:
    return int(value) if isinstance(value, ByteSize) else value


def _over(base: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `tree`, and those of `base` that it does not give."""
    both = base.keys() & tree.keys()
    deep = {key: _over(base[key], tree[key]) for key in both if key in SECTIONS and tree[key] is not None
            and isinstance(tree[key], Mapping)}  # fmt: skip
    return {**base, **tree, **deep}


def _refused(key: str, value: object, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key, value, reason, fix)])


def _problems_of(error: ValidationError) -> Iterator[Problem]:
    seen = set()
    for detail in error.errors(include_url=False):
        path = [str(each) for each in detail["loc"]]
        owner = SECTIONS[path[0]] if len(path) > 1 and path[0] in SECTIONS else Cluster
        name = path[1] if owner is not Cluster else path[0]
        if (key := f"{path[0]}.{name}" if owner is not Cluster else name) in seen:
            continue
        seen.add(key)
        field = owner.model_fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, owner.model_fields, 1)
            fix = f'did you mean "{near[0]}"?' if near else f"use one of {', '.join(owner.model_fields)}"
            yield Problem(key, detail["input"], "there is no such key", fix)
        elif name in SECTIONS:
            yield Problem(key, detail["input"], "must be a table of keys", f"begin a table [{name}]")
        else:
            fix = f"write {name} = {toml(example(field))}"
            yield Problem(
                ".".join(each for each in path if each != "[key]"),
                detail["input"],
                f"must be {expects(field)}",
                fix,
            )


# ---- what the makers and public micro-benchmarks say

_NCCL = {"start": 8.4e-6}
"""Of a ring with the protocol "Simple": NCCL 2.21, src/graph/tuning.cc, table of base latencies. Latencies of
links are that file's of a ring with LL128 (NVLink 1.9 us, network 4.0 us), which NCCL takes where latency
counts."""
_LAMBDA = {"priced": "Lambda, 8 on demand, USD, 2026-09-20"}
_CONTEXT = {"context": "1 GB"}
"""Assumed, not measured: about half of it for the driver's context with torch's kernels, the rest for cuBLAS'
workspace and the buffers of NCCL's communicators. `bench/plan_cuda.py` prints what a GPU takes."""
_HOPPER: dict[str, Any] = {
    **_CONTEXT,
    "name": "NVIDIA H100",  # flops: planner.flops, from its data sheet
    # 720 of 989 TFLOP/s in products of a Llama's shapes, on normal numbers, so at the clock that 700 W leave
    # (SemiAnalysis, "MI300X vs H100 vs H200", December 2024); the best shape alone reaches 794.5 (Bekman,
    # "Maximum Achievable Matmul FLOPS", torch 2.7)
    "sustained": 0.728,
    # FlashAttention-2, causal, heads of 128: 335 TFLOP/s of 989; backward 291 (arXiv:2407.08608, figures 5
    # and 6). cuDNN's and FlashAttention-3's reach 0.54 and 0.57
    "attention": 0.34,
    "attention_backward": 0.29,
    "units": 132,  # data sheet
    # two reads of the device's memory, 0.5 us each under load (latencies: arXiv:2402.13499)
    "fill": 1e-6,
    "tile": (256, 128),  # cuBLAS' and CUTLASS' largest for wgmma (CUTLASS, profiler's default kernels)
    "memory": "80 GB",
    "bandwidth": 3.35e12,  # data sheet
    # 3.57 of 3.94 TB/s in a copy (H100 NVL); likewise BabelStream's 0.9
    "streaming": 0.9,
    "launch": 1.5e-6,  # from one kernel to the next: 1.3 us within a CUDA graph, a little more in a stream
    "dispatch": 5e-6,  # one operator issued by torch from Python: 4 to 6 us
    "collective_units": 16,  # channels of NCCL over NVLink on this architecture, one multiprocessor each
}
_DGX_H100: dict[str, Any] = {
    # NVLink 4: 450 GB/s each way (data sheet); 360 in nccl-tests, which its author calls what is expected
    # (github.com/NVIDIA/nccl-tests, issue 326)
    "inside": {"bandwidth": 450e9, "efficiency": 0.8, "latency": 1.9e-6},
    # eight adapters of 400 Gb/s (DGX H100 data sheet); 340 of 400 GB/s over 32 hosts in nccl-tests
    # (github.com/NVIDIA/nccl, issue 1218)
    "between": {"bandwidth": 50e9, "efficiency": 0.85, "latency": 4e-6},
    # 2 TB of 16 channels DDR5-4800; PCIe 5 x16, of which copies reach 55; 8 NVMe, 6.8 and 4 GB/s each
    "host": {"memory": "2 TB", "bandwidth": 614e9, "bus": 55e9, "read": 50e9, "write": 30e9},
    "ranks_per_host": 8,
    **_NCCL,
}
PRESETS: dict[str, dict[str, Any]] = {
    "a100": {
        "name": "DGX A100 80 GB",
        "device": {
            "name": "NVIDIA A100",
            **_CONTEXT,
            "sustained": 0.869,  # 271.2 of 312 TFLOP/s (Bekman, as above, torch 2.6): hardly throttled
            # FlashAttention-2, causal, heads of 128: 193 TFLOP/s of 312, backward 160 (arXiv:2307.08691)
            "attention": 0.62,
            "attention_backward": 0.51,
            "units": 108,
            "fill": 1e-6,
            "tile": (256, 128),
            "memory": "80 GB",
            "bandwidth": 2.039e12,  # data sheet
            "streaming": 0.87,  # BabelStream: 1.77 TB/s
            "launch": 1.5e-6,
            "dispatch": 5e-6,
            "collective_units": 12,
        },
        # NVLink 3: 300 GB/s each way (data sheet), 230 in nccl-tests; eight adapters of 200 Gb/s
        "inside": {"bandwidth": 300e9, "efficiency": 0.77, "latency": 1.9e-6},
        "between": {"bandwidth": 25e9, "efficiency": 0.85, "latency": 4e-6},
        **_LAMBDA,
        "price": 2.79,
        # DGX A100: 16 channels DDR4-3200, PCIe 4 x16, "25 GB/s" of NVMe
        "host": {"memory": "2 TB", "bandwidth": 410e9, "bus": 26e9, "read": 25e9, "write": 15e9},
        "ranks_per_host": 8,
        **_NCCL,
    },
    "h100": {"name": "DGX H100", "device": _HOPPER, **_DGX_H100, "price": 3.99, **_LAMBDA},
    "h200": {
        "name": "DGX H200",
        # data sheet: as the H100, with 141 GB at 4.8 TB/s; the same 720 TFLOP/s (SemiAnalysis, as above)
        "device": {**_HOPPER, "name": "NVIDIA H200", "memory": "141 GB", "bandwidth": 4.8e12},
        **_DGX_H100,
        "price": 3.99,
        "priced": "Hyperstack, on demand, USD, 2026-08-26",
    },
    "b200": {
        "name": "DGX B200",
        "device": {
            **_HOPPER,
            "name": "NVIDIA B200",
            "sustained": 0.71,  # 1,745 of 2,250 in the best shape (Bekman), and 0.91 of it, as of the H100's
            "units": 148,
            "tile": (256, 256),  # two multiprocessors together (CUTLASS, sm100)
            "memory": "180 GB",
            "bandwidth": 7.7e12,  # data sheet "HGX B200"
        },
        # NVLink 5: 900 GB/s each way (data sheet); the efficiency is the H100's
        **_DGX_H100,
        **_LAMBDA,
        "price": 6.69,
        "inside": {"bandwidth": 900e9, "efficiency": 0.8, "latency": 1.9e-6},
        "host": {"memory": "4 TB", "bandwidth": 717e9, "bus": 55e9, "read": 50e9, "write": 30e9},
    },
    "mi300x": {
        "name": "8 x MI300X",
        "device": {
            "name": "AMD Instinct MI300X",
            **_CONTEXT,
            "sustained": 0.474,  # 620 of 1,307 TFLOP/s (SemiAnalysis, as above)
            "attention": 0.3,  # assumed: no public figure of a training shape was found
            "attention_backward": 0.2,
            "units": 304,
            "fill": 1.5e-6,  # likewise, of 0.75 us each (chipsandcheese.com, "Testing AMD's Giant MI300X")
            "tile": (256, 256),
            "memory": "192 GB",
            "bandwidth": 5.3e12,  # data sheet
            "streaming": 0.81,  # 4.3 TB/s (AMD, ROCm blog "MI300X memory bandwidth")
            "launch": 3e-6,
            "dispatch": 5e-6,
            "collective_units": 32,
        },
        # seven links of 64 GB/s each way (data sheet); RCCL reaches about 0.7
        "inside": {"bandwidth": 448e9, "efficiency": 0.7, "latency": 3e-6},
        "between": {"bandwidth": 50e9, "efficiency": 0.85, "latency": 5e-6},
        "host": {"memory": "2 TB", "bandwidth": 614e9, "bus": 55e9, "read": 50e9, "write": 30e9},
        "ranks_per_host": 8,
        **_NCCL,
    },
    "cpu": {
        "name": "CPU host, one rank on each two cores",
        # two cores of EPYC Genoa with AVX-512: 32 fp32 operations a cycle and core at 3.1 GHz (AMD's
        # optimization guide), bf16 twice that; memory: 460 GB/s among 96 cores, of which few take 30 a core.
        # `polyreme plan --measure` is better
        "device": {
            "flops": {"bf16": 8e11, "fp32": 3e11, "fp64": 1.5e11},
            "sustained": 0.7,
            "memory": "8 GB",
            "bandwidth": 4e10,
            "launch": 6e-6,
            "collective_units": 1,  # the cores of a rank do both
        },
        "inside": {"bandwidth": 5e9, "latency": 1e-5},  # shared memory: bench/results
        "between": {"bandwidth": 1.25e9, "efficiency": 0.9, "latency": 5e-5},  # 10 Gb/s
        "host": {"memory": "64 GB", "bandwidth": 2e11, "bus": 1e10, "read": 1e9, "write": 1e9},
    },
}
