"""bench/gpu.py: its names, its arithmetic, its table, and one run of it without a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples import ALL

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_gpu"] = module
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def test_a_name_says_kind_stage_and_options(bench: ModuleType) -> None:
    system = bench.System.parse("polyreme3+recompute+compile")
    assert (system.kind, system.stage, system.recompute, system.compile) == ("polyreme", 3, True, True)
    assert system.floor == "torch+recompute+compile"
    away = bench.System.parse("polyreme3+host+params+recompute")
    assert (away.home, away.params, away.floor) == ("host", True, "torch+recompute")
    assert all(
        bench.System.parse(name).home and bench.System.parse(name).floor == "torch" for name in bench.TIERS
    )
    assert bench.System.parse("fsdp2").kind == "fsdp2" and bench.System.parse("fsdp2").floor == "torch"
    assert {bench.System.parse(name).floor for name in bench.SYSTEMS} <= set(bench.SYSTEMS)


OTHERS = """polyreme polyreme4 torch2 fsdp23 torch+compile+recompute ddp torch+cpu
    deepspeed1+cpu deepspeed2+cpu+params polyreme3+cpu
    polyreme3+params fsdp2+host"""


@pytest.mark.parametrize("name", [*OTHERS.split(), ""])
def test_other_names_are_refused(bench: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is no system"):
        bench.System.parse(name)
    with pytest.raises(SystemExit):
        bench.parse(["--device", "cpu", "--systems", name])
    assert "is no system" in capsys.readouterr().err


def test_patterns_choose_systems_in_order(bench: ModuleType) -> None:
    assert bench.choose("all") == list(bench.SYSTEMS)
    assert bench.choose("fsdp2,polyreme?,fsdp*")[:4] == ["fsdp2", "polyreme2", "polyreme3", "fsdp2+recompute"]
    assert bench.choose("polyreme0+compile") == ["polyreme0+compile"]
    assert bench.choose("*3+host*,fsdp2+cpu") == ["polyreme3+host+params", "polyreme3+host", "fsdp2+cpu"]


def record(seconds: dict[str, float], losses: list[float]) -> dict[str, Any]:
    turns = {
        turn: {"seconds": [s, 9 * s, s], "live": 2**30, "peak": 3 * 2**30} for turn, s in seconds.items()
    }
    return {"turns": turns, "checked": {"losses": losses}}


def case(**systems: dict[str, Any]) -> dict[str, Any]:
    job = {"size": "tiny", "dtype": "bf16", "batch": 2, "sequence": 500}
    about = {"device": "D", "parameters": 1e6, "flops_per_token": 6e6, "peak_flops": 12e9, "peak_source": "S"}
    return {"job": job, "about": about, "systems": systems}


def test_speeds_are_compared_round_by_round(bench: ModuleType) -> None:
    """The machine is twice as slow in the second round."""
    losses = [6.0, 5.0]
    found = case(
        **{
            "torch": record({"0.0": 1.0, "0.1": 2.0}, losses),
            "polyreme2": record({"0.0": 0.5, "0.1": 1.0}, losses),
            "torch+compile": record({"0.1": 1.0}, losses),
            "polyreme2+compile": record({"0.1": 0.5}, losses),
        }
    )
    rows = bench.summarise(found)
    assert [rows[name]["over_torch"] for name in rows] == [1.0, 2.0, 1.0, 2.0]
    assert rows["torch"]["tokens_per_second"] == pytest.approx(1000 / 1.5)
    assert rows["torch"]["mfu"] == pytest.approx(6e6 * 1000 / 1.5 / 12e9)
    assert (rows["torch"]["live_gib"], rows["torch"]["peak_gib"]) == (1.0, 3.0)
    assert all(row["equal"] for row in rows.values())
    text = "\n".join(bench.table(found | {"summary": rows}))
    assert "| polyreme2+compile | 2,000 | 500.0 |" in text and "DIFFER" not in text


@pytest.mark.parametrize(
    ("loss", "equal"), [(5.0, True), (5.0 * (1 + 5e-4), True), (5.1, False), (math.nan, False)]
)
def test_a_different_loss_is_found(bench: ModuleType, loss: float, equal: bool) -> None:
    found = case(torch=record({"0.0": 1.0}, [6.0, 5.0]), fsdp2=record({"0.0": 1.0}, [6.0, loss]))
    rows = bench.summarise(found)
    assert rows["fsdp2"]["equal"] is equal
    assert ("**DIFFER**" in "\n".join(bench.table(found | {"summary": rows}))) is not equal


def test_a_system_that_failed_is_reported_and_no_row(bench: ModuleType) -> None:
    others = {
        "fsdp2": {"turns": {}, "error": "out of memory"},
        "deepspeed2": {"turns": {}, "skipped": "not here"},
    }
    found = case(torch=record({"0.0": 1.0}, [6.0]), **others)
    rows = bench.summarise(found)
    text = "\n".join(bench.table(found | {"summary": rows}))
    assert list(rows) == ["torch"]
    assert "**fsdp2** failed: out of memory" in text and "**deepspeed2** not run: not here" in text


@pytest.mark.parametrize(
    ("limit", "tried"),
    [(0, [4, 2, 1]), (3, [4, 2, 3]), (4, [4, 5]), (16, [4, 16, 18]), (19, [4, 19]), (99, [4, 20])],
)
def test_the_deepest_model_is_found_in_few_tries(bench: ModuleType, limit: int, tried: list[int]) -> None:
    """Of at most 20 blocks, of which `limit` fit, as each that fits says."""
    seen: list[int] = []

    def fits(blocks: int) -> int:
        seen.append(blocks)
        return limit if blocks <= limit else 0

    found = bench.deepest(fits, 4, 20)
    assert seen == tried and found == max((blocks for blocks in tried if blocks <= limit), default=0)
    assert bench.deepest(fits, 4, 20, late=lambda: len(seen) > 5) <= limit


@pytest.mark.parametrize("error", [0.3, 0.9, 1.0, 1.1, 3.0])
@pytest.mark.parametrize("limit", [1, 30, 97, 400, 2000])
def test_the_deepest_model_is_found_with_wrong_guesses(bench: ModuleType, limit: int, error: float) -> None:
    seen: list[int] = []

    def fits(blocks: int) -> int:
        seen.append(blocks)
        return max(1, int(limit * error)) if blocks <= limit else 0

    found = bench.deepest(fits, 24, 2048)
    assert found <= limit <= found + max(1, found // 8) and len(seen) <= 35 and len(set(seen)) == len(seen)


def test_memory_that_runs_out_first_bounds_the_guess(bench: ModuleType) -> None:
    told = {"peak": 10, "live": 5, "free": 75, "host": (30, 120), "disk": (0, 64)}
    assert [bench.guess(24, told | change) for change in ({}, {"peak": 40}, {"disk": (48, 64)})] == [
        96,
        48,
        32,
    ]
    assert bench.guess(1, told | {"peak": 81}) == 1, "what trained fits, whatever else took memory meanwhile"


def test_a_process_that_takes_all_host_memory_is_ended(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = [sys.executable, "-c", "input()"]
    for left, ended in ((bench.RESERVE + 1, False), (bench.RESERVE - 1, True)):
        monkeypatch.setattr(bench, "host_free", lambda: 2 * bench.RESERVE)
        with (
            subprocess.Popen(sleeper, stdin=subprocess.PIPE, text=True) as process,
            bench.Guard(process) as guard,
        ):
            monkeypatch.setattr(bench, "host_free", lambda left=left: left)
            if ended:
                process.wait()
            else:
                process.communicate("\n")
        assert guard.ended is ended and process.returncode == (-signal.SIGKILL if ended else 0)
    assert guard.used == 2 * bench.RESERVE - left


def test_copies_beside_kernels(bench: ModuleType) -> None:
    copies = bench.merged([(5.0, 9.0), (0.0, 2.0), (1.0, 3.0)])
    kernels = bench.merged([(2.0, 6.0), (8.0, 20.0)])
    assert copies == [(0.0, 3.0), (5.0, 9.0)]
    assert bench.length(copies) == 7.0 and bench.shared(copies, kernels) == 1.0 + 1.0 + 1.0


@pytest.mark.skipif(ALL not in os.environ, reason="a whole run of the benchmark: run with --all-cases")
def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = (
        "--device cpu --size tiny --dtype fp32 --batch 2 --sequence "
        "32 --rounds 1 --steps 2 --settle 1 --threads 1 --profile"
    )
    options += f" --folder {tmp_path} --largest 1"
    command = [
        sys.executable,
        str(SCRIPT),
        *options.split(),
        "--systems",
        "polyreme3+file+params+recompute",
        "--out",
        str(out),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == out.with_suffix(".md").read_text().strip()
    found = json.loads(out.read_text())["cases"][0]
    assert list(found["summary"]) == ["torch", "polyreme3+file+params+recompute"]
    for name, row in found["summary"].items():
        assert row["equal"] and row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1, name
    polyreme = found["systems"]["polyreme3+file+params+recompute"]
    assert polyreme["checked"]["categories"] and polyreme["profile"]["kernels"] > 0
    assert polyreme["largest"]["blocks"] == 1 and polyreme["largest"]["why"] == "--largest 1"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "nothing is left on the disk"
    assert polyreme["checked"]["losses"] == pytest.approx(
        found["systems"]["torch"]["checked"]["losses"], rel=1e-5
    )
