"""Command lines that start the ranks of several hosts, as DeepSpeed builds them for each launcher. Of these,
`elsewhere` runs srun's."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from itertools import pairwise
from pathlib import Path
from shlex import split
from typing import Any

from polyreme.compat.deepspeed.launcher.constants import (
    LAUNCH_MODULE,
    LOCAL_SIZE,
    MVAPICH_TMP_HOSTFILE,
    PDSH_MAX_FAN_OUT,
)
from polyreme.compat.deepspeed.launcher.resources import Active, Pool, ResourceError, get_accelerator, logger
from polyreme.compat.deepspeed.utils.numa import get_numactl_cmd
from polyreme.distributed.environment import LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
from polyreme.files.direct_io import no_links


class MultiNodeRunner(ABC):
    """One launcher. `args` are those of `runner.parse_args`, `world_info_base64` is the word of
    `encode_world_info`."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The launcher's name, as for --launcher."""
        return type(self).__name__

    @abstractmethod
    def backend_exists(self) -> Any:
        """Whether its commands are installed here: a truth value."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> Any:
        """The command that starts all ranks, as words; of PDSHRunner with the one that kills them, and the
        variables."""

    def add_export(self, key: str, var: str) -> None:
        """Give the ranks a variable; one that a shell would not take as it is gets quotes."""
        value = var.strip()
        self.exports[key.strip()] = f'"{value}"' if re.search(r"[^\w@%+=:,./-]", value) else value

    def parse_user_args(self) -> list[str]:
        """The script's arguments, as the launcher has to get them."""
        arguments: list[str] = self.args.user_args
        return arguments

    def validate_args(self) -> None:
        """Raise ResourceError for options that this launcher cannot do."""
        return

    @classmethod
    def validate_active_resources(cls, active_resources: Active) -> None:
        """Raise ResourceError for slots that this launcher cannot choose."""
        return

    def _python(self) -> list[str]:
        """What stands before the script."""
        if self.args.no_python:
            return []
        return [sys.executable, "-u", *(["-m"] if self.args.module else [])]

    def _script(self) -> list[str]:
        return [*self._python(), self.user_script, *self.user_arguments]


