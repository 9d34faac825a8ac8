"""What ranks on several hosts find out about their hosts and the ways between them; `polyreme doctor` shows
it.

Communication: facts as JSON in two all-gathers; then between the first ranks of each pair of hosts, one pair
at a time, small messages to and fro and some large ones. Invariant: nothing is left in the folder."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from polyreme.distributed.environment import detect
from polyreme.distributed.interfaces import addresses
from polyreme.distributed.process_group import close, join
from polyreme.version import VERSION

PINGS, LARGE, TIMES = 30, 16 * 2**20, 3
SEEN = 5.0  # seconds that a file may take to be seen on other hosts: network file systems remember folders
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Pair:
    """Two hosts: how long a small message takes one way, in seconds, how many bytes a second large ones
    bring, and by how many seconds the second's clock is ahead."""

    hosts: tuple[str, str]
    latency: float
    bandwidth: float
    ahead: float


@dataclass(frozen=True)
class Survey:
    """`facts` of each host, from its first rank, and all pairs of hosts."""

    ranks: int
    facts: Sequence[Mapping[str, Any]]
    pairs: Sequence[Pair]


def survey() -> Survey | None:
    """Look at all hosts; all ranks call it. None on all ranks but the first.

    Raises TransportError where the ranks do not meet."""
    device = join()
    place = detect()
    everyone = _gather([socket.gethostname(), place.local_rank], device)
    first = [rank for rank, (_, local) in enumerate(everyone) if local == 0]
    facts = _gather({**_facts(), "sees folder": _sees_folder(device)}, device)
    pairs = [_measure(a, b, everyone[a][0], everyone[b][0], device) for a, b in combinations(first, 2)]
    close()
    found = [pair for pair in pairs if pair is not None]
    return Survey(place.world_size, [facts[rank] for rank in first], found) if place.rank == 0 else None


def links(matrix: str) -> Mapping[str, int]:
    """How many pairs of GPUs have which link, in `nvidia-smi topo -m`: NV18, PIX, SYS, ..."""
    rows = [re.split(r"[\t ]+", line.strip()) for line in matrix.splitlines()]
    gpus = {row[0]: row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and "X" in row}
    return Counter(row[other] for number, row in enumerate(gpus.values()) for other in range(number))


def _facts() -> dict[str, Any]:
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return {
        "host": socket.gethostname(),
        "versions": _versions(),
        "interface": interface,
        "addresses": [
            address
            for address, name in addresses().items()
            if name == interface and not address.startswith("fe80:")
        ],
        "folder": str(Path.cwd()),
        "shared memory": None if shared is None else shared.free,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": torch.cuda.device_count(),
        "links": links(_topology()),
    }


def _versions() -> dict[str, str]:
    """Of what has to be the same on all hosts; over MPI its library, too."""
    found = {"python": platform.python_version(), "polyreme": VERSION, "torch": metadata.version("torch")}
    if mpi := sys.modules.get("mpi4py.MPI"):  # over which ranks met
        name = mpi.Get_library_version().splitlines()[0].partition(",")[0]
        found |= {
            "mpi4py": metadata.version("mpi4py"),
            "MPI": " ".join(name.replace(" Version:", "").split()),
        }
    return found


def _topology() -> str:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", asked.stdout)


def _sees_folder(device: torch.device) -> bool | None:
    """Whether a file that rank 0 writes in its folder is there; None where it could not write one."""
    path = None
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            path = Path.cwd() / f".polyreme-doctor-{uuid.uuid4().hex}"
            path.touch(exist_ok=False)
    try:
        told = _gather(str(path) if path and path.exists() else None, device)[0]
        deadline = time.monotonic() + SEEN
        seen = told is not None and Path(told).exists()
        while told is not None and not seen and time.monotonic() < deadline:
            time.sleep(0.1)
            seen = Path(told).exists()
        _gather(None, device)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return None if told is None else seen


def _measure(a: int, b: int, host: str, other: str, device: torch.device) -> Pair | None:
    """Between ranks a and b; on other ranks, and on all but rank 0 in the end, None."""
    rank = dist.get_rank()
    found = None
    if rank == a:
        ahead, latency = min((_ping(b, device) for _ in range(PINGS)), key=lambda pair: pair[1])
        found = [latency, max(_bandwidth(b, device) for _ in range(TIMES)), ahead]
    elif rank == b:
        _answer(a, device)
    told = _gather(found, device)[a]
    return Pair((host, other), *told)


def _ping(b: int, device: torch.device) -> tuple[float, float]:
    """How far b's clock is ahead, and half the time to it and back."""
    said = torch.zeros(1, dtype=torch.float64, device=device)
    clock, began = time.time(), time.perf_counter()
    dist.send(said, b)
    dist.recv(said, b)
    there = said.item()
    way = (time.perf_counter() - began) / 2
    return there - (clock + way), way


def _bandwidth(b: int, device: torch.device) -> float:
    """Bytes a second to b."""
    large = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    done = torch.zeros(1, device=device)
    began = time.perf_counter()
    dist.send(large, b)
    dist.recv(done, b)
    done.item()
    return LARGE / (time.perf_counter() - began)


def _answer(a: int, device: torch.device) -> None:
    said = torch.zeros(1, dtype=torch.float64, device=device)
    large = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    for _ in range(PINGS):
        dist.recv(said, a)
        said.item()
        dist.send(torch.full_like(said, time.time()), a)
    for _ in range(TIMES):
        dist.recv(large, a)
        dist.send(torch.zeros(1, device=device), a)


def _gather(what: Any, device: torch.device) -> list[Any]:
    """What each rank gives, an object of JSON's."""
    data = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [
        json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(received, sizes, strict=True)
    ]
