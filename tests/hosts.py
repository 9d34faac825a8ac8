"""Hosts for tests: each is a network, a PID, an IPC, a mount and a host-name namespace, on a bridge in a
namespace that nothing else is in.

Invariants: no packet leaves these namespaces; nothing of them is left when the block ends, nor of those of a
test process that was killed, once the next one begins. Hosts share the file system, but for /etc/hosts and
the like, /dev/shm, /run and, as TMPDIR, a folder for temporary files."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from command import RANK_VARIABLES, SOURCE
from pool import forkserver
from warm import _live

MARK = "polyreme-test"
NETWORK = "10.77.0"
TEMPORARY = "/dev/shm/tmp"
"""Of each host its own."""
SETTLED = 30.0
"""Seconds that a host gets to begin; it takes a tenth of one."""
TOOLS = ("ip", "unshare", "nsenter", "hostname")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NUMBERS = itertools.count()
_NEW = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "pid": 0x20000000, "mnt": 0x00020000}


def lacking(*programs: str) -> str:
    """Why there can be no hosts here on which these programs run, or empty."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        return "hosts are namespaces, which root makes on Linux"
    missing = [name for name in (*TOOLS, *programs) if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    words = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"]
    made = subprocess.run(words, capture_output=True, text=True)
    return "" if made.returncode == 0 else f"namespaces cannot be made here: {made.stderr.strip()}"


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process on a host: none of a rank, and its own folder for temporary files."""
    dropped = (*RANK_VARIABLES, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    ours = {"PATH": PATH, "TMPDIR": TEMPORARY, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return {**own, **ours, **(variables or {})}


@dataclass
class Host:
    """One host: its name, the address of its interface eth0, and its first process."""

    name: str
    address: str
    namespace: str
    files: Path
    init: subprocess.Popen[bytes]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """The host's first process, as this system numbers it."""
        return int(Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()[0])

    def popen(
        self, *words: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command here, its output and errors in one pipe; it ends with the host at the latest."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--uts", "--ipc"]
        process = subprocess.Popen(
            [*enter, f"--wd={folder or '/'}", *words], env=environment(variables), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(
        self,
        *words: str,
        seconds: float = 120,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """What a command prints that ends well."""
        process = self.popen(*words, folder=folder, variables=variables)
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, f"{' '.join(words)} on {self.name}: {process.returncode}\n{output}"
        return output

    def script(self, path: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> Script:
        """Start a Python script here, as a fork of a process that has imported torch (warm.py)."""
        return Script(self, path, arguments, environment(variables))

    def set_own_address(self, address: str) -> None:
        """Have this host's hosts file give its own name another address, such as 127.0.1.1."""
        file = self.files / "hosts"
        lines = [line for line in file.read_text().splitlines() if not line.endswith(f" {self.name}")]
        file.write_text("\n".join([*lines, f"{address} {self.name}", ""]))  # in place: it is mounted

    def link(self, state: str) -> None:
        """Take the host off the network ("down"), or put it back ("up")."""
        _do("ip", "-n", self.namespace, "link", "set", "eth0", state)

    def end(self) -> None:
        """Kill every process of the host at once."""
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.kill()
        self.init.wait()
        for process in self.started:
            process.kill()
            process.communicate()
        self.started.clear()


class Script:
    """A Python script that runs on a host."""

    def __init__(
        self, host: Host, path: Path, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._printed = Path(tempfile.mkdtemp(prefix="printed-", dir=path.parent)) / "output"
        words = (host.pid, path, list(arguments), dict(variables), self._printed)
        self._process = forkserver().Process(target=_in_host, args=words)
        self._process.start()

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Exit status, and what it printed, at its end."""
        self._process.join(seconds)
        printed = self._printed.read_text() if self._printed.exists() else ""
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"not ended within {seconds} s:\n{printed}")
        return self._process.exitcode, printed


def _in_host(pid: int, path: Path, arguments: list[str], variables: dict[str, str], printed: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    for name, kind in _NEW.items():
        with Path(f"/proc/{pid}/ns/{name}").open() as namespace:
            if library.setns(namespace.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {name}")
    if child := os.fork():  # which is in the PID namespace
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    descriptor = os.open(printed, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(path.parent)
    sys.argv = [str(path), *arguments]
    _live(lambda: runpy.run_path(str(path), run_name="__main__"), variables)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts n1, n2, ..., each of which knows the others' names."""
    _end_left_ones()
    prefix = f"{MARK}-{os.getpid()}-{next(_NUMBERS)}"
    made: list[Host] = []
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-") as folder:
        try:
            _do("ip", "netns", "add", f"{prefix}-net")
            _do("ip", "-n", f"{prefix}-net", "link", "add", "br0", "type", "bridge")
            _do("ip", "-n", f"{prefix}-net", "link", "set", "br0", "up")
            for number in range(1, count + 1):
                made.append(_host(prefix, number, count, Path(folder)))
            for host in made:
                _await(host)
            yield made
        finally:
            for host in made:
                host.end()
            _delete(prefix)


def _host(prefix: str, number: int, count: int, folder: Path) -> Host:
    name, namespace, address = f"n{number}", f"{prefix}-n{number}", f"{NETWORK}.{number}"
    files = folder / name
    files.mkdir()
    names = [f"{NETWORK}.{each} n{each}" for each in range(1, count + 1)]
    (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    (files / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    (files / "resolv.conf").write_text("")
    _do("ip", "netns", "add", namespace)
    net = ["ip", "-n", f"{prefix}-net", "link"]
    _do(*net, "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _do(*net, "set", f"v{number}", "master", "br0", "up")
    _do("ip", "-n", namespace, "link", "set", "lo", "up")
    _do("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    _do("ip", "-n", namespace, "link", "set", "eth0", "up")
    binds = [f"mount --bind {each} /etc/{each.name}" for each in sorted(files.iterdir())]
    own = ["mount -t tmpfs tmpfs /dev/shm", "mount -t tmpfs tmpfs /run", f"mkdir -m 1777 {TEMPORARY}"]
    begin = [f"hostname {name}", *binds, *own, f"touch {TEMPORARY}/.ready", "exec sleep infinity"]
    isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--ipc"]
    init = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{namespace}", *isolated, "sh", "-c", " && ".join(begin)],
        env=environment({"TMPDIR": "/tmp"}), stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    return Host(name, address, namespace, files, init)


def _await(host: Host) -> None:
    deadline = time.monotonic() + SETTLED
    while True:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{host.pid}/root{TEMPORARY}/.ready").exists():
                return
        assert host.init.poll() is None and time.monotonic() < deadline, f"{host.name} did not begin"
        time.sleep(0.01)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env=environment({"TMPDIR": "/tmp"}))
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _delete(prefix: str) -> None:
    for file in Path("/run/netns").glob(f"{prefix}-*"):
        _do("ip", "netns", "del", file.name)


def _end_left_ones() -> None:
    """End the hosts of test processes that were killed."""
    for file in Path("/run/netns").glob(f"{MARK}-*"):
        pid = file.name.removeprefix(f"{MARK}-").partition("-")[0]
        if Path(f"/proc/{pid}").exists():
            continue
        within = subprocess.run(["ip", "netns", "pids", file.name], capture_output=True, text=True)
        for process in within.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _delete(f"{MARK}-{pid}")
