"""Real processes under the launcher: what reaches them, who is named when they fail, and that none is
left."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyreme.errors
from command import polyreme as run_command
from examples import ALL
from polyreme.errors import LaunchError
from polyreme.launch.cores import share
from polyreme.launch.local import Failure, Local, report
from polyreme.launch.torchrun import RanksFailedError, launch
from warm import WarmPython

Process = subprocess.Popen[str] | WarmPython
END_WITHIN = 30.0  # seconds from a failure to the end of the run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tracebacks are kept."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for `condition`; the limit only matters when it never comes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether the process has ended, counting one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Script:
    """A script for ranks that leaves its process id and, if told so, facts, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "script.py"

    def write(self, body: str) -> str:
        """A script with `rank`, `tell(fact)` and `wait()` (for as long as a hung rank would) at hand."""
        head = f"""
            import json, os, signal, sys, time
            from pathlib import Path
            folder, rank = Path({str(self.folder)!r}), int(os.environ["RANK"])

            def tell(fact, name="fact"):
                draft = folder / f"draft-{{rank}}"
                draft.write_text(json.dumps(fact))
                draft.replace(folder / f"{{name}}-{{rank}}")

            def wait():
                time.sleep(600)

            def both_are_up():
                while len(list(folder.glob("pid-*"))) < 2:
                    time.sleep(0.01)

            tell(os.getpid(), "pid")
        """
        self.path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return str(self.path)

    def facts(self, name: str = "fact") -> dict[int, Any]:
        paths = self.folder.glob(f"{name}-*")
        return {int(path.name.rpartition("-")[2]): json.loads(path.read_text()) for path in paths}

    def pids(self) -> list[int]:
        return list(self.facts("pid").values())


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    made = Script(tmp_path)
    yield made
    left = [pid for pid in made.pids() if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "ranks outlived the test"


def failure(command: list[str], ranks: int = 2) -> RanksFailedError:
    """How a launch fails."""
    with pytest.raises(RanksFailedError) as caught:
        launch(command, ranks)
    return caught.value


def command(folder: Path, *words: str) -> Process:
    """The command itself, in a process of its own; what it leaves behind when it is killed lies in
    `folder`."""
    return python(folder, "-m", "polyreme", *words)


def python(folder: Path, *words: str) -> Process:
    """A launcher; its ranks begin as ever."""
    source = str(Path(polyreme.errors.__file__).parents[1])
    variables = {
        **os.environ,
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }
    if ALL not in os.environ:
        return WarmPython(words, folder, variables)
    return subprocess.Popen(
        [sys.executable, *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


ARGUMENTS = ["--d", "3", "--nproc", "x", "-n", "5", "--help", "--", "$HOME $$ ${local_rank}", "", "-m"]
LAUNCHES: dict[str, tuple[dict[str, str], int, int | None]] = {
    "a network, and threads": ({"NCCL_SOCKET_IFNAME": "eth7"}, 2, 3),
    "nothing": ({}, 2, None),
    "nothing, one rank": ({}, 1, None),
    "threads of one rank": ({"OMP_NUM_THREADS": "7"}, 1, None),
    "no pinning": ({"POLYREME_PIN": "0"}, 2, None),
    "threads": ({"OMP_NUM_THREADS": "1"}, 2, None),
}
"""What the user decides: variables, ranks and threads."""
DECIDED = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "POLYREME_PIN")


Launched = Callable[[str], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """What each rank of one of LAUNCHES, started once, finds of itself."""

    @functools.cache
    def started(case: str) -> dict[int, dict[str, Any]]:
        variables, ranks, threads = LAUNCHES[case]
        script = Script(tmp_path_factory.mktemp("launched"))
        path = script.write("""
            tell({
                "arguments": sys.argv[1:],
                "variables": dict(os.environ),
                "cores": sorted(os.sched_getaffinity(0)),
                "name": __name__,
                "path": sys.path[0],
            })
        """)
        with pytest.MonkeyPatch.context() as patches:
            for name in DECIDED:
                patches.delenv(name, raising=False)
            for name, value in variables.items():
                patches.setenv(name, value)
            before = dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            launch([path, *ARGUMENTS], ranks, threads=threads)
            after = dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            assert after == before, case
        facts = script.facts()
        assert len(facts) == ranks and all(fact["path"] == str(script.folder) for fact in facts.values())
        return facts

    return started


def test_arguments_and_variables_reach_the_script(launched: Launched) -> None:
    for rank, fact in launched("a network, and threads").items():
        assert fact["arguments"] == ARGUMENTS and fact["name"] == "__main__"
        expected = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "3",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        assert expected.items() <= fact["variables"].items()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a network, and threads", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}),
        ("nothing", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        ("nothing, one rank", {}),
    ],
)
def test_ranks_of_one_host_meet_on_the_loopback_unless_the_user_decides(
    launched: Launched, case: str, expected: dict[str, str]
) -> None:
    for fact in launched(case).values():
        found = {k: v for k, v in fact["variables"].items() if k.endswith("_SOCKET_IFNAME")}
        assert found == expected


def test_the_users_own_number_of_threads_stays(launched: Launched) -> None:
    assert launched("threads of one rank")[0]["variables"]["OMP_NUM_THREADS"] == "7"


def test_ranks_stay_on_their_share_of_the_cores_unless_the_user_decides(launched: Launched) -> None:
    mine = os.sched_getaffinity(0)
    first, second = (set(fact["cores"]) for fact in launched("nothing").values())
    if len(mine) > 1:
        assert len(first) == len(second) == len(mine) // 2 and not first & second and first | second <= mine
    for case in ("no pinning", "threads"):
        assert [set(fact["cores"]) for fact in launched(case).values()] == [mine, mine], case


@given(st.integers(1, 64), st.integers(1, 16))
def test_shares_of_the_cores_are_even_and_disjoint(cores: int, ranks: int) -> None:
    shares = [share(range(cores), rank, ranks) for rank in range(ranks)]
    assert {len(each) for each in shares} == {cores // ranks}
    assert [core for each in shares for core in each] == list(range(cores // ranks * ranks))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(RanksFailedError) as caught:
        launch(["-m", "json.gone"], 1)
    assert str(caught.value).startswith(
        "-m json.gone: No module named json.gone; name a module"
    ) and "\n" not in str(caught.value)
    assert caught.value.exit_status == 1


def test_a_module_with_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    launch(["-m", "this", "--d"], 1)
    assert "Namespaces are one honking great idea" in capfd.readouterr().out


def test_a_rank_that_raises_is_named_with_its_traceback(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script.write("""
        def deep():
            raise ValueError("no good")
        both_are_up()
        deep() if rank == 1 else wait()
    """)
    start = time.monotonic()
    error = failure([path])
    assert time.monotonic() - start < END_WITHIN
    assert (error.rank, error.exit_status) == (1, 1)
    [file] = Path.cwd().glob("traceback-*")
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of 2 failed first: ValueError: no good"
    assert re.fullmatch(rf"  at {path}:\d+: raise ValueError\(\"no good\"\)", lines[2]), lines
    assert len(lines) == 4 and lines[3] == f"traceback: {file} on {socket.gethostname()}"
    text = file.read_text()
    assert text == error.traceback and "in deep" in text and text.endswith("ValueError: no good\n")
    assert "runpy" not in text and "polyreme" not in text
    assert capfd.readouterr().err == "", "one report, by whoever catches the error"


def test_a_killed_rank_is_named_though_its_peer_raises_at_once(script: Script) -> None:
    path = script.write("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    """)
    status, _, errors = run_command(script.folder, "launch", "-n", "2", path)
    assert status == 1
    assert errors.startswith("error: rank 1 of 2 failed first: it was ended by SIGKILL")
    assert "Traceback" not in errors


def test_the_first_of_two_that_raise_is_named_first(script: Script) -> None:
    path = script.write("""
        both_are_up()
        if rank == 1:
            raise KeyError("the cause")
        report = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        while not (report.parents[1] / "1" / report.name).exists():
            time.sleep(0.001)
        raise RuntimeError("a consequence")
    """)
    error = failure([path])
    assert error.rank == 1
    assert str(error).startswith("rank 1 of 2 failed first: KeyError: 'the cause'\n  at ")


def test_one_report_for_many_ranks(tmp_path: Path) -> None:
    def failed(rank: int, exit_status: int, message: str | None = None, at: float = 0.0) -> Failure:
        file = tmp_path / f"{rank}.json"
        if message is not None:
            facts = {"py_callstack": f"Traceback of {rank}", "timestamp": str(int(at)), "at": at}
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}))
        return Failure.read(rank, exit_status, file)

    failures = [
        failed(0, 1, "RuntimeError: connection lost\nmore", at=100.75),
        failed(1, -signal.SIGTERM),
        failed(2, 1, "KeyError: 7", at=100.5),
        failed(3, 1, "KeyError: 7", at=100.9),
    ]
    *said, last = str(report(failures, (), 4)).splitlines()
    assert said == [
        "rank 2 of 4 failed first: KeyError: 7",
        "rank 3 failed in the same way",
        "then rank 0 failed: RuntimeError: connection lost",
    ]
    assert Path(last.split()[1]).read_text() == "Traceback of 2"
    failures[1] = failed(1, -signal.SIGSEGV)
    assert str(report(failures, (1,), 4)).startswith(
        "rank 1 of 4 failed first: it was ended by SIGSEGV\nthen"
    )
    failures = [failed(rank, 1, f"KeyError: {rank}", at=rank) for rank in range(9)]
    text = str(report(failures, (), 9))
    assert "\nthen rank 3 failed: KeyError: 3\nand 5 more failed then\ntraceback: " in text


def test_an_error_of_ours_is_a_message_with_its_exit_status(script: Script) -> None:
    path = script.write("""
        from polyreme.errors import ConfigError, Problem
        both_are_up()
        raise ConfigError([Problem("batch.size", 3, "cannot be divided by 2 ranks", "batch.size = 4")])
    """)
    error = failure([path])
    assert error.exit_status == 2
    assert "batch.size = 3: cannot be divided by 2 ranks" in str(error) and "Traceback" not in str(error)
    assert error.traceback is not None and "raise ConfigError" in error.traceback


def test_an_exit_status_is_a_failure(script: Script) -> None:
    error = failure([script.write("both_are_up()\nsys.exit(3) if rank == 1 else wait()")])
    assert error.rank == 1
    assert str(error).startswith("rank 1 of 2 failed first: the script called sys.exit(3)\n  at ")
    error = failure([script.write("both_are_up()\nos._exit(4) if rank == 1 else wait()")])
    assert (error.rank, str(error)) == (1, "rank 1 of 2 failed first: it ended with exit status 4")


def test_a_script_may_exit_with_zero(script: Script) -> None:
    launch([script.write("sys.exit(0)")], 2)
    assert len(script.pids()) == 2


def test_a_rank_that_will_not_end_is_killed(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "leaving", 1)
    path = script.write("""
        signal.signal(signal.SIGTERM, lambda *_: tell("asked to end"))
        tell(0, "ready")
        while len(list(folder.glob("ready-*"))) < 2:
            time.sleep(0.01)
        if rank == 1:
            raise ValueError("no good")
        while True:
            wait()
    """)
    start = time.monotonic()
    assert failure([path]).rank == 1
    assert time.monotonic() - start < END_WITHIN
    assert script.facts()[0] == "asked to end"


def test_clean_up_at_exit_runs_on_the_rank_that_failed(script: Script) -> None:
    failure([script.write("import atexit; atexit.register(tell, 'tidy'); raise ValueError")], ranks=1)
    assert script.facts() == {0: "tidy"}


def test_nothing_listens_beyond_loopback(script: Script) -> None:
    path = script.write("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        links = [link for pid in ("self", os.getppid()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        mine = {os.readlink(link) for link in links if link.is_symlink()}
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        tell([row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine])
        dist.barrier()
    """)
    status, _, errors = run_command(script.folder, "launch", "-n", "2", path)
    assert status == 0, errors
    listening = [address for rank in script.facts().values() for address in rank]
    assert listening and set(listening) == {"0100007F"}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["interrupt", "terminate"]
)
def test_a_signal_reaches_the_ranks_and_ends_the_run(
    script: Script, number: signal.Signals, status: int
) -> None:
    path = script.write("""
        def note(number, frame):
            tell(number)
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            os.kill(os.getpid(), number)
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGTERM, note)
        tell(0, "ready")
        wait()
    """)
    process = command(script.folder, "launch", "-n", "2", path)
    until(lambda: len(script.facts("ready")) == 2, "both ranks run")
    process.send_signal(number)
    output, errors = process.communicate(timeout=END_WITHIN)
    assert (process.returncode, output) == (status, "")
    assert errors.strip() == f"error: stopped by {number.name}; every rank has ended"
    assert script.facts() == {0: number, 1: number}


def test_ranks_that_end_well_after_ctrl_c_are_no_error(script: Script) -> None:
    path = script.write("""
        tell(0, "ready")
        try:
            wait()
        except KeyboardInterrupt:
            tell("saved")
    """)
    process = command(script.folder, "launch", "-n", "2", path)
    until(lambda: len(script.facts("ready")) == 2, "both ranks run")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=END_WITHIN)
    assert (process.returncode, output) == (130, "") and script.facts() == {0: "saved", 1: "saved"}
    assert errors == "stopped by SIGINT; every rank has ended\n"


BLOCKS = """
import signal, sys
from polyreme.__main__ import main
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
main()
"""


def test_a_signal_reaches_the_ranks_though_it_was_blocked(script: Script) -> None:
    path = script.write("""
        tell(0, "ready")
        try:
            wait()
        except KeyboardInterrupt:
            tell("interrupted")
    """)
    (script.folder / "hosts").write_text("localhost slots=1\n")
    process = python(script.folder, "-c", BLOCKS, "launch", "--hostfile", str(script.folder / "hosts"), path)
    until(lambda: len(script.facts("ready")) == 1, "the rank runs")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=END_WITHIN)
    assert "stopped by SIGHUP" in errors and script.facts() == {0: "interrupted"}


STOPS = """
def note(number, frame):
    time.sleep(0.3 * rank)  # which is no reason to end the slower one
    tell(number)
    sys.exit(75)
if "handled" in sys.argv:
    signal.signal(signal.SIGUSR1, note)
tell(0, "ready")
wait()
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--saves", "handled"], 75, "ranks have stopped by SIGUSR1, and are to go on (status 75)"),
        (["--saves", "not"], 138, "they have not saved: let SCRIPT call engine.ask_to_stop"),
        (["--threads=1", "not"], 138, "stopped by SIGUSR1; every rank has ended; with --saves a script is"),
    ],
)
def test_a_script_is_asked_to_save(script: Script, words: list[str], status: int, said: str) -> None:
    path = script.write(STOPS)
    process = command(script.folder, "launch", "-n", "2", words[0], path, words[1])
    until(lambda: len(script.facts("ready")) == 2, "both ranks run")
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=END_WITHIN)
    assert process.returncode == status and errors.startswith("error: ") and said in errors
    assert script.facts() == (dict.fromkeys((0, 1), signal.SIGUSR1) if status == 75 else {})


