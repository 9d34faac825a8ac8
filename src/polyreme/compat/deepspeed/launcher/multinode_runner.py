"""DeepSpeed's builders of the commands that start the ranks of several hosts, for scripts that read or run
these. Those of MPI and Slurm are what `elsewhere` runs for that --launcher; in place of pdsh it takes ssh,
and only `PDSHRunner` has a command of pdsh."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from shlex import quote, split
from typing import Any

from polyreme.compat.deepspeed.launcher import constants, elsewhere
from polyreme.compat.deepspeed.launcher.arguments import OF_RANKS
from polyreme.compat.deepspeed.lazy import lazily
from polyreme.launch import mpirun

__getattr__ = lazily(__name__)


class MultiNodeRunner:
    """One launcher, for the options of `runner.parse_args`. Each has `get_cmd(environment,
    active_resources)`, which returns the words that start the ranks of hosts, whose slots are listed or
    counted, and adds to the environment what these words need there."""

    name, program = "", "mpirun"

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Any = None) -> None:
        self.args, self.world_info_base64, self.resource_pool = args, world_info_base64, resource_pool
        self.user_arguments, self.user_script = self.parse_user_args(), args.user_script
        self.exports, self._values = dict[str, str](), dict[str, str]()

    @classmethod
    def validate_active_resources(cls, active_resources: Any) -> None:
        """Raise ResourceError for slots of hosts that the launcher can never choose."""

    def parse_user_args(self) -> list[str]:
        """Return the script's arguments as the command has them."""
        return list(self.args.user_args)

    def backend_exists(self) -> bool:
        """Return whether the launcher is installed here."""
        return shutil.which(self.program) is not None

    def add_export(self, key: str, var: str) -> None:
        """Give the ranks a variable. In `exports` a value that a shell would not take as it is has quotes."""
        self._values[key.strip()] = value = var.strip()
        self.exports[key.strip()] = value if re.fullmatch(r"[\w@%+=:,./-]*", value) else f'"{value}"'


class PDSHRunner(MultiNodeRunner):
    """pdsh, which runs `launcher.launch` on each host over ssh, in this folder and by this Python's path.

    pdsh must be installed here, and ssh must reach every host without a question."""

    name = program = constants.PDSH_LAUNCHER

    def parse_user_args(self) -> list[str]:
        return [_for_pdsh(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Any
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the words that start the ranks, the words that end them, and `environment`, which both need.

        `active_resources` names the hosts in the order of `world_info_base64`, which has their slots
        (`runner.encode_world_info` returns it). They meet at the first one, unless --master_addr says
        another."""
        options = self.args
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if options.ssh_port is not None:
            given = f"{environment.get(elsewhere.OF_SSH, '')} -p {options.ssh_port}"
            environment[elsewhere.OF_SSH] = given.strip()
        hosts = list(active_resources)
        pdsh = ["pdsh", "-S", "-f", str(constants.PDSH_MAX_FAN_OUT), "-w", ",".join(hosts)]
        pdsh += split(options.launcher_args)
        exports = [_for_pdsh(f"{name}={value}") for name, value in self._values.items()]
        source = [".", _for_pdsh(options.venv_script), "&&"] if options.venv_script else []
        python = [
            *(sys.executable, "-u", "-m", "polyreme.compat.deepspeed.launcher.launch"),
            f"--world_info={self.world_info_base64}",
        ]
        of_run = [
            *("--node_rank=%n", f"--master_addr={options.master_addr or hosts[0]}"),
            *(f"--master_port={options.master_port}", f"--save_pid={os.getpid() if options.save_pid else 0}"),
        ]
        for names, kind, default, *_ in OF_RANKS:
            name = names.split()[-1]
            if (value := getattr(options, name.removeprefix("--"))) != default:
                of_run.append(name if kind is bool else _for_pdsh(f"{name}={value}"))
        # from its beginning, so that pdsh, ssh and shells, which have these words in theirs, are not ended
        launcher = f"^{re.escape(' '.join(python))} .* --master_port={options.master_port} "
        start = [
            *source,
            *(["export", *exports, "&&"] if exports else []),
            *("cd", _for_pdsh(str(Path.cwd())), "&&"),
            *("exec", *map(_for_pdsh, python)),
            *(*of_run, _for_pdsh(self.user_script), *self.user_arguments),
        ]
        return [*pdsh, *start], [*pdsh, "pkill", "-f", "--", _for_pdsh(launcher)], environment


def _for_pdsh(word: str) -> str:
    """Return the word as pdsh takes it, which replaces %n, and then the shell of a host."""
    return quote(word).replace("%", "%%")


class SlurmRunner(MultiNodeRunner):
    """srun, which hands on the whole environment."""

    name, program = constants.SLURM_LAUNCHER, "srun"

    @classmethod
    def validate_active_resources(cls, active_resources: Any) -> None:
        elsewhere.refuse_for_srun(active_resources)

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        environment.update(self._values)
        return elsewhere.srun_words(self.args, active_resources)


class MPICHRunner(MultiNodeRunner):
    """mpirun of MPICH, and of other libraries that have its Hydra."""

    name, kind = constants.MPICH_LAUNCHER, mpirun.HYDRA

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        listed = {host: [*range(n)] if isinstance(n, int) else n for host, n in active_resources.items()}
        # DeepSpeed's ranks of Open MPI meet over eth0, unless options say another
        meets = self.kind == mpirun.OPEN_MPI and "tcp_if_include" not in self.args.launcher_args
        request = elsewhere.mpi_request(self.args, listed, self._values, "eth0" if meets else None)
        words, variables = mpirun.command(mpirun.Library("mpirun", self.kind), request)
        environment.update(variables)
        return words


class OpenMPIRunner(MPICHRunner):
    """mpirun of Open MPI."""

    name, kind = constants.OPENMPI_LAUNCHER, mpirun.OPEN_MPI


class IMPIRunner(MPICHRunner):
    """mpirun of Intel MPI."""

    name = constants.IMPI_LAUNCHER


class MVAPICHRunner(MPICHRunner):
    """mpirun of MVAPICH."""

    name = constants.MVAPICH_LAUNCHER
