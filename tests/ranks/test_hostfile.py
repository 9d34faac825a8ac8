"""`polyreme launch --hostfile` on two hosts, the second over a real ssh: bits, failures, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_kubernetes_pods import SCRIPT

from command import TINY, polyreme, write_text
from examples import whole
from hosts import Host, hosts, lacking
from ssh import PROGRAMS, logins

pytestmark = pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS))
ODD = ["a b", "$(HOME) '$$", '"; exit 3', "", "--env", "é\n"]
# no torch in it: a second less
HOLD = """
import os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ.get("WORD"))
print("an error", file=sys.stderr)
Path("begun" + os.environ["RANK"]).touch()
if sys.argv[1] == os.environ["RANK"]:
    raise ValueError("as it was told")
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], str]]:
    """The hosts, and the ssh between them."""
    with hosts(2) as made:
        yield made, " ".join(logins(made, tmp_path_factory.mktemp("ssh")))


class Running:
    """`polyreme WORDS` on the first host, for the ranks of both."""

    def __init__(self, two: tuple[list[Host], str], folder: Path, *words: str) -> None:
        made, ssh = two
        command, *rest = words
        if "--hostfile" not in rest:
            (folder / "hostfile").write_text("# the ranks' hosts\nn1 slots=1\nn2 slots=1\n")
            rest = ["--hostfile", "hostfile", *rest]
        options = ["--ssh", ssh]
        self.hosts, self.folder = made, folder
        self.process = made[0].popen(
            sys.executable,
            "-m",
            "polyreme",
            command,
            *options,
            *rest,
            folder=folder,
            variables={"WORD": "x y'z"},
        )

    def until_begun(self) -> None:
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("begun*"))) < 2:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        [python] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(python), number)

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Exit status and what was printed; nothing is left on any host."""
        printed, _ = self.process.communicate(timeout=seconds)
        for host in self.hosts:
            until = time.monotonic() + 15
            while any("polyreme" in each for each in processes(host)):
                assert time.monotonic() < until, processes(host)
                time.sleep(0.05)
        return self.process.returncode, printed


def processes(host: Host) -> list[str]:
    """The commands that run on a host, but those that have ended."""
    inside = ["nsenter", f"--target={host.pid}", "--pid", "--mount", "ps", "ax", "-o", "stat=,args="]
    lines = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if not line.startswith("Z")]


def test_a_script_on_two_hosts_has_the_weights_of_one(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    status, printed = Running(two, tmp_path, "launch", "script.py", "weights", "$(HOME) '$$").end()
    assert status == 0, printed
    assert "n1: rank 0 (this machine)\nn2: rank 1 (ssh)\n2 ranks meet at 10.77.0.1 port " in printed
    status, _, errors = polyreme(tmp_path, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "alone").read_bytes()


@whole
def test_hosts_that_cannot_run_it_are_named_together(two: tuple[list[Host], str], tmp_path: Path) -> None:
    hosts_of = tmp_path / "many"
    hosts_of.write_text("n1 slots=1\nn2 slots=1\nnone slots=1\n10.77.0.9 slots=1\nroot@10.77.0.2 slots=1\n")
    status, printed = Running(two, tmp_path, "launch", "--hostfile", str(hosts_of), "none.py").end()
    assert status == 1 and "no rank was started:" in printed
    assert "- n1: none.py is not a file" in printed and "- n2: none.py is not a file" in printed
    assert "- none: ssh ended with status 255: ssh: Could not resolve hostname none" in printed
    assert "- 10.77.0.9: ssh ended with status 255: ssh: connect to host 10.77.0.9" in printed
    assert "- root@10.77.0.2: it is the machine of n2, too: give all its slots in one line" in printed


@whole
def test_ctrl_c_ends_both_hosts(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    running = Running(two, tmp_path, "launch", "--env", "WORD", "hold.py", "none", *ODD)
    running.until_begun()
    began = time.monotonic()
    running.signal(signal.SIGINT)
    status, printed = running.end()
    assert status == 130 and time.monotonic() < began + 15, printed
    assert "error: stopped by SIGINT" in printed
    given = repr(["none", *ODD])
    assert f"\nrank 0 of 2 {given} x y'z\n" in printed and f"\n[n2 1] rank 1 of 2 {given} x y'z\n" in printed
    assert "\nan error\n" in printed and "\n[n2 1] an error\n" in printed


@whole
def test_a_rank_that_fails_ends_the_other_host_and_is_named(
    two: tuple[list[Host], str], tmp_path: Path
) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    status, printed = Running(two, tmp_path, "launch", "hold.py", "1").end()
    assert status == 1 and "error: on n2: rank 1 of 2 failed first:" in printed, printed
    assert "ValueError: as it was told" in printed and "then on" not in printed


@whole
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_command(two: tuple[list[Host], str], tmp_path: Path, number: int) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    running = Running(two, tmp_path, "launch", "hold.py", "none")
    running.until_begun()
    running.signal(number)
    status, _ = running.end()
    assert status == (-number if number == signal.SIGKILL else 128 + number)


@whole
def test_an_ssh_that_dies_ends_all(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    running = Running(two, tmp_path, "launch", "hold.py", "none")
    running.until_begun()
    [python] = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    for child in Path(f"/proc/{python}/task/{python}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == "ssh":
            os.kill(int(child), signal.SIGKILL)
    status, printed = running.end()
    assert status == 1 and "error: on n2: the connection was lost (ssh ended with status -9)" in printed


@whole
def test_doctor_looks_at_both_hosts(two: tuple[list[Host], str], tmp_path: Path) -> None:
    status, printed = Running(two, tmp_path, "doctor").end()
    assert status == 0, printed
    for said in (
        "ok    hosts          2, with 2 ranks: n1, n2",
        "ok    interfaces     n1: eth0 10.77.0.1; n2: eth0 10.77.0.2",
        "is seen on each",
        "ok    n1 - n2        ",
    ):
        assert said in printed
    assert not list(tmp_path.glob(".polyreme-doctor-*"))


@whole
def test_training_saves_on_both_hosts_when_it_is_asked_to(
    two: tuple[list[Host], str], tmp_path: Path
) -> None:
    write_text(tmp_path)
    text = TINY.replace("[checkpoint]\n", '[checkpoint]\nfolder = "out"\n').replace(
        "length = 20", "length = 400"
    )
    (tmp_path / "run.toml").write_text(text)
    running = Running(two, tmp_path, "train", "run.toml")
    log = tmp_path / "out" / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 4:
        assert running.process.poll() is None
        time.sleep(0.05)
    running.signal(signal.SIGUSR1)
    status, printed = running.end()
    assert status == 0 and "stopped by SIGUSR1 after step" in printed, printed
    status, printed = Running(two, tmp_path, "train", "run.toml", "--set", "train.length=30").end()
    assert status == 0, printed


@whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_script_saves_on_both_hosts(
    two: tuple[list[Host], str], tmp_path: Path, number: signal.Signals
) -> None:
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    text = page.read_text("utf-8").partition("# saves.py\n")[2].partition("```")[0]
    begun = "    Path(f'begun{engine.mesh.dp.rank}').touch()\n    done = "
    (tmp_path / "saves.py").write_text(text.replace("    done = ", begun))
    running = Running(two, tmp_path, "launch", "--saves", "saves.py", "1000000", "out")
    running.until_begun()
    running.signal(number)
    status, printed = running.end()
    assert status == os.EX_TEMPFAIL and f"ranks have stopped by {number.name}, and are to go on" in printed
    assert (tmp_path / "out" / "resume.json").exists()
