"""What a script does to the options of an optimizer's groups comes back by `engine.load`, whoever made the
optimizer and its schedule: a run that was killed and goes on is the one that never was, to the last bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import polyreme
import threads
from cover import some
from polyreme.checkpoint import manifest
from polyreme.errors import CheckpointError, ConfigError, ModelError

STEPS, SAVED = 6, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=draw), torch.randn(8, 3, generator=draw)
    return x.double().chunk(world)[rank], y.double().chunk(world)[rank]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95))


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1.0, 2), schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.5)],
        [2],
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "config's": lambda model: None,
    "class": lambda model: torch.optim.AdamW,
    "factory": lambda model: adamw,
    "own": lambda model: adamw(model.parameters()),
}
SCHEDULES = ("none", "config's", "factory", "own")


def weight_decay(engine: Any, step: int) -> None:
    if step == 1:
        engine.optimizer.param_groups[0]["weight_decay"] = 0.3


def rates(engine: Any, step: int) -> None:
    if step == SAVED - 1:  # right before it is saved
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.005


def several(engine: Any, step: int) -> None:
    if step == 2:
        group = engine.optimizer.param_groups[0]
        group.update(betas=(0.5, 0.6), eps=1e-3, my_own="kept")


CHANGES = {"weight decay": weight_decay, "rates": rates, "several": several}


def begun(rank: int, world: int, stage: int, way: str, schedule: str, **sections: Any) -> Any:
    model = network()
    optimizer = OPTIMIZERS[way](model)
    config: dict[str, Any] = {
        "batch": {"size": 8},
        "zero": {"stage": stage, "min_bucket": 0},
        "precision": {"compute": "fp64"},
        "optimizer": {"lr": 0.01, **sections},
    }
    scheduler: Any = None
    if schedule == "config's":
        config["lr_schedule"] = {"name": "cosine", "warmup": "2 steps", "total": "20 steps"}
    elif schedule == "factory":
        scheduler = warmup
    elif schedule == "own":
        seen = optimizer if way == "own" else torch.optim.SGD([torch.zeros(1)], lr=0.01)
        scheduler = schedulers.StepLR(seen, 2, 0.5)
    return polyreme.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler, loss_fn=F.mse_loss)


def gone_on(rank: int, world: int, cases: list[Any], folder: Path) -> list[tuple[Any, Any, Any]]:
    """Of each case, what counts at the end: of the run that was never killed, and of the one that was; and
    what `load` said."""
    found = []
    for number, (way, schedule, change, stage) in enumerate(cases):
        ends: list[Any] = []
        notes: Any = None
        for killed in (False, True):
            engine = begun(rank, world, stage, way, schedule)
            if killed:
                notes = engine.load(folder / str(number)).notes
            for step in range(SAVED if killed else 0, STEPS):
                engine.train_step(batch(rank, world, step))
                CHANGES[change](engine, step)
                if step == SAVED - 1:
                    engine.save(folder / str(number))
            options = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
            ends.append((options, {name: t.tolist() for name, t in engine.state_dict().items()}))
            engine.close()
        found.append((ends[0], ends[1], notes))
    return found


CASES = [
    case
    for case in some(2, list(OPTIMIZERS), SCHEDULES, list(CHANGES), (0, 2, 3), (1, 2))
    if case[:2] != ("own", "config's")  # which is refused
    if case[0] == "own" or case[1:3] != ("own", "rates")  # likewise
]


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_script_set_comes_back(world: int, tmp_path: Path) -> None:
    cases = [case[:-1] for case in CASES if case[-1] == world]
    for found in threads.run(world, gone_on, cases, tmp_path):
        for case, (never, killed, notes) in zip(cases, found, strict=True):
            assert never == killed, case
            assert list(notes) == [], case


def small(lr: float = 0.01, way: str = "config's", schedule: str = "none", **sections: Any) -> Any:
    """An engine of one rank, after two steps."""
    return begun(0, 1, 2, way, schedule, lr=lr, **sections)


def saved(folder: Path, change: Callable[[Any], object], schedule: str = "none", **made: Any) -> Path:
    with small(schedule=schedule, **made) as engine:
        for step in range(2):
            engine.train_step(batch(0, 1, step))
        change(engine)
        engine.save(folder)
    return folder


def test_the_config_counts_for_what_no_script_set(tmp_path: Path) -> None:
    """Another learning rate in the config of the run that goes on."""
    at = saved(tmp_path / "a", lambda engine: None, schedule="config's")
    with small(1e-4, schedule="config's", weight_decay=0.5) as engine:
        assert engine.load(at).notes == []
        assert engine.state.lr == pytest.approx(1e-4, rel=1e-3)
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.5
    at = saved(tmp_path / "b", lambda engine: engine.optimizer.param_groups[0].update(weight_decay=0.3))
    with small(1e-4, betas=[0.5, 0.6], weight_decay=0.5) as engine:
        (note,) = engine.load(at).notes
        group = engine.optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.5, 0.6), 0.3)
        assert "weight_decay is 0.3, as the checkpoint says, and not 0.5, of the optimizer's group 0" in note


def test_what_was_set_before_load_is_told(tmp_path: Path) -> None:
    """Such as by a learning rate finder, after which the state before it is loaded."""
    at = saved(tmp_path / "a", lambda engine: None, schedule="config's")
    with small(schedule="config's") as engine:
        engine.optimizer.param_groups[0].update(lr=5.0, eps=1.0)
        notes = engine.load(at).notes
        assert engine.optimizer.param_groups[0]["eps"] == 1e-8 and engine.state.lr == pytest.approx(0.01)
        assert len(notes) == 2 and "eps is 1e-08" in notes[0] and "which were set before load()" in notes[1]
        engine.train_step(batch(0, 1, 2))
        assert engine.state.lr < 0.01  # the schedule's again


def own_scheduler(engine: Any) -> None:
    schedulers.StepLR(engine.optimizer, 1, 0.5).step()


def test_what_cannot_come_back_is_told(tmp_path: Path) -> None:
    at = saved(tmp_path / "a", own_scheduler)
    with small() as engine:
        (note,) = engine.load(at).notes
        assert engine.state.lr == 0.005 and "a torch scheduler of the script's own" in note
        assert "is not in the checkpoint" not in note, "it may be in `extra`"
    with small(schedule="factory") as engine:
        assert "SequentialLR, begins anew" in engine.load(at).notes[0]
    at = saved(tmp_path / "b", lambda engine: engine.optimizer.param_groups[0].update(odd={1, 2}))
    with small() as engine:
        (note,) = engine.load(at).notes
        assert note == "odd is as the script has it now: a checkpoint cannot keep it"
    at = saved(tmp_path / "c", lambda engine: None, schedule="factory")
    with small() as engine:
        (note,) = engine.load(at).notes
        assert "SequentialLR, is not followed any more" in note and engine.state.lr == 0.01
    groups = {"0.weight": {"lr": 0.1}}
    with small(groups=groups) as engine:
        assert "the optimizer has 3 groups, and had 2" in engine.load(at).notes[0]
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.01, 0.1]


def test_a_learning_rate_that_is_a_tensor_comes_back(tmp_path: Path) -> None:
    for again in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
        with polyreme.initialize(
            model, {"batch": {"size": 8}, "precision": {"compute": "fp64"}}, optimizer=optimizer
        ) as engine:
            if again:
                engine.load(tmp_path / "a")
                assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.125, dtype=torch.float64))
            else:
                optimizer.param_groups[0]["lr"].fill_(0.125)
                engine.save(tmp_path / "a")


def test_a_scheduler_of_the_scripts_goes_on_over_a_refresh() -> None:
    with small() as engine:
        schedule = schedulers.StepLR(engine.optimizer, 1, 0.5)
        engine.optimizer.param_groups[0]["weight_decay"] = 0.3
        engine.refresh()
        schedule.step()
        assert engine.optimizer is schedule.optimizer
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.3
        assert engine.train_step(batch(0, 1, 0)).lr == 0.005


def test_what_would_count_for_nothing_is_refused() -> None:
    with small(schedule="own") as engine:
        engine.optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(ConfigError, match=r"(?s)StepLR.*set a learning rate.*scheduler\.optimizer"):
            engine.train_step(batch(0, 1, 0))
    with small() as engine:
        with pytest.raises(ModelError, match=r"param_groups = \.\.\."):
            engine.optimizer.param_groups = []
        with pytest.raises(ModelError, match=r"engine\.numbers"):
            engine.optimizer.state = {}
        engine.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
        with pytest.raises(ModelError, match=r"than the engine made.*engine\.refresh"):
            engine.train_step(batch(0, 1, 0))


def test_states_that_nothing_takes_are_told() -> None:
    model = network()
    optimizer: Any = adamw(model.parameters())
    model(batch(0, 1, 0)[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
    with (
        pytest.warns(UserWarning, match="has states of 4 parameters"),
        polyreme.initialize(model, config, optimizer=optimizer) as engine,
        pytest.raises(ModelError, match=r"load_state_dict.*engine\.load"),
    ):
        optimizer.load_state_dict(saved)
    assert engine.state.step == 0


def with_schedulers(rank: int, world: int, folder: Path) -> list[tuple[Any, Any]]:
    """Weights and rates of runs with a scheduler of the script's own, never killed and killed."""
    found: list[tuple[Any, Any]] = []
    for way in ("config's", "own"):
        for make in (
            lambda optimizer: schedulers.StepLR(optimizer, 2, 0.5),
            lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 4),
            lambda optimizer: schedulers.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1),
        ):
            ends: list[Any] = []
            for killed in (False, True):
                engine = begun(rank, world, 3, way, "none")
                schedule = make(engine.optimizer)
                if killed:
                    loaded = engine.load(folder / "saved")
                    schedule.load_state_dict(loaded.extra["schedule"])
                    assert "a torch scheduler of the script's own" in loaded.notes[-1]
                for step in range(SAVED if killed else 0, STEPS):
                    engine.train_step(batch(rank, world, step))
                    schedule.step()
                    if step == SAVED - 1:
                        kept = {k: v for k, v in schedule.state_dict().items() if not callable(v)}
                        engine.save(folder / "saved", extra={"schedule": kept})
                weights = {name: t.tolist() for name, t in engine.state_dict().items()}
                ends.append((weights, schedule.get_last_lr(), engine.optimizer.param_groups[0]["lr"]))
                engine.close()
            found.append((ends[0], ends[1]))
    return found


