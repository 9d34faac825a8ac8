"""DeepSpeed's command: options, hosts and slots in, ranks started: of this machine by `launch`, of others by
`elsewhere`.

Each option is done, or refused with what to do in its place; those that speak of the way to other hosts are
named in a warning where there is none."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from polyreme.compat.deepspeed.launcher import constants, elsewhere, launch
from polyreme.compat.deepspeed.launcher.arguments import parse_args
from polyreme.compat.deepspeed.launcher.resources import encode_world_info as encode_world_info
from polyreme.compat.deepspeed.launcher.resources import fetch_hostfile, get_accelerator, logger
from polyreme.launch import hostfile
from polyreme.launch.hostfile import Active, Pool, ResourceError, is_this_machine

# names that scripts import from here
DLTS_HOSTFILE, PDSH_MAX_FAN_OUT = constants.DLTS_HOSTFILE, constants.PDSH_MAX_FAN_OUT
TORCH_DISTRIBUTED_DEFAULT_PORT = constants.TORCH_DISTRIBUTED_DEFAULT_PORT
DEEPSPEED_ENVIRONMENT_NAME = constants.ENVIRONMENT_FILE
parse_resource_filter = hostfile.parse_resource_filter
parse_inclusion_exclusion = hostfile.parse_inclusion_exclusion
parse_node_config, parse_node_config_list = hostfile.parse_node_config, hostfile.parse_node_config_list
apply_num_nodes_and_gpus, _parse_hostfile = hostfile.apply_num_nodes_and_gpus, hostfile.parse_hostfile


def main(args: Sequence[str] | None = None) -> None:
    """Do what `deepspeed ARGS` does; returns when all ranks have ended well.

    Raises ResourceError (a ValueError) for options, hosts and slots that cannot be, RanksFailedError when a
    rank fails."""
    options = parse_args(args)
    logger.setLevel("ERROR" if options.quiet else options.log_level.upper())
    pool = fetch_hostfile(options.hostfile)
    active = _resources(options, pool)
    _refuse(options, active)
    if not options.no_ssh and (
        options.force_multi or len(active) > 1 or not is_this_machine(next(iter(active)))
    ):
        elsewhere.start(options, active)
        return
    _warn(options)
    command = launch.words(options.module, options.user_script, options.user_args)
    index = options.node_rank if options.no_ssh else 0
    if options.no_ssh and len(active) > 1:
        options.master_addr = options.master_addr or next(iter(active))
    logger.debug("slots %s run %s", list(active.values())[index], command)
    launch.run(options, command, active, index, pid=os.getpid() if options.save_pid else 0)


def _resources(options: argparse.Namespace, pool: Pool | None) -> Active:
    """The slots that are to be used, of the hostfile's `pool` or of this machine."""
    if not pool:
        _take_visible_devices(options)
    if 0 in (options.num_nodes, options.num_gpus):
        raise ResourceError("--num_nodes or --num_gpus is 0; give 1 or more, or leave it out for all")
    if max(options.num_nodes, options.num_gpus) >= 0 and (options.include or options.exclude):
        raise ResourceError(
            "--num_nodes or --num_gpus is given with --include or --exclude; each says which slots to use: "
            "leave one of them out"
        )
    if not pool:
        devices = get_accelerator()
        count = devices.device_count()
        if options.num_nodes > 1:
            raise ResourceError(
                f"--num_nodes {options.num_nodes}, but there is no hostfile: only this machine is known"
            )
        if options.num_gpus > count and devices.device_name() != "cpu":
            raise ResourceError(
                f"--num_gpus {options.num_gpus}, but this machine has {count}; give at most as many"
            )
        pool = {"localhost": count}
    active = parse_inclusion_exclusion(pool, options.include, options.exclude)
    return apply_num_nodes_and_gpus(active, options.num_nodes, options.num_gpus)


def _take_visible_devices(options: argparse.Namespace) -> None:
    """Take CUDA_VISIBLE_DEVICES=0,2 as --include localhost:0,2, unless other options say which slots; with
    names of devices in it, slots count those."""
    name = next(iter(get_accelerator().visible_devices_envs()), None)
    visible = os.environ.get(name, "") if name else ""
    if not name or not all(device.strip().isdecimal() for device in visible.split(",")):
        return
    if options.include or options.exclude or options.num_nodes > 1 or options.num_gpus > 0:
        logger.warning("%s=%s is not used: options say which devices are", name, visible)
    else:
        options.include = f"localhost:{visible}"
    del os.environ[name]


def _refuse(options: argparse.Namespace, active: Active) -> None:
    """Raise ResourceError for what is not done."""
    if options.autotuning:
        raise ResourceError(
            f"--autotuning {options.autotuning}: there is no autotuner that runs trainings; "
            "compare runs with other values of zero_optimization.stage and train_micro_batch_size_per_gpu"
        )
    if options.launcher.lower() not in constants.LAUNCHERS:
        raise ResourceError(
            f"--launcher {options.launcher} is not known; there are {', '.join(constants.LAUNCHERS)}"
        )
    if options.launcher.lower() == constants.SLURM_LAUNCHER:
        elsewhere.refuse_for_srun(active)
    if not active:
        raise ResourceError("--exclude leaves no slot; name fewer")
    if options.no_ssh and not 0 <= options.node_rank < len(active):
        raise ResourceError(
            f"--no_ssh with --node_rank {options.node_rank}: it says which of the hosts {', '.join(active)} "
            f"this is; give 0 to {len(active) - 1}"
        )


def _warn(options: argparse.Namespace) -> None:
    """Name the options that say nothing where no other host is to be reached."""
    idle = ("launcher", "launcher_args", "ssh_port", "no_ssh_check", "venv_script")
    defaults = parse_args([options.user_script])
    if said := [f"--{name}" for name in idle if getattr(options, name) != getattr(defaults, name)]:
        logger.warning("%s: of use on other hosts only, and ranks are started on this one", ", ".join(said))


if __name__ == "__main__":
    launch.command_line(main)
