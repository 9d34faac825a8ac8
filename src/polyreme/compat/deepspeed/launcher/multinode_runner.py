"""DeepSpeed's builders of the commands that start the ranks of several hosts, by MPI and Slurm, for scripts
that read these: each is what `elsewhere` runs for that --launcher. pdsh has none, as ssh itself takes its
place."""

from __future__ import annotations

import re
import shutil
from typing import Any

from polyreme.compat.deepspeed.launcher import constants, elsewhere
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
        self.user_arguments, self.user_script = args.user_args, args.user_script
        self.exports, self._values = dict[str, str](), dict[str, str]()

    def backend_exists(self) -> bool:
        """Return whether the launcher is installed here."""
        return shutil.which(self.program) is not None

    def add_export(self, key: str, var: str) -> None:
        """Give the ranks a variable. In `exports` a value that a shell would not take as it is has quotes."""
        self._values[key.strip()] = value = var.strip()
        self.exports[key.strip()] = value if re.fullmatch(r"[\w@%+=:,./-]*", value) else f'"{value}"'


class SlurmRunner(MultiNodeRunner):
    """srun, which hands on the whole environment."""

    name, program = constants.SLURM_LAUNCHER, "srun"

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
