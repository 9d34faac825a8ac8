"""Python's search for garbage is put off, and goes on as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import polyreme
from polyreme.garbage import put_off


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_and_as_it_was_after() -> None:
    with put_off():
        assert not gc.isenabled()
        with put_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with put_off():
        pass
    assert not gc.isenabled()


def test_an_error_switches_it_on_again() -> None:
    with pytest.raises(ValueError), put_off():
        raise ValueError
    assert gc.isenabled()


def test_nothing_is_searched_while_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    engine = polyreme.initialize(model, {"batch": {"size": 1}}, loss_fn=lambda out, _: out.sum())
    engine.train_step(torch.ones(1, 4))
    engine.save(tmp_path / "step")
    searched: list[int] = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: searched.append(info["generation"]) if phase == "start" else None)
    try:
        engine.load(tmp_path / "step")
    finally:
        gc.callbacks.pop()
    assert searched in ([], [0]), "at most the one that is due after it"
