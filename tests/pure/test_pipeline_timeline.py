"""The picture of a step, in the terminal and as SVG, and `polyreme inspect --schedule`."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli import main
from polyreme.cli.inspect import step_table
from polyreme.config import Config
from polyreme.errors import ConfigError
from polyreme.pipeline.schedule import NAMES, Name, build
from polyreme.pipeline.simulate import Costs, Simulation, simulate
from polyreme.pipeline.timeline import COLOURS, svg, text


def step(name: Name, pp: int, microbatches: int) -> Simulation:
    schedule = build(name, pp, microbatches)
    return simulate(schedule, Costs.even(schedule))


def lines(simulation: Simulation, width: int) -> list[str]:
    return [line.rstrip() for line in text(simulation, "a step", width).plain.splitlines()]


def test_text() -> None:
    assert lines(step("1f1b", 2, 3), width=80) == [
        "a step",
        "                                            bubble keep",
        "rank 0 F0 F1       B0    F2 B1       B2      25.0%    2",
        "rank 1    F0 B0    F1 B1    F2 B2            25.0%    1",
        " F  forward   B  backward  bubble 25.0%",
    ]
    assert lines(step("1f1b", 2, 3), width=50)[2:4] == [
        "rank 0 0 1     0   2 1     2     25.0%    2",
        "rank 1   0 0   1 1   2 2         25.0%    1",
    ]
    assert lines(step("zb-v", 2, 3), width=40)[2:4] == [
        "rank 0 FFFfbwfbwBBfbwBBBB    5.3%    4",
        "rank 1  FfFfbbFBWfbbBbBWwW   5.3%    4",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_row_is_wider_than_the_terminal(name: Name, width: int) -> None:
    for pp, microbatches in [(1, 1), (4, 8), (12, 64)]:
        assert all(len(row) <= width for row in lines(step(name, pp, microbatches), width)[1 : pp + 2])


def test_colours_tell_operations_and_stages_apart() -> None:
    picture = text(step("zb-v", 2, 3), "a step", 80)
    shown = {str(span.style).split(" on ")[-1] for span in picture.spans}
    assert {colour for op in ("F", "B", "W") for colour in COLOURS[op]} <= shown  # type: ignore[index]
    assert len({colour for pair in COLOURS.values() for colour in pair}) == 2 * len(COLOURS)


@pytest.mark.parametrize("name", NAMES)
def test_svg(name: Name) -> None:
    simulation = step(name, 3, 5)
    root = ElementTree.fromstring(svg(simulation, "a < b & c"))
    space = "{http://www.w3.org/2000/svg}"
    cells = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    computed = [cell for row in simulation.cells for cell in row if cell.action.op in ("F", "B", "W")]
    assert [rect.find(f"{space}title").text for rect in cells] == [str(cell.action) for cell in computed]  # type: ignore[union-attr]
    scale = float(cells[0].attrib["width"]) / (computed[0].end - computed[0].start)
    for rect, cell in zip(cells, computed, strict=True):
        assert float(rect.attrib["width"]) == pytest.approx((cell.end - cell.start) * scale, rel=1e-4)
        assert float(rect.attrib["x"]) == pytest.approx(64 + cell.start * scale, rel=1e-4)
    words = [element.text for element in root.iter(f"{space}text")]
    assert words[0] == f"a < b & c; bubble {simulation.bubble_fraction:.1%}"
    assert words.count("rank 2") == 1 and f"{simulation.bubble[2]:.1%}, {simulation.peak[2]}" in words
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for rect in cells:
        assert (
            float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            and float(rect.attrib["y"]) + 26 <= height
        )


def test_costs_in_seconds_are_drawn_as_well() -> None:
    schedule = build("1f1b", 2, 2)
    seconds = {what: time * 1e-4 for what, time in Costs.even(schedule).duration.items()} | {
        ("R", 0): 3e-5,
        ("R", 1): 1e-6,
        ("U", 0): 2e-4,
    }
    simulation = simulate(schedule, Costs(seconds, transfer=1e-5))  # type: ignore[arg-type]
    assert all(len(row) <= 60 for row in lines(simulation, 60)[:-1]) and "reduce" in lines(simulation, 60)[-1]
    view = re.search(r'viewBox="0 0 ([\d.]+)', svg(simulation, "a step"))
    assert view and 640 <= float(view[1]) < 2000


# ---- the command


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text("[mesh]\npp = 4\n[batch]\nsize = 16\nmicro = 1\n")
    return str(path)


def polyreme(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, words)
    return result.exit_code, result.stdout, result.stderr


def test_the_command_draws_the_schedule(config: str, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    status, output, _ = polyreme(
        "inspect", config, "--schedule", "--set", "batch.size=8", "--svg", str(picture)
    )
    assert status == 0 and output.startswith("1f1b-w: 4 stages on 4 ranks, 8 micro-batches\n")
    assert "bubble 25.0%" in output and ElementTree.parse(picture).getroot().tag.endswith("svg")
    status, output, _ = polyreme(
        "inspect", config, "--schedule", "--json", "--set", "pipeline.schedule=interleaved"
    )
    told = json.loads(output)
    assert status == 0 and told["rows"] == [" ".join(map(str, row)) for row in build("interleaved", 4, 16)]
    assert (
        told["bubble"] == pytest.approx(3 / 35)
        and told["peak_activations"] == [11, 9, 7, 5]
        and told["total"] == 105
    )


def test_the_command_says_what_is_wrong(config: str, tmp_path: Path) -> None:
    assert polyreme("inspect", config, "--svg", "x.svg")[0] == 2
    status, _, errors = polyreme("inspect", config, "--schedule", "-n", "6")
    assert status == 2 and "mesh.dp" in errors and "world size, 6" in errors
    status, _, errors = polyreme("inspect", config, "--schedule", "--set", "batch.micro=3")
    assert status == 2 and "batch.micro" in errors
    status, _, errors = polyreme("inspect", config, "--schedule", "--svg", str(tmp_path / "none" / "x.svg"))
    assert status == 1 and "cannot write" in errors and "No such file" in errors


@pytest.mark.parametrize(
    ("changes", "world_size", "microbatches"),
    [
        ([], None, 16),
        ([], 8, 8),
        (["mesh.dp=2"], None, 8),
        (["mesh.dp=2", "mesh.tp=2", "mesh.sequence_parallel=true"], 16, 8),
        (["batch.micro=auto"], 4, 1),
    ],
)
def test_micro_batches_follow_from_the_mesh(
    config: str, changes: list[str], world_size: int | None, microbatches: int
) -> None:
    title, schedule, _ = step_table(Config.load(config, changes), world_size)
    assert title.endswith(f", {microbatches} micro-batch{'es' if microbatches > 1 else ''}")
    assert schedule == build("1f1b-w", 4, microbatches)


def test_a_mesh_of_another_size_is_refused(config: str) -> None:
    for changes, world_size in [([], 2), (["mesh.dp=2"], 4), (["mesh.tp=3"], 16)]:
        with pytest.raises(ConfigError) as caught:
            step_table(Config.load(config, changes), world_size)
        assert [problem.key for problem in caught.value.problems] == ["mesh.dp"]
