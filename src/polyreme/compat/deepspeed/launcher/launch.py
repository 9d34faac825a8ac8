"""Starts the ranks of this machine as DeepSpeed's launcher does, through `polyreme.launch`.

`python -m polyreme.compat.deepspeed.launcher.launch --world_info=... SCRIPT ARGUMENTS...`

What a script finds: `--local_rank=N` before its own arguments (unless --no_local_rank), torchrun's variables,
CROSS_RANK, CROSS_SIZE and LOCAL_SIZE, with GPUs CUDA_VISIBLE_DEVICES, and this door (`import deepspeed`). Of
several hosts each starts its own, and they meet at --master_addr; of one nothing listens beyond loopback."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import constants
from polyreme.compat.deepspeed.launcher.arguments import parse_launch_args as parse_args
from polyreme.compat.deepspeed.launcher.resources import decode_world_info, get_accelerator, logger
from polyreme.compat.deepspeed.utils.numa import parse_range_list
from polyreme.distributed.environment import LOOPBACK, refuse_several
from polyreme.errors import PolyremeError
from polyreme.files.direct_io import no_links
from polyreme.launch.cores import PIN
from polyreme.launch.hostfile import Active, ResourceError, is_this_machine
from polyreme.launch.hosts import Hosts
from polyreme.launch.options import LaunchOptions
from polyreme.launch.torchrun import launch

PID_FILE_BASEPATH = "/tmp"
MODULE_OR_PROGRAM = "--module and --no_python are both given: SCRIPT is a module or a program"


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks of the node that the arguments name, and wait for their end.

    Raises ResourceError for options that cannot be, RanksFailedError when a rank fails."""
    options = parse_args(args)
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    if options.world_info == "None":
        raise ResourceError("--world_info is missing; it is what encode_world_info gives, of hosts and slots")
    world = decode_world_info(options.world_info)
    if not 0 <= options.node_rank < len(world):
        raise ResourceError(f"--node_rank={options.node_rank}, but the hosts are {', '.join(world)}")
    run(
        options,
        words(options.module, options.training_script, options.training_script_args),
        world,
        options.node_rank,
        pid=options.save_pid,
    )


def words(module: bool, script: str, arguments: Sequence[str]) -> list[str]:
    """Return the words that follow `python`."""
    return [*(["-m"] if module else []), script, *arguments]


def place(index: int, hosts: int, ranks: int) -> dict[str, str]:
    """Return the variables that say which host a rank is on, of how many, and beside how many ranks."""
    names = (constants.CROSS_RANK, constants.CROSS_SIZE, constants.LOCAL_SIZE)
    return dict(zip(names, map(str, (index, hosts, ranks)), strict=True))


def ports(port: int) -> tuple[int, ...]:
    """Return where ranks of one host may meet: instead of the default port at any other."""
    return (port, 0) if port == constants.TORCH_DISTRIBUTED_DEFAULT_PORT else (port,)


def run(options: argparse.Namespace, command: Sequence[str], world: Active, index: int, pid: int = 0) -> None:
    """Run `command` as a rank for each slot of this machine, which is number `index` of the hosts of `world`,
    as `options` say (those that both parsers of `arguments` have), and wait for their end. `pid`: the name
    of the file for --save_pid, or 0.

    Raises LaunchError or ResourceError for what cannot be started, RanksFailedError when a rank fails."""
    if options.module and options.no_python:
        raise ResourceError(MODULE_OR_PROGRAM)
    hosts = _hosts(options, len(world), index)
    slots = list(world.values())[index]
    with _cores(options, len(slots)) as binding, pid_file(pid):
        launch_options = LaunchOptions(
            variables={
                **finder.variables("deepspeed"),
                **place(index, len(world), len(slots)),
                **_visible_devices(slots),
                **binding,
            },
            ports=ports(options.master_port),
            local_rank=not options.no_local_rank,
            program=options.no_python,
            log=log(options.enable_each_rank_log),
        )
        launch(command, len(slots), options=launch_options, hosts=hosts)


def _hosts(options: argparse.Namespace, count: int, index: int) -> Hosts | None:
    """Return where the command, which was given on each of several hosts, meets the others."""
    if count == 1:
        refuse_several("DeepSpeed's launcher")
        if options.master_addr and not is_this_machine(options.master_addr):
            raise ResourceError(
                f"--master_addr {options.master_addr} is another machine's, and ranks are started on this "
                "one only; leave it out"
            )
        return None
    if options.master_addr in ("", "localhost", LOOPBACK):
        raise ResourceError(
            f"{count} hosts, each of which starts its own ranks, and where they meet is not said; give each "
            "--master_addr with the address of the first one"
        )
    return Hosts(index, count, count, (options.master_addr, options.master_port))


def _visible_devices(slots: Sequence[int]) -> dict[str, str]:
    """Return the variables that show ranks these devices alone: of those that this process sees, by their
    place."""
    found = {}
    for name in get_accelerator().visible_devices_envs():
        seen = [device for device in os.environ.get(name, "").split(",") if device]
        devices = [seen[slot] for slot in slots] if seen and max(slots) < len(seen) else slots
        found[name] = ",".join(map(str, devices))
    return found


def log(folder: str) -> str | None:
    """Return how the paths of the ranks' files begin, in a folder that is made if it is not there."""
    if folder == "None":
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"--enable_each_rank_log {folder}: {error.strerror}; give a folder that can be made or written to"
        ) from None
    return str(Path(folder, time.strftime("%Y%m%d%H%M%S_rank")))


@contextlib.contextmanager
def _cores(options: argparse.Namespace, ranks: int) -> Iterator[dict[str, str]]:
    """Give variables for ranks that each stay on their share of the cores, if that is asked for: of all that
    this process may use, or of --bind_core_list."""
    if not options.bind_cores_to_rank:
        if options.bind_core_list is not None:
            raise ResourceError("--bind_core_list is for --bind_cores_to_rank: give both, or neither")
        yield {}
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ResourceError("--bind_cores_to_rank: this system keeps no process on cores; leave it out")
    before = os.sched_getaffinity(0)
    asked = before if options.bind_core_list is None else set(parse_range_list(options.bind_core_list))
    if not asked <= before or len(asked) < ranks:
        raise ResourceError(
            f"--bind_cores_to_rank: {ranks} ranks need a core each, of the cores {sorted(before)} "
            f"that this process may use, and are given {sorted(asked)}; give fewer ranks or other cores"
        )
    os.sched_setaffinity(0, asked)
    try:
        yield {PIN: "1", "OMP_NUM_THREADS": str(len(asked) // ranks)}
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def pid_file(pid: int) -> Iterator[None]:
    """Keep this process's id in /tmp/PID.deepspeed, as long as ranks run."""
    if not pid:
        yield
        return
    path = Path(PID_FILE_BASEPATH, f"{pid}.deepspeed")
    try:
        with open(path, "x", opener=no_links) as file:
            file.write(str(os.getpid()))
    except OSError as error:
        raise ResourceError(
            f"--save_pid: {path}: {error.strerror}; delete it if no such run is left"
        ) from None
    print(f"launcher pid: {os.getpid()}", flush=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def command_line(function: Callable[[], object]) -> None:
    """Call `main` of a module that is run by itself; an error of Polyreme's is a message and an exit
    status."""
    try:
        function()
    except PolyremeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    command_line(main)
