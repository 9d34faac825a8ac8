"""Facts that ranks on several hosts find out about their hosts and the connections between them;
`polyreme doctor` shows them.

Communication: facts as JSON in two all-gathers; then between the first ranks of each pair of hosts, one pair
at a time, small messages to and fro and some large ones. Invariant: no file is left in the folder."""

from __future__ import annotations

import contextlib
import os
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
from polyreme.distributed.mesh import Axis, everyone
from polyreme.distributed.process_group import close, join
from polyreme.distributed.versions import versions

PINGS, LARGE, TIMES = 30, 16 * 2**20, 3
SEEN = 5.0  # seconds that a file may take to be seen on other hosts: network file systems remember folders
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Pair:
    """Two hosts: the seconds that a small message takes one way, the bytes a second of large ones in the
    slower direction, and the seconds by which the second host's clock is ahead."""

    hosts: tuple[str, str]
    latency: float
    bandwidth: float
    ahead: float


@dataclass(frozen=True)
class Survey:
    """The `facts` of each host, from its first rank, and all pairs of hosts."""

    ranks: int
    facts: Sequence[Mapping[str, Any]]
    pairs: Sequence[Pair]


def survey() -> Survey | None:
    """Examine all hosts; all ranks call it. Returns None on all ranks but the first.

    Raises TransportError where the ranks do not meet."""
    device, place, ranks = join(), detect(), everyone()
    names = ranks.gather_objects([socket.gethostname(), place.local_rank])
    first = [rank for rank, (_, local) in enumerate(names) if local == 0]
    facts = ranks.gather_objects({**_facts(), "sees folder": _sees_folder(ranks)})
    pairs = [_measure(a, b, (names[a][0], names[b][0]), ranks, device) for a, b in combinations(first, 2)]
    close()
    return Survey(place.world_size, [facts[rank] for rank in first], pairs) if place.rank == 0 else None


def links(matrix: str) -> Mapping[str, int]:
    """Count the pairs of GPUs by their link (NV18, PIX, SYS, ...), from the output of
    `nvidia-smi topo -m`."""
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
    """Return versions of software that has to be the same on all hosts; over MPI its library's, too."""
    found = dict(versions())
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


def _sees_folder(ranks: Axis) -> bool | None:
    """Return whether a file that rank 0 writes in its folder shows here; None where it could not write
    one."""
    path = None
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            path = Path.cwd() / f".polyreme-doctor-{uuid.uuid4().hex}"
            path.touch(exist_ok=False)
    try:
        written = ranks.gather_objects(str(path) if path and path.exists() else None)[0]
        deadline = time.monotonic() + SEEN
        seen = written is not None and Path(written).exists()
        while written is not None and not seen and time.monotonic() < deadline:
            time.sleep(0.1)
            seen = Path(written).exists()
        ranks.barrier()
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return None if written is None else seen


def _measure(a: int, b: int, hosts: tuple[str, str], ranks: Axis, device: torch.device) -> Pair:
    """Measure between ranks a and b, the first of their hosts; all ranks call it."""
    rank = dist.get_rank()
    found: list[float] = []
    if rank == a:
        ahead, latency = min((_ping(b, device) for _ in range(PINGS)), key=lambda pair: pair[1])
        found = [_bandwidth(b, device), latency, ahead]
        _take(b, device)
    elif rank == b:
        _answer(a, device)
        _take(a, device)
        found = [_bandwidth(a, device)]
    results = ranks.gather_objects(found)
    (there, latency, ahead), [back] = results[a], results[b]
    return Pair(hosts, latency, min(there, back), ahead)


def _ping(b: int, device: torch.device) -> tuple[float, float]:
    """Return by how much b's clock is ahead, and half the time of a round trip."""
    said = torch.zeros(1, dtype=torch.float64, device=device)
    clock, began = time.time(), time.perf_counter()
    dist.send(said, b)
    dist.recv(said, b)
    there = said.item()
    way = (time.perf_counter() - began) / 2
    return there - (clock + way), way


def _answer(a: int, device: torch.device) -> None:
    said = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(PINGS):
        dist.recv(said, a)
        said.item()
        dist.send(torch.full_like(said, time.time()), a)


def _bandwidth(to: int, device: torch.device) -> float:
    """Return the bytes a second to a rank, the best of TIMES."""
    large = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    done = torch.zeros(1, device=device)
    most = 0.0
    for _ in range(TIMES):
        began = time.perf_counter()
        dist.send(large, to)
        dist.recv(done, to)
        done.item()
        most = max(most, LARGE / (time.perf_counter() - began))
    return most


def _take(sender: int, device: torch.device) -> None:
    large = torch.zeros(LARGE, dtype=torch.uint8, device=device)
    for _ in range(TIMES):
        dist.recv(large, sender)
        dist.send(torch.zeros(1, device=device), sender)