SAVES = """
from polyreme.errors import PolyremeError
from polyreme.launch import local, signals, torchrun
for name, value in {limits!r}.items():
    setattr(local.Local if hasattr(local.Local, name) else signals, name, value)
try:
    torchrun.launch([{path!r}], 2, saves=True)
except PolyremeError as error:
    sys.exit(f"{{error.exit_status}}: {{error}}")
"""
RANK_THAT_SAVES = """
def note(number, frame):
    asked.append(number)
    tell(0, "asked")
asked = []
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
tell(0, "ready")
while not asked or (folder / "hold").exists():
    time.sleep(0.01)
tell(asked)
"""


def saving(script: Script, body: str = RANK_THAT_SAVES, **limits: float) -> Process:
    """A launcher of two ranks that save when they are asked to, as soon as they run."""
    path = script.write(body)
    process = python(script.folder, "-c", "import sys\n" + SAVES.format(limits=limits, path=path))
    until(lambda: len(script.facts("ready")) == 2, "both ranks run")
    return process


def test_ranks_that_save_are_asked_once_and_waited_for(script: Script) -> None:
    process = saving(script)
    process.send_signal(signal.SIGTERM)
    # as a scheduler does that signals every process, of which some forward it
    process.send_signal(signal.SIGTERM)
    assert (*process.communicate(timeout=END_WITHIN), process.returncode) == ("", "", 0)
    assert script.facts() == {0: [signal.SIGTERM], 1: [signal.SIGTERM]}


