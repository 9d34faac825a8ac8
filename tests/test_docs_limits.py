"""The table on the page of limits is what happens: where it says that two things are refused, initialize
refuses them together, and where it says that they work, a small model trains with both."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import models
import polyreme
import threads
from examples import whole
from polyreme.config import Config
from polyreme.errors import PolyremeError
from pool import RanksFailed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
SAMPLES = 8
FEATURES: dict[str, Mapping[str, Any]] = {
    "stage 2": {"zero": {"stage": 2}},
    "stage 3": {"zero": {"stage": 3}},
    "tp": {"mesh": {"tp": 2}},
    "sp": {"mesh": {"tp": 2, "sequence_parallel": True}},
    "pp": {"mesh": {"pp": 2}},
    "states": {"memory": {"states": "host"}},
    "params": {"memory": {"params": "host"}, "zero": {"stage": 3}},
    "grads": {"memory": {"states": "./tier", "gradients": "./tier"}},
    "recompute": {"memory": {"activations": "recompute"}},
    "acts": {"memory": {"activations": "host"}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "autocast": {"precision": {"compute": "autocast-bf16"}},
    "muon": {"optimizer": {"name": "muon"}},
    "lamb": {"optimizer": {"name": "lamb"}},
    "8bit": {"optimizer": {"states": "8bit"}},
    "compile": {"compile": True},
    "hsdp": {"zero": {"shard_over": 2}},
    "qgrads": {"zero": {"shard_over": 2, "quantized_gradients": True}},
    "qweights": {"zero": {"stage": 3, "quantized_weights": True}},
    "micro": {"batch": {"micro": 1}},
    "loop": {},
}
"""What the rows and columns stand for, by their short names; `loop` is a loop of the user's own."""
PAIRS = list(combinations(FEATURES, 2))
WORKS, SAME = "✓", "·"
"""Cells: of two that work together, and of two values of one key."""
REFUSED = {
    "1": "precision.compute: torch.autocast does not reach",
    "2": "optimizer.name: it needs whole matrices|needs whole tensors",
    "3": "optimizer.states: of (muon|lamb) in 8bit none are kept",
    "4": r"engine\(\.\.\.\) calls the whole model",
}
"""What is said where two are refused, by the page's number of the reason."""
SOME = [
    ("stage 3", "tp"),
    ("tp", "pp"),
    ("params", "bf16"),
    ("grads", "micro"),
    ("muon", "hsdp"),
    ("acts", "pp"),
]
"""Pairs of which each makes another part of Polyreme work."""


def merged(one: str, other: str) -> dict[str, Any] | None:
    """The config of both; None where they want different values of a key."""
    config: dict[str, Any] = {"batch": {"size": SAMPLES}, "optimizer": {"lr": 1e-3}}
    config["zero"] = {"min_bucket": 0}
    given: dict[tuple[str, str], Any] = {}
    for name in (one, other):
        for section, keys in FEATURES[name].items():
            if not isinstance(keys, dict):
                config[section] = keys
                continue
            for key, value in keys.items():
                if given.setdefault((section, key), value) != value:
                    return None
                config[section] = {**config.get(section, {}), key: value}
    return config


def ranks_for(config: Mapping[str, Any]) -> int:
    """So many that data parallelism has two ranks, and four where groups of two share."""
    mesh = config.get("mesh", {})
    return mesh.get("tp", 1) * mesh.get("pp", 1) * (4 if "shard_over" in config["zero"] else 2)


def losses(rank: int, world: int, config: Mapping[str, Any], loop: bool) -> list[float]:
    model = models.build("llama", torch.float32)
    engine = polyreme.initialize(model, config)
    dp, found = engine.mesh.dp, []
    for seed in range(3):
        batch = models.share(models.batch_of("llama", SAMPLES, seed), dp.rank, dp.size)
        if loop:
            count = engine.config.accumulation
            for part in range(count):
                rows = {key: value.chunk(count)[part] for key, value in batch.items()}
                engine.backward(engine(**rows).loss)
            found.append(engine.step().loss)
        else:
            found.append(engine.train_step(batch).loss)
    return found


def outcome(one: str, other: str) -> str:
    """WORKS, SAME, or what is said by which kind of error."""
    config = merged(one, other)
    if config is None:
        return SAME
    world, loop = ranks_for(config), "loop" in (one, other)
    problems = Config.load(config).problems(world)
    if problems:
        return f"{problems[0].key}: {problems[0].reason}"
    eager = patch(
        "torch.compile", partial(torch.compile, backend="eager")
    )  # it takes seconds to generate code
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), eager:
        try:
            found = threads.run(world, losses, config, loop)
        except RanksFailed as error:
            first = next(iter(error.exceptions.values()))
            kind = "refused" if isinstance(first, PolyremeError) else "FAILED"
            return f"{kind}: {type(first).__name__}: {str(first).splitlines()[0]}"
    for each in found:
        assert math.isclose(each[0], math.log(models.VOCABULARY), rel_tol=0.1) and all(
            map(math.isfinite, each)
        )
    return WORKS


def table() -> dict[tuple[str, str], str]:
    """The cells of the page."""
    rows = [line.strip()[1:-1].split("|") for line in re.findall(r"^\|.*$", shown(), re.MULTILINE)]
    names = [cell.strip() for cell in rows[0][1:]]
    return {
        (row[0].strip(" *"), name): cell.strip()
        for row in rows[2:]
        for name, cell in zip(names, row[1:], strict=True)
    }


def shown() -> str:
    return PAGE.read_text("utf-8").split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0]


def markdown(cells: Mapping[tuple[str, str], str]) -> str:
    """The page's table of these cells, of which each is there in one order of its two."""
    lines = ["| | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for row in FEATURES:
        found = [cells.get((row, each)) or cells.get((each, row)) or "" for each in FEATURES]
        lines.append(f"| **{row}** | " + " | ".join(found) + " |")
    return "\n".join(lines)


def test_the_table_has_every_two() -> None:
    cells = table()
    assert [name for name in FEATURES if any((name, each) not in cells for each in FEATURES)] == []
    for one, other in PAIRS:
        cell = cells[one, other]
        assert cell == cells[other, one] and cell in (WORKS, SAME, *REFUSED), (one, other)
        assert (cell == SAME) == (merged(one, other) is None), (one, other)
    reasons = re.findall(r"^(\d+)\. ", PAGE.read_text("utf-8"), re.MULTILINE)
    assert reasons == list(REFUSED)


@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if table()[pair] in REFUSED])
def test_what_is_refused(one: str, other: str) -> None:
    assert re.search(REFUSED[table()[one, other]], outcome(one, other))


@pytest.mark.parametrize(("one", "other"), SOME)
def test_some_that_work(one: str, other: str) -> None:
    assert outcome(one, other) == table()[one, other] == WORKS


@whole
@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if table()[pair] == WORKS])
def test_all_that_work(one: str, other: str) -> None:
    assert outcome(one, other) == WORKS


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)", PAGE.read_text("utf-8"))
    assert len(named) > 15
    assert [file for file in named if not (ROOT / file).is_file()] == []


if __name__ == "__main__":  # write the page's table again, where every cell is known
    cells = {}
    for pair in PAIRS:
        said = outcome(*pair)
        cells[pair] = next((number for number, reason in REFUSED.items() if re.search(reason, said)), said)
        print(*pair, cells[pair], sep="\t", flush=True)
    PAGE.write_text(PAGE.read_text("utf-8").replace(shown(), f"\n{markdown(cells)}\n"), "utf-8")
