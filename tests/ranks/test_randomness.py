"""Whose random numbers a script and a model draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
import threads

MESHES = {"dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}


class Noisy(nn.Module):
    """Adds what it draws, which it notes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(())
        self.drawn.append(float(noise))
        return self.down(self.up(x)) + noise.to(x.dtype)


def layers(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(Noisy()) for _ in range(count))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def make(mesh: dict[str, Any], batch: int = 2, **config: Any) -> polyreme.Engine:
    if "tp" in mesh:
        mesh = {**mesh, "tp_plan": {"layers.*.0.up": "colwise", "layers.*.0.down": "rowwise"}}
    return polyreme.initialize(
        Model(),
        {"mesh": mesh, "batch": {"size": batch}, "precision": {"compute": "fp32"}, **config},
        loss_fn=nn.functional.mse_loss,
    )


def drawn(engine: polyreme.Engine) -> list[float]:
    """What the noisy layers that run here have drawn since."""
    found = []
    for module in engine.module.modules():
        if isinstance(module, Noisy):
            found += module.drawn
            module.drawn.clear()
    return found


def script(rank: int, size: int, mesh: dict[str, int], seed: int) -> tuple[Any, ...]:
    """What the script draws after initialize, and what the model draws, on a rank."""
    torch.manual_seed(seed)
    engine = make(mesh)
    share = 2 // engine.mesh.dp.size
    batch = torch.full((share, 4), 1.0 + engine.mesh.dp.rank), torch.zeros(share, 4)
    order = [torch.randperm(40).tolist()]
    steps = []
    for _ in range(2):
        engine.train_step(batch)
        steps.append(drawn(engine))
        order.append(torch.randperm(40).tolist())
        engine.eval_step(batch)
        drawn(engine)
    return order, steps


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_draw_the_same_order_and_each_its_own_dropout(mesh: str) -> None:
    (order, steps), (other_order, other_steps) = threads.run(2, script, MESHES[mesh], 1)
    torch.manual_seed(1)
    Model()
    assert order == other_order == [torch.randperm(40).tolist() for _ in range(3)]  # as without an engine
    assert (steps == other_steps) == (mesh == "tp")
    assert steps[0] != steps[1]
    again, second = threads.run(2, script, MESHES[mesh], 1), threads.run(2, script, MESHES[mesh], 2)
    assert again[0] == (order, steps)
    assert second[0][0] != order and second[0][1] != steps


def test_one_rank_draws_as_without_an_engine() -> None:
    """The model draws from the script's generator, in turns with it."""
    order, steps = script(0, 1, {}, 3)
    torch.manual_seed(3)
    model = Model()
    expected_order, expected_steps = [torch.randperm(40).tolist()], []
    for _ in range(2):
        model(torch.ones(2, 4))
        expected_steps.append([each for layer in model.layers for each in layer[0].drawn])
        [layer[0].drawn.clear() for layer in model.layers]
        expected_order.append(torch.randperm(40).tolist())
        model(torch.ones(2, 4))
        [layer[0].drawn.clear() for layer in model.layers]
    assert (order, steps) == (expected_order, expected_steps)


def loop(rank: int, size: int, looks: bool) -> list[Any]:
    """A loop of the script's own, with or without validation between."""
    torch.manual_seed(0)
    engine = make({"dp": 2}, 8)
    x, found = torch.ones(4, 4), []
    for _ in range(2):
        if looks:
            engine.eval_step((x, x))
            with torch.no_grad():
                engine(x)
        drawn(engine)
        nn.functional.mse_loss(engine(x), x).backward()
        engine.step()
        found.append(drawn(engine))
    return [*found, torch.rand(()).item()]


def test_validation_leaves_training_alone() -> None:
    with_looks, without = threads.run(2, loop, True), threads.run(2, loop, False)
    assert with_looks == without
    assert with_looks[0][:2] != with_looks[1][:2] and with_looks[0][2] == with_looks[1][2]


def unlike(rank: int, size: int, mesh: dict[str, int]) -> tuple[Any, ...]:
    torch.manual_seed(rank)  # as many scripts do
    engine = make(mesh)
    before = torch.rand(3).tolist()
    share = 2 // engine.mesh.dp.size
    engine.train_step(
        (torch.full((share, 4), rank + 0.5 if engine.mesh.dp.size > 1 else 1.0), torch.zeros(share, 4))
    )
    return before, drawn(engine)


def test_ranks_of_one_line_that_were_seeded_unlike_draw_alike() -> None:
    first, second = threads.run(2, unlike, {"tp": 2})
    assert first == second
    first, second = threads.run(2, unlike, {"dp": 2})
    assert first[0] != second[0] and first[1] != second[1]
    torch.manual_seed(1)
    Model()
    assert second[0] == torch.rand(3).tolist()


def without_seed(rank: int, size: int, seed: int) -> tuple[Any, ...]:
    torch.manual_seed((1 << 60) + 123 * rank + seed)  # as a process is that nobody seeds
    engine = make({"dp": 2}, seed=7)
    engine.train_step((torch.full((1, 4), rank + 1.0), torch.zeros(1, 4)))
    return torch.rand(3).tolist(), drawn(engine)


def test_a_script_without_a_seed_has_the_configs() -> None:
    first, second = threads.run(2, without_seed, 0), threads.run(2, without_seed, 99)
    assert first == second and first[0][0] == first[1][0] and first[0][1] != first[1][1]
    torch.manual_seed(7)
    assert first[0][0] == torch.rand(3).tolist()


def resumed(rank: int, size: int, mesh: dict[str, int], folder: str, kill: bool) -> tuple[Any, ...]:
    torch.manual_seed(5)
    engine = make(mesh)
    share = 2 // engine.mesh.dp.size
    found = []
    for step in range(4):
        if step == 2 and kill:
            engine.save(Path(folder) / "saved")
            torch.manual_seed(11)  # another script goes on
            torch.rand(rank + 3)
            engine = make(mesh)
            assert not engine.load(Path(folder) / "saved").notes
        noise = torch.rand(()).item()
        result = engine.train_step((torch.full((share, 4), noise), torch.zeros(share, 4)))
        found.append((noise, result.loss, drawn(engine)))
    return found, {name: t.tolist() for name, t in engine.state_dict().items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_resumed_run_draws_what_the_other_would_have(mesh: str, tmp_path: Path) -> None:
    never, killed = (threads.run(2, resumed, MESHES[mesh], str(tmp_path), kill) for kill in (False, True))
    assert never == killed


def on_more(rank: int, size: int, folder: str) -> float:
    torch.manual_seed(rank + 1)
    engine = make({"dp": size})
    (note,) = engine.load(folder).notes
    assert "another mesh" in note
    return torch.rand(()).item()


def test_on_another_mesh_the_script_goes_on_alike(tmp_path: Path) -> None:
    torch.manual_seed(5)
    engine = make({})
    engine.save(tmp_path / "saved")
    expected = torch.rand(()).item()
    assert threads.run(2, on_more, str(tmp_path / "saved")) == [expected, expected]
