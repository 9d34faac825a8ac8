"""Several hosts: what they say to each other, how a login is written, whose output is printed how."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from polyreme.errors import LaunchError
from polyreme.launch import frames, hostfile, mpirun, on_host, several
from polyreme.launch.frames import ERRORS, OUTPUT, Frame
from polyreme.launch.streams import Pipes, Printer

HOSTS = {"a": 2, "b": 1}


def test_frames_come_whole_or_not_at_all() -> None:
    sent = [Frame(OUTPUT, 7, b"\0x\n"), frames.message(end="well"), Frame(ERRORS, 2**20, b"")]
    data = b"".join(map(frames.pack, sent))
    stream = io.BytesIO(b"Welcome to a\n" + frames.MARK + data[:-1])
    assert frames.find_mark(stream) == b"Welcome to a\n"
    assert [frames.unpack(stream), frames.unpack(stream)] == sent[:2]
    with pytest.raises(EOFError):
        frames.unpack(stream)
    with pytest.raises(EOFError):
        frames.find_mark(io.BytesIO(b"no such command"))
    with pytest.raises(EOFError):
        frames.unpack(io.BytesIO(b"\xff" * 100))


def test_a_login_is_one_word_for_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a b:/$c")
    words = several.login("-oProxyCommand=x", ["ssh", "-p", "22"])
    assert words[:3] == ["ssh", "-p", "22"] and words[-3:-1] == ["--", "-oProxyCommand=x"]
    assert "BatchMode=yes" in words
    assert shlex.split(words[-1])[:3] == ["exec", "env", "PYTHONPATH=/a b:/$c"]
    assert several.login("localhost") == [sys.executable, "-m", "polyreme.launch.on_host"]


@pytest.mark.parametrize("by_mpi", [False, True])
def test_an_ssh_that_is_not_there_is_no_fault_of_the_hosts(by_mpi: bool) -> None:
    with pytest.raises(LaunchError, match=r"^the program 'nossh' given by --ssh was not found"):
        if by_mpi:
            request = mpirun.Request(["x"], {"192.0.2.1": 1}, {}, ["nossh", "-v"])
            mpirun.run(mpirun.Library("/none", mpirun.HYDRA), request)
        else:
            several.run({"192.0.2.1": [0]}, several.RankCommand(["x"]), ssh=["nossh", "-v"])


def test_the_variables_that_go_along() -> None:
    there = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "WORD": "x",
        "POLYREME_LAUNCHED": "1",
        "POLYREME_PIN": "0",
    }
    assert several.forwarded(["WORD", "B=c=d"], there) == {
        "NCCL_DEBUG": "INFO", "POLYREME_PIN": "0", "WORD": "x", "B": "c=d",
    }  # fmt: skip
    with pytest.raises(LaunchError, match="--env NONE: the variable is not set"):
        several.forwarded(["NONE"], there)


@pytest.mark.parametrize("how", ["closes", "is silent"])
def test_a_run_ends_where_who_started_it_is_gone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, sent, gone = list[int](), list[int](), threading.Event()
    monkeypatch.setattr(on_host, "SILENCE", 600.0 if how == "closes" else 0.01)
    monkeypatch.setattr(on_host, "_end", ended.append)
    monkeypatch.setattr(on_host.os, "kill", lambda _, number: sent.append(number))  # type: ignore[attr-defined]
    out, into = os.pipe()
    for wish in {"do": "signal", "number": 15}, {"do": "nothing"}:
        os.write(into, frames.line(wish))
    if how == "closes":
        os.close(into)
    with os.fdopen(out, "rb", buffering=0) as asked:
        on_host._listen(asked, gone)
    assert gone.is_set() and ended == [signal.SIGINT] and sent == [15]
    if how != "closes":
        os.close(into)


def test_who_reads_that_a_run_has_ended_may_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leaving sends SIGINT, while this process has not returned from telling so."""
    monkeypatch.setattr(on_host, "_run", lambda *_: None)
    told: list[Frame] = []

    def tell(frame: Frame) -> None:
        told.append(frame)
        signal.raise_signal(signal.SIGINT)

    numbers = (signal.SIGINT, *on_host.SAVE_SIGNALS)
    before = [signal.getsignal(number) for number in numbers]
    try:
        on_host._begin({"variables": {}}, tell)
    finally:
        for number, action in zip(numbers, before, strict=True):
            signal.signal(number, action)
    assert told == [frames.message(end="well")]