class PDSHRunner(MultiNodeRunner):
    """pdsh, which gives the same command to a shell on each host."""

    @property
    def name(self) -> str:
        return "pdsh"

    def backend_exists(self) -> Any:
        return shutil.which("pdsh")

    def parse_user_args(self) -> list[str]:
        """Quoted where a shell would divide them."""
        return [
            '"{}"'.format(word.replace('"', '\\"')) if " " in word else word for word in self.args.user_args
        ]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Active
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            before = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{before} -p {self.args.ssh_port}"
        hosts = ",".join(active_resources)
        logger.debug("hosts: %s", hosts)
        pdsh = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", hosts, *split(self.args.launcher_args)]
        shell = ["".join(f"export {key}={value}; " for key, value in self.exports.items())]
        shell.append(f"cd {Path.cwd()};")
        if self.args.venv_script is not None:
            shell.insert(0, f"source {self.args.venv_script};")
        world = f"--world_info={self.world_info_base64}"
        python = [sys.executable, "-u", "-m", LAUNCH_MODULE]
        meeting = [f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"]
        node = [*python, world, "--node_rank=%n", *meeting, *self._options_of_ranks()]
        # the words that tell these processes from all others, as one pattern
        kill = [*pdsh, "pkill -f ", "\\ ".join([*python, world])]
        return [*pdsh, *shell, *node, self.user_script, *self.user_arguments], kill, environment

    def _options_of_ranks(self) -> list[str]:
        words = [f"--{name}" for name in ("no_python", "module", "no_local_rank") if getattr(self.args, name)]
        if self.args.save_pid:
            words += ["--save_pid", str(os.getpid())]
        if self.args.enable_each_rank_log:
            words.append(f"--enable_each_rank_log={self.args.enable_each_rank_log}")
        return words


class _MPIRunner(MultiNodeRunner):
    """One of MPI, which starts a rank on every slot of the pool."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def validate_args(self) -> None:
        for names in (("include", "exclude"), ("num_nodes", "num_gpus")):
            if said := [name for name in names if getattr(self.args, name) not in ("", -1)]:
                raise ResourceError(
                    f"the launcher {self.name} cannot choose slots, and --{said[0]} is given; "
                    "give a hostfile with these slots alone"
                )

    def backend_exists(self) -> Any:
        return shutil.which("mpirun")

    def _ranks(self) -> tuple[int, int]:
        """On all hosts, and on each.

        Raises ResourceError where hosts differ."""
        counts = set(self.resource_pool.values())
        if len(counts) != 1:
            raise ResourceError(
                f"the launcher {self.name} needs as many slots on each host, and they have "
                f"{dict(self.resource_pool)}"
            )
        return sum(self.resource_pool.values()), counts.pop()

    def _meeting(self, total: int, on_each: int) -> list[str]:
        """What Hydra's mpirun gives all ranks."""
        values = {
            MASTER_ADDR: self.args.master_addr,
            MASTER_PORT: self.args.master_port,
            WORLD_SIZE: total,
            LOCAL_SIZE: on_each,
        }
        return [word for name, value in values.items() for word in ("-genv", name, str(value))]


class OpenMPIRunner(_MPIRunner):
    """Open MPI."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    @property
    def name(self) -> str:
        return "openmpi"

    def backend_exists(self) -> Any:
        return shutil.which("ompi_info")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> list[str]:
        own = split(self.args.launcher_args)
        pairs = list(pairwise(own))
        says_network = any((dash, "btl_tcp_if_include") in pairs for dash in ("-mca", "--mca"))
        network = [] if says_network else ["--mca", "btl_tcp_if_include", "eth0"]
        count = str(sum(self.resource_pool.values()))
        mpirun = ["mpirun", "-n", count, "-hostfile", str(self.args.hostfile), "--mca", "btl", "^openib"]
        exports = [word for key, value in self.exports.items() for word in ("-x", f"{key}={value}")]
        return [*mpirun, *network, *own, *exports, *self._script()]


class MPICHRunner(_MPIRunner):
    """MPICH, whose ranks `launcher_helper` gives torchrun's variables."""

    @property
    def name(self) -> str:
        return "mpich"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> list[str]:
        total, on_each = self._ranks()
        mpirun = ["mpirun", "-n", str(total), "-ppn", str(on_each), *split(self.args.launcher_args)]
        exports = [word for key, value in self.exports.items() for word in ("-genv", f"{key}={value}")]
        hosts = ["-hosts", ",".join(self.resource_pool)]
        kind = "--no_python" if self.args.no_python else "--module" if self.args.module else ""
        helper = [
            *(sys.executable, "-u", str(Path(__file__).with_name("launcher_helper.py"))),
            *("--launcher", self.name),
            *([kind] if kind else []),
        ]
        meeting = self._meeting(total, on_each)
        return [*mpirun, *exports, *meeting, *hosts, *helper, self.user_script, *self.user_arguments]


class IMPIRunner(_MPIRunner):
    """Intel MPI, which starts each rank with variables of its own."""

    @property
    def name(self) -> str:
        return "impi"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> list[str]:
        total, on_each = self._ranks()
        command = ["mpirun", "-ppn", str(on_each), *split(self.args.launcher_args)]
        for key, value in self.exports.items():
            command += ["-genv", key, value]
        if self.args.bind_cores_to_rank:
            threads, _ = get_numactl_cmd(self.args.bind_core_list, on_each, 0)
            command += ["-genv", "OMP_NUM_THREADS", str(threads)]
        command += self._meeting(total, on_each)
        command += ["-genv", "I_MPI_PIN", "0", "-hosts", ",".join(self.resource_pool)]
        for rank in range(total):
            command += [*([":"] if rank else []), "-n", "1", "-env", RANK, str(rank)]
            command += ["-env", LOCAL_RANK, str(rank % on_each)]
            if self.args.bind_cores_to_rank:
                command += get_numactl_cmd(self.args.bind_core_list, on_each, rank % on_each)[1]
            command += self._script()
        return command


class SlurmRunner(MultiNodeRunner):
    """srun, which places ranks by their number alone."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    @property
    def name(self) -> str:
        return "slurm"

    def backend_exists(self) -> Any:
        return shutil.which("sinfo")

    @classmethod
    def validate_active_resources(cls, active_resources: Active) -> None:
        """Slots are to be the first ones, and as many on each host."""
        for host, slots in active_resources.items():
            if list(slots) != list(range(len(slots))):
                raise ResourceError(
                    f"srun cannot choose specific device ids, and {host} has {list(slots)}; "
                    "take whole hosts, or the first slots of each"
                )
        if len({len(slots) for slots in active_resources.values()}) > 1:
            counts = {host: len(slots) for host, slots in active_resources.items()}
            raise ResourceError(f"srun needs the same slot count on every host, and they have {counts}")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> list[str]:
        self.validate_active_resources(active_resources)
        total = sum(len(slots) for slots in active_resources.values())
        command = ["srun", "-n", str(total), *split(self.args.launcher_args)]
        if comment := getattr(self.args, "slurm_comment", ""):
            command += ["--comment", comment]
        if self.args.include or self.args.exclude:
            # srun may use fewer than all hosts of a list, unless their number is said, too
            command += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        if self.args.num_nodes > 0:
            command += ["--nodes", str(self.args.num_nodes)]
        if self.args.num_gpus > 0:
            command += ["--gpus-per-node", str(self.args.num_gpus)]
        command.append(",".join(["--export=ALL", *(f"{key}={value}" for key, value in self.exports.items())]))
        return [*command, *self._script()]


class MVAPICHRunner(_MPIRunner):
    """MVAPICH2-GDR."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        variables: Mapping[str, str] = {
            "MV2_SMP_USE_CMA": "0",  # a kernel module that Ubuntu does not have
            "MV2_DEBUG_SHOW_BACKTRACE": "1",
            **({"MV2_USE_CUDA": "1"} if get_accelerator().device_name() == "cuda" else {}),
            "MV2_SUPPORT_DL": "1",
            "MV2_ENABLE_AFFINITY": "0",  # which several threads of MPI need
            "MV2_INTER_ALLGATHER_TUNING": "5",
            "MV2_CUDA_USE_NAIVE": "0",
        }
        for key, value in variables.items():
            self.add_export(key, value)

    @property
    def name(self) -> str:
        return "mvapich"

    def backend_exists(self) -> bool:
        if not shutil.which("mpiname"):
            warnings.warn("there is no mpiname: MVAPICH2 is not installed", stacklevel=2)
            return False
        found = subprocess.check_output(["mpiname"], text=True).strip()
        if "MVAPICH2-GDR" not in found:
            warnings.warn(f"mpiname says {found!r}, and not MVAPICH2-GDR", stacklevel=2)
        return "MVAPICH2-GDR" in found

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Active) -> list[str]:
        total, on_each = self._ranks()
        with open(MVAPICH_TMP_HOSTFILE, "w", opener=no_links) as file:
            file.writelines(f"{host}\n" for host in self.resource_pool)
        mpirun = ["mpirun", "-np", str(total), "-ppn", str(on_each), "--hostfile", MVAPICH_TMP_HOSTFILE]
        exports = [word for key, value in self.exports.items() for word in ("-env", f"{key}={value}")]
        return [*mpirun, *split(self.args.launcher_args), *exports, *self._script()]
