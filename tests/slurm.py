"""A Slurm cluster for tests: a controller on the first of some hosts (hosts.py), and a node on each.

Invariant: its files are in one folder and in the hosts' own /run; its daemons end with the hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hosts import Host, hosts

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")
SETTLED = 20.0
"""Seconds that the nodes get to come; they take 4."""

CONFIG = """
ClusterName=tests
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Cluster:
    """The hosts of a cluster; commands run on the first."""

    def __init__(self, made: list[Host], folder: Path) -> None:
        self.hosts, self._folder = made, folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        """What a command (srun, sbatch, ...) prints that ends well."""
        return self.hosts[0].run(*words, folder=folder, variables={**self.variables, **(variables or {})})

    def popen(self, *words: str) -> subprocess.Popen[str]:
        """Start a command."""
        return self.hosts[0].popen(*words, variables=self.variables)

    def start(self) -> None:
        """Start the daemons, and wait until every node is idle."""
        cores = len(os.sched_getaffinity(0))
        nodes = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs={cores} State=UNKNOWN" for host in self.hosts
        ]
        (self._folder / "slurm.conf").write_text(CONFIG.format(folder=self._folder, nodes="\n".join(nodes)))
        key = os.urandom(128)
        for host in self.hosts:
            run = Path(f"/proc/{host.pid}/root/run")
            (run / "munge").mkdir()
            (run / "munge" / "key").write_bytes(key)
            (run / "munge" / "key").chmod(0o600)
            files = [f"--{name}-file=/run/munge/{name}" for name in ("key", "log", "pid", "seed")]
            host.run("munged", "--force", "--socket=/run/munge/munge.socket.2", *files)
        self.hosts[0].popen("slurmctld", "-D", variables=self.variables)
        for host in self.hosts:
            host.popen("slurmd", "-D", "-N", host.name, variables=self.variables)
        self._await_nodes()

    def _await_nodes(self) -> None:
        deadline, said = time.monotonic() + SETTLED, ""
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                said = self.run("sinfo", "--noheader", "--Node", "--format=%N %t")
                if said.split("\n")[:-1] == [f"{host.name} idle" for host in self.hosts]:
                    return
            time.sleep(0.1)
        logs = "\n".join(file.read_text()[-2000:] for file in self._folder.glob("*.log"))
        raise AssertionError(f"the nodes did not come: {said}\n{logs}")


@contextlib.contextmanager
def cluster(count: int, folder: Path) -> Iterator[Cluster]:
    """A cluster of `count` nodes n1, n2, ..., whose files are in `folder`."""
    with hosts(count) as made:
        slurm = Cluster(made, folder)
        slurm.start()
        yield slurm
