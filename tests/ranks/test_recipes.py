"""Every script of examples/recipes computes, on one rank and on two, what its twin in tests/recipes computes
in plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import polyreme
from models import Wide
from pool import Ranks

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.py"))


@contextlib.contextmanager
def in_float64() -> Any:
    """New tensors in float64, also where transformers would go to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def run_recipe(rank: int, world_size: int, name: str, folder: Path) -> list[float]:
    """On one rank: the script's `losses`, where it computes in float64."""
    initialize = polyreme.initialize

    def in_fp64(model: Any, config: dict[str, Any], **options: Any) -> polyreme.Engine:
        return initialize(
            model, {**config, "precision": {**config.get("precision", {}), "compute": "fp64"}}, **options
        )

    with contextlib.chdir(folder), in_float64(), mock.patch.object(polyreme, "initialize", in_fp64):
        return runpy.run_path(str(ROOT / "examples" / "recipes" / f"{name}.py"))["losses"]


def run_twin(rank: int, world_size: int, name: str) -> list[float]:
    """In one process."""
    with in_float64():
        return importlib.import_module(f"recipes.{name}").plain()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_computes_what_plain_pytorch_does(name: str, ranks: Ranks, tmp_path: Path) -> None:
    [expected] = ranks(1, run_twin, name)
    assert len(expected) > 1
    for world_size in (1, 2):
        for losses in ranks(world_size, run_recipe, name, tmp_path):
            assert losses == pytest.approx(expected, rel=1e-10, abs=1e-12), world_size


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_in_the_documentation(name: str) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    assert f"```python\n# from examples/recipes/{name}.py\n" in page