def test_a_second_wish_of_another_kind_does_not_disturb_saving(script: Script) -> None:
    hold = script.folder / "hold"
    hold.touch()
    process = saving(script, ONE_SIGNAL=0)
    process.send_signal(signal.SIGUSR1)
    until(lambda: len(script.facts("asked")) == 2, "both ranks were asked")
    process.send_signal(signal.SIGTERM)
    hold.unlink()
    assert (*process.communicate(timeout=END_WITHIN), process.returncode) == ("", "", 0)
    assert script.facts() == {0: [signal.SIGUSR1], 1: [signal.SIGUSR1]}


def test_a_second_sigterm_ends_ranks_that_save(script: Script) -> None:
    (script.folder / "hold").touch()
    process = saving(script, ONE_SIGNAL=0)
    process.send_signal(signal.SIGTERM)
    until(lambda: len(script.facts("asked")) == 2, "both ranks were asked")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=END_WITHIN)[1] == "143: stopped by SIGTERM; every rank has ended\n"
    assert script.facts() == {}


def test_ranks_that_take_too_long_to_save_are_killed(script: Script) -> None:
    (script.folder / "hold").touch()
    process = saving(script, saving=0.3)
    process.send_signal(signal.SIGUSR1)
    errors = process.communicate(timeout=END_WITHIN)[1]
    assert (
        errors == "138: stopped by SIGUSR1; its ranks had not saved and ended 0.3 s later, and were killed\n"
    )


