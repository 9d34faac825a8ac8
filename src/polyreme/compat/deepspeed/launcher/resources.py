"""Hosts and slots: hostfiles, and what --include, --exclude, --num_nodes and --num_gpus leave of them.

A pool is {host: number of slots}; active resources are {host: [slot, ...]}, both in the hostfile's order. No
network, but for `is_this_machine`, which may ask what a name's address is."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import socket
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.launcher.constants import DLTS_HOSTFILE
from polyreme.errors import LaunchError

Pool = Mapping[str, int]
Active = Mapping[str, list[int]]


class _Stderr(logging.Handler):
    """Shows what the launcher tells."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


logger = logging.getLogger("polyreme.deepspeed")
logger.addHandler(_Stderr())


class ResourceError(LaunchError, ValueError):
    """Hosts or slots that are not there, or that are asked for in a way that cannot be."""

    exit_status = 2


def fetch_hostfile(hostfile_path: str) -> Pool | None:
    """The pool that a file of lines `HOST slots=N` describes; None, with a warning, where there is no file.

    Raises ResourceError for a line of another form, a host that is there twice, and a file without hosts."""
    if not Path(hostfile_path).is_file():
        level = logging.DEBUG if hostfile_path == DLTS_HOSTFILE else logging.WARNING
        logger.log(level, "no hostfile %s: only this machine is used", hostfile_path)
        return None
    return parse_hostfile(Path(hostfile_path).read_text("utf-8").splitlines())


def parse_hostfile(hostfile_lines: Iterable[str]) -> Pool:
    """As `fetch_hostfile`, of lines."""
    pool: OrderedDict[str, int] = OrderedDict()
    for each in hostfile_lines:
        line = each.strip()
        if not line or line.startswith("#"):
            continue
        entry = re.match(r"(\S+)\s+slots=(\d+)", line)
        if entry is None:
            raise ResourceError(f"the hostfile has the line {line!r}; write HOST slots=N, a host in a line")
        if entry[1] in pool:
            raise ResourceError(f"the hostfile has {entry[1]} twice; give all its slots in one line")
        pool[entry[1]] = int(entry[2])
    if not pool:
        raise ResourceError("the hostfile names no host; write HOST slots=N, a host in a line")
    return pool


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Host and slots of `HOST[:SLOT,...]`; no slots where it names none."""
    host, *slots = node_config.split(":")
    try:
        return host, [int(slot) for slot in slots[0].split(",")] if slots else []
    except ValueError:
        raise ResourceError(f"{node_config!r} names no slots; write HOST or HOST:0,1") from None


def parse_node_config_list(node_configs: str) -> dict[str, list[int]]:
    """Slots of each host of `HOST[:SLOT,...]@HOST...`, sorted."""
    found: dict[str, set[int]] = {}
    for each in node_configs.split("@"):
        if each.count(":") > 1:
            raise ResourceError(f"{each!r} has several colons; write HOST or HOST:0,1, with @ between hosts")
        host, slots = parse_node_config(each)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(host_info: Active, include_str: str = "", exclude_str: str = "") -> Active:
    """What is left of `host_info` when only what `include_str` names is taken, or all but what `exclude_str`
    names. Both are `HOST[:SLOT,...]@...`; a host without slots stands for all of its own.

    Raises ResourceError where both are given, or where a host or a slot is not there."""
    if include_str and exclude_str:
        raise ResourceError("include and exclude are both given; one says all: leave the other out")
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            raise ResourceError(f"Hostname '{host}' not found in hostfile, which has {', '.join(host_info)}")
        for slot in slots:
            if slot not in host_info[host]:
                raise ResourceError(
                    f"No slot '{slot}' specified on host '{host}', which has {host_info[host]}"
                )
    left = OrderedDict()
    for host, there in host_info.items():
        chosen = (named[host] or list(there)) if host in named else []
        slots = chosen if include_str else [slot for slot in there if slot not in chosen]
        if unique := list(dict.fromkeys(slots)):
            left[host] = unique
    return left


def parse_inclusion_exclusion(resource_pool: Pool, inclusion: str, exclusion: str) -> Active:
    """As `parse_resource_filter`, of a pool."""
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(active_resources: Active, num_nodes: int, num_gpus: int) -> Active:
    """The first `num_nodes` hosts, with slots 0 to `num_gpus` - 1 of each; either is 0 or less for all."""
    hosts = list(active_resources.items())[: num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus)) if num_gpus > 0 else slots) for host, slots in hosts)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """As a word of a command line: base64 (for URLs) of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(word: str) -> dict[str, list[int]]:
    """What `encode_world_info` made a word of.

    Raises ResourceError for any other word."""
    try:
        found = json.loads(base64.urlsafe_b64decode(word))
        return {str(host): [int(slot) for slot in slots] for host, slots in found.items()}
    except (ValueError, AttributeError, TypeError):
        raise ResourceError(
            f"--world_info={word!r} is no world; it is what encode_world_info gives, of hosts and their slots"
        ) from None


def is_this_machine(host: str) -> bool:
    """Whether `host`, a name or an address, is of this machine."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_has_address(family, address) for family, _, _, _, address in addresses)


def _has_address(family: int, address: Sequence[Any]) -> bool:
    """Only a machine's own address can be bound to."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(tuple(address))
        return True
    except OSError:
        return False


class LocalDevices:
    """The devices of this machine, as far as a launcher asks for them: CUDA's, or else the CPU.

    On the CPU there is one slot, as `polyreme launch` starts one rank (DeepSpeed has one for each NUMA node);
    DS_ACCELERATOR=cpu asks for it where there are GPUs."""

    def device_name(self) -> str:
        return "cuda" if self._gpus() else "cpu"

    def device_count(self) -> int:
        return self._gpus() or 1

    def _gpus(self) -> int:
        import torch

        # counted without CUDA, which would go on with the devices that are visible now
        return 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()

    def visible_devices_envs(self) -> list[str]:
        """Variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"] if self.device_name() == "cuda" else []


def get_accelerator() -> LocalDevices:
    """What a launcher asks for devices."""
    return LocalDevices()
