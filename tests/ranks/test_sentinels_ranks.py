"""Damaged numbers are found over real ranks as over those of tests/sim/test_sentinels.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flips
import training
from pool import Ranks

NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"zero": {"stage": 0}}, "dp: rank 1 from rank 0"),
        (
            {"zero": {"stage": 0}, "precision": {"compute": "bf16"}, "memory": {"states": "host"}},
            "dp: rank 1",
        ),
        ({"zero": {"stage": 2}, "mesh": {"tp": 2}}, "tp: rank 1 from rank 0"),
        ({"zero": {"stage": 3}, "mesh": {"tp": 2, "sequence_parallel": True}}, "tp: rank 1 from rank 0"),
    ],
)
def test_a_flipped_bit_is_found_and_named(
    ranks: Ranks, tmp_path: Path, sections: dict[str, Any], where: str
) -> None:
    config = training.config(1 if "mesh" in sections else 2, sentinels={"every": 4}, **sections)
    for folder in (None, tmp_path):
        for steps, error in ranks(2, flips.flipped, "llama", config, NORM, 0, True, None, folder):
            assert 0 < steps <= 4 and f"{NORM} (over {where}" in error
