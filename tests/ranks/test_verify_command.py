"""The command `polyreme verify` on real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from command import TINY, polyreme, write_text
from cover import ALL

LAYOUTS: dict[str, tuple[str, ...]] = {
    "stage 3": ("-n", "2", "--set", "zero.stage=3", "--set", 'memory.states="host"', "--steps", "2"),
    "pipeline in bf16": (
        *("-n", "2", "--set", "mesh.pp=2", "--set", 'precision.compute="bf16"'),
        *("--mode", "numerics"),
    ),
    "both axes": ("-n", "4", "--set", "mesh.tp=2", "--set", "mesh.pp=2", "--shrink"),
    "divided sequences": ("-n", "4", "--set", "mesh.cp=2", "--set", "mesh.tp=2", "--shrink", "--steps", "2"),
    "recomputed": ("-n", "4", "--set", "mesh.tp=2", "--set", 'memory.activations="recompute"'),
}
SHORT = () if ALL in os.environ else ("stage 3",)


@pytest.mark.parametrize("name", SHORT or LAYOUTS)
def test_a_run_is_verified_on_ranks_that_it_starts(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY.replace("key_value_heads = 1", "key_value_heads = 2"))
    write_text(tmp_path)
    status, output, errors = polyreme(tmp_path, "verify", "run.toml", *LAYOUTS[name], "--json")
    assert status == 0, output + errors
    found = json.loads(output)
    assert found["first"] is None and found["exit_status"] == 0
    assert found["verdict"].startswith(f"equal: {LAYOUTS[name][1]} ranks (")
    assert {"samples", "loss", "gradients", "weights after the update"} <= {
        row["what"] for row in found["rows"]
    }
    shrunk = any(note.startswith("a smaller model with new weights") for note in found["notes"])
    assert shrunk == ("--shrink" in LAYOUTS[name])


def test_words_that_the_command_does_not_take(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    status, output, errors = polyreme(tmp_path, "verify", "run.toml", "--mode", "fast")
    assert (status, output) == (2, "") and "'fast' is not one of 'structure'" in errors