def test_a_scheduler_of_the_scripts_goes_on_where_it_was(tmp_path: Path) -> None:
    for found in threads.run(2, with_schedulers, tmp_path):
        for never, killed in found:
            assert never == killed


def set_momentum(engine: Any, momentum: float) -> None:
    for group in engine.optimizer.param_groups:
        group["momentum"] = momentum


def with_momentum(
    rank: int, world: int, way: str, sections: dict[str, Any], momenta: tuple[float, float], folder: Path
) -> list[Any]:
    """Losses of a run whose momentum a script changes before its third step, and of the same after a refresh
    and from a checkpoint."""

    def begin() -> Any:
        model = network()
        section = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": momenta[0], "clip": "none"}
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momenta[0]) if way == "own" else None
        return polyreme.initialize(
            model,
            {"batch": {"size": 8}, "precision": {"compute": "fp64"}, "optimizer": section, **sections},
            optimizer=own,
            loss_fn=F.mse_loss,
        )

    found = []
    for kind in ("plain", "refreshed", "loaded"):
        engine, losses = begin(), []
        for step in range(STEPS):
            if step == 2:
                set_momentum(engine, momenta[1])
            if step == 4 and kind == "refreshed":
                engine.refresh()
            if step == 4 and kind == "loaded":
                engine.save(folder)
                engine.close()
                engine = begin()
                assert engine.load(folder).notes == []
            losses.append(engine.train_step(batch(rank, world, step)).loss)
        engine.close()
        found.append(losses)
    return found