def test_a_wish_before_ranks_listen_ends_them(script: Script) -> None:
    process = saving(script, body='tell(0, "ready")\nwait()')
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=END_WITHIN)[1] == "143: stopped by SIGTERM; every rank has ended\n"


def test_where_one_fails_those_that_would_go_on_to_the_end_of_their_step_are_ended(script: Script) -> None:
    process = saving(script, body="""
def note(number, frame):
    tell("asked to end")
signal.signal(signal.SIGTERM, note)
tell(0, "ready")
both_are_up()
if rank == 1:
    raise ValueError("no good")
while True:
    wait()
""")  # fmt: skip
    assert process.communicate(timeout=END_WITHIN)[1].startswith(
        "1: rank 1 of 2 failed first: ValueError: no good\n"
    )
    assert script.facts() == {}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's parent death signal is Linux's"
)
def test_a_killed_launcher_leaves_no_rank(script: Script) -> None:
    process = command(script.folder, "launch", "-n", "2", script.write("wait()"))
    until(lambda: len(script.pids()) == 2, "both ranks run")
    process.kill()
    process.wait()
    until(lambda: all(gone(pid) for pid in script.pids()), "the ranks have ended", END_WITHIN)


def test_the_command_reports_once_and_passes_output_on(script: Script) -> None:
    path = script.write("""
        print("rank", rank, sys.argv[1:])
        both_are_up()
        from polyreme.errors import BatchError
        raise BatchError("a batch of 3")
    """)
    process = command(script.folder, "launch", "-n", "2", path, "--d", "3")
    output, errors = process.communicate()
    assert process.returncode == 1
    assert sorted(output.splitlines()) == ["rank 0 ['--d', '3']", "rank 1 ['--d', '3']"]
    assert re.fullmatch(
        rf'error: a batch of 3\n  at {path}:\d+: raise BatchError\("a batch of 3"\)\n', errors
    )


def test_lines_of_ranks_do_not_mix(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python writes each piece of a line by itself, too."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    path = script.write("""
        both_are_up()
        for _ in range(300):
            print(*[rank] * 20)
            print(*[rank] * 20, file=sys.stderr)
    """)
    process = command(script.folder, "launch", "-n", "2", path)
    for text in process.communicate():
        assert sorted(text.splitlines()) == [" ".join([rank] * 20) for rank in "0" * 300 + "1" * 300]


@pytest.mark.parametrize(
    ("words", "ranks", "named"),
    [
        (["none.py"], 2, "'none.py' is not a file"),
        ([], 2, "nothing to launch"),
        (["-m"], 2, "nothing"),
        (["x"], 0, "ranks = 0"),
    ],
)
def test_what_cannot_be_launched(words: list[str], ranks: int, named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        launch(words, ranks)
