"""The command: what it refuses, what it hands on, and how it says so. No ranks are started here."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pod_security import broken, pods
from polyreme.checkpoint.manifest import File, Resume, write
from polyreme.cli import main
from polyreme.compat.finder import SITE
from polyreme.config import Config
from polyreme.errors import BatchError, LaunchError
from polyreme.job.ended import ended
from polyreme.launch import torchrun
from polyreme.launch.options import SAVING
from polyreme.version import VERSION

GOOD = """
[model]
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 64
num_attention_heads = 16
num_hidden_layers = 5
[data]
path = "corpus.txt"
[batch]
size = 8
"""
RANK_VARIABLES = (
    "POLYREME_LAUNCHED",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclasses.dataclass
class Summary:
    loss: float
    stopped: str | None = None


@pytest.fixture(autouse=True)
def outside_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], int]]:
    """Every call of `launch`, in place of starting ranks."""
    calls: list[tuple[Sequence[str], int]] = []
    monkeypatch.setattr(torchrun, "launch", lambda command, ranks, **_: calls.append((command, ranks)))
    return calls


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Every config that `polyreme.job.run.run` would get."""
    configs: list[Config] = []

    def run(config: Config) -> Summary:
        configs.append(config)
        if config.seed == 13:
            raise BatchError("a batch of 13")
        if config.seed == 14:
            raise KeyboardInterrupt
        return Summary(loss=1.5)

    module = types.ModuleType("polyreme.job.run")
    module.run = run  # type: ignore[attr-defined]
    module.check_sources = module.check_division = lambda config: None  # type: ignore[attr-defined]
    module.finished = lambda config, alone: Summary(loss=0.5) if config.seed == 15 else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polyreme.job.run", module)
    monkeypatch.setattr("polyreme.job.run", module, raising=False)
    return configs


