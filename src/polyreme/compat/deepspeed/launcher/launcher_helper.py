"""Gives a rank that MPICH started torchrun's variables, and becomes the script. Run by its path, by the
command of `multinode_runner.MPICHRunner`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence

from polyreme.distributed.environment import LOCAL_RANK, RANK
from polyreme.errors import LaunchError

_RANKS = ("PMIX_RANK", "PMI_RANK")
_LOCAL_RANKS = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """`[--launcher mpich] [--module | --no_python] SCRIPT ARGUMENTS...`"""
    parser = argparse.ArgumentParser(description="Start one rank of MPICH.")
    parser.add_argument("--launcher", default="mpich", type=str, choices=["mpich"], help="who started it")
    parser.add_argument("--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("--no_python", action="store_true", help="SCRIPT is a program")
    parser.add_argument("user_script", type=str, metavar="SCRIPT")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, metavar="ARGUMENTS")
    return parser.parse_args(args)


def env_mapping(
    env: MutableMapping[str, str],
    rank_name_list: Sequence[str] = _RANKS,
    local_rank_name_list: Sequence[str] = _LOCAL_RANKS,
) -> MutableMapping[str, str]:
    """Add this rank's numbers to `env`, from the variables that a launcher may set.

    Raises LaunchError where there are none, or where two differ."""
    for own, names in ((RANK, rank_name_list), (LOCAL_RANK, local_rank_name_list)):
        found = {env[name] for name in names if name in env}
        if len(found) != 1:
            raise LaunchError(
                f"{', '.join(names)} say {', '.join(sorted(found)) or 'nothing'}, and one of them is to say "
                f"{own}; start this with MPICH's mpirun"
            )
        env[own] = found.pop()
    return env


def main(args: Sequence[str] | None = None) -> None:
    """Become the script."""
    options = parse_args(args)
    python = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    command = [*python, options.user_script, *options.user_args]
    os.execvpe(command[0], command, env_mapping(dict(os.environ)))


if __name__ == "__main__":
    main()
