"""The options of DeepSpeed's command, 0.19.8. `runner` says which of them are done, and which refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from polyreme.compat.deepspeed.launcher.constants import (
    DLTS_HOSTFILE,
    PDSH_LAUNCHER,
    TORCH_DISTRIBUTED_DEFAULT_PORT,
)

LEVELS = ["debug", "info", "warning", "error", "critical"]
_REMOVED = {
    "--elastic_training": "checkpoints go on with any number of ranks: start again with as many as there are",
    "--min_elastic_nodes": "checkpoints go on with any number of ranks",
    "--max_elastic_nodes": "checkpoints go on with any number of ranks",
    "--detect_nvlink_pairs": "name the devices in their order with --include or CUDA_VISIBLE_DEVICES",
    "--slurm_comment": "give it with --launcher_args",
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: DeepSpeed's "" and -1 stand for an option that is left out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", -1, "None"):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Says what to do: in place of an option that DeepSpeed had once, and where nothing is given."""

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:
            message = f"there is no script to run: {self.prog} --num_gpus 2 train.py --deepspeed ds.json"
        for name, instead in _REMOVED.items():
            if name in message:
                message += f"\n  DeepSpeed 0.19.8 has no {name}: {instead}"
        super().error(f"{message}\n{self.prog} --help shows the options")


def _options_of_ranks(parser: argparse.ArgumentParser) -> None:
    """What concerns ranks, once their hosts are known."""
    add = parser.add_argument
    add("--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("--no_python", action="store_true", help="SCRIPT is a program, and is run as it is")
    add("--no_local_rank", action="store_true", help="do not give the script --local_rank=N")
    add(
        "--enable_each_rank_log",
        default="None",
        type=str,
        metavar="FOLDER",
        help="write the output of each rank to a file in this folder",
    )
    add(
        "--bind_cores_to_rank",
        action="store_true",
        help="keep each rank on its share of the cores, whatever OMP_NUM_THREADS is",
    )
    add("--bind_core_list", type=str, metavar="CORES", help="share these cores only, such as 1,3-5,7")
    add("--log_level", type=str, default="info", choices=LEVELS, help="what the launcher tells")
    add("-q", "--quiet", action="store_true", help="the same as --log_level error")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `deepspeed [OPTIONS] SCRIPT ARGUMENTS...`, with DeepSpeed's names and defaults; all that
    follows SCRIPT is `user_args`. Ends the process with status 2 for options that are not."""
    parser = _Parser(
        prog="polyreme deepspeed",
        usage="%(prog)s [OPTIONS] SCRIPT [ARGUMENTS]...",
        description="Run a DeepSpeed script as ranks on this machine or on a hostfile's, on Polyreme.",
        formatter_class=_Help,
    )
    _options_of_hosts(parser)
    _options_of_the_way_there(parser)
    _options_of_ranks(parser)
    add = parser.add_argument
    add("--save_pid", action="store_true", help="write the launcher's process id to /tmp/PID.deepspeed")
    add(
        "--autotuning",
        default="",
        choices=["tune", "run"],
        type=str,
        help="(refused) try other settings by itself",
    )
    add("user_script", type=str, metavar="SCRIPT", help="the script")
    add("user_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="all that follows is the script's")
    return parser.parse_args(args)


def _options_of_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    slots = "as HOST[:SLOT,...]@HOST..., a host without slots being all of its own"
    add("-H", "--hostfile", type=str, default=DLTS_HOSTFILE, help="a file of lines HOST slots=N")
    add("-i", "--include", type=str, default="", help=f"use only these slots, {slots}")
    add("-e", "--exclude", type=str, default="", help=f"use all but these slots, {slots}")
    add(
        "--num_nodes",
        type=int,
        default=-1,
        help="use so many hosts, the first of the hostfile; all by default",
    )
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="ranks on each host; by default one a GPU, and 1 without GPUs",
    )
    add("--force_multi", action="store_true", help="start a single host's ranks as those of several")


def _options_of_the_way_there(parser: argparse.ArgumentParser) -> None:
    """How hosts and ranks reach each other."""
    add = parser.add_argument
    add(
        "--master_port",
        default=TORCH_DISTRIBUTED_DEFAULT_PORT,
        type=int,
        help="where ranks meet; the default, or any other if it is taken",
    )
    add("--master_addr", default="", type=str, help="the address of the first host")
    add("--node_rank", default=-1, type=int, help="with --no_ssh: which of the hosts this is")
    add(
        "--launcher",
        default=PDSH_LAUNCHER,
        type=str,
        help="(for several hosts) what starts ranks there: pdsh, which is ssh itself here, openmpi, mpich, "
        "impi, mvapich or slurm",
    )
    add(
        "--launcher_args",
        default="",
        type=str,
        help="(for several hosts) arguments of mpirun or srun, in one word",
    )
    add("--no_ssh", action="store_true", help="the command is given on each host, with its --node_rank")
    add("--no_ssh_check", action="store_true", help="(nothing to do) hosts are always looked at first")
    add("--ssh_port", type=int, default=None, help="(for several hosts) the port of ssh")
    add(
        "--venv_script",
        type=str,
        default=None,
        help="(for several hosts) the file that their shells source first",
    )


def parse_launch_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `launch`, which starts the ranks of one host of several."""
    parser = argparse.ArgumentParser(
        prog="polyreme.compat.deepspeed.launcher.launch", description="Start the ranks of one host."
    )
    add = parser.add_argument
    add("--node_rank", type=int, default=0, help="which of the hosts this is")
    add("--master_addr", default="127.0.0.1", type=str, help="the address of the first host")
    add("--master_port", default=TORCH_DISTRIBUTED_DEFAULT_PORT, type=int, help="where ranks meet")
    add("--world_info", default="None", type=str, help="hosts and slots, from encode_world_info")
    _options_of_ranks(parser)
    add(
        "--save_pid", type=int, default=0, metavar="PID", help="write this process's id to /tmp/PID.deepspeed"
    )
    add("training_script", type=str, help="the script")
    add("training_script_args", nargs=argparse.REMAINDER, help="all that follows is the script's")
    return parser.parse_args(args)
