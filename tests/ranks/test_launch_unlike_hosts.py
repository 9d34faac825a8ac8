"""Hosts that lack something, or differ: what `polyreme` says of them over ssh, and that nothing is left."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_hostfile import Running

from command import SOURCE
from examples import whole
from hosts import Host, hosts, lacking
from polyreme.version import VERSION
from ssh import PROGRAMS, logins

pytestmark = [pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=lacking(*PROGRAMS)), whole]
AHEAD = """
import time
now = time.time
time.time = lambda: now() + 3600
"""
WANTED = f"the same Python, with Polyreme, is needed there as here, {sys.executable}"
SAVES = """
import sys, torch, polyreme
engine = polyreme.initialize(
    torch.nn.Linear(512, 4096), {"batch": {"size": 8}}, loss_fn=torch.nn.functional.cross_entropy
)
engine.train_step((torch.randn(4, 512), torch.randint(4, (4,))))
engine.save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], str]]:
    """The hosts, and the ssh between them."""
    with hosts(2) as made:
        yield made, " ".join(logins(made, tmp_path_factory.mktemp("ssh")))


@contextmanager
def bound(host: Host, what: Path, over: Path) -> Iterator[None]:
    """On this host alone another file or folder in the place of one."""
    host.run("mount", "--bind", str(what), str(over))
    try:
        yield
    finally:
        host.run("umount", "--lazy", str(over))


def refused(two: tuple[list[Host], str], folder: Path) -> str:
    (folder / "train.py").write_text("print('began')")
    status, printed = Running(two, folder, "launch", "train.py").end()
    assert status == 1 and "no rank was started:" in printed and "began" not in printed, printed
    return printed


def as_if(name: str, version: str, folder: Path) -> tuple[Path, Path]:
    """A file by which a library is of another version, and the one in whose place it does so."""
    [file] = [each for each in importlib.metadata.files(name) or () if each.name == "METADATA"]
    path, here = Path(str(file.locate())), importlib.metadata.version(name)
    (folder / "METADATA").write_text(
        path.read_text().replace(f"\nVersion: {here}\n", f"\nVersion: {version}\n")
    )
    return folder / "METADATA", path


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_host_with_another_version_is_named(two: tuple[list[Host], str], tmp_path: Path, name: str) -> None:
    with bound(two[0][1], *as_if(name, "2.12.0", tmp_path)):
        said = refused(two, tmp_path)
    here = importlib.metadata.version(name)
    assert f"- n2: {name} 2.12.0 is there, and {here} here: install the same one" in said


def test_a_host_with_other_sources_of_polyreme_is_named(two: tuple[list[Host], str], tmp_path: Path) -> None:
    version = Path(SOURCE) / "polyreme" / "version.py"
    (tmp_path / "version.py").write_text(f"{version.read_text()}\n")
    with bound(two[0][1], tmp_path / "version.py", version):
        said = refused(two, tmp_path)
    other, here = re.findall(rf"{re.escape(VERSION)} \((\w{{8}})\)", said)
    assert f"- n2: polyreme {VERSION} ({other}) is there, and {VERSION} ({here}) here: install" in said
    assert other != here


def test_a_host_without_polyreme_is_named(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'polyreme'\")"
    )
    with bound(two[0][1], tmp_path / "none", Path(SOURCE) / "polyreme"):
        said = refused(two, tmp_path)
    assert "- n2: " in said and "No module named 'polyreme'" in said and WANTED in said, said


def test_a_host_without_python_is_named(two: tuple[list[Host], str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with bound(two[0][1], tmp_path / "empty", Path(sys.executable).parent):
        said = refused(two, tmp_path)
    assert "- n2: env: " in said and "No such file or directory: " + WANTED in said, said


def test_a_host_with_an_old_python_is_named(two: tuple[list[Host], str], tmp_path: Path) -> None:
    old = tmp_path / "old" / Path(sys.executable).name
    old.parent.mkdir()
    usage = (
        "Unknown option: -P\\nusage: python3 [option] ... [-c cmd]\\nTry `python -h' for more information."
    )
    old.write_text(f"""#!/bin/sh\nprintf "{usage}\\n" >&2\nexit 2\n""".replace("`", "'"))
    old.chmod(0o755)
    with bound(two[0][1], old.parent, Path(sys.executable).parent):
        said = refused(two, tmp_path)
    assert f"- n2: {sys.executable} is an older Python there" in said, said
    assert "Polyreme needs 3.11 or newer on each host" in said, said


def test_doctor_finds_a_clock_that_is_an_hour_ahead(two: tuple[list[Host], str], tmp_path: Path) -> None:
    version = Path(torch.version.__file__)
    (tmp_path / "version.py").write_text(version.read_text() + AHEAD)
    with bound(two[0][1], tmp_path / "version.py", version):
        status, printed = Running(two, tmp_path, "doctor").end()
    assert status == 1 and "fail  clocks" in printed and "ok    versions" in printed, printed


def test_doctor_measures_a_way_that_is_slow_in_one_direction(
    two: tuple[list[Host], str], tmp_path: Path
) -> None:
    limit = ["root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
    two[0][1].run("tc", "qdisc", "add", "dev", "eth0", *limit)
    try:
        status, printed = Running(two, tmp_path, "doctor").end()
    finally:
        two[0][1].run("tc", "qdisc", "del", "dev", "eth0", "root")
    assert status == 0 and re.search(r"ok    n1 - n2 .* us, 0\.01 GB/s", printed), printed


@pytest.mark.parametrize("full", [[0, 1], [1]], ids=["shared", "of one"])
def test_a_full_disk_is_named(two: tuple[list[Host], str], tmp_path: Path, full: list[int]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "save.py").write_text(SAVES)
    for host in (two[0][each] for each in full):
        host.run("mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path / "out"))
    try:
        status, printed = Running(two, tmp_path, "launch", "save.py", "out/saved").end()
    finally:
        for host in (two[0][each] for each in full):
            host.run("umount", "--lazy", str(tmp_path / "out"))
    print(printed)
    own = "rank 1: it does not see out/saved.tmp, which rank 0 made: give a folder that all hosts share"
    why = own if full == [1] else "rank 0: No space left on device"
    assert status == 1 and f"the checkpoint out/saved was not written, {why}" in printed, printed
