"""The options of DeepSpeed's command, 0.19.8. `runner` says which of them are done, and which refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

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


class _Parser(argparse.ArgumentParser):
    """Says what to do: in place of an option that DeepSpeed had once, and where nothing is given."""

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:
            message = f"there is no script to run: {self.prog} --num_gpus 2 train.py --deepspeed ds.json"
        for name, instead in _REMOVED.items():
            if name in message:
                message += f"\n  DeepSpeed 0.19.8 has no {name}: {instead}"
        super().error(f"{message}\n{self.prog} --help shows the options")


_SLOTS = "as HOST[:SLOT,...]@HOST..., a host without slots being all of its own"
Option = tuple[Any, ...]
"""Its names, its type (bool: it has no value), its default, what it does, and the values that it may have."""
_OF_HOSTS: tuple[Option, ...] = (
    ("-H --hostfile", str, DLTS_HOSTFILE, "a file of lines HOST slots=N"),
    ("-i --include", str, "", f"use only these slots, {_SLOTS}"),
    ("-e --exclude", str, "", f"use all but these slots, {_SLOTS}"),
    ("--num_nodes", int, -1, "use so many hosts, the first of the hostfile; all by default"),
    ("--num_gpus --num_accelerators", int, -1, "ranks on each host; by default one a GPU, 1 without GPUs"),
    ("--force_multi", bool, False, "start a single host's ranks as those of several"),
    ("--master_port", int, TORCH_DISTRIBUTED_DEFAULT_PORT, "where ranks meet; any other if that is taken"),
    ("--master_addr", str, "", "the address of the first host"),
    ("--node_rank", int, -1, "with --no_ssh: which of the hosts this is"),
    ("--launcher", str, PDSH_LAUNCHER, "(for several hosts) what starts ranks there: pdsh, which is ssh "
     "itself here, openmpi, mpich, impi, mvapich or slurm"),
    ("--launcher_args", str, "", "(for several hosts) arguments of mpirun or srun, in one word"),
    ("--no_ssh", bool, False, "the command is given on each host, with its --node_rank"),
    ("--no_ssh_check", bool, False, "(nothing to do) hosts are always looked at first"),
    ("--ssh_port", int, None, "(for several hosts) the port of ssh"),
    ("--venv_script", str, None, "(for several hosts) the file that their shells source first"),
    ("--save_pid", bool, False, "write the launcher's process id to /tmp/PID.deepspeed"),
    ("--autotuning", str, "", "(refused) try other settings by itself", ["tune", "run"]),
)  # fmt: skip
OF_RANKS: tuple[Option, ...] = (
    ("--module", bool, False, "SCRIPT is the name of a module, as for python -m"),
    ("--no_python", bool, False, "SCRIPT is a program, and is run as it is"),
    ("--no_local_rank", bool, False, "do not give the script --local_rank=N"),
    ("--enable_each_rank_log", str, "None", "write the output of each rank to a file in this folder"),
    ("--bind_cores_to_rank", bool, False, "keep ranks on their shares of cores, with any OMP_NUM_THREADS"),
    ("--bind_core_list", str, None, "share these cores only, such as 3,5-7,9"),
    ("--log_level", str, "info", "what the launcher tells", LEVELS),
    ("-q --quiet", bool, False, "the same as --log_level error"),
)  # fmt: skip
"""The options about ranks, once their hosts are known."""
_OF_ONE_HOST: tuple[Option, ...] = (
    ("--node_rank", int, 0, "which of the hosts this is"),
    ("--master_addr", str, "127.0.0.1", "the address of the first host"),
    ("--master_port", int, TORCH_DISTRIBUTED_DEFAULT_PORT, "where ranks meet"),
    ("--world_info", str, "None", "hosts and slots, from encode_world_info"),
    ("--save_pid", int, 0, "write this process's id to /tmp/PID.deepspeed"),
)
"""The options of the starter of the ranks of one host of several."""


def _add(parser: argparse.ArgumentParser, script: str, arguments: str, *tables: tuple[Option, ...]) -> None:
    """Add the options of the tables, the script, and all that follows it."""
    for names, kind, default, says, *choices in (row for table in tables for row in table):
        how: dict[str, Any] = {"type": kind, "choices": choices[0] if choices else None}
        if kind is bool:
            how = {"action": "store_true"}
        shown = "" if default in (None, False, "", -1, "None") else " (default: %(default)s)"
        parser.add_argument(*names.split(), default=default, help=says + shown, **how)
    parser.add_argument(script, type=str, metavar="SCRIPT", help="the script")
    parser.add_argument(
        arguments, nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="all that follows is the script's"
    )


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `deepspeed [OPTIONS] SCRIPT ARGUMENTS...`, with DeepSpeed's names and defaults;
    all that follows SCRIPT is `user_args`. Ends the process with status 2 for options that are not."""
    parser = _Parser(
        prog="polyreme deepspeed",
        usage="%(prog)s [OPTIONS] SCRIPT [ARGUMENTS]...",
        description="Run a DeepSpeed script as ranks on this machine or on a hostfile's, on Polyreme.",
    )
    _add(parser, "user_script", "user_args", _OF_HOSTS, OF_RANKS)
    return parser.parse_args(args)


def parse_launch_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `launch`, which starts the ranks of one host of several."""
    parser = argparse.ArgumentParser(
        prog="polyreme.compat.deepspeed.launcher.launch", description="Start the ranks of one host."
    )
    _add(parser, "training_script", "training_script_args", _OF_ONE_HOST, OF_RANKS)
    return parser.parse_args(args)
