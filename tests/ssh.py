"""Logins between the hosts of a test (hosts.py), by a real sshd on each.

Invariant: keys and configuration are in one folder, and no file of the user's is read."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from hosts import TEMPORARY, Host, environment

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
SETTLED = 30.0

DAEMON = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PrintMotd no
MaxStartups 100
SetEnv {variables}
"""
CLIENT = """
IdentityFile {folder}/user
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
BatchMode yes
LogLevel ERROR
"""


def logins(made: list[Host], folder: Path) -> list[str]:
    """Start sshd on every host. Returns the command that logs in, without a host's name and the command to
    run there: there are the variables of any process on a host."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    kept = {name: environment()[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    variables = " ".join(f'"{name}={value}"' for name, value in {**kept, "TMPDIR": TEMPORARY}.items())
    (folder / "sshd_config").write_text(DAEMON.format(folder=folder, variables=variables))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    for host in made:
        Path(f"/proc/{host.pid}/root/run/sshd").mkdir(exist_ok=True)
        program = host.run("sh", "-c", "command -v sshd").strip()  # which wants its whole path
        host.popen(program, "-D", "-e", "-f", str(folder / "sshd_config"))
    login = ["ssh", "-F", str(folder / "ssh_config")]
    for host in made:
        _await(made[0], [*login, host.name, "true"])
    return login


def _await(first: Host, words: list[str]) -> None:
    deadline = time.monotonic() + SETTLED
    while True:
        with contextlib.suppress(AssertionError):
            first.run(*words)
            return
        assert time.monotonic() < deadline, first.popen(*words).communicate()[0]
        time.sleep(0.05)
