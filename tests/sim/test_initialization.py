"""Keys that are "auto" in a config for `initialize`: all ranks take what rank 0 finds, or raise; and the run
is that of the values that were found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import polyreme
import threads
import training
from examples import whole
from polyreme import initialization
from polyreme.errors import ConfigError, LaunchError, ModelError, PolyremeError
from polyreme.planner import choice

MSE = nn.functional.mse_loss
OPEN = {"memory": {"activations": "auto"}, "batch": {"size": 4, "micro": 2}}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))


def pair(samples: int) -> tuple[Tensor, Tensor]:
    return torch.ones(samples, 8), torch.ones(samples, 4)


def both(rank: int, world: int, case: str, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What is chosen, and what a run of it and one of the written values differ in."""
    runs, drawn, chosen = [], [], {}
    build, batch, loss_fn = CASES[case]
    for _ in range(2):
        torch.manual_seed(3)
        engine = polyreme.initialize(build(), given, loss_fn=loss_fn, batch=batch if case == "mlp" else None)
        drawn.append(torch.rand(3))
        data, results = engine.mesh.data, []
        for _ in range(2):
            share = models.share(batch(training.SAMPLES), data.rank, data.size)
            result = engine.train_step(share)
            results.append((result.loss, result.grad_norm))
        runs.append((results, engine.state_dict(rank0_only=True, master=True)))
        if not chosen:
            assert {engine.config.origins[key] for key in KEYS} == {"derived"}
            chosen = {key: engine.config.value(key) for key in KEYS}
            assert engine.config.plan.ranks == world and engine.config.plan.seconds
            given = {name: {**given.get(name, {})} for name in {*given, "mesh", "zero", "memory"}}
            for section, name in (key.split(".") for key in KEYS):
                given[section][name] = chosen[f"{section}.{name}"]
        else:
            assert {engine.config.origins[key] for key in KEYS} == {"user"}
        engine.close()
    return chosen, training.differences(*runs) + ["draws"] * (not torch.equal(*drawn))


KEYS = ("mesh.pp", "zero.stage", "memory.activations", "batch.micro")


def gpt2() -> nn.Module:
    return models.build("gpt2", torch.float32)


def tokens(samples: int) -> Any:
    return models.batch_of("gpt2", samples, 0)


CASES: dict[str, tuple[Any, Any, Any]] = {"mlp": (perceptron, pair, MSE), "gpt2": (gpt2, tokens, None)}


@pytest.mark.parametrize("case", ["mlp", pytest.param("gpt2", marks=whole)])
def test_a_run_is_that_of_the_values_that_are_chosen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(initialization, "warn", lambda text, every: said.append((threads.HERE.rank, text)))
    memory, batch = {"activations": "auto"}, {"size": training.SAMPLES, "micro": 2}
    given = {"mesh": {"pp": "auto"}, "zero": {"stage": "auto"}, "memory": memory, "batch": batch}
    (first, unlike), (second, others) = threads.run(2, both, case, given)
    assert first == second and unlike == others == []
    [(rank, line)] = said
    assert rank == 0 and line.startswith('"auto" (mesh.pp, memory.activations) is chosen for CPU host')
    assert f"mesh.pp = {first['mesh.pp']}" in line and "; next best mesh.pp = " in line and "\n" not in line


def refused(rank: int, world: int, **given: Any) -> tuple[type[Exception], str]:
    """What `initialize` raises."""
    config = given.pop("config", OPEN)
    if callable(config):
        config = config(rank)
    arguments = {"loss_fn": MSE, "batch": pair, **given}
    with pytest.raises(PolyremeError) as caught:
        polyreme.initialize(perceptron(), config, **arguments)
    return type(caught.value), str(caught.value)


def fail(samples: int) -> Any:
    raise ValueError("no such batch")


def test_an_error_of_rank_0_is_raised_on_all() -> None:
    first, second, third = threads.run(3, lambda *ranks: refused(*ranks, batch=fail, config=batch_of(3)))
    assert first[0] is ModelError and "no such batch" in first[1]
    assert second == third and second[0] is LaunchError
    assert second[1].startswith("rank 0 could not choose memory.activations for all ranks: ")
    assert "no such batch" in second[1]


def batch_of(ranks: int) -> dict[str, Any]:
    return {**OPEN, "batch": {"size": 2 * ranks, "micro": 2}}


def test_where_nothing_fits_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "own_memory", lambda: 2000)
    first, second = threads.run(2, refused)
    assert first[0] is ConfigError and second[0] is LaunchError
    assert "of 2 layouts of 2 ranks none fits; the nearest, " in first[1] and "more than the " in first[1]


def test_ranks_leave_the_same_open() -> None:
    def config(rank: int) -> dict[str, Any]:
        return {**OPEN, "memory": {"activations": "keep" if rank else "auto"}}

    found = threads.run(2, lambda *ranks: refused(*ranks, config=config))
    assert {kind for kind, _ in found} == {ConfigError}
    assert all("memory.activations = " in text and '"auto" on rank 0' in text for _, text in found)


class ByValue(nn.Module):
    """Multiplies by how many different numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.unique(x).numel()


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (perceptron, {}, "it is not known what Sequential takes"),
        (ByValue, {"batch": pair}, "cannot be told without numbers, which a search for"),
    ],
)
def test_a_model_that_cannot_be_run_dry(model: Any, given: dict[str, Any], words: str) -> None:
    config = {**OPEN, "batch": {"size": 2, "micro": 2}}
    with pytest.raises(ModelError, match=words):
        polyreme.initialize(model(), config, loss_fn=MSE, **given)


@pytest.mark.parametrize("kind", ["function", "layers", "optimizer", "class"])
def test_what_initialize_takes_can_be_chosen_for(kind: str) -> None:
    """And an optimizer that was made counts with its options: SGD without momentum has no states."""
    built: Any = perceptron()
    given: Any = {
        "function": (perceptron, None),
        "layers": ([nn.Linear(8, 4), lambda: nn.Linear(4, 4)], None),
        "optimizer": (built, torch.optim.SGD(built.parameters(), lr=0.1)),
        "class": (built, torch.optim.AdamW),
    }[kind]
    config = {**OPEN, "batch": {"size": 2, "micro": 2}}
    with polyreme.initialize(given[0], config, loss_fn=MSE, batch=pair, optimizer=given[1]) as engine:
        assert engine.config.memory.activations == "keep" and engine.config.plan.ranks == 1
        assert ("states" in engine.config.plan.memory) == (kind != "optimizer")
        assert engine.train_step(pair(2)).step == 1