def polyreme(*words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    result = CliRunner().invoke(main.app, words, env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, polyreme.cli.main; sys.exit(any(name in "
        "sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )


@pytest.mark.parametrize(
    "words", [["--help"], *([name, "--help"] for name in ("train", "launch", "door", "inspect", "doctor"))]
)
def test_every_command_has_help(words: list[str]) -> None:
    status, output, _ = polyreme(*words)
    assert status == 0 and "Usage: " in output and "--help" in output


@pytest.mark.parametrize(
    "words", [["train"], ["none"], ["train", "x.toml", "-n", "0"], ["launch", "-n", "two", "x.py"]]
)
def test_bad_usage_is_exit_status_2(words: list[str]) -> None:
    status, output, errors = polyreme(*words)
    assert (status, output) == (2, "") and "Usage: " in errors


def test_train_in_this_process(config: str, trained: list[Config], launched: list[object]) -> None:
    status, output, _ = polyreme("train", config, "--set", "batch.size=4", "--set", "seed=7")
    assert (status, output, launched) == (0, "", [])
    assert (trained[0].batch.size, trained[0].seed, trained[0].monitor.console) == (4, 7, True)


def test_train_writes_its_summary_as_json(config: str, trained: list[Config]) -> None:
    status, output, _ = polyreme("train", config, "--json")
    assert (status, json.loads(output)) == (0, {"loss": 1.5, "stopped": None})
    assert trained[0].monitor.console is False


def test_train_starts_its_ranks(
    config: str, trained: list[Config], launched: list[tuple[Sequence[str], int]]
) -> None:
    assert polyreme("train", config, "-n", "2", "--set", "seed=7", "--json")[0] == 0
    assert launched == [(["-m", "polyreme", "train", config, "--set", "seed=7", "--json"], 2)]
    assert trained == []


def test_where_training_begins(
    config: str, trained: list[Config], launched: list[tuple[Sequence[str], int]]
) -> None:
    for words, resume in (
        ([], "auto"),
        (["--no-resume"], "never"),
        (["--resume", 'runs/a "b"/step-3'], 'runs/a "b"/step-3'),
    ):
        assert (
            polyreme("train", config, *words)[0] == 0 and polyreme("train", config, "-n", "2", *words)[0] == 0
        )
        assert trained[-1].checkpoint.resume == resume
        command = launched[-1][0]
        assert (
            Config.load(
                config, [word for at, word in enumerate(command) if command[at - 1] == "--set"]
            ).checkpoint.resume
            == resume
        )
    assert polyreme("train", config, "--no-resume", "--resume", "run")[0] == 2


def test_a_run_that_has_ended_starts_no_ranks(
    config: str, trained: list[Config], launched: list[object]
) -> None:
    status, output, _ = polyreme("train", config, "-n", "2", "--json", "--set", "seed=15")
    assert (status, json.loads(output), trained, launched) == (0, {"loss": 0.5, "stopped": None}, [], [])


def test_a_run_that_has_ended_is_told_without_torch(config: str, tmp_path: Path) -> None:
    resolved = Config.load(config, [f"checkpoint.folder={tmp_path / 'run'}", "train.length=8 steps"]).resolve(
        2
    )
    end = tmp_path / "run" / "step-10"
    end.mkdir(parents=True)
    (end / "model.safetensors").write_bytes(b"weights")
    state = {"step": 10, "samples": 80, "tokens": 1234}
    saved = Resume({"model.safetensors": File(7, 0)}, state, config=resolved.model_dump(mode="json"))
    write(end, saved)
    code = (
        "import sys; from polyreme.__main__ import main\n"
        "try: main()\n"
        "finally: sys.exit(7 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)"
    )

    def told(*more: str) -> tuple[int, str, str]:
        sets = ["--set", f"checkpoint.folder={tmp_path / 'run'}", "--set", "train.length=8 steps", *more]
        command = [sys.executable, "-c", code, "train", config, "-n", "2", *sets]
        done = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    status, output, errors = told("--set", "optimizer.lr=0.5")
    assert (status, errors) == (0, "")
    assert output.splitlines()[:2] == [
        f"nothing to do: {end} is the end of this run, with 10 steps and 1,234 tokens",
        "changed since then: optimizer.lr = 0.5, and was 0.0003",
    ]
    for name, other in (
        ("longer", resolved.model_copy(update={"train": Config.load({"train": {"length": 11}}).train})),
        ("another model", Config.load(resolved, ["model.config.hidden_size=128"])),
        ("begins anew", Config.load(resolved, ["checkpoint.resume=never"])),
    ):
        assert ended(other) is None, name
    assert ended(resolved) is not None
    (end / "model.safetensors").write_bytes(b"cut")
    assert ended(resolved) is None
    (end / "resume.json").write_text("{}")
    assert ended(resolved) is None


def test_the_version_takes_no_config_and_no_torch() -> None:
    assert polyreme("--version") == (0, f"polyreme {VERSION}\n", "")


def test_train_as_one_of_several_ranks(config: str, trained: list[Config], launched: list[object]) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert polyreme("train", config, "--json", env=ranks)[:2] == (0, "")  # rank 0 writes the summary
    assert (len(trained), launched) == (1, [])
    status, _, errors = polyreme("train", config, "-n", "4", env=ranks)
    assert (status, errors) == (
        1,
        f"error: rank 1 of 2 on {socket.gethostname()} failed: -n 4, but torchrun has already started 2 "
        "ranks; leave -n out\n",
    )
    with pytest.raises(BatchError):  # our launcher makes one report of all ranks
        polyreme("train", config, "--set", "seed=13", env={**ranks, "POLYREME_LAUNCHED": "1"})


def test_the_config_says_how_many_ranks_where_nobody_else_does(
    config: str, trained: list[Config], launched: list[tuple[Sequence[str], int]]
) -> None:
    two = ["--set", "launch.ranks=2"]
    polyreme("train", config, *two)
    polyreme("train", config, *two, "-n", "4")
    assert [ranks for _, ranks in launched] == [2, 4] and trained == []
    assert polyreme("train", config, *two, "-n", "1")[0] == 0
    for world_size in ("1", "4"):  # started already, by whoever
        assert (
            polyreme(
                "train",
                config,
                *two,
                env={"RANK": "0", "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            )[0]
            == 0
        )
    assert (len(launched), len(trained)) == (2, 3)


def test_bad_configs_are_refused_before_a_rank_starts(
    config: str, trained: list[Config], launched: list[object]
) -> None:
    status, output, errors = polyreme("train", config, "-n", "3")
    assert (status, output) == (2, "") and "batch.size = 8" in errors and "fix:" in errors
    status, _, errors = polyreme(
        "train", config, "-n", "2", "--set", "batch.sise=4", "--set", "optimizer.name=none"
    )
    assert status == 2 and "batch.sise" in errors and "Traceback" not in errors
    status, _, errors = polyreme("train", config + ".toml", "-n", "2")
    assert status == 2 and "there is no such file" in errors
    assert (trained, launched) == ([], [])


def test_an_error_is_a_message_and_with_debug_a_traceback(
    config: str, trained: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyreme", "train", config])
    status, output, errors = polyreme("train", config, "--set", "seed=13")
    begun = f"training as {config} says, on 1 rank of this host, in the folder run\n"
    assert (status, output, errors) == (1, "", f"{begun}error: a batch of 13\n")
    status, _, errors = polyreme("--debug", "train", config, "--set", "seed=13")
    assert status == 1 and "Traceback" in errors and errors.endswith("error: a batch of 13\n")


def test_an_interrupt_is_exit_status_130(config: str, trained: list[Config]) -> None:
    quiet = ["--set", "monitor.console=false"]
    status, output, errors = polyreme("train", config, "--set", "seed=14", *quiet)
    assert (status, output) == (130, "")
    assert errors.startswith("there is no complete checkpoint yet; this begins anew:\n  ")


def test_contradicting_variables_are_an_error_not_a_crash(config: str) -> None:
    status, _, errors = polyreme(
        "train", config, env={"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    )
    assert status == 1 and errors.startswith("error: torchrun gave rank = 2 with world_size = 2")


def test_launch_hands_on_all_that_follows_the_script(launched: list[tuple[Sequence[str], int]]) -> None:
    polyreme("launch", "-n", "2", "script.py", "--d", "3", "-n", "5", "--help", "--", "-m")
    polyreme("launch", "--ranks", "4", "-m", "package.module", "--json")
    assert launched == [
        (["script.py", "--d", "3", "-n", "5", "--help", "--", "-m"], 2),
        (["-m", "package.module", "--json"], 4),
    ]


def test_door_is_another_program_with_the_door(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *words: run.append(words))
    monkeypatch.setenv("OTHER", "1")
    polyreme("door", "sh", "launch", "--config_file", "x.yaml", "--help", "--", "script.py")
    ((file, words, variables),) = run
    assert Path(file).is_file() and words == [
        "sh",
        "launch",
        "--config_file",
        "x.yaml",
        "--help",
        "--",
        "script.py",
    ]
    assert variables["POLYREME_DOORS"] == "deepspeed" and variables["OTHER"] == "1"
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(SITE)
    status, _, errors = polyreme("door", "./no-such-program")
    assert status == 1 and "'./no-such-program' is no program that can be run" in errors


@pytest.mark.parametrize(
    "variables",
    [
        {"COLUMNS": "0"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["a terminal of no width", "a locale of ASCII"],
)
def test_any_terminal_shows_what_is_said(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "ä.toml").write_text('[data]\npath = "ö.txt"\n', "utf-8")
    command = [sys.executable, "-m", "polyreme", "inspect", "ä.toml", "--set", "checkpoint.folder=é"]
    env = {"PYTHONPATH": ":".join(sys.path), **variables}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    for key, value in ("data.path", "ö.txt"), ("checkpoint.folder", "é"):
        shown = value.encode() if "COLUMNS" in variables else value.encode("ascii", "backslashreplace")
        assert key.encode() in done.stdout and shown in done.stdout


def test_inspect(config: str) -> None:
    status, output, _ = polyreme("inspect", config, "-n", "2", "--set", "seed=7")
    assert status == 0 and "batch.micro" in output and "derived" in output
    status, output, _ = polyreme("inspect", config, "-n", "2", "--set", "seed=7", "--json")
    told = json.loads(output)
    assert (told["world_size"], told["config"]["seed"], told["origins"]["seed"]) == (2, 7, "user")
    assert polyreme("inspect", config, "-n", "3")[0] == 2


def test_inspect_tells_which_ranks_form_which_axis(config: str) -> None:
    divided = [
        "inspect",
        config,
        "-n",
        "8",
        "--set",
        "mesh.tp=2",
        "--set",
        "mesh.pp=2",
        "--set",
        "model.config=none",
    ]
    status, output, _ = polyreme(*divided)
    rows = [line for line in output.splitlines() if "|" in line]
    assert status == 0 and [re.split(r"[\s│]+", row.strip(" │"), maxsplit=2) for row in rows] == [
        ["pp", "2", "0 4  |  1 5  |  2 6  |  3 7"],
        ["dp", "2", "0 2  |  1 3  |  4 6  |  5 7"],
        ["tp", "2", "0 1  |  2 3  |  4 5  |  6 7"],
        ["pipeline", "stages", "on the ranks of a pp line: 0  |  1"],
    ]
    told = json.loads(polyreme(*divided, "--json", "--set", "pipeline.schedule=interleaved")[1])
    assert told["axes"]["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]] and list(told["axes"]) == ["pp", "dp", "tp"]
    assert told["stages"] == [[0, 2], [1, 3]]
    reordered = polyreme(*divided, "--json", "--set", 'mesh.order=["tp","pp","cp","ep","dp"]')[1]
    assert json.loads(reordered)["axes"] == {
        "tp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    told = json.loads(polyreme("inspect", config, "-n", "2", "--json", "--set", "mesh.cp=2")[1])
    assert told["context"]["method"] == "ulysses" and "it sends 4 times" in told["context"]["reason"]
    status, output, _ = polyreme(
        "inspect", config, "-n", "64", "--set", "mesh.tp=16", "--set", "batch.size=64"
    )
    assert (
        "0 4 8" not in output
        and "0 1 2 3 4 5 6 ... 15  |  16 17" in output
        and "0 16 32 48  |  1 17 33 49" in output
    )
    assert "ranks that form" not in polyreme("inspect", config)[1], "one rank forms none"


def test_inspect_tells_how_attention_is_computed_over_hosts(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('base = "h100"\nranks_per_host = 2\n')
    over = ["--set", f"plan.cluster={tmp_path / 'cluster.toml'}"]

    def told(heads: int, *more: str) -> str:
        heads_of = f"num_attention_heads = {heads}\nnum_key_value_heads = 2"
        (tmp_path / "run.toml").write_text(GOOD.replace("num_attention_heads = 16", heads_of))
        words = ["inspect", str(tmp_path / "run.toml"), "-n", "4", "--set", "mesh.cp=4", *more]
        status, output, errors = polyreme(*words)
        assert status == 0, errors
        return " ".join(output.split())

    assert "(on one host: there is no plan.cluster" in told(16)
    sent = "it sends 6 times a rank's keys between hosts with 2 of the ranks each in a step, ring 9 times"
    assert f"over cp: 2 ulysses x 2 ring: {sent}, ulysses 20 times" in told(16, *over)
    assert f"2 ring: {sent}; 4 ranks do not divide the 2 heads of a rank, as ulysses" in told(2, *over)
    asked = told(16, *over, "--set", "context.method={ulysses = 2, ring = 2}")
    assert f"2 ulysses x 2 ring: context.method says so; {sent}" in asked


def test_inspect_tells_what_each_pipeline_stage_has(config: str) -> None:
    """The vocabulary is that of the tokenizer to come: 2048 x 64 numbers in the embedding and in the head."""
    divided = ["inspect", config, "-n", "2", "--set", "mesh.pp=2"]
    block = 4 * 64 * 64 + 3 * 64 * 64 + 2 * 64
    status, output, _ = polyreme(*divided, "--set", "pipeline.blocks=[3,2]")
    rows = [line.strip(" │").split("│") for line in output.splitlines() if "model.layers" in line]
    total = 5 * block + 2 * 2048 * 64 + 64
    assert status == 0 and [[cell.strip() for cell in row] for row in rows] == [
        [
            "0",
            "0",
            "model.layers.0 to model.layers.2",
            f"{3 * block + 2048 * 64:,}",
            f"{(3 * block + 2048 * 64) / total:.1%}",
        ],
        [
            "1",
            "1",
            "model.layers.3 to model.layers.4",
            f"{2 * block + 2048 * 64 + 64:,}",
            f"{(2 * block + 2048 * 64 + 64) / total:.1%}",
        ],
    ]
    told = json.loads(polyreme(*divided, "--set", "pipeline.schedule=zb-v", "--json")[1])["pipeline"]
    assert [(part["stage"], part["rank"]) for part in told] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    assert [block for part in told for block in part["blocks"]] == [f"model.layers.{i}" for i in range(5)]
    assert sum(part["share"] for part in told) == pytest.approx(1)
    tied = ["--set", "model.config.tie_word_embeddings=true", "--set", "pipeline.blocks=time"]
    told = json.loads(polyreme(*divided, *tied, "--json")[1])["pipeline"]
    assert sum(part["parameters"] for part in told) == total, "both stages have the tied matrix"
    assert "until blocks are measured" in " ".join(polyreme(*divided, *tied)[1].split())
    gone = ["--set", "model.config=none", "--set", "model.path=elsewhere"]
    status, output, _ = polyreme(*divided, *gone)
    assert status == 0 and "pipeline stages on the ranks of a pp line: 0  |  1" in output
    assert json.loads(polyreme(*divided, *gone, "--json")[1])["pipeline"] == []


def test_inspect_tells_what_each_rank_has_in_memory(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 blocks and two tables, at stage 2 and in fp32: all parameters, all gradients, half of AdamW's two
    states; nothing is taken."""
    monkeypatch.setenv("COLUMNS", "80")
    numbers = 5 * (4 * 64 * 64 + 3 * 64 * 64 + 2 * 64) + 2 * 2048 * 64 + 64
    (told,) = json.loads(polyreme("inspect", config, "-n", "2", "--json")[1])["memory"]
    assert told["parameters"] == numbers and not any("_" in category for category in told["memory"])
    for category in ("parameters", "states"):  # with padding
        assert 0 <= told["memory"][category] - 4 * numbers < 1024
    assert told["working_set"]["gradients"] > told["memory"]["gradients"]
    tiers = ["--set", "memory.states=host", "--set", f"memory.params={tmp_path / 'no'}"]
    divided = ["inspect", config, "-n", "4", "--set", "mesh.pp=2", "--set", "zero.stage=3", *tiers]
    status, output, _ = polyreme(*divided)
    rows = output[output.index("memory of a rank") :].splitlines()
    assert status == 0 and [row.split()[0] for row in rows[4:6]] == ["0", "1"] and len(rows[2]) <= 80
    columns = ["pp", "parameters", "weights", "gradients", "states", "in a step", "device", "host", "files"]
    assert rows[2].split() == " ".join(columns).split()
    assert not (tmp_path / "no").exists()
    told = json.loads(polyreme(*divided, "--json")[1])["memory"]
    assert sum(part["parameters"] for part in told) == numbers
    assert all(part["memory"]["parameters_files"] for part in told)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        (["mesh.pp=6"], 1, "the model has 5 blocks (model.layers), too few for 6 stages"),
        (
            ["mesh.pp=2", "pipeline.blocks=[2,2]"],
            1,
            "2 numbers of at least 1 with the sum 5, the model's blocks: change pipeline.blocks",
        ),
        (["mesh.tp=3"], 1, "model.layers.*.self_attn: its 16 attention heads cannot be divided over 3 ranks"),
        (
            ["mesh.pp=2", "model.config.num_attention_heads=3"],
            2,
            "not a multiple of the number of attention heads",
        ),
    ],
)
def test_inspect_refuses_a_model_that_the_mesh_cannot_divide(
    config: str, changes: list[str], status: int, said: str
) -> None:
    words = [word for change in ["batch.size=12", *changes] for word in ("--set", change)]
    found, output, errors = polyreme("inspect", config, "-n", "6", *words)
    assert (found, output) == (status, "") and errors.count("error: ") == 1 and said in errors


def test_doctor_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Sequence[str], int]]
) -> None:
    status, output, _ = polyreme("doctor")
    lines = [line for line in output.splitlines() if not line.startswith(" ")]  # without folded ones
    assert status == 0 and [line.split()[0] for line in lines] == ["ok"] * 9
    assert launched == [(["-m", "polyreme.launch.probe"], 2)]

    def fails(command: Sequence[str], ranks: int) -> None:
        raise LaunchError("no loopback")

    monkeypatch.setattr(torchrun, "launch", fails)
    status, output, _ = polyreme("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(output)}
    assert status == 1 and checks["torch"]["ok"]
    assert checks["ranks"] == {
        "name": "ranks",
        "ok": False,
        "found": "two gloo ranks could not all-reduce: no loopback; let "
        "processes of this host connect over loopback (127.0.0.1)",
    }


def test_a_reader_that_reads_no_further_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `| head -1`: nothing more is said."""

    def closed(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("polyreme.cli.doctor.examine", closed)
    found = CliRunner().invoke(main.app, ["doctor"])
    assert (found.exit_code, found.output) == (1, "")


def test_a_current_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["train", "x.toml"], ["launch", "x.py"], ["inspect", "x.toml"]):
        found = CliRunner().invoke(main.app, words)
        assert found.exit_code == 1 and found.stderr.startswith("error: the current folder cannot be used"), (
            words
        )
    assert CliRunner().invoke(main.app, ["--help"]).exit_code == 0


def test_train_hands_the_run_to_a_cluster(config: str, trained: list[Config], launched: list[object]) -> None:
    options = ["--set", "seed=7", "-n", "2", "--nodes", "2"]
    status, output, _ = polyreme("train", config, *options, "--slurm", "--dry-run")
    assert status == 0 and f"-m polyreme train {config} --set seed=7 -n 2 --stopped-status 75 &" in output
    assert "#SBATCH --nodes=2\n" in output and "--signal=B:USR1@300\n" in output
    cluster = ["--kubernetes", "--image", "me:1"]
    status, output, errors = polyreme("train", config, *options, *cluster)
    assert (status, output) == (2, "") and "checkpoint.folder = " in errors
    fix = re.search("fix: give (.*)", errors)
    assert fix
    options += fix[1].replace("CLAIM", "runs").replace(" and ", " ").split()
    status, output, errors = polyreme("train", config, *options, *cluster)
    documents = list(yaml.safe_load_all(output))
    assert (status, [each["kind"] for each in documents]) == (0, ["ConfigMap", "Service", "Job"])
    assert documents[0]["data"] == {"run.toml": Path(config).read_text()}
    pod = documents[2]["spec"]["template"]["spec"]
    assert "--set data.cache=/tmp/cache/polyreme" in " ".join(pod["containers"][0]["command"])
    assert " ".join(pod["containers"][0]["command"]).startswith("polyreme train /etc/polyreme/run.toml --set")
    assert pod["terminationGracePeriodSeconds"] > SAVING
    assert "Job polyreme-run, 2 pods with 2 ranks each; pipe it to: kubectl apply -f -" in errors
    assert trained == launched == []


def test_launch_hands_a_script_to_a_cluster(tmp_path: Path, launched: list[object]) -> None:
    options = ["--threads", "3", "--deepspeed", "--kubernetes", "--image", "me:1", "--elastic", "1:2"]
    status, _, errors = polyreme("launch", *options, "x.py")
    assert status == 2 and "--elastic = '1:2'" in errors
    status, output, errors = polyreme(
        "launch", *options[:-2], "-o", str(tmp_path / "job.yaml"), "-m", "a.b", "--name", "c"
    )
    assert (status, output) == (0, "") and f"kubectl apply -f {tmp_path}/job.yaml" in errors
    written = list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))[1]
    assert written["metadata"]["name"] == "polyreme-a"
    command = written["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == [
        "polyreme",
        "launch",
        "-n",
        "1",
        "--threads",
        "3",
        "--deepspeed",
        "-m",
        "a.b",
        "--name",
        "c",
    ]
    assert launched == []


def test_the_commands_of_the_page_write_restricted_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(main.__file__).parents[3] / "docs" / "cluster.md"
    section = page.read_text("utf-8").split("\n## Kubernetes\n")[1].split("\n## ")[0]
    commands = re.findall(r"^polyreme (.*?)(?: \| kubectl apply -f -)?$", section, re.MULTILINE)
    assert (
        len(commands) == section.count("polyreme launch --") + section.count("polyreme train run.toml") == 6
    )
    [patch] = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "patch.yaml").write_text(patch)
    (tmp_path / "run.toml").write_text(GOOD.replace("size = 8", "size = 16"))
    (tmp_path / "kubectl").write_text("#!/bin/sh\n/bin/cat\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in commands:
        status, output, errors = polyreme(*command.split())
        assert status == 0, errors
        documents = list(yaml.safe_load_all(output.partition("applied: ")[0]))
        found = list(pods(documents))
        assert found and not any(broken(*each) for each in found), command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--image", "a"], "it applies with --kubernetes only"),
        (["--slurm", "--image", "a"], "it applies with --kubernetes only"),
        (["--kubernetes", "--image", "a", "--time", "1"], "it applies with --slurm only"),
        (["--nodes", "2"], "it applies with --slurm or --kubernetes or --hostfile"),
        (["--slurm", "--kubernetes"], "leave --slurm or --kubernetes out"),
        (["--slurm", "--hostfile", "h"], "leave --slurm or --hostfile out"),
        (["--slurm", "--include", "a"], "it applies with --hostfile or --mpi only"),
        (["--mpi", "--include", "a"], "it applies with --hostfile only"),
        (["--hostfile", "/none/hosts"], "/none/hosts cannot be read: No such file"),
        (["--mpi", "--port", "7"], "applies with --hostfile or --ray only"),
        (["--hostfile", "h", "--elastic", "1:2"], "start it again with other --nodes"),
        (["--kubernetes"], "--kubernetes needs one"),
        (["--user", "1"], "it applies with --kubernetes only"),
        (
            ["--kubernetes", "--image", "a", "--patch", "/none.yaml"],
            "/none.yaml cannot be read: No such file",
        ),
        (["--kubernetes", "--image", "a", "--set", "memory.states=./a"], "memory.states = './a'"),
        (["--kubernetes", "--image", "a", "--set", "data.cache=/c"], "data.cache = '/c'"),
        (
            ["--kubernetes", "--image", "a", "--gpus", "a100:4"],
            "with --slurm only: give --gpus 4; pods get it",
        ),
        (["--kubernetes", "--image", "a", "--gpus", "many"], "'many' is no number of GPUs"),
        (["--ray", "--gpus", "a100:4"], "with --slurm only: give --gpus 4; on Ray"),
        (["--kubernetes", "--image", "a", "--setup", "true"], "it applies with --slurm only"),
        (["--kubernetes", "--image", "a", "--elastic", "2"], "no pair of bounds"),
        (["--kubernetes", "--image", "a", "--elastic", "1:2", "--pods", "2"], "leave --nodes out"),
        (["--kubernetes", "--image", "a", "--apply", "--dry-run"], "give one of the two"),
        (["--kubernetes", "--image", "a", "--no-resume"], "would begin anew each time"),
        (["--slurm", "--stopped-status", "3"], "leave it out"),
        (["--slurm", "-n", "3", "--nodes", "3"], "batch.size"),
        (["--slurm", "--time", "2"], "--warning = 300"),
    ],
)
def test_options_of_clusters_that_do_not_fit(config: str, options: list[str], said: str) -> None:
    status, _, errors = polyreme("train", config, *options)
    assert status == 2 and said in " ".join(errors.replace("│", " ").split())


@pytest.mark.parametrize(("finished", "status"), [(True, 0), (False, 75)])
def test_the_status_tells_whether_work_is_left(
    config: str,
    trained: list[Config],
    launched: list[object],
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    status: int,
) -> None:
    found = types.SimpleNamespace(finished=finished)
    monkeypatch.setattr("polyreme.job.resume.find_beginning", lambda config: found)
    assert polyreme("train", config, "-n", "2", "--stopped-status", "75")[0] == status and len(launched) == 1
    assert polyreme("train", config, "-n", "2")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch --nproc-per-node 2 x.py", "--nproc-per-node: -n RANKS"),
        ("train x.toml --num_processes=2", "--num_processes: -n RANKS"),
        ("launch --nnodes 2 x.py", "--nnodes: --nodes HOSTS"),
        ("train x.toml --batch_size 16", "--batch_size: it is a key of the config: --set batch.size=VALUE"),
        ("train x.toml --lr=0.1", "--set optimizer.lr=VALUE"),
        ("inspect x.toml --zero-stage 3", "--set zero.stage=VALUE"),
        ("train x.toml --scheduler cosine", "--set lr_schedule.name=VALUE"),
        ("train x.toml --epochs 3", '--set train.length="N samples"'),
        ("train x.toml --gradient-accumulation-steps 4", "--set batch.micro=N, N being batch.size / (dp"),
        ("train x.toml --output-dir x", "--set checkpoint.folder=VALUE"),
        ("train x.toml --resum x", "--resume"),
    ],
)
def test_an_unknown_option_is_answered_with_what_does_it(words: str, said: str) -> None:
    found = CliRunner().invoke(main.app, words.split(), env={"COLUMNS": "200"})
    assert found.exit_code == 2 and said in found.output, found.output
    assert "--patch" not in found.output
