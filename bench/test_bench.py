"""The arithmetic of the benchmark: ratios stay within a round, and losses that differ do not pass. And its
short ways, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bubble
import report
from polyreme.pipeline.schedule import NAMES, Action, Name, build
from polyreme.pipeline.simulate import Costs, simulate
from systems import SUITES

BENCH = Path(__file__).parent
LIMIT = 900
"""Seconds, which nothing takes but what hangs."""


def turn(seconds: float, loss: float = 5.0) -> list[dict[str, Any]]:
    counters = {
        "faults": 7.0,
        "main_cpu_seconds": seconds,
        "other_cpu_seconds": 0.0,
        "loopback_bytes": 4.0 * 2**20,
    }
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


def system(
    turns: dict[str, list[dict[str, Any]]], losses: tuple[float, float] = (6.0, 5.5)
) -> dict[str, Any]:
    checked: dict[str, Any] = {"losses": list(losses), "norms": [1.0, 1.0], "collectives": {"allreduce": 3}}
    checked |= {"collective_bytes": {"allreduce": 2**21}, "live_bytes": 2**20, "rss": 2**20}
    return {"turns": turns, "checked": [checked, checked], "rss_imported": 100 * 2**20}


def case(dtype: str = "fp32", **systems: dict[str, Any]) -> dict[str, Any]:
    job = {
        "size": "12m",
        "dtype": dtype,
        "world": 2,
        "threads": 1,
        "batch": 4,
        "sequence": 256,
        "suite": "step",
    }
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


@pytest.mark.parametrize(
    ("apart", "equal"), [(0.0, True), (5e-6, True), (1e-4, False), (float("nan"), False)]
)
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
    # peak less imports, live, collectives, payload, sent
    assert "| 200 | 1 | 3 | 2.0 | 2.0 | 7 | 0.0e+00 |" in table
    assert "**fsdp2 failed**: fsdp2: rank 0 ended: ValueError: no" in table


def test_rivals_and_titles_are_of_what_each_script_compares() -> None:
    assert report.RIVALS.keys() == report.TITLES.keys() == SUITES.keys()
    for suite, rivals in report.RIVALS.items():
        assert {name for ours, theirs, _ in rivals for name in (ours, theirs)} <= SUITES[suite].keys()


@pytest.mark.parametrize(
    ("script", "systems", "options"),
    [
        (
            "tensor",
            ["floor", "polyreme", "dtensor", "polyreme-sequence", "polyreme-silent"],
            ["--size", "h64", "--sequence", "32"],
        ),
        (
            "pipeline",
            ["floor", "polyreme", "torch", "deepspeed"],
            ["--size", "tiny", "--sequence", "32", "--microbatches", "4"],
        ),
    ],
)
def test_divided_models_compute_the_same(
    script: str, systems: list[str], options: list[str], tmp_path: Path
) -> None:
    """Every system starts, and its losses are those of the undivided model; but for the one that leaves out
    its sums."""
    if "deepspeed" in systems:
        pytest.importorskip("deepspeed")
    out = tmp_path / "found.json"
    options = [
        *options,
        "--systems",
        ",".join(systems),
        "--rounds",
        "1",
        "--steps",
        "1",
        "--settle",
        "0",
        "--out",
        str(out),
    ]
    command = [sys.executable, str(BENCH / f"{script}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads(out.read_text())["cases"][0]
    assert list(case["summary"]) == systems
    assert {name for name, found in case["losses"].items() if found["largest"] > 1e-5} == {
        "polyreme-silent"
    } & set(systems)
    assert f"| {systems[1]} | {systems[2]} |" in out.with_suffix(".md").read_text()


def stepped(name: Name) -> bubble.Step:
    """A simulated step of 4 ranks as they would have noted it: posting takes no time, and what begins later
    than the action before it ended has waited."""
    table = build(name, 4, 8)
    cells = simulate(table, Costs.even(table)).cells
    step = []
    for row in cells:
        at, spans = 0.0, []
        for cell in row:
            start, end = (cell.start, cell.end) if cell.action.op in bubble.COMPUTES else (at, at)
            spans.append(bubble.Span(cell.action, at, end, start - at))
            at = end
        step.append(spans)
    return step


@pytest.mark.parametrize("name", NAMES)
def test_the_measured_bubble_of_a_simulated_step_is_the_simulated_one(name: Name) -> None:
    table, step = build(name, 4, 8), stepped(name)
    expected = simulate(table, Costs.even(table)).bubble_fraction
    assert expected == pytest.approx(bubble.published(name, 4, 8))
    assert set(bubble.transfers(step)) == {0}
    assert bubble.bubbles(table, step, transfer=0) == dict.fromkeys(bubble.KINDS, pytest.approx(expected))


def test_the_bubbles_of_a_step_by_hand() -> None:
    """Two ranks, from 0 to 23 without the update; 10 of it are computed on the first, 9 on the second."""
    first: list[tuple[Any, ...]] = [
        ("F", 0, 0, 2, 0),
        ("SA", 0, 2, 2.5, 0),
        ("F", 1, 2.5, 4.5, 0),
        ("SA", 1, 4.5, 5, 0),
        ("RG", 0, 5, 5, 0),
        ("B", 0, 5, 15, 8),
        ("RG", 1, 15, 15, 0),
        ("B", 1, 15, 23, 4),
        ("U", None, 23, 40, 0),
    ]
    second: list[tuple[Any, ...]] = [
        ("RA", 0, 1, 1, 0),
        ("RA", 1, 1, 1, 0),
        ("F", 0, 1, 5, 3),
        ("B", 0, 5, 10, 0),
        ("SG", 0, 10, 11, 0),
        ("F", 1, 11, 12, 0),
        ("B", 1, 12, 14, 0),
        ("SG", 1, 14, 15, 0),
    ]
    step = [
        [bubble.Span(Action(op, stage, i), *times) for op, i, *times in row]
        for stage, row in enumerate((first, second))
    ]
    # sent at 2 and arrived at 4, sent at 10 and arrived at 13
    assert sorted(bubble.transfers(step)) == [2, 3]
    means = {(op, stage): mean for (op, stage, _), mean in bubble.means(step).items()}
    assert means == {("F", 0): 2, ("B", 0): 3, ("F", 1): 1, ("B", 1): 3.5}
    found = bubble.bubbles(build("1f1b", 2, 2), step, transfer=2)
    lengths = {kind: 19 / 2 / (1 - share) for kind, share in found.items()}
    assert lengths == pytest.approx({"simulated": 14, "own times": 15, "with messages": 20, "measured": 23})


def test_bubbles_are_measured(tmp_path: Path) -> None:
    """Every schedule of sleeping blocks, and one that computes, as small as can be."""
    out = tmp_path / "found.json"
    for options in (["--models", "sleep"], ["--models", "tiny", "--schedules", "zb-h1"]):
        command = [
            sys.executable,
            str(BENCH / "bubble.py"),
            *options,
            "--microbatches",
            "4",
            "--steps",
            "1",
            "--milliseconds",
            "0.5",
        ]
        done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        cases = json.loads(out.read_text())["cases"]
        assert [case["schedule"] for case in cases] == (["zb-h1"] if "tiny" in options else list(NAMES))
        assert all(case["blocks"] == ([1, 1] if "tiny" in options else [2] * 4) for case in cases)
        assert all(0 < case[kind]["median"] < 1 for case in cases for kind in bubble.KINDS)
        assert out.with_suffix(".md").read_text().count("| zb-h1 | 4 |") == 1


def test_checkpoints_are_measured(tmp_path: Path) -> None:
    """Every system saves, loads the same again, and saves in the background."""
    systems = ["polyreme", "dcp", *(["deepspeed"] if find_spec("deepspeed") else [])]
    command = [
        sys.executable,
        str(BENCH / "checkpoint.py"),
        "--size",
        "tiny",
        "--batch",
        "1",
        "--sequence",
        "16",
        "--steps",
        "1",
        "--rounds",
        "2",
        "--fresh",
        "1",
    ]
    out = tmp_path / "found.json"
    options = ["--settle", "0", "--systems", ",".join(systems), "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    for found, load in zip(
        json.loads(out.read_text())["rounds"], ("load, fresh memory", "load"), strict=True
    ):
        assert {f"{name} {action}" for name in systems for action in ("save", load, "load, cached")} < set(
            found
        )
        assert found["polyreme save aside"]["call"] > 0 and found["dcp save aside"]["call"] > 0
    assert "| polyreme load, cached | dcp load, cached |" in out.with_suffix(".md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_the_file_tier_is_measured(tmp_path: Path) -> None:
    """With fio or without; nothing is left."""
    out = tmp_path / "found.json"
    options = [
        "--record",
        "1",
        "--records",
        "3",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH / "tiers.py"), *options], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())["rounds"]
    assert list(found) == ["read", "write", "update"]
    assert all(way["FileTier.stream"] > 0 and way["loop, threads: 2"] > 0 for way in found.values())
    assert out.with_suffix(".md").read_text().count("| FileTier.stream |") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_updates_from_files_are_measured(tmp_path: Path) -> None:
    """They move every state once each way, and change what those from host memory do."""
    out = tmp_path / "found.json"
    options = [
        "--numbers",
        "4",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--folder",
        str(tmp_path),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH / "overlap.py"), *options], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert run["moved"] == 2 * 12 * 4 * 2**20 and run["same"]
    assert "| 1 | the disk |" in out.with_suffix(".md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_steps_are_measured_in_every_home(tmp_path: Path) -> None:
    """With the losses of numbers on the device; nothing is left."""
    out = tmp_path / "found.json"
    systems = ["floor", "polyreme2+host", "polyreme3+file+params", "fsdp2+cpu"]
    options = [
        "--size",
        "tiny",
        "--sequence",
        "32",
        "--systems",
        ",".join(systems[1:]),
        "--rounds",
        "1",
        "--steps",
        "1",
        "--settle",
        "0",
    ]
    command = [sys.executable, str(BENCH / "step.py"), *options, "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(json.loads(out.read_text())["cases"][0]["summary"]) == sorted(systems)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_a_model_trains_from_files_as_predicted(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = [
        "--size",
        "tiny",
        "--ranks",
        "1",
        "--steps",
        "1",
        "--tokens",
        "16",
        "--folder",
        str(tmp_path / "tier"),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH / "large.py"), *options], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(out.read_text())
    assert told["steps"][0]["tiers"]["states"]["read"] == told["traffic"]["states"][0] > 0
    assert told["losses"][1] < told["losses"][0]


def test_the_optimizers_step_is_measured(tmp_path: Path) -> None:
    """Its bits are compared with torch's first."""
    out = tmp_path / "found.json"
    options = [
        "--numbers",
        "1",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--rivals",
        "torch fused",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, str(BENCH / "optimizer.py"), *options], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert {
        f"{case}/{name}"
        for case in ("fp32", "bf16, clipped")
        for name in ("polyreme", "torch fused", "polyreme, Lion")
    } < set(run["seconds"])
    assert "| bf16, clipped: polyreme | the stream |" in out.with_suffix(".md").read_text()


