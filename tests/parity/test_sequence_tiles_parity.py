"""With its loss in chunks and its MLPs in tiles, a run computes what plain transformers computes with all
logits: float64, to 1e-10."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from test_engine_parity_mesh import causal
from test_sequence_parity import FAMILIES, SMALL, check, settings

from cover import ALL, cover, together

FAMILIES["cohere"] = lambda: causal("cohere", **SMALL, logit_scale=0.25)
FAMILIES["granite"] = lambda: causal("granite", **SMALL, logits_scaling=3.0)

LIGHT = {"loss_chunk": 5, "mlp_tile": 3}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "tp": ({"tp": 2}, {}),
    "sequence parallel": ({"tp": 2, "sequence_parallel": True}, {}),
    "pp": ({"pp": 2}, {}),
    "recompute": ({}, {"memory": {"activations": "recompute"}}),
}
Case = tuple[str, int, int, str]
FAMILIES_TRIED = ("llama", "gemma2", "gemma3", "cohere", "granite", "gpt2")
CASES: list[Case] = [*itertools.product(FAMILIES_TRIED, (1, 2), (0, 3), OTHERS)]


def cases(size: int) -> list[Case]:
    """Cases in which every `size` of the values are together."""
    return cover(CASES, lambda case: together(dict(zip("abcd", case, strict=True)), size))


@pytest.mark.parametrize("case", cases(2) if ALL in os.environ else cases(1), ids=str)
def test_a_light_run_is_a_plain_one(case: Case) -> None:
    family, cp, stage, other = case
    mesh, sections = OTHERS[other]
    kind = "packed" if cp == 2 else "labels of a few"
    check(family, kind, settings({"cp": cp, **mesh}, context=LIGHT, zero={"stage": stage}, **sections))