@pytest.mark.parametrize("momenta", [(0.0, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("way", ["own", "config's"])
def test_states_that_came_with_an_option_come_back(
    way: str, momenta: tuple[float, float], tmp_path: Path
) -> None:
    """Momentum that a script has set: the optimizer as it was made has no such state."""
    reference, model = [], network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momenta[0])
    for step in range(STEPS):
        plain.param_groups[0]["momentum"] = momenta[step >= 2]
        x, y = batch(0, 1, step)
        plain.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        plain.step()
        reference.append(loss.item())
    for world, sections in (
        (1, {}),
        (2, {"zero": {"stage": 2}}),
        (2, {"zero": {"stage": 3}}),
        (1, {"memory": {"states": "host"}}),
    ):
        folder = tmp_path / f"{world} {sections}".replace(" ", "_").replace("'", "")
        for found in threads.run(world, with_momentum, way, sections, momenta, folder):
            assert found[0] == found[1] == found[2], (world, sections)
            assert found[0] == pytest.approx(reference, abs=1e-10)


def momentum_for_a_time(
    rank: int, world: int, way: str, section: dict[str, Any], folder: Path
) -> list[float]:
    """Losses of a run that a script gives momentum for two of its steps, begun anew before each change."""
    losses: list[float] = []
    for turn, momentum in enumerate((0.0, 0.5, 0.0, 0.5)):
        model = network()
        own = torch.optim.SGD(model.parameters(), lr=0.1) if way == "own" else None
        config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}, **section}
        config["optimizer"] = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "clip": "none"}
        engine = polyreme.initialize(model, config, optimizer=own, loss_fn=F.mse_loss)
        if turn:
            assert engine.load(folder / str(turn)).notes == []
        set_momentum(engine, momentum)
        losses += [engine.train_step(batch(rank, world, 2 * turn + i)).loss for i in range(2)]
        engine.save(folder / str(turn + 1))
        engine.close()
    return losses