def test_a_run_that_ends_otherwise_is_seen(tmp_path: Path) -> None:
    import crash

    def make(name: str, weights: bytes, seconds: float, loss: float) -> Path:
        run = tmp_path / name
        (run / "step-1").mkdir(parents=True)
        (run / "step-1" / "model.safetensors").write_bytes(weights)
        (run / "step-1" / "resume.json").write_text(
            json.dumps({"self": f"{seconds}", "state": {"step": 1}, "extra": {"seconds": seconds}})
        )
        lines = [{"kind": "run", "step": 0}, {"kind": "step", "step": 1, "loss": loss, "seconds": seconds}]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    whole = make("whole", b"1", 3.0, 0.5)
    assert crash.differences(make("slower", b"1", 4.0, 0.5), whole) == []
    assert crash.differences(make("other", b"2", 3.0, 0.25), whole) == [
        "step-1/model.safetensors is another",
        "the logs differ",
    ]
    kill = {
        "moment": "writing",
        "target": "rank 1",
        "writing": True,
        "deleting": False,
        "step": 5,
        "seconds": 0.5,
        "newest": "step-3",
    }
    environment = {
        "date": "",
        "commit": "",
        "python": "",
        "versions": {"torch": "", "transformers": ""},
        "cpu": "",
        "cores": 2,
        "command": "",
    }
    runs = [{"case": "stage 1, waiting", "kills": [kill, kill], "problems": ["it hung"]}]
    page = crash.markdown({"environment": environment, "runs": runs, "corruptions": {"found flip": 2}})
    assert (
        "killed by SIGKILL 2 times" in page
        and "Steps done again: 4, at most 2 after one kill. 0 of 1 runs ended" in page
    )
    assert (
        "| stage 1, waiting | 1 | 2 | 2 | 0 | 2 | 0 | 0 |" in page
        and "- **stage 1, waiting: it hung**" in page
        and "| flip | 2 | 0 |" in page
    )


