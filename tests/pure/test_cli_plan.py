"""The command plan: what it writes trains as what it shows, and bad input is answered before it searches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import polyreme
from examples import whole
from polyreme.cli.trial import STEPS
from polyreme.config import Config
from polyreme.planner.hardware import Cluster

OPEN = """
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
[data]
sequence = 32
[mesh]
tp = "auto"
pp = "auto"
[memory]
activations = "auto"
[batch]
size = 16
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "open.toml").write_text(OPEN)
    return tmp_path


def test_what_is_chosen_is_what_is_written(folder: Path) -> None:
    options = ("-n", "4", "--cluster", "cpu", "--tries", "6", "--write", "chosen.toml", "--json")
    status, said, errors = polyreme(folder, "plan", "open.toml", *options)
    assert status == 0, errors
    best = json.loads(said)["best"]
    values = [each["values"] for each in best]
    assert len({json.dumps(each, sort_keys=True) for each in values}) == len(values) > 1  # none twice
    chosen = Config.load(folder / "chosen.toml")
    assert {key: chosen.value(key) for key in values[0]} == values[0]
    assert {"mesh.tp", "mesh.pp", "memory.activations", "batch.micro"} <= {*values[0]} and not chosen.searched
    chosen.resolve(4)
    assert chosen.plan.ranks == 4 and chosen.plan.seconds == pytest.approx(best[0]["seconds"], rel=1e-3)
    assert chosen.plan.memory["parameters"] > 0  # `polyreme train` compares itself with these


def test_a_given_layout_is_shown_at_80_columns(folder: Path) -> None:
    given = ("--set", "mesh.tp=2", "--set", "mesh.pp=2", "--set", "memory.activations=keep")
    files = ("--html", "plan.html", "--trace", "plan.json")
    options = ("-n", "4", "--cluster", "cpu", *files, *given)
    status, said, errors = polyreme(folder, "plan", "open.toml", *options)
    assert status == 0, errors
    assert "<h3>rank 2, stage" in (folder / "plan.html").read_text("utf-8")
    assert json.loads((folder / "plan.json").read_text("utf-8"))["traceEvents"]
    assert "the step by streams" in said and " axis tp " in said and " bubble " in said
    assert "4 ranks of " in said and "a step takes " in said and "all_reduce" in said and "rank 1 " in said
    assert "checkpoints of " in said and "a checkpoint; to save" in (folder / "plan.html").read_text("utf-8")
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-n", "4", "--cluster", "nope"), "cluster = 'nope': there is no preset of this name"),
        (("-n", "4", "--cluster", "none.toml"), "there is no such file"),
        (("-n", "4", "--html", "none/plan.html"), "cannot write --html none/plan.html: name a file in"),
        pytest.param(("-n", "4", "--trace", "."), "cannot write --trace .: name a file in", marks=whole),
        pytest.param(("-n", "4", "--set", "mesh.tp=3"), "mesh.tp = 3: tp x pp x cp x ep is 3", marks=whole),
        pytest.param(("-n", "4", "--write", "open.toml"), "open.toml: it is there already", marks=whole),
    ],
)
def test_bad_input_is_answered(folder: Path, options: tuple[str, ...], words: str) -> None:
    status, _, errors = polyreme(folder, "plan", "open.toml", *options)
    assert status == 2 or {"--write", "--html", "--trace"} & {*options}
    assert words in errors and "Traceback" not in errors and (folder / "open.toml").read_text() == OPEN


@whole
def test_a_machine_is_measured_and_what_is_best_there_is_run(folder: Path) -> None:
    """On two real ranks; figures need only be possible."""
    status, _, errors = polyreme(folder, "plan", "--measure", "here.toml", "-n", "2")
    assert status == 0, errors
    cluster = Cluster.load(folder / "here.toml")
    assert cluster.ranks_per_host == 2 and cluster.inside != Cluster.load("cpu").inside
    options = ("-n", "2", "--cluster", "here.toml", "--set", "memory.activations=keep", "--set", "mesh.tp=1")
    status, said, errors = polyreme(
        folder, "plan", "open.toml", *options, "--tries", "2", "--measure-top", "1", "--json"
    )
    assert status == 0, errors
    found = json.loads(said)
    [measured] = found["measured"]
    assert measured["values"] == found["best"][0]["values"] and not measured["why"]
    assert len(measured["measured"]) == STEPS and all(0 < each < 100 for each in measured["measured"])
    status, _, errors = polyreme(folder, "plan", "--measure", "here.toml")
    assert status == 1 and "--measure here.toml: it is there already" in errors


def cheap(folder: Path, *options: str) -> tuple[int, str]:
    given = ("-n", "4", "--cluster", "h100", "--tries", "3", "--set", "mesh.pp=1", "--set", "mesh.tp=1")
    status, said, errors = polyreme(folder, "plan", "open.toml", *given, "--cheapest", *options)
    assert "Traceback" not in errors
    return status, said


@whole
def test_the_cheapest_number_of_ranks_that_is_done_in_time(folder: Path) -> None:
    found = json.loads(cheap(folder, "--tokens", "1e9", "--json")[1])
    hours = {each["ranks"]: each["hours"] for each in found["offers"]}
    assert [*hours] == [1, 2, 4] and found["ranks"] == 1 and found["meets"]
    price = Cluster.load("h100").price
    for each in found["offers"]:
        assert each["price"] == pytest.approx(each["hours"] * each["ranks"] * price)
    least = min(hours.values())
    status, said = cheap(folder, "--tokens", "1e9", "--deadline", str(least * 0.99))
    assert status == 1 and "none of them ends by the deadline" in said and "Lambda" in said


@whole
@pytest.mark.parametrize("options", [("--deadline", "3"), ("--tokens", "1e9")])
def test_what_applies_with_cheapest_only_is_refused(folder: Path, options: tuple[str, ...]) -> None:
    status, _, errors = polyreme(folder, "plan", "open.toml", *options)
    assert status == 2 and "it applies with --cheapest only" in " ".join(errors.split())


@whole
def test_a_plan_needs_a_config_or_something_to_measure(folder: Path) -> None:
    status, _, errors = polyreme(folder, "plan")
    assert status == 2 and "--measure FILE" in errors


def test_a_config_without_a_model_is_refused(folder: Path) -> None:
    (folder / "none.toml").write_text("[batch]\nsize = 8\n")
    status, _, errors = polyreme(folder, "plan", "none.toml", "-n", "2")
    assert status == 2 and "the config names no model" in errors and "polyreme.plan a function" in errors
