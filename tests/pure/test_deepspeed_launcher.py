"""DeepSpeed's launcher: its options and defaults, hostfiles and filters, command lines for several hosts, and
what is refused. No ranks are started here."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polyreme.cli import main as cli
from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import elsewhere as deepspeed_elsewhere
from polyreme.compat.deepspeed.launcher import launch, multinode_runner, resources, runner
from polyreme.compat.deepspeed.launcher.arguments import parse_launch_args
from polyreme.compat.deepspeed.launcher.runner import (
    apply_num_nodes_and_gpus,
    encode_world_info,
    fetch_hostfile,
    parse_args,
    parse_inclusion_exclusion,
    parse_node_config_list,
    parse_resource_filter,
)
from polyreme.compat.deepspeed.utils import numa
from polyreme.errors import PolyremeError
from polyreme.launch import hostfile as hostfile_module
from polyreme.launch import mpirun, several
from polyreme.launch.hosts import Hosts
from polyreme.launch.options import LaunchOptions

POOL = {"n1": 4, "n2": 4}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process on a machine without GPUs; other machines' names cost no question."""
    for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    names = lambda host: host in ("localhost", "127.0.0.1", "here")  # noqa: E731
    monkeypatch.setattr(runner, "is_this_machine", names)
    monkeypatch.setattr(launch, "is_this_machine", names)
    logging.getLogger("polyreme.deepspeed").setLevel(logging.INFO)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, LaunchOptions]]:
    """Every call of `polyreme.launch`, in place of starting ranks."""
    calls: list[tuple[list[str], int, LaunchOptions]] = []
    monkeypatch.setattr(
        launch, "launch", lambda command, ranks, options, hosts: calls.append((command, ranks, options))
    )
    return calls


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("# all\nn1 slots=4\n\n  n2 slots=4\n")
    return str(path)


def refused(*words: str) -> str:
    """Why the command is refused, before a rank starts."""
    with pytest.raises(ValueError) as caught:
        runner.main([*words, "train.py"])
    assert isinstance(caught.value, PolyremeError) and caught.value.exit_status == 2
    return str(caught.value)


def test_defaults() -> None:
    expected = {
        "hostfile": "/job/hostfile",
        "include": "",
        "exclude": "",
        "num_nodes": -1,
        "num_gpus": -1,
        "master_port": 29500,
        "master_addr": "",
        "node_rank": -1,
        "launcher": "pdsh",
        "launcher_args": "",
        "module": False,
        "no_python": False,
        "no_local_rank": False,
        "no_ssh": False,
        "no_ssh_check": False,
        "force_multi": False,
        "save_pid": False,
        "enable_each_rank_log": "None",
        "autotuning": "",
        "user_script": "train.py",
        "user_args": [],
        "bind_cores_to_rank": False,
        "bind_core_list": None,
        "ssh_port": None,
        "venv_script": None,
        "log_level": "info",
        "quiet": False,
    }
    assert vars(parse_args(["train.py"])) == expected


def test_what_follows_the_script_is_the_scripts() -> None:
    words = [
        "--num_accelerators",
        "2",
        "-H",
        "hosts",
        "train.py",
        "--num_gpus",
        "7",
        "--",
        "-i",
        "x",
        "--help",
    ]
    options = parse_args(words)
    assert (options.num_gpus, options.hostfile, options.include) == (2, "hosts", "")
    assert options.user_args == ["--num_gpus", "7", "--", "-i", "x", "--help"]


def test_an_option_that_was_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--elastic_training", "train.py"])
    assert caught.value.code == 2
    assert "has no --elastic_training: checkpoints go on" in capsys.readouterr().err


