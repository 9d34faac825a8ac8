"""DeepSpeed's launcher: its options and defaults, hostfiles and filters, command lines for several hosts, and
what is refused. No ranks are started here."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyreme.cli import main as cli
from polyreme.compat import finder
from polyreme.compat.deepspeed.launcher import elsewhere as deepspeed_elsewhere
from polyreme.compat.deepspeed.launcher import launch, launcher_helper, multinode_runner, resources, runner
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
from polyreme.errors import LaunchError, PolyremeError
from polyreme.launch import mpirun, several
from polyreme.launch.hosts import Hosts
from polyreme.launch.manner import Manner

POOL = {"worker-0": 4, "worker-1": 4}


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
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, Manner]]:
    """Every call of `polyreme.launch`, in place of starting ranks."""
    calls: list[tuple[list[str], int, Manner]] = []
    monkeypatch.setattr(
        launch, "launch", lambda command, ranks, manner, hosts: calls.append((command, ranks, manner))
    )
    return calls


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("# all\nworker-0 slots=4\n\n  worker-1 slots=4\n")
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
        ("a slots=1\nb slots=1\na slots=2", "a twice"),
        ("this is bad slots=1", "'this is bad slots=1'"),
        ("a slots=2\nno", "'no'"),
        ("a slots=two", "'a slots=two'"),
        ("a slots=2 b slots=2", "'a slots=2 b slots=2'"),
        ("a slots=2.5", "'a slots=2.5'"),
        ("a slots=1\nb slots=0", "'b slots=0': a host has 1 to"),
        ("a slots=999999999", "1 to 4096 slots"),
        ("\n# nobody\n", "no host"),
    ],
)
def test_hostfiles_that_cannot_be(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        runner._parse_hostfile(text.splitlines())


SLOTS = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", SLOTS),
        ("b:0,3", "", {"b": [0, 3]}),
        ("a:1,1", "", {"a": [1]}),
        ("a:1@a:0,1", "", {"a": [0, 1]}),
        ("b@a:2", "", {"a": [2], "b": [0, 1, 2, 3]}),
        ("a", "", {"a": [0, 1, 2, 3]}),
        ("", "a", {"b": [0, 1, 2, 3]}),
        ("", "a:0,1,2,3@b", {}),
        ("", "a:0,1@b:3", {"a": [2, 3], "b": [0, 1, 2]}),
    ],
)
def test_filters(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    found = parse_resource_filter(SLOTS, include_str=include, exclude_str=exclude)
    assert found == left and list(found) == sorted(left)
    assert parse_inclusion_exclusion({"a": 4, "b": 4}, include, exclude) == left
    assert SLOTS == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}


@pytest.mark.parametrize("wrong", ["c", "c:0", "a:4", "a:0,4", "a:x", "a:", "a:1:2", "b@a:1@5"])
def test_filters_that_cannot_be(wrong: str) -> None:
    for sides in ((wrong, ""), ("", wrong)):
        with pytest.raises(ValueError):
            parse_inclusion_exclusion({"a": 4, "b": 4}, *sides)
    with pytest.raises(ValueError, match="both given"):
        parse_resource_filter({}, include_str="a", exclude_str="b")


def test_numbers_of_hosts_and_slots() -> None:
    assert parse_node_config_list("a@b:1,0@a:2") == {"a": [2], "b": [0, 1]}
    assert apply_num_nodes_and_gpus(SLOTS, -1, -1) == SLOTS
    assert apply_num_nodes_and_gpus(SLOTS, 1, 2) == {"a": [0, 1]}
    assert resources.decode_world_info(encode_world_info(SLOTS)) == SLOTS
    assert encode_world_info({"a": [0]}) == "eyJhIjogWzBdfQ=="
    for wrong in ("x", encode_world_info({"a": "b"})):
        with pytest.raises(ValueError, match="no world"):
            resources.decode_world_info(wrong)


def test_which_machine_a_name_is_of() -> None:
    assert resources.is_this_machine("localhost") and resources.is_this_machine("127.0.0.1")
    assert not resources.is_this_machine("192.0.2.1")  # which is kept for documentation
    assert not resources.is_this_machine("a..b")


def test_ranks_of_this_machine(
    started: list[tuple[list[str], int, Manner]], capsys: pytest.CaptureFixture[str]
) -> None:
    runner.main(["--num_gpus", "2", "train.py", "--flag", "$x"])
    assert capsys.readouterr() == ("", "")
    runner.main(["--num_gpus", "2", "--log_level", "debug", "train.py", "--flag", "$x"])
    assert "slots [0, 1] run ['train.py', '--flag', '$x']" in capsys.readouterr().err
    del started[1]
    ((command, ranks, manner),) = started
    assert (command, ranks) == (["train.py", "--flag", "$x"], 2)
    assert manner.local_rank and not manner.program and manner.log is None and manner.ports == (29500, 0)
    assert {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}.items() <= manner.variables.items()
    assert finder.variables("deepspeed").items() <= manner.variables.items()
    assert "CUDA_VISIBLE_DEVICES" not in manner.variables and "OMP_NUM_THREADS" not in manner.variables


def test_options_of_ranks(
    started: list[tuple[list[str], int, Manner]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("here slots=3\n")
    words = ["--hostfile", str(hosts), "--exclude", "here:1", "--master_port", "7", "--no_local_rank"]
    words += ["--module", "--enable_each_rank_log", str(tmp_path / "logs" / "new"), "--master_addr", "here"]
    runner.main([*words, "--no_ssh", "--node_rank", "0", "--ssh_port", "22", "package.train", "-x"])
    ((command, ranks, manner),) = started
    assert (command, ranks) == (["-m", "package.train", "-x"], 2)
    assert manner.ports == (7,) and not manner.local_rank
    assert (
        manner.log and manner.log.startswith(str(tmp_path / "logs" / "new")) and manner.log.endswith("_rank")
    )
    assert "--ssh_port: of use on other hosts only" in caplog.text
    runner.main(["--no_python", "-q", "tool"])
    assert started[-1][:2] == (["tool"], 1) and started[-1][2].program
    assert logging.getLogger("polyreme.deepspeed").level == logging.ERROR


def test_cores(started: list[tuple[list[str], int, Manner]], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    monkeypatch.setattr(launch, "launch", lambda *_, **how: seen.append(os.sched_getaffinity(0)))
    runner.main(["--bind_cores_to_rank", "--bind_core_list", str(mine[-1]), "train.py"])
    assert seen == [{mine[-1]}] and os.sched_getaffinity(0) == set(mine)
    assert "need a core each" in refused("--num_gpus", str(len(mine) + 1), "--bind_cores_to_rank")
    assert "need a core each" in refused("--bind_cores_to_rank", "--bind_core_list", str(mine[-1] + 1))
    assert "give both" in refused("--bind_core_list", "0")
    assert "Bad range" in refused("--bind_cores_to_rank", "--bind_core_list", "2-1")


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
        (["-i", "localhost:1"], "No slot '1' specified on host 'localhost'"),
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
    runner.main(["--hostfile", hostfile, "-i", "worker-1:2", "--master_addr", "m", "--module", "t"])
    runner.main(["--num_gpus", "2", "--force_multi", "--no_python", "--bind_cores_to_rank", "t"])
    (active, what, ssh), (one, of_one, _), (here, program, _) = elsewhere
    assert dict(active) == {"worker-0": [0, 1, 2], "worker-1": [0, 1, 2]} and ssh == ["ssh", "-p", "7"]
    assert what.command == ["t.py", "-x"] and what.files == ["t.py"] and not what.manner.local_rank
    assert what.port == 29500 and what.address is None and what.source is None
    assert what.variables["NAME"] == "a b=c" and what.variables["UCX_TLS"] == "tcp"
    assert "DS_OTHER" not in what.variables
    assert str(tmp_path) in what.variables["PYTHONPATH"].split(os.pathsep)
    assert what.of_hosts["worker-1"] == {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "3"}
    assert dict(one) == {"worker-1": [2]} and of_one.address == "m" and of_one.command == ["-m", "t"]
    assert dict(here) == {"localhost": [0, 1]} and program.manner.program and not program.files
    assert program.manner.variables == {"POLYREME_PIN": "1"} and not of_one.manner.variables
    Path(".deepspeed_env").write_text("NAME\n")
    assert "NAME=VALUE" in refused("--hostfile", hostfile)


def test_other_launchers(hostfile: str, elsewhere: list[Any]) -> None:
    hosts = ["--hostfile", hostfile, "--num_gpus", "2"]
    runner.main([*hosts, "--launcher", "impi", "--launcher_args=-x 1", "--master_addr", "m", "t.py", "-y"])
    runner.main([*hosts, "--launcher", "slurm", "--launcher_args=--mem 3", "--module", "t", "-y"])
    request, (name, words, given) = elsewhere
    assert request.command == ["t.py", "-y"] and request.hosts == {"worker-0": 2, "worker-1": 2}
    assert request.options == ["-x", "1"] and request.variables["MASTER_ADDR"] == "m"
    assert (
        name == "srun" and words[:5] == ["srun", "-n", "4", "--mem", "3"] and words[-3:] == ["-m", "t", "-y"]
    )
    assert "MASTER_ADDR" not in given and finder.variables("deepspeed").keys() <= given.keys()
    assert "--launcher of this one" in refused(*hosts, "--launcher", "openmpi")
    assert "are Python's" in refused(*hosts, "--launcher", "mpich", "--no_python")
    assert "--venv_script with" in refused(*hosts, "--launcher", "slurm", "--venv_script", "v")
    assert "does not choose slots" in refused(*hosts[:2], "--launcher", "mpich", "-i", "worker-1:0,2")
    assert "options of ssh" in refused(*hosts, "--launcher_args", "x")
    assert "cores of one host" in refused(*hosts, "--bind_cores_to_rank", "--bind_core_list", "0")
    for more in ([], ["--force_multi"]):  # as srun cannot do it
        text = refused(*hosts[:2], "--launcher", "slurm", "--include", "worker-1:0,2", *more)
        assert "specific device ids" in text
    assert len(elsewhere) == 2


def test_the_command_on_each_host(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda command, ranks, manner, hosts: places.append((ranks, manner.variables, hosts)),
    )
    monkeypatch.setenv("SLURM_PROCID", "1")
    runner.main(["--hostfile", hostfile, "--no_ssh", "--node_rank", "1", "train.py"])
    world = encode_world_info({"a": [0], "b": [0, 1]})
    launch.main([f"--world_info={world}", "--node_rank=1", "--master_addr=a", "train.py"])
    assert [ranks for ranks, _, _ in places] == [4, 2] and places[0][1]["CROSS_RANK"] == "1"
    assert [hosts for _, _, hosts in places] == [
        Hosts(1, 2, 2, ("worker-0", 29500)), Hosts(1, 2, 2, ("a", 29500))
    ]  # fmt: skip
    with pytest.raises(ValueError, match="give each --master_addr"):
        launch.main([f"--world_info={world}", "train.py"])


def test_one_host_of_a_world(started: list[tuple[list[str], int, Manner]]) -> None:
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
    started: list[tuple[list[str], int, Manner]],
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


def made(kind: Any, *words: str, pool: dict[str, int] = POOL) -> Any:
    """A runner for `words` and a pool."""
    options = parse_args([*words, "train.py", "--prompt", 'say "a b"'])
    arguments = [options, encode_world_info(pool)]
    return kind(*arguments) if kind is multinode_runner.PDSHRunner else kind(*arguments, pool)


def command(kind: Any, *words: str, pool: dict[str, int] = POOL) -> list[str]:
    active = parse_inclusion_exclusion(
        pool, *(getattr(parse_args([*words, "x"]), n) for n in ("include", "exclude"))
    )
    built = made(kind, *words, pool=pool)
    built.add_export("A", "64(x2)")
    return built.get_cmd({}, active)


def after(words: Sequence[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_pdsh() -> None:
    words = ["--no_local_rank", "--ssh_port", "7", "--venv_script", "v", "--launcher_args", "-x 'a b'"]
    built = made(multinode_runner.PDSHRunner, *words)
    built.add_export("A", "64(x2)")
    built.add_export(" B ", " /a/b \n")
    line, kill, variables = built.get_cmd({}, SLOTS)
    assert built.name == "pdsh" and built.exports == {"A": '"64(x2)"', "B": "/a/b"}
    assert line[:9] == ["pdsh", "-S", "-f", "1024", "-w", "a,b", "-x", "a b", "source v;"]
    assert line[9] == 'export A="64(x2)"; export B=/a/b; ' and line[10] == f"cd {Path.cwd()};"
    assert "--node_rank=%n" in line and "--no_local_rank" in line and "--master_port=29500" in line
    assert line[-3:] == ["train.py", "--prompt", '"say \\"a b\\""']
    assert variables["PDSH_RCMD_TYPE"] == "ssh" and variables["PDSH_SSH_ARGS_APPEND"].endswith(" -p 7")
    assert kill[:2] == line[:2] and "world_info" in kill[-1] and "\\ -m\\ " in kill[-1]


def test_open_mpi() -> None:
    kind = multinode_runner.OpenMPIRunner
    line = command(kind)
    assert line[:3] == ["mpirun", "-n", "8"] and after(line, "btl_tcp_if_include") == "eth0"
    assert "UCX_TLS=tcp" in line and line[-5:-2] == [sys.executable, "-u", "train.py"]
    for dash in ("-mca", "--mca"):
        line = command(kind, "--launcher_arg", f"{dash} btl_tcp_if_include eth1")
        assert "eth0" not in line and "eth1" in line
    for words in (["-i", "worker-0"], ["-e", "worker-0"], ["--num_nodes", "1"], ["--num_gpus", "1"]):
        with pytest.raises(ValueError, match="openmpi cannot choose slots"):
            made(kind, *words)


def test_mpich_and_intel_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    line = command(multinode_runner.MPICHRunner, "--module", "--master_addr", "10.0.0.1")
    assert line[:5] == ["mpirun", "-n", "8", "-ppn", "4"] and after(line, "-hosts") == "worker-0,worker-1"
    assert after(line, "MASTER_ADDR") == "10.0.0.1" and after(line, "WORLD_SIZE") == "8"
    helper = line.index(launcher_helper.__file__)
    options = launcher_helper.parse_args([*line[helper + 1 :]])
    assert options.module and options.user_script == "train.py" and options.user_args[0] == "--prompt"
    monkeypatch.setattr(numa, "get_numa_cores", list)
    line = command(multinode_runner.IMPIRunner, "--bind_cores_to_rank", "--bind_core_list", "0-7")
    assert after(line, "OMP_NUM_THREADS") == "2" and line.count("numactl") == line.count("train.py") == 8
    assert [line[i + 1] for i, word in enumerate(line) if word == "-C"] == ["0-1", "2-3", "4-5", "6-7"] * 2
    assert [line[i + 1] for i, word in enumerate(line) if word == "RANK"] == [*map(str, range(8))]
    for kind in (multinode_runner.MPICHRunner, multinode_runner.IMPIRunner, multinode_runner.MVAPICHRunner):
        with pytest.raises(ValueError, match="as many slots on each host"):
            command(kind, pool={"a": 1, "b": 2})


def test_slurm() -> None:
    kind = multinode_runner.SlurmRunner
    line = command(kind)
    assert line[:3] == ["srun", "-n", "8"] and '--export=ALL,A="64(x2)"' in line
    line = command(kind, "--include", "worker-0:0,1@worker-1:0,1")
    assert (after(line, "-n"), after(line, "--nodelist"), after(line, "--nodes")) == (
        "4",
        "worker-0,worker-1",
        "2",
    )
    line = command(kind, "--num_gpus", "2", "--num_nodes", "1")
    assert (after(line, "--gpus-per-node"), after(line, "--nodes")) == ("2", "1") and "--nodelist" not in line
    for exclude, named in (("worker-1:0", "specific device ids"), ("worker-1:1,2,3", "same slot count")):
        with pytest.raises(ValueError, match=named):
            command(kind, "--exclude", exclude)


def test_mvapich(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = multinode_runner.MVAPICHRunner
    monkeypatch.setattr(multinode_runner, "MVAPICH_TMP_HOSTFILE", str(tmp_path / "hosts"))
    line = command(kind)
    assert line[:5] == ["mpirun", "-np", "8", "-ppn", "4"] and "MV2_SUPPORT_DL=1" in line
    assert (tmp_path / "hosts").read_text() == "worker-0\nworker-1\n"
    monkeypatch.setattr(multinode_runner.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="mpiname"):
        assert not made(kind).backend_exists()
    for other in runner.LAUNCHER_CLASSES.values():
        assert other is kind or not made(other).backend_exists()
        assert made(other).name == next(k for k, v in runner.LAUNCHER_CLASSES.items() if v is other)


def test_a_runner_of_the_users_own() -> None:
    class Own(multinode_runner.MultiNodeRunner):
        def backend_exists(self) -> bool:
            return True

        def get_cmd(self, environment: Any, active_resources: Any) -> list[str]:
            return self.user_arguments

    own = Own(SimpleNamespace(user_args=["a b"], user_script="x"), "")  # type: ignore[arg-type]
    assert own.name == "Own" and own.get_cmd({}, {}) == ["a b"]
    own.validate_active_resources({"a": [1]})


def test_a_rank_of_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *how: became.append(how))
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    launcher_helper.main(["train.py", "-x"])
    ((program, words, variables),) = became
    assert (program, words) == (sys.executable, [sys.executable, "-u", "train.py", "-x"])
    assert (variables["RANK"], variables["LOCAL_RANK"]) == ("3", "1")
    for wrong in ({}, {"PMIX_RANK": "1", "PMI_RANK": "2"}):
        with pytest.raises(LaunchError, match="PMIX_RANK, PMI_RANK say"):
            launcher_helper.env_mapping(dict(wrong))


def test_cores_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.parse_range_list("0,2-4,6,8-9") == [0, 2, 3, 4, 6, 8, 9]
    for wrong in ("0,2-6,5-9", "8,2-6", "1,6-2", "", "a", "1-2-3", "1,1"):
        with pytest.raises(ValueError, match="Bad range"):
            numa.parse_range_list(wrong)
    nodes: list[list[int]] = []
    monkeypatch.setattr(numa, "get_numa_cores", lambda: nodes)
    assert numa.get_numactl_cmd("0-3,8-11", 2, 1) == (4, ["numactl", "-C", "8-11"])
    nodes[:] = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numa.get_numactl_cmd("0,2,4-6", 2, 0) == (2, ["numactl", "-m", "0", "-C", "0,2"])
    assert numa.get_numactl_cmd("0-7", 1, 0) == (8, ["numactl", "-C", "0-7"])
    nodes[:] = [[0, 1], [2, 3], [], []]
    assert numa.get_numactl_cmd("0-3", 2, 1) == (2, ["numactl", "-p", "3", "-C", "2-3"])
    nodes[:] = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert numa.get_numactl_cmd("0-3", 2, 1) == (2, ["numactl", "-m", "2,3", "-C", "2-3"])
    with pytest.raises(ValueError, match="3 ranks have 2 cores"):
        numa.get_numactl_cmd("0-1", 3, 0)
    monkeypatch.setenv("KMP_AFFINITY", "none")
    with pytest.raises(ValueError, match="KMP_AFFINITY"):
        numa.get_numactl_cmd(None, 1, 0)


def test_cores_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "available: 2 nodes (0-1)\nnode 0 cpus: 0 1\nnode 0 size: 3 MB\nnode 1 cpus:\nnode distances:\n"
    monkeypatch.setattr(numa.subprocess, "check_output", lambda *_, **how: told)
    assert numa.get_numa_cores() == [[0, 1], []]

    def missing(*_: object, **how: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(numa.subprocess, "check_output", missing)
    assert numa.get_numa_cores() == []
    assert numa.get_numactl_cmd(None, 1, 0)[0] >= 1


def test_the_command(started: list[tuple[list[str], int, Manner]], capfd: pytest.CaptureFixture[str]) -> None:
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