@pytest.mark.parametrize("way", ["own", "config's"])
def test_states_of_an_option_that_was_set_for_a_time_come_back(way: str, tmp_path: Path) -> None:
    reference, model = [], network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        plain.param_groups[0]["momentum"] = (0.0, 0.5)[step // 2 % 2]
        x, y = batch(0, 1, step)
        plain.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        plain.step()
        reference.append(loss.item())
    for section in ({"zero": {"stage": 3}}, {"memory": {"states": "host"}}):
        folder = tmp_path / next(iter(section))
        for losses in threads.run(2, momentum_for_a_time, way, section, folder):
            assert losses == pytest.approx(reference, abs=1e-10), section


def test_a_weight_decay_of_another_class_is_not_taken_over(tmp_path: Path) -> None:
    """AdamW is Adam with an option, which would make one of the other."""

    def engine_of(cls: type[torch.optim.Optimizer]) -> Any:
        model = network()
        made = cls(model.parameters(), lr=0.01, weight_decay=0.1)  # type: ignore[call-arg]
        config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
        return polyreme.initialize(model, config, optimizer=made, loss_fn=F.mse_loss)

    for cls, other in ((torch.optim.AdamW, torch.optim.Adam), (torch.optim.Adam, torch.optim.AdamW)):
        with engine_of(cls) as engine:
            engine.train_step(batch(0, 1, 0))
            engine.save(tmp_path / cls.__name__)
        with engine_of(other) as engine:
            (note,) = engine.load(tmp_path / cls.__name__).notes
            decoupled = other is torch.optim.AdamW
            assert engine.optimizer.param_groups[0]["decoupled_weight_decay"] is decoupled
            assert f"decoupled_weight_decay is {decoupled}, as the optimizer was made here" in note


def test_states_that_are_left_behind_are_told(tmp_path: Path) -> None:
    """A group that is added after load() begins without."""

    def begin() -> tuple[Any, Any, Any]:
        model: Any = network()
        model[0].requires_grad_(False)
        made = torch.optim.AdamW(model[2].parameters(), lr=0.01)
        config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}}
        return model, made, polyreme.initialize(model, config, optimizer=made, loss_fn=F.mse_loss)

    def add(model: Any, made: Any) -> None:
        model[0].requires_grad_(True)
        made.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    model, made, engine = begin()
    add(model, made)
    engine.train_step(batch(0, 1, 0))
    engine.save(tmp_path / "a")
    engine.close()
    model, made, engine = begin()
    counts, states = engine.load(tmp_path / "a").notes
    assert "had 2: their options are of now" in counts
    assert "states of 0.weight, 0.bias are left behind" in states and "before load()" in states
    engine.close()
    model, made, engine = begin()
    add(model, made)
    assert engine.load(tmp_path / "a").notes == []


