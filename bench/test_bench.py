"""The arithmetic of the benchmark: ratios stay within a round, and losses that differ do not pass. And its short ways, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import report
from systems import SUITES

BENCH = Path(__file__).parent


def turn(seconds: float, loss: float = 5.0) -> list[dict[str, Any]]:
    counters = {"faults": 7.0, "main_cpu_seconds": seconds, "other_cpu_seconds": 0.0, "loopback_bytes": 4.0 * 2**20}
    reply = {
        "seconds": [seconds, seconds],
        "losses": [loss, loss],
        "per_step": counters,
        "peak_rss": 300 * 2**20,
        "idle_seconds": 10.0,
        "idle_cpu_seconds": 0.0,
        "foreign_cores": 0.0,
    }
    return [dict(reply), dict(reply)]


def system(turns: dict[str, list[dict[str, Any]]], losses: tuple[float, float] = (6.0, 5.5)) -> dict[str, Any]:
    checked = {"losses": list(losses), "norms": [1.0, 1.0], "collectives": {"allreduce": 3}}
    checked |= {"collective_bytes": {"allreduce": 2**21}, "live_bytes": 2**20, "rss": 2**20}
    return {"turns": turns, "checked": [checked, checked], "rss_imported": 100 * 2**20}


def case(dtype: str = "fp32", **systems: dict[str, Any]) -> dict[str, Any]:
    job = {"size": "12m", "dtype": dtype, "world": 2, "threads": 1, "batch": 4, "sequence": 256, "suite": "step"}
    return {"job": job, "groups": [list(systems)], "systems": systems}


def test_a_ratio_divides_turns_of_the_same_round() -> None:
    """The machine is three times slower in the second round; the ratio must not see it."""
    floor = system({"0.0": turn(1.0), "0.1": turn(3.0)})
    ddp = system({"0.1": turn(3.3), "0.0": turn(1.1)})
    assert report.ratios(case(floor=floor, ddp=ddp), "ddp") == pytest.approx([1.1, 1.1])


def test_systems_of_different_groups_are_compared_over_their_floors() -> None:
    floor = system({"0.0": turn(1.0), "1.0": turn(2.0)})
    both = case(floor=floor, ddp=system({"0.0": turn(1.2)}), polyreme0=system({"1.0": turn(2.0)}))
    assert report.ratios(both, "ddp", "polyreme0") == pytest.approx([1.2])


def test_the_mean_over_ranks_then_the_median_over_steps() -> None:
    replies = [{"seconds": [1.0, 2.0, 9.0]}, {"seconds": [3.0, 2.0, 9.0]}]
    assert report.turn_seconds(replies) == 2.0


@pytest.mark.parametrize(("apart", "equal"), [(0.0, True), (5e-6, True), (1e-4, False), (float("nan"), False)])
def test_a_different_loss_in_the_checked_steps_is_found(apart: float, equal: bool) -> None:
    floor = system({"0.0": turn(1.0)})
    found = report.compare_losses(case(floor=floor, ddp=system({"0.0": turn(1.0)}, (6.0, 5.5 * (1 + apart)))))
    assert found["ddp"]["equal"] is equal
    assert found["floor"]["equal"]


def test_later_losses_are_compared_with_the_first_rival_and_not_with_the_floor() -> None:
    """After the checked steps the floor's ranks train apart: its loss may differ, a rival's may not."""
    floor, ddp = system({"0.0": turn(1.0, loss=3.0)}), system({"0.0": turn(1.0, loss=5.0)})
    found = report.compare_losses(case(floor=floor, ddp=ddp, fsdp2=system({"0.0": turn(1.0, loss=5.01)})))
    assert [found[name]["equal"] for name in ("floor", "ddp", "fsdp2")] == [True, True, False]


def test_bf16_is_looser_and_the_known_fault_looser_still() -> None:
    floor = system({"0.0": turn(1.0)})
    apart = {name: system({"0.0": turn(1.0)}, (6.0, 5.5 * 1.005)) for name in ("deepspeed0", "deepspeed1")}
    found = report.compare_losses(case("bf16", floor=floor, **apart))
    assert found["deepspeed0"]["equal"]
    assert not found["deepspeed1"]["equal"]


def test_the_table_has_a_row_per_system_and_names_what_failed() -> None:
    both = case(floor=system({"0.0": turn(1.0)}), ddp=system({"0.0": turn(1.25)}), fsdp2={"turns": {}})
    both["systems"]["fsdp2"]["error"] = "fsdp2: rank 0 ended\nValueError: no"
    both["losses"], both["summary"] = report.compare_losses(both), report.summarise(both)
    table = "\n".join(report.case_markdown(both))
    assert "| ddp | 1250.0 | 1250.0 to 1250.0 | **1.250** |" in table
    assert "| 200 | 1 | 3 | 2.0 | 2.0 | 7 | 0.0e+00 |" in table  # peak less imports, live, collectives, payload, sent
    assert "**fsdp2 failed**: fsdp2: rank 0 ended: ValueError: no" in table


def test_rivals_and_titles_are_of_what_each_script_compares() -> None:
    assert report.RIVALS.keys() == report.TITLES.keys() == SUITES.keys()
    for suite, rivals in report.RIVALS.items():
        assert {name for ours, theirs, _ in rivals for name in (ours, theirs)} <= SUITES[suite].keys()


@pytest.mark.parametrize(
    ("script", "systems", "options"),
    [
        ("tensor", ["floor", "polyreme", "dtensor", "polyreme-sequence", "polyreme-silent"], ["--size", "h64", "--sequence", "32"]),
        ("pipeline", ["floor", "polyreme", "torch", "deepspeed"], ["--size", "tiny", "--sequence", "32", "--microbatches", "4"]),
    ],
)
def test_divided_models_compute_the_same(script: str, systems: list[str], options: list[str], tmp_path: Path) -> None:
    """Every system starts, and its losses are those of the undivided model; but for the one that leaves out its sums."""
    if "deepspeed" in systems:
        pytest.importorskip("deepspeed")
    out = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / f"{script}.py"), *options, "--rounds", "1", "--steps", "1", "--settle", "0", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads(out.read_text())["cases"][0]
    assert list(case["summary"]) == systems
    assert {name for name, found in case["losses"].items() if found["largest"] > 1e-5} == {"polyreme-silent"} & set(systems)
    assert f"| {systems[1]} | {systems[2]} |" in out.with_suffix(".md").read_text()