def test_one_host_alone_failed_first() -> None:
    started = several._Started({}, Mock(), [], {})
    outcomes = {
        "a": "rank 0 of 2 failed first: it waited",
        "b": "rank 1 of 2 failed first: it was ended by SIGKILL",
    }
    a, b = (
        Mock(outcome={"message": message, "exit_status": 1, "rank": rank})
        for rank, message in enumerate(outcomes.values())
    )
    a.name, b.name = outcomes
    assert str(started._report([b, a])) == (
        f"on b: {outcomes['b']}\nthen on a: rank 0 of 2 failed: it waited"
    )


def test_whose_output_is_printed_how(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = Printer()
    printer.begin("a", "ssh", 0, 1)
    printer.begin("b", "ssh", 1, 2)
    for kind, rank, data in [
        (OUTPUT, 0, b"\r 10%"), (OUTPUT, 1, b"one\r\ntw"), (ERRORS, 1, b"bad"), (OUTPUT, 1, b"o\n\nlast"),
        (OUTPUT, 1, b""), (OUTPUT, 2, b"lost"),
    ]:  # fmt: skip
        printer.take(Frame(kind, rank, data))
    printer.flush()
    out, errors = capsysbinary.readouterr()
    assert out == b"\r 10%[b 1] one\n[b 1] two\n[b 1] \n[b 1] last\n[b 2] lost\n"
    assert errors == b"a: rank 0 (ssh)\nb: ranks 1 to 2 (ssh)\n[b 1] bad\n"


def test_all_that_ranks_print_is_handed_on_though_others_hold_their_pipes() -> None:
    frames: list[Frame] = []
    pipes = Pipes(frames.append)
    held, ended = pipes.open(3, OUTPUT), pipes.open(4, ERRORS)
    os.write(held, b"by one that started a process")
    os.write(ended, b"by one that did not")
    os.close(ended)
    pipes.start()
    pipes.close()
    assert [each.data for each in frames if each.rank == 3] == [b"by one that started a process", b""]
    assert [each.data for each in frames if each.rank == 4] == [b"by one that did not", b""]
    assert {(each.rank, each.kind) for each in frames} == {(3, OUTPUT), (4, ERRORS)}
    os.close(held)


def test_a_hostfile_of_another_system(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbf# all\r\na slots=2 # fast\r\nb  slots=1\r\n")
    assert hostfile.read(tmp_path / "hosts") == {"a": 2, "b": 1}


def test_all_wrong_lines_of_a_hostfile_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# all\na slots=2\nb slot=1\n\na slots=1\nc slots=0\nd:22 slots=1\n")
    with pytest.raises(hostfile.ResourceError) as caught:
        hostfile.read(tmp_path / "hosts")
    assert str(caught.value).splitlines() == [
        "the hostfile cannot be used:",
        "  - line 3, 'b slot=1': write HOST slots=N, a host in a line",
        "  - line 5, 'a slots=1': it has a twice, as line 2; give all its slots in one line",
        "  - line 6, 'c slots=0': a host has 1 to 4096 slots; begin the line with # to leave the host out",
        "  - line 7, 'd:22 slots=1': d:22 is with a port; write the host alone, and the port in "
        "~/.ssh/config or as --ssh 'ssh -p PORT'",
    ]
    with pytest.raises(hostfile.ResourceError, match=r"line 50, .*\n  and 1950 lines more$"):
        hostfile.parse_hostfile(["?"] * 2000)


def test_ipv6_addresses() -> None:
    pool = hostfile.parse_hostfile(["fd00::1 slots=2", "[fd00::2] slots=1", "me@[fd00::3] slots=1"])
    assert pool == {"fd00::1": 2, "fd00::2": 1, "me@fd00::3": 1}
    some = hostfile.parse_inclusion_exclusion(pool, "[fd00::1]:1@[fd00::2]", "")
    assert some == {"fd00::1": [1], "fd00::2": [0]}
    with pytest.raises(hostfile.ResourceError, match="IPv6 address in brackets"):
        hostfile.parse_inclusion_exclusion(pool, "fd00::1:1", "")
    with pytest.raises(hostfile.ResourceError, match="mpirun takes fd00::1 for a host and its ranks"):
        mpirun.ranks_of(some | {"fd00::1": [0]})


@pytest.mark.parametrize("host", ["[fd00::1", "a[1-4]", "[]", "-oProxyCommand=x"])
def test_what_is_no_host_is_a_wrong_line(host: str) -> None:
    with pytest.raises(hostfile.ResourceError, match=r"line 2, .*: a host is a name or an address"):
        hostfile.parse_hostfile(["a slots=1", f"{host} slots=1"])


@pytest.mark.parametrize("host", ["[fd00::1]:22", "gpu1:22"])
def test_a_port_belongs_to_ssh(host: str) -> None:
    with pytest.raises(hostfile.ResourceError, match="is with a port; write the host alone"):
        hostfile.parse_hostfile([f"{host} slots=1"])


def test_a_hostfile_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    for path in tmp_path / "hosts", tmp_path:
        with pytest.raises(hostfile.ResourceError, match="cannot be read"):
            hostfile.read(path)


def test_the_words_of_mpirun() -> None:
    request = mpirun.Request(
        ["-m", "x", "a b"], HOSTS, {"WORD": "x y"}, ["/bin/ssh", "-p", "22"], "eth0", ["--verbose"]
    )
    words, variables = mpirun.command(mpirun.Library("/opt/mpirun", mpirun.OPEN_MPI), request)
    rank = ["--verbose", sys.executable, "-m", "polyreme.launch.mpi_rank", "-m", "x", "a b"]
    assert words == [
        "/opt/mpirun", "-n", "3", "--host", "a:2,b:1", "--bind-to", "none", "--mca", "plm_rsh_agent",
        "/bin/ssh -p 22", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
        "-x", "WORD", *rank,
    ]  # fmt: skip
    assert variables == {"WORD": "x y"}
    words, variables = mpirun.command(mpirun.Library("/opt/mpirun", mpirun.HYDRA), request)
    assert words == [
        "/opt/mpirun", "-n", "3", "-hosts", "a:2,b:1", "-launcher", "ssh", "-launcher-exec", "/bin/ssh",
        "-iface", "eth0", "-genvlist", "PATH,LD_LIBRARY_PATH,WORD", *rank,
    ]  # fmt: skip
    assert variables == {"WORD": "x y", "HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22"}
    shown = mpirun.shown(mpirun.Library("/opt/mpirun", mpirun.HYDRA), request)
    assert shown.startswith("HYDRA_LAUNCHER_EXTRA_ARGS='-p 22' /opt/mpirun -n 3 ") and "x y" not in shown


def test_an_mpirun_that_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho SomeMPI 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "python"))  # type: ignore[attr-defined]
    with pytest.raises(LaunchError, match="'SomeMPI 3'"):
        mpirun.find()
    for said in (
        "mpirun (Open MPI) 4.1.4",
        "mpirun.openmpi (OpenRTE) 4.1.4",
    ):  # by whichever name Debian has it
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        assert mpirun.find() == mpirun.Library(str(program), mpirun.OPEN_MPI)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="not on PATH"):
        mpirun.find()
