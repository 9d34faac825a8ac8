"""An optimizer that the user made of the model's parameters, and engine.optimizer, beside plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import models
import polyreme
import threads
import training
from polyreme.errors import BatchError, ConfigError, ModelError
from polyreme.optim.groups import Lion
from polyreme.optim.lamb import Lamb
from pool import Ranks

WIDTH, STEPS = 12, 5


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1 + rank + 10 * step)
    shape = (2, 4, WIDTH)
    x, y = torch.randn(shape, generator=draw, dtype=torch.float64)
    return x, y


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.002}]


MAKERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.9)),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.05, momentum=0.9, nesterov=True),
    "lion": lambda model: Lion(groups(model), lr=0.003),
    "lamb": lambda model: Lamb(groups(model), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.01),
}


def change(optimizer: Any, step: int) -> None:
    """What a user's script does to options between steps."""
    if step == 2:
        optimizer.param_groups[0]["weight_decay"] = 0.3
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def plain(world: int, name: str) -> Tensor:
    model = network()
    optimizer = MAKERS[name](model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        for rank in range(world):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        change(optimizer, step)
    return flat(model.parameters())


STAGES = (0, 2, 3)


def given(rank: int, world: int, name: str, stage: int, through: str) -> Tensor:
    """All weights after training with an optimizer of that name."""
    model = network()
    optimizer = MAKERS[name](model)
    config = {
        "batch": {"size": 4 * world},
        "precision": {"compute": "fp64"},
        "zero": {"stage": stage, "min_bucket": 0},
        "optimizer": {"clip": None},
    }
    with polyreme.initialize(model, config, optimizer=optimizer) as engine:
        seen = optimizer if through == "the user's" else engine.optimizer
        schedule = LambdaLR(seen, lambda step: 1 / (1 + step))
        for step in range(STEPS):
            x, y = batch(rank, step)
            engine.backward(nn.functional.mse_loss(engine(x), y), weight=1.0)
            engine.step() if through == "the user's" else engine.optimizer.step()
            seen.zero_grad()
            schedule.step()
            change(seen, step)
        assert seen.param_groups[0]["params"][0] is next(model.parameters()) and len(seen.param_groups) == 2
        whole = engine.state_dict()
        return flat(whole[name] for name, _ in engine.module.named_parameters())


def all_given(rank: int, world: int, through: str) -> dict[tuple[str, int], Tensor]:
    return {(name, stage): given(rank, world, name, stage, through) for name in MAKERS for stage in STAGES}


@pytest.mark.parametrize("through", ["the user's", "engine.optimizer"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_is_taken_over(world: int, through: str) -> None:
    wanted = {name: plain(world, name) for name in MAKERS}
    for found in threads.run(world, all_given, through):
        for (name, stage), weights in found.items():
            difference = (weights - wanted[name]).abs().max()
            assert difference < 1e-12, (name, stage, difference)


def resumed(rank: int, world: int, folder: Any) -> list[float]:
    """The learning rates that a checkpoint brings back."""
    found = []
    for again in (False, True):
        model = network()
        optimizer = MAKERS["adamw"](model)
        config = {"batch": {"size": 4 * world}, "precision": {"compute": "fp64"}}
        engine = polyreme.initialize(model, config, optimizer=optimizer)
        if again:
            engine.load(folder)
        else:
            optimizer.param_groups[1]["lr"] = 0.125
            engine.save(folder)
        found.append(engine.optimizer.param_groups[1]["lr"])
    return found


def test_options_are_saved(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(2, resumed, tmp_path / "saved") == [[0.125, 0.125]] * 2


def parts(rank: int, world: int) -> int:
    """Numbers of Adam's first moment that this rank has."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = polyreme.initialize(model, {"batch": {"size": 4 * world}}, optimizer=optimizer)
    x, y = (each.float() for each in batch(rank, 0))
    engine.backward(nn.functional.mse_loss(engine(x), y), weight=1.0)
    engine.step()
    state = engine.optimizer.state
    assert {*state} <= {*model.parameters()}
    assert all(each["step"] == 1 for each in state.values())
    return sum(each["exp_avg"].numel() for each in state.values())


def test_the_state_is_this_ranks_part(ranks: Ranks) -> None:
    assert sum(ranks(2, parts)) == sum(p.numel() for p in network().parameters())


def some(model: nn.Module) -> list[nn.Parameter]:
    """Those of a network that its optimizer has: others are between them, and before."""
    return [p for name, p in model.named_parameters() if name.startswith("1.") or name == "2.0.weight"]


def plain_some(world: int) -> tuple[Tensor, Tensor]:
    """All weights after training some of them; and rank 0's gradients of the others."""
    model = network()
    optimizer = torch.optim.AdamW(some(model), lr=0.01)
    others = [p for p in model.parameters() if not any(p is each for each in some(model))]
    first = [torch.zeros_like(p) for p in others]
    for step in range(STEPS):
        for rank in reversed(range(world)):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / world).backward()
            for total, p in zip(first, others, strict=True):
                assert p.grad is not None
                total += p.grad * world * (rank == 0)
                p.grad = None
        nn.utils.clip_grad_norm_(some(model), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters()), flat(first)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def train_some(
    rank: int, world: int, stage: int, memory: dict[str, Any], folder: Any
) -> tuple[Tensor, Tensor]:
    """What `plain_some` returns, of a run that was saved and goes on from there as another one."""

    def begin() -> tuple[Any, nn.Module]:
        model = network()
        config = {
            "batch": {"size": 4 * world},
            "precision": {"compute": "fp64"},
            "zero": {"stage": stage, "min_bucket": 0},
            "optimizer": {"clip": 0.01},
            "memory": memory,
        }
        with training.warned(rank, r"leaves out 0.0.weight, .* \(7 in all\)"):
            return polyreme.initialize(
                model, config, optimizer=torch.optim.AdamW(some(model), lr=0.01)
            ), model

    engine, model = begin()
    gradients = torch.zeros(())
    for step in range(STEPS):
        if step == 3:
            gradients = flat(p.grad for p in model.parameters() if p.grad is not None)
            engine.save(folder)
            engine.close()
            engine, model = begin()
            engine.load(folder)
        x, y = batch(rank, step)
        engine.backward(nn.functional.mse_loss(engine(x), y), weight=1.0)
        engine.step()
    left = [p for p in model.parameters() if p.grad is not None]
    assert len(left) == 7 and engine.numbers(left[0]).whole("gradient") is None
    with pytest.raises(ModelError, match=r"gradient of 0.0.weight .* parameter.grad"):
        engine.numbers(left[0]).set_whole("gradient", torch.zeros_like(left[0]))
    whole = engine.state_dict()
    found = flat(whole[name] for name, _ in engine.module.named_parameters())
    return found, gradients + flat(p.grad for p in left)


@pytest.mark.parametrize(
    ("world", "stage", "memory"),
    [(1, 2, {}), (2, 0, {}), (2, 2, {}), (2, 3, {}), (2, 3, {"states": "host", "params": "host"})],
)
def test_parameters_in_no_group_stay_as_they_are(
    ranks: Ranks, world: int, stage: int, memory: dict[str, Any], tmp_path: Any
) -> None:
    weights, gradients = plain_some(world)
    found = ranks(world, train_some, stage, memory, tmp_path / "saved")
    for each, _ in found:
        assert torch.allclose(each, weights, rtol=0, atol=1e-12)
    assert torch.allclose(found[0][1], gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_cannot_be_is_refused(stage: int, tmp_path: Path) -> None:
    model = network()
    config: dict[str, Any] = {"batch": {"size": 4}, "zero": {"stage": stage}}
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        polyreme.initialize(model, config, optimizer=torch.optim.SGD(network().parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="learning rate of each step"):
        polyreme.initialize(model, config | {"lr_schedule": {"name": "cosine"}}, optimizer=optimizer)
    engine = polyreme.initialize(model, config, optimizer=optimizer)
    with pytest.raises(ModelError, match=r"call engine\.step\(\)"):
        optimizer.step()
    with pytest.raises(ModelError, match="closure"):
        engine.optimizer.step(lambda: 0.0)
    for each in (engine.optimizer, optimizer):
        with pytest.raises(ModelError, match=r"states are spread.*engine\.save"):
            each.state_dict()
    engine.refresh()
    with pytest.raises(ModelError, match=r"states are spread"):
        torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    engine.close()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("given", ["object", "class", "factory", "none", "1.0", "section", "by hand"])
def test_clipping_that_nobody_asked_for_is_told_once(recwarn: pytest.WarningsRecorder, given: str) -> None:
    """By the default, beside an optimizer of the script's; not where the config or the script says it."""
    model, x = network(), torch.ones(4, WIDTH, dtype=torch.float64)
    makes: dict[str, Any] = {"class": torch.optim.SGD, "section": None}
    makes["factory"] = lambda groups: torch.optim.SGD(groups, lr=0.0)
    optimizer = makes.get(given, torch.optim.SGD(model.parameters(), lr=0.0))
    config: dict[str, Any] = {"batch": {"size": 4}, "precision": {"compute": "fp64"}}
    if given in ("none", "1.0"):
        config["optimizer"] = {"clip": given if given == "none" else 1.0}
    engine = polyreme.initialize(model, config, optimizer=optimizer)
    norms = []
    for factor in (1e-9, 1e9, 1e9):
        engine.backward(factor * engine(x).square().mean())
        if given == "by hand":
            engine.gradients().clip_(1.0)
        norms.append(engine.step().grad_norm)
        engine.refresh()
    assert norms[0] < 1 < norms[1]
    said = [str(each.message) for each in recwarn if "optimizer.clip" in str(each.message)]
    if given in ("object", "class", "factory"):
        assert len(said) == 1 and f"norm {norms[1]:g} " in said[0] and 'optimizer.clip = "none"' in said[0]
    else:
        assert said == []


def set_on_one(rank: int, world: int, mesh: dict[str, int], stage: int, key: str, value: Any) -> Any:
    """Set an option on rank 1 alone, then on all ranks; or on all of them at once."""
    ends = []
    for alone in (True, False):
        model = models.build("gpt2")
        config = training.config(world, mesh=mesh, zero={"stage": stage}, optimizer={"clip": 1.0})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        said = ""
        with polyreme.initialize(model, config, optimizer=optimizer) as engine:
            share = models.share(
                models.batch_of("gpt2", training.SAMPLES), engine.mesh.dp.rank, engine.mesh.dp.size
            )
            engine.train_step(share)
            if alone:
                if rank == 1:
                    optimizer.param_groups[0][key] = value
                with pytest.raises(ModelError) as error:
                    engine.train_step(share)
                said = str(error.value)
            optimizer.param_groups[0][key] = value
            engine.train_step(share)
            assert engine.state.step == 2
            ends.append((said, engine.state_dict()))
    (said, found), (_, expected) = ends
    return said, all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("mesh", "stage", "key", "value", "text"),
    [
        ({}, 2, "lr", 0.5, "is 0.01 on rank 0; 0.5 on rank 1"),
        ({}, 3, "betas", (0.5, 0.9), "is 0.9, 0.999 on rank 0; 0.5, 0.9 on rank 1"),
        ({}, 0, "maximize", True, "is 0 on rank 0; 1 on rank 1"),
        ({"tp": 2}, 0, "lr", torch.tensor(0.5), "is 0.01 on rank 0; 0.5 on rank 1"),
        ({"pp": 2}, 2, "weight_decay", 0.3, "is 0.01 on rank 0; 0.3 on rank 1"),
    ],
)
def test_options_that_one_rank_sets_alone_are_refused(
    mesh: dict[str, int], stage: int, key: str, value: Any, text: str
) -> None:
    for said, alike in threads.run(2, set_on_one, mesh, stage, key, value):
        assert f"param_groups[0]['{key}'] {text}" in said and "Set it on all ranks" in said and alike


class Counted(torch.optim.SGD):
    """Keeps counts of its own: a number, and a tensor of one element."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state = self.state[p]
            state["number"] = state.get("number", 0) + 1
            state["tensor"] = state.get("tensor", torch.zeros(1)) + 1


def test_states_of_one_element_are_saved_and_loaded(tmp_path: Path) -> None:
    config = {"batch": {"size": 4}, "zero": {"stage": 2}, "precision": {"compute": "fp64"}}
    engines = []
    for _ in range(2):
        model = network()
        engines.append(polyreme.initialize(model, config, optimizer=Counted(model.parameters(), lr=0.1)))
    saved, loaded = engines
    for _ in range(2):
        saved.backward(saved(torch.ones(4, WIDTH, dtype=torch.float64)).mean())
        saved.step()
    saved.save(tmp_path / "one")
    loaded.load(tmp_path / "one")
    for engine in engines:
        for state in engine.optimizer.state.values():
            assert state["number"] == 2 and torch.equal(state["tensor"], torch.full((1,), 2.0))


def staged(model: nn.Module) -> torch.optim.Optimizer:
    """Only the last block trains at first."""
    for part in (0, 1):
        model[part].requires_grad_(False)
    return torch.optim.AdamW(model[2].parameters(), lr=0.01)


def unfreeze(model: nn.Module, optimizer: Any, step: int) -> None:
    """What a script does before a step: a block more, then the first in a group of another place; then
    others in their place."""
    if step == 1:
        model[1].requires_grad_(True)
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.003})
    if step == 2:
        model[0].requires_grad_(True)
        optimizer.param_groups[0]["params"] += [*model[0].parameters()]
    if step == 3:
        del optimizer.param_groups[1]
        optimizer.param_groups[0]["weight_decay"] = 0.5


def plain_unfrozen(world: int) -> list[list[float]]:
    model = network()
    optimizer = staged(model)
    for step in range(STEPS):
        unfreeze(model, optimizer, step)
        for rank in range(world):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / world).backward()
        optimizer.step()
        model.zero_grad()
    return flat(model.parameters()).tolist()


def unfrozen(rank: int, world: int, stage: int, loop: str, folder: Path) -> list[list[float]]:
    model = network()
    optimizer = staged(model)
    config = {
        "batch": {"size": 4 * world},
        "precision": {"compute": "fp64"},
        "zero": {"stage": stage, "min_bucket": 0},
        "optimizer": {"clip": None},
    }
    engine = polyreme.initialize(model, config, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    for step in range(STEPS):
        unfreeze(model, engine.optimizer if step == 1 else optimizer, step)
        if step == 2:
            engine.save(folder / str(stage))  # which has the groups of now
            engine.load(folder / str(stage))
        if loop == "train_step":
            engine.train_step(batch(rank, step))
        else:
            x, y = batch(rank, step)
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            model.zero_grad()
    whole = engine.state_dict()
    return flat(whole[name] for name, _ in engine.module.named_parameters()).tolist()


@pytest.mark.filterwarnings("ignore:the optimizer leaves out")
@pytest.mark.parametrize("world", [1, 2])
def test_groups_that_are_added_train_from_the_next_step_on(world: int, tmp_path: Path) -> None:
    wanted = plain_unfrozen(world)
    for stage, loop in zip(STAGES, ("train_step", "calls", "train_step"), strict=True):
        for found in threads.run(world, unfrozen, stage, loop, tmp_path):
            assert found == pytest.approx(wanted, abs=1e-10), stage


def refused_groups(rank: int, world: int, folder: Path) -> list[str]:
    said = []
    for sections in ({"mesh": {"pp": 2}} if world == 2 else {"memory": {"states": f"{folder}/"}}, {}):
        model = network()
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
        for part in (0, 1):
            model[part].requires_grad_(False)
        config = {"batch": {"size": 8, "micro": 4 if world == 2 else 8}, "precision": {"compute": "fp64"}}
        engine = polyreme.initialize(
            model, config | sections, optimizer=optimizer, loss_fn=nn.functional.mse_loss
        )
        data = batch(0, 0)[0].repeat(2, 1), batch(0, 0)[1].repeat(2, 1)
        data = data if sections or world == 1 else (data[0][:4], data[1][:4])
        engine.train_step(data)
        if sections:
            optimizer.param_groups[0]["params"].pop()
            with pytest.raises(ModelError) as error:
                engine.train_step(data)
        else:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            with pytest.raises(ModelError) as error:
                engine.train_step(data)
        said.append(str(error.value))
        engine.close()
    return said


@pytest.mark.filterwarnings("ignore:the optimizer leaves out")
@pytest.mark.parametrize("world", [1, 2])
def test_groups_that_cannot_be_taken_in_are_refused(world: int, tmp_path: Path) -> None:
    for cut, foreign in threads.run(world, refused_groups, tmp_path):
        assert "cannot take in what was changed of the optimizer's groups" in cut
        assert ("mesh.pp" if world == 2 else "memory.states is in files") in cut
        assert "group 1 of the optimizer has a parameter of shape (3,) that is none of the model's" in foreign


def test_groups_are_not_added_within_a_step() -> None:
    model = network()
    optimizer = staged(model)
    config = {"batch": {"size": 8, "micro": 4}, "precision": {"compute": "fp64"}}
    engine = polyreme.initialize(model, config, optimizer=optimizer)
    x, y = batch(0, 0)
    engine.backward(nn.functional.mse_loss(engine(x), y))
    unfreeze(model, optimizer, 1)
    with pytest.raises(BatchError, match="add_param_group after step"):
        engine(x)
    engine.zero_grad()
    for _ in range(2):
        engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()
    assert engine.numbers(model[1][0].weight).whole("exp_avg") is not None
    model.requires_grad_(True)  # which has gradients of no optimizer's from here on
    with pytest.raises(ModelError, match=r"call engine\.refresh\(\)"):
        engine(x)
    engine.close()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="leaves out"):
        engine = polyreme.initialize(model, config, optimizer=optimizer)
    for _ in range(2):
        engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()
    optimizer.add_param_group({"params": [model[1][0].weight]})
    with pytest.raises(ModelError, match=r"1\.0\.weight\.grad is the sum.*model\.zero_grad"):
        engine(x)
    model.zero_grad()
    with pytest.warns(UserWarning, match="leaves out"):
        engine(x)
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    engine.close()
    with pytest.raises(ModelError, match=r"shape \(2,\) that is none of the model's"):
        polyreme.initialize(model, config, optimizer=foreign)


def unfrozen_llama(rank: int, world: int) -> dict[str, Tensor]:
    model = models.build("llama", torch.float64)
    model.model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    config = {"batch": {"size": 4}, "precision": {"compute": "fp64"}, "mesh": {"tp": world}}
    loss_fn = models.CASES["llama"][2]  # transformers' own is in fp32
    with polyreme.initialize(model, config, optimizer=optimizer, loss_fn=loss_fn) as engine:
        for step in range(3):
            if step:
                model.model.layers[2 - step].requires_grad_(True)
                optimizer.add_param_group({"params": model.model.layers[2 - step].parameters()})
            engine.train_step(models.tokens(4, seed=step))
        return engine.state_dict()


def test_groups_are_added_over_tensor_parallel_ranks() -> None:
    (one,) = threads.run(1, unfrozen_llama)
    for found in threads.run(2, unfrozen_llama):
        for name, tensor in found.items():
            assert torch.allclose(tensor, one[name], rtol=0, atol=1e-10), name