def test_a_script_through_the_door_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ["--systems", "polyreme", "--scripts", "mlp-zero2", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "doors.py"), *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(out.read_text())["runs"]["mlp-zero2"]
    assert len(run["polyreme"]["losses"]) == 2 and run["polyreme"]["median_ms"] > 0


def test_scripts_whose_losses_differ_are_seen() -> None:
    import doors

    def record(loss: float, ms: float) -> dict[str, Any]:
        return {"losses": [1.0, loss], "median_ms": ms, "cpu_ms": ms, "seconds": 1.0}

    def row(name: str, *losses: float) -> dict[str, Any]:
        rounds = [{"deepspeed": record(1.0, 30.0), "polyreme": record(loss, 20.0)} for loss in losses]
        return doors.summarise(name, rounds)

    assert row("cnn", 1.0, 1.0 + 1e-7)["equal"] and not row("cnn", 1.0, 1.0 + 1e-5)["equal"]
    assert row("llama-bf16", 1.005)["equal"] and not row("cnn", float("nan"))["equal"]
    assert row("cnn", 1.0)["faster"]["median"] == 1.5
    failed = doors.summarise("cnn", [{"deepspeed": record(1.0, 1.0), "polyreme": {"error": "it\nbroke"}}])
    assert "equal" not in failed and failed["errors"] == {"polyreme": "it\nbroke"}
    summary = {"offload-optimizer": row("cnn", 1.0), "llama-bf16": row("cnn", 2.0), "cnn": failed}
    lines = doors.table({"summary": summary, "foreign_cores": 0.0}).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == [
        "offload-optimizer",
        "30.0",
        "20.0",
        "1.50",
        "1.50",
        "-",
        "1.50",
        "1.50",
        "0.0e+00",
    ]
    assert lines[4].endswith("!") and lines[5].endswith("no times: polyreme")
    assert lines[7].startswith("2 of 2 at least 1.15 times")