def test_hostfiles(hostfile: str, caplog: pytest.LogCaptureFixture) -> None:
    assert fetch_hostfile(hostfile) == POOL
    caplog.set_level(logging.WARNING, "polyreme.deepspeed")
    assert fetch_hostfile("/none/hosts") is None and "/none/hosts" in caplog.text
    caplog.clear()
    assert fetch_hostfile("/job/hostfile") is None and not caplog.text  # DeepSpeed's default


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("left slots=3\nright slots=3\nleft slots=3", "left twice"),
        ("left and right slots=3", "'left and right slots=3'"),
        ("left slots=3\nright", "'right'"),
        ("left slots=three", "'left slots=three'"),
        ("left slots=3 right slots=3", "'left slots=3 right slots=3'"),
        ("a slots=2.5", "'a slots=2.5'"),
        ("a slots=1\nb slots=0", "'b slots=0': a host has 1 to"),
        ("a slots=999999999", "1 to 4096 slots"),
        ("\n# nobody\n", "no host"),
    ],
)
def test_hostfiles_that_cannot_be(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        runner._parse_hostfile(text.splitlines())


SLOTS = {"p": [0, 1, 2], "q": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", SLOTS),
        ("q:4,2", "", {"q": [2, 4]}),
        ("p:2,2,2", "", {"p": [2]}),
        ("q:0@q:3,0", "", {"q": [0, 3]}),
        ("q@p:0", "", {"p": [0], "q": [0, 1, 2, 3, 4]}),
        ("p", "", {"p": [0, 1, 2]}),
        ("", "p", {"q": [0, 1, 2, 3, 4]}),
        ("", "p@q:4,3,2,1,0", {}),
        ("", "q:1,3@p:2", {"p": [0, 1], "q": [0, 2, 4]}),
    ],
)
def test_filters(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    found = parse_resource_filter(SLOTS, include_str=include, exclude_str=exclude)
    assert found == left and list(found) == sorted(left)
    assert parse_inclusion_exclusion({"p": 3, "q": 5}, include, exclude) == left
    assert SLOTS == {"p": [0, 1, 2], "q": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize("wrong", ["r", "r:1", "p:3", "q:4,5", "p:first", "p:", "q:2:1", "p:0@1", "p@@q"])
def test_filters_that_cannot_be(wrong: str) -> None:
    for sides in ((wrong, ""), ("", wrong)):
        with pytest.raises(ValueError):
            parse_inclusion_exclusion({"p": 3, "q": 5}, *sides)
    with pytest.raises(ValueError, match="both given"):
        parse_resource_filter({}, include_str="p", exclude_str="q")


def test_numbers_of_hosts_and_slots() -> None:
    assert parse_node_config_list("a@b:1,0@a:2") == {"a": [2], "b": [0, 1]}
    assert apply_num_nodes_and_gpus(SLOTS, -1, -1) == SLOTS
    assert apply_num_nodes_and_gpus(SLOTS, 1, 2) == {"p": [0, 1]}
    assert resources.decode_world_info(encode_world_info(SLOTS)) == SLOTS
    assert encode_world_info({"a": [0]}) == "eyJhIjogWzBdfQ=="
    for wrong in ("x", encode_world_info({"a": "b"})):
        with pytest.raises(ValueError, match="no world"):
            resources.decode_world_info(wrong)


def test_which_machine_a_name_is_of() -> None:
    assert hostfile_module.is_this_machine("localhost") and hostfile_module.is_this_machine("127.0.0.1")
    assert not hostfile_module.is_this_machine("192.0.2.1")  # which is kept for documentation
    assert not hostfile_module.is_this_machine("a..b")


def test_ranks_of_this_machine(
    started: list[tuple[list[str], int, LaunchOptions]], capsys: pytest.CaptureFixture[str]
) -> None:
    runner.main(["--num_gpus", "2", "train.py", "--flag", "$x"])
    assert capsys.readouterr() == ("", "")
    runner.main(["--num_gpus", "2", "--log_level", "debug", "train.py", "--flag", "$x"])
    assert "slots [0, 1] run ['train.py', '--flag', '$x']" in capsys.readouterr().err
    del started[1]
    ((command, ranks, options),) = started
    assert (command, ranks) == (["train.py", "--flag", "$x"], 2)
    assert options.local_rank and not options.program and options.log is None and options.ports == (29500, 0)
    assert {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}.items() <= options.variables.items()
    assert finder.variables("deepspeed").items() <= options.variables.items()
    assert "CUDA_VISIBLE_DEVICES" not in options.variables and "OMP_NUM_THREADS" not in options.variables


def test_options_of_ranks(
    started: list[tuple[list[str], int, LaunchOptions]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("here slots=3\n")
    words = ["--hostfile", str(hosts), "--exclude", "here:1", "--master_port", "7", "--no_local_rank"]
    words += ["--module", "--enable_each_rank_log", str(tmp_path / "logs" / "new"), "--master_addr", "here"]
    runner.main([*words, "--no_ssh", "--node_rank", "0", "--ssh_port", "22", "package.train", "-x"])
    ((command, ranks, options),) = started
    assert (command, ranks) == (["-m", "package.train", "-x"], 2)
    assert options.ports == (7,) and not options.local_rank
    assert (
        options.log
        and options.log.startswith(str(tmp_path / "logs" / "new"))
        and options.log.endswith("_rank")
    )
    assert "--ssh_port: of use on other hosts only" in caplog.text
    runner.main(["--no_python", "-q", "tool"])
    assert started[-1][:2] == (["tool"], 1) and started[-1][2].program
    assert logging.getLogger("polyreme.deepspeed").level == logging.ERROR


def test_cores(started: list[tuple[list[str], int, LaunchOptions]], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    monkeypatch.setattr(launch, "launch", lambda *_, **how: seen.append(os.sched_getaffinity(0)))
    runner.main(["--bind_cores_to_rank", "--bind_core_list", str(mine[-1]), "train.py"])
    assert seen == [{mine[-1]}] and os.sched_getaffinity(0) == set(mine)
    assert "need a core each" in refused("--num_gpus", str(len(mine) + 1), "--bind_cores_to_rank")
    assert "need a core each" in refused("--bind_cores_to_rank", "--bind_core_list", str(mine[-1] + 1))
    assert "give both" in refused("--bind_core_list", "0")
    assert "from the lowest up" in refused("--bind_cores_to_rank", "--bind_core_list", "2-1")


def test_the_file_with_the_process_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "PID_FILE_BASEPATH", str(tmp_path))
    path = tmp_path / f"{os.getpid()}.deepspeed"
    seen: list[str] = []
    monkeypatch.setattr(launch, "launch", lambda *_, **how: seen.append(path.read_text()))
    runner.main(["--save_pid", "train.py"])
    assert seen == [str(os.getpid())] and not path.exists()
    assert capsys.readouterr().out == f"launcher pid: {os.getpid()}\n"
    path.symlink_to(tmp_path / "elsewhere")
    assert "delete it" in refused("--save_pid") and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--num_nodes", "1", "-i", "localhost"], "leave one of them out"),
        (["--num_gpus", "1", "-e", "localhost"], "leave one of them out"),
        (["--num_gpus", "0"], "is 0"),
        (["--num_nodes", "2"], "only this machine is known"),
        (["-i", "localhost:1"], "the slot 1 of 'localhost' is not there to choose: name some of"),
        (["-e", "localhost"], "leaves no slot"),
        (["--autotuning", "run"], "no autotuner"),
        (["--launcher", "rsh"], "rsh is not known"),
        (["--no_ssh"], "give 0 to 0"),
        (["--module", "--no_python"], "both given"),
        (["--master_addr", "192.0.2.1"], "another machine's"),
        (["--enable_each_rank_log", "/dev/null"], "give a folder"),
    ],
)
def test_what_is_refused(words: list[str], named: str, started: list[object]) -> None:
    assert named in refused(*words) and not started


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call of what starts ranks on other hosts, in its place."""
    calls: list[Any] = []
    monkeypatch.setattr(several, "run", lambda active, what, ssh: calls.append((active, what, ssh)))
    monkeypatch.setattr(mpirun, "run", lambda library, request: calls.append(request))
    monkeypatch.setattr(mpirun, "find", lambda: mpirun.Library("mpirun", mpirun.HYDRA))
    by_srun = lambda *words, **how: types.SimpleNamespace(run=lambda: calls.append(words))  # noqa: E731
    monkeypatch.setattr(deepspeed_elsewhere, "Command", by_srun)
    monkeypatch.setattr(deepspeed_elsewhere.shutil, "which", lambda name: name)
    return calls


def test_other_hosts(
    hostfile: str, elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_OTHER", "no")
    monkeypatch.setenv("UCX_TLS", "tcp")
    Path(".deepspeed_env").write_text("NAME=a b=c\n")
    runner.main(
        ["--hostfile", hostfile, "--num_gpus", "3", "--ssh_port", "7", "--no_local_rank", "t.py", "-x"]
    )
    runner.main(["--hostfile", hostfile, "-i", "n2:2", "--master_addr", "m", "--module", "t"])
    runner.main(["--num_gpus", "2", "--force_multi", "--no_python", "--bind_cores_to_rank", "t"])
    (active, what, ssh), (one, of_one, _), (here, program, _) = elsewhere
    assert dict(active) == {"n1": [0, 1, 2], "n2": [0, 1, 2]} and ssh == ["ssh", "-p", "7"]
    assert what.command == ["t.py", "-x"] and what.files == ["t.py"] and not what.options.local_rank
    assert what.port == 29500 and what.address is None and what.source is None
    assert what.variables["NAME"] == "a b=c" and what.variables["UCX_TLS"] == "tcp"
    assert "DS_OTHER" not in what.variables
    assert str(tmp_path) in what.variables["PYTHONPATH"].split(os.pathsep)
    assert what.of_hosts["n2"] == {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "3"}
    assert dict(one) == {"n2": [2]} and of_one.address == "m" and of_one.command == ["-m", "t"]
    assert dict(here) == {"localhost": [0, 1]} and program.options.program and not program.files
    assert program.options.variables == {"POLYREME_PIN": "1"} and not of_one.options.variables
    Path(".deepspeed_env").write_text("NAME\n")
    assert "NAME=VALUE" in refused("--hostfile", hostfile)


def test_other_launchers(hostfile: str, elsewhere: list[Any]) -> None:
    hosts = ["--hostfile", hostfile, "--num_gpus", "2"]
    runner.main([*hosts, "--launcher", "impi", "--launcher_args=-x 1", "--master_addr", "m", "t.py", "-y"])
    runner.main([*hosts, "--launcher", "slurm", "--launcher_args=--mem 3", "--module", "t", "-y"])
    request, (name, words, given) = elsewhere
    assert request.command == ["t.py", "-y"] and request.hosts == {"n1": 2, "n2": 2}
    assert request.options == ["-x", "1"] and request.variables["MASTER_ADDR"] == "m"
    assert (
        name == "srun" and words[:5] == ["srun", "-n", "4", "--mem", "3"] and words[-3:] == ["-m", "t", "-y"]
    )
    assert "MASTER_ADDR" not in given and finder.variables("deepspeed").keys() <= given.keys()
    assert "--launcher of this one" in refused(*hosts, "--launcher", "openmpi")
    assert "are Python's" in refused(*hosts, "--launcher", "mpich", "--no_python")
    assert "--venv_script with" in refused(*hosts, "--launcher", "slurm", "--venv_script", "v")
    assert "does not choose slots" in refused(*hosts[:2], "--launcher", "mpich", "-i", "n2:0,2")
    assert "options of ssh" in refused(*hosts, "--launcher_args", "x")
    assert "cores of one host" in refused(*hosts, "--bind_cores_to_rank", "--bind_core_list", "0")
    for more in ([], ["--force_multi"]):  # as srun cannot do it
        text = refused(*hosts[:2], "--launcher", "slurm", "--include", "n2:0,2", *more)
        assert "specific device ids" in text
    assert len(elsewhere) == 2


def test_the_command_on_each_host(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda command, ranks, options, hosts: places.append((ranks, options.variables, hosts)),
    )
    monkeypatch.setenv("SLURM_PROCID", "1")
    runner.main(["--hostfile", hostfile, "--no_ssh", "--node_rank", "1", "train.py"])
    world = encode_world_info({"a": [0], "b": [0, 1]})
    launch.main([f"--world_info={world}", "--node_rank=1", "--master_addr=a", "train.py"])
    assert [ranks for ranks, _, _ in places] == [4, 2] and places[0][1]["CROSS_RANK"] == "1"
    assert [hosts for _, _, hosts in places] == [
        Hosts(1, 2, 2, ("n1", 29500)), Hosts(1, 2, 2, ("a", 29500))
    ]  # fmt: skip
    with pytest.raises(ValueError, match="give each --master_addr"):
        launch.main([f"--world_info={world}", "train.py"])


def test_one_host_of_a_world(started: list[tuple[list[str], int, LaunchOptions]]) -> None:
    launch.main([f"--world_info={encode_world_info({'here': [0, 1]})}", "--no_local_rank", "train.py", "-x"])
    assert started[0][:2] == (["train.py", "-x"], 2) and not started[0][2].local_rank
    with pytest.raises(ValueError, match="world_info is missing"):
        launch.main(["train.py"])
    with pytest.raises(ValueError, match="node_rank=1"):
        launch.main([f"--world_info={encode_world_info({'here': [0]})}", "--node_rank", "1", "train.py"])


class GPUs:
    """Four devices of CUDA."""

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 4

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("visible", "words", "shown"),
    [
        (None, [], "0,1,2,3"),
        ("0,2", [], "0,2"),
        ("0,2", ["--num_gpus", "3"], "0,1,2"),
        ("0,2", ["-i", "localhost:3"], "3"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["-i", "localhost:1,3"], "GPU-b,GPU-d"),
    ],
)
def test_visible_devices(
    visible: str | None,
    words: Sequence[str],
    shown: str,
    started: list[tuple[list[str], int, LaunchOptions]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (runner, launch):
        monkeypatch.setattr(module, "get_accelerator", GPUs)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    runner.main([*words, "train.py"])
    assert started[0][2].variables["CUDA_VISIBLE_DEVICES"] == shown
    assert started[0][1] == len(shown.split(","))
    assert "this machine has 4" in refused("--num_gpus", "5")


def test_srun(elsewhere: list[Any]) -> None:
    """Of which the command says numbers of ranks, and which hosts."""

    def after(active: dict[str, list[int]], *words: str) -> dict[str, str]:
        line = deepspeed_elsewhere.srun_words(parse_args([*words, "t.py"]), active)
        assert line[0] == "srun" and line[-4] == "--export=ALL" and line[-2:] == ["-u", "t.py"]
        return dict(zip(line[1:-4:2], line[2:-4:2], strict=True))

    both = {"n1": [0, 1, 2], "n2": [0, 1, 2]}
    assert after(both) == {"-n": "6"}
    assert after({"n2": [0, 1, 2]}, "-e", "n1") == {"-n": "3", "--nodelist": "n2", "--nodes": "1"}
    assert after({"n1": [0]}, "--num_nodes", "1", "--num_gpus", "1") == {
        "-n": "1", "--nodes": "1", "--gpus-per-node": "1"
    }  # fmt: skip
    for wrong, reason in (({"n1": [1, 2]}, "specific device ids"), ({**both, "n2": [0]}, "same slot count")):
        with pytest.raises(ValueError, match=reason):
            after(wrong)


class Own(multinode_runner.MultiNodeRunner):
    """A launcher of a script's."""

    name = "own"


def test_commands_for_scripts() -> None:
    """Which are those that the launcher runs."""
    pool = {"n1": 2, "n2": 2}
    names = ("OpenMPIRunner", "MPICHRunner", "IMPIRunner", "MVAPICHRunner", "SlurmRunner")
    for kind in (getattr(multinode_runner, name) for name in names):
        options = parse_args(["--launcher", kind.name, "--launcher_args", "-v -w", "t.py", "--x", "a b"])
        runner = kind(options, "word", pool)
        runner.add_export(" A ", " 64(x2) ")
        variables = {"B": "c"}
        words = runner.get_cmd(variables, parse_inclusion_exclusion(pool, "", "n2"))
        assert words[:3] == ["srun" if kind.name == "slurm" else "mpirun", "-n", "2"] and "-v" in words
        assert words[-3:] == ["t.py", "--x", "a b"] and variables["A"] == "64(x2)" and variables["B"] == "c"
        assert runner.exports == {"A": '"64(x2)"'} and ("eth0" in words) == (kind.name == "openmpi")
        assert kind.name == "slurm" or words == runner.get_cmd({}, {"n1": 2})


def of_a_host(words: list[str], number: int, folder: str) -> list[str]:
    """The words that a host runs: pdsh joins those after its own by spaces, replaces %n by the number of the
    host and %% by %, and a shell there reads them."""
    line = " ".join(words).replace("%%", "\0").replace("%n", str(number)).replace("\0", "%")
    source, exports, change, run = line.split(" && ")
    assert source == ". 'my venv'" and exports == "export 'NAME=x $y'" and change == f"cd {folder}"
    return shlex.split(run)


def test_words_of_pdsh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = {"n9": [0, 1], "n1": [2]}
    world = encode_world_info(hosts)
    given = ["--ssh_port", "7", "--launcher_args", "-b -u 9", "--venv_script", "my venv", "-q", "--save_pid"]
    given += ["--no_local_rank", "--bind_cores_to_rank", "--bind_core_list", "0-3", "--master_port", "5"]
    pdsh = multinode_runner.PDSHRunner(parse_args([*given, "t 1.py", "a b", '"$HOME"', "%n 100%"]), world)
    pdsh.add_export(" NAME ", " x $y ")
    environment = {"PDSH_SSH_ARGS_APPEND": "-q"}
    start, end, changed = pdsh.get_cmd(environment, hosts)
    assert start[:9] == end[:9] == ["pdsh", "-S", "-f", "1024", "-w", "n9,n1", "-b", "-u", "9"]
    assert changed is environment
    assert changed == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-q -p 7"}
    run = of_a_host(start[9:], 1, str(tmp_path))
    assert run[:5] == ["exec", sys.executable, "-u", "-m", launch.__name__]
    options = parse_launch_args(run[5:])
    assert (options.world_info, options.node_rank) == (world, 1)
    assert (options.master_addr, options.master_port, options.save_pid) == ("n9", 5, os.getpid())
    assert options.quiet and options.no_local_rank and options.bind_cores_to_rank
    assert options.bind_core_list == "0-3" and not options.module
    assert [options.training_script, *options.training_script_args] == [
        "t 1.py", "a b", '"$HOME"', "%n 100%"
    ]  # fmt: skip
    assert end[9:12] == ["pkill", "-f", "--"]
    [pattern] = shlex.split(end[12])
    line = " ".join(run[1:])
    assert re.search(pattern, line) and not re.search(pattern, line.replace("_port=5", "_port=55"))
    assert not any(re.search(pattern, " ".join(words)) for words in (start, end, ["bash", "-c", line]))


def test_words_of_pdsh_by_default() -> None:
    """Which change no variable of ssh's, and have an address that is given."""
    options = parse_args(["--master_addr", "m", "--no_python", "t"])
    start, _, environment = multinode_runner.PDSHRunner(options, "w").get_cmd({}, {"n1": 1})
    assert environment == {"PDSH_RCMD_TYPE": "ssh"} and start[6:8] == ["cd", str(Path.cwd())]
    assert start[-3:] == ["--save_pid=0", "--no_python", "t"] and "--master_addr=m" in start


def test_a_launcher_of_a_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own(parse_args(["--launcher_args", "--mca btl_tcp_if_include eth1", "t.py", "-y"]), "word")
    own.add_export("P", "/usr/lib")
    assert own.exports == {"P": "/usr/lib"} and own.user_script == "t.py" and own.user_arguments == ["-y"]
    asked: list[str] = []
    monkeypatch.setattr("shutil.which", asked.append)
    slurm = multinode_runner.SlurmRunner(own.args, "word", {"n1": 1})
    assert not own.backend_exists() and not slurm.backend_exists() and asked == ["mpirun", "srun"]
    words = multinode_runner.OpenMPIRunner(own.args, "word").get_cmd({}, {"localhost": 1})
    assert "eth1" in words and "eth0" not in words
    uneven = {"n1": [0, 2], "n2": [1]}
    own.validate_active_resources(uneven)
    with pytest.raises(ValueError, match="specific device ids"):
        slurm.validate_active_resources(uneven)
    with pytest.raises(ValueError, match="ranks of MPI are Python's"):
        multinode_runner.MPICHRunner(parse_args(["--no_python", "t"]), "word").get_cmd({}, {"localhost": 1})


def test_cores_of_a_list() -> None:
    assert numa.parse_range_list("1,3-5,7") == [1, 3, 4, 5, 7]
    for wrong in ("1,3-7,6-9", "7,2-5", "3,9-4", "", "x", "1-3-5", "2,2"):
        with pytest.raises(ValueError, match="from the lowest up"):
            numa.parse_range_list(wrong)


def test_the_command(
    started: list[tuple[list[str], int, LaunchOptions]], capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            cli.app(["deepspeed", *words], prog_name="polyreme")
        return int(caught.value.code or 0), "".join(capfd.readouterr())

    assert run("--num_gpus=2", "-i", "", "train.py", "--num_gpus", "3", "--", "--help", "-n") == (0, "")
    assert started[0][:2] == (["train.py", "--num_gpus", "3", "--", "--help", "-n"], 2)
    status, text = run("--force_multi", "--launcher_args=x", "train.py")
    assert status == 2 and text.startswith("error: --launcher_args")
    status, text = run("--none", "train.py")
    assert status == 2 and "unrecognized arguments: --none" in text
    status, text = run()
    assert status == 2 and "no script to run: polyreme deepspeed --num_gpus 2 train.py" in text
    assert len(text.splitlines()) == 3
    status, text = run("--help")
    assert status == 0 and "--bind_core_list" in text and "polyreme deepspeed" in text