def test_keys_beside_an_own_optimizer_are_told() -> None:
    """Those that say something else than it has."""

    def begun_with(given: Callable[[nn.Module], Any], **section: Any) -> list[str]:
        model = network()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = {"batch": {"size": 8}, "precision": {"compute": "fp64"}, "optimizer": section}
            with polyreme.initialize(model, config, optimizer=given(model), loss_fn=F.mse_loss) as engine:
                model.requires_grad_(True)
                engine.refresh()
        return [str(each.message) for each in caught if "of the config" in str(each.message)]

    for way in ("own", "factory"):
        (text,) = begun_with(OPTIMIZERS[way], lr=0.5, weight_decay=0.2, betas=[0.9, 0.95], clip=1.0)
        assert "optimizer.lr = 0.5, optimizer.weight_decay = 0.2 of the config: unused" in text
        assert "AdamW, lr 0.01" in text
        assert begun_with(OPTIMIZERS[way], name="adamw", lr=0.01, clip=2.0, unused="zero") == []
        assert begun_with(OPTIMIZERS[way]) == []
        assert "optimizer.name = 'sgd'" in begun_with(OPTIMIZERS[way], name="sgd")[0]
    assert begun_with(OPTIMIZERS["class"], lr=0.5) == []


JUNK: dict[str, Callable[[Any], Any]] = {
    "eps": lambda options: options["groups"][0].update(eps=[]),
    "maximize": lambda options: options["groups"][0].update(maximize=float("nan")),
    "weight_decay": lambda options: options["groups"][0].update(weight_decay="junk"),
    "betas": lambda options: options["groups"][0].update(betas=[0.9]),
    "last_epoch": lambda options: options["scheduler"].update(last_epoch="junk"),
    "base_lrs": lambda options: options["scheduler"].update(base_lrs=[None]),
}


@pytest.mark.parametrize("option", JUNK)
def test_options_that_no_optimizer_has_are_refused(option: str, tmp_path: Path) -> None:
    """With a checksum that is right, too, which any program can write."""
    model = network()
    engine = polyreme.initialize(
        model,
        {"batch": {"size": 8}},
        optimizer=adamw,
        lr_scheduler=lambda optimizer: schedulers.StepLR(optimizer, 2),
        loss_fn=F.mse_loss,
    )
    engine.train_step(batch(0, 1, 0))
    path = engine.save(tmp_path / "saved")
    tree = json.loads((path / "resume.json").read_text())
    tree.pop("self")
    JUNK[option](tree["state"]["options"])
    (path / "resume.json").write_text(json.dumps(tree | {"self": manifest._checksum(tree)}))
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=f"(?s)resume.json.*{option} = "):
        engine.load(path)
    assert all(torch.equal(before[name], each) for name, each in engine.state_dict().items())
    engine.close()
