"""Hosts and slots: hostfiles in DeepSpeed's syntax, and filters that keep some of their hosts and slots.

A pool is {host: number of slots}; active slots are {host: [slot, ...]}, both in the hostfile's order. No
network, except that `is_this_machine` may resolve a name."""

from __future__ import annotations

import re
import shutil
import socket
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.distributed.apart import look_up
from polyreme.errors import LaunchError, shortened

Pool = Mapping[str, int]
Active = Mapping[str, list[int]]
MOST = 4096
"""Most slots of a host; more are a mistake."""
SHOWN = 50
"""Most wrong lines that an error lists."""


class ResourceError(LaunchError, ValueError):
    """Hosts or slots that do not exist, or that cannot be asked for in this way."""

    exit_status = 2


def find_login(hosts: Iterable[str], ssh: Sequence[str]) -> None:
    """Raise ResourceError where a host is another machine, and the program that logs in there is missing."""
    if shutil.which(ssh[0]) is None and not all(map(is_this_machine, hosts)):
        how = "that logs in to other hosts" if ssh[0] == "ssh" else "given by --ssh"
        raise ResourceError(f"the program {ssh[0]!r} {how} was not found: install it, or give another --ssh")


def read(path: Path) -> Pool:
    """Return the pool that a file of lines `HOST slots=N` describes.

    Raises ResourceError where it cannot be read, and as `parse_hostfile`."""
    try:
        return parse_hostfile(path.read_text("utf-8-sig").splitlines())
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ResourceError(
            f"the hostfile {path} cannot be read: {reason}; give a file of lines HOST slots=N"
        ) from None


def parse_hostfile(hostfile_lines: Iterable[str]) -> Pool:
    """Return the pool of such lines; empty ones, and those that begin with #, are skipped.

    Raises ResourceError with the number of each line that has another form, repeats a host or gives it no
    slots; or where there is no host at all."""
    pool: OrderedDict[str, int] = OrderedDict()
    lines: dict[str, int] = {}
    problems = []
    for number, each in enumerate(hostfile_lines, 1):
        line = each.strip()
        if not line or line.startswith("#"):
            continue
        entry = re.fullmatch(r"(\S+)\s+slots=(\d{1,9})(\s*#.*)?", line, re.ASCII)
        host = _unbracketed(entry[1]) if entry else ""
        if entry is None:
            why = "write HOST slots=N, a host in a line"
        elif not 1 <= int(entry[2]) <= MOST:
            why = f"a host has 1 to {MOST} slots; begin the line with # to leave the host out"
        elif re.fullmatch(r"([^:]*|.*\]):\d+", host):
            why = (
                f"{host} is with a port; write the host alone, and the port in ~/.ssh/config or as --ssh "
                "'ssh -p PORT'"
            )
        elif not re.fullmatch(r"[^-\[\]][^\[\]]*", host):
            why = "a host is a name or an address, an IPv6 one perhaps in brackets; ssh takes no other"
        elif host in pool:
            why = f"it has {host} twice, as line {lines[host]}; give all its slots in one line"
        else:
            pool[host], lines[host] = int(entry[2]), number
            continue
        problems.append(f"\n  - line {number}, {shortened(repr, line)}: {why}")
    if problems:
        more = f"\n  and {len(problems) - SHOWN} lines more" * (len(problems) > SHOWN)
        raise ResourceError(f"the hostfile cannot be used:{''.join(problems[:SHOWN])}{more}")
    if not pool:
        raise ResourceError("the hostfile names no host; write HOST slots=N, a host in a line")
    return pool


def _unbracketed(host: str) -> str:
    """Return an IPv6 address, perhaps after USER@, without brackets, as ssh and sockets take it."""
    return re.sub(r"^(.*@)?\[([^\[\]]*)\]$", r"\1\2", host)


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Return host and slots of `HOST[:SLOT,...]`; no slots where it names none. An IPv6 address is in
    brackets."""
    address, bracket, rest = node_config.rpartition("]")
    host, *slots = rest.split(":")
    host = _unbracketed(address + bracket + host)
    try:
        return host, [int(slot) for slot in slots[0].split(",")] if slots else []
    except ValueError:
        raise ResourceError(f"{node_config!r} names no slots; write HOST or HOST:0,1") from None


def parse_node_config_list(node_configs: str) -> dict[str, list[int]]:
    """Return the slots of each host of `HOST[:SLOT,...]@HOST...`, sorted."""
    found: dict[str, set[int]] = {}
    for each in node_configs.split("@"):
        if each.rpartition("]")[2].count(":") > 1:
            raise ResourceError(
                f"{each!r} has several colons; write HOST or HOST:0,1, with @ between hosts, and an IPv6 "
                "address in brackets"
            )
        host, slots = parse_node_config(each)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(host_info: Active, include_str: str = "", exclude_str: str = "") -> Active:
    """Return the hosts and slots of `host_info` that `include_str` names, or all but those that `exclude_str`
    names.
    Both are `HOST[:SLOT,...]@...`; a host without slots stands for all of its own.

    Raises ResourceError where both are given, or where a host or a slot does not exist."""
    if include_str and exclude_str:
        raise ResourceError("include and exclude are both given; one says all: leave the other out")
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            users = "; a USER@ of it cannot be named here: move it to ~/.ssh/config" * ("@" in str(host_info))
            raise ResourceError(
                f"the host {host!r} is not there to choose: name one of {', '.join(host_info)}{users}"
            )
        for slot in slots:
            if slot not in host_info[host]:
                raise ResourceError(
                    f"the slot {slot} of {host!r} is not there to choose: name some of {host_info[host]}"
                )
    left = OrderedDict()
    for host, there in host_info.items():
        chosen = (named[host] or list(there)) if host in named else []
        slots = chosen if include_str else [slot for slot in there if slot not in chosen]
        if unique := list(dict.fromkeys(slots)):
            left[host] = unique
    return left


def parse_inclusion_exclusion(resource_pool: Pool, inclusion: str, exclusion: str) -> Active:
    """Do the same as `parse_resource_filter`, for a pool."""
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(active_resources: Active, num_nodes: int, num_gpus: int) -> Active:
    """Return the first `num_nodes` hosts, with slots 0 to `num_gpus` - 1 of each; 0 or less means all."""
    hosts = list(active_resources.items())[: num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus)) if num_gpus > 0 else slots) for host, slots in hosts)


def is_this_machine(host: str) -> bool:
    """Return whether `host`, a name or an address, is of this machine."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        addresses = look_up(host, 0, socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_has_address(family, address) for family, _, _, _, address in addresses)


def _has_address(family: int, address: Sequence[Any]) -> bool:
    """Return whether this machine can bind to an address, as only its own can be bound to."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(tuple(address))
        return True
    except OSError:
        return False
