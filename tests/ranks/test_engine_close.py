"""An engine that nobody has any more leaves neither its model nor its threads behind, and one that is closed
nothing at all: no hook, no forward, no thread, no file."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import models
import polyreme
import probe
import training
from polyreme.distributed.mesh import Axis
from polyreme.distributed.shared_memory import heap
from polyreme.distributed.work import Work
from polyreme.errors import ModelError, TransportError
from pool import Ranks

WIDTH, TIMEOUT = 16, 60


def settings(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        f"stage {stage}": {"zero": {"stage": stage, "min_bucket": 0}} for stage in (0, 2, 3)
    }
    cases["states in files"] = {**cases["stage 2"], "memory": {"states": str(folder / "states")}}
    cases["all in files"] = {
        **cases["stage 3"],
        "memory": {"states": str(folder / "all"), "params": str(folder / "all")},
    }
    cases["activations in files"] = {
        **cases["stage 3"],
        "memory": {"activations": str(folder / "activations")},
    }
    cases["recomputation"] = {**cases["stage 3"], "memory": {"activations": "recompute"}}
    cases["accumulation"] = {**cases["stage 2"], "batch": {"size": 4, "micro": 1}}
    if world > 1:
        cases["stages of a pipeline"] = {"mesh": {"pp": world}}
    return cases


def unsettled() -> list[object]:
    """Inputs of exchanges that others may still read."""
    if (mine := heap()) is None:
        return []
    mine.unsettled.sweep()
    return [*mine.unsettled._alive]


def left(rank: int, world: int, folder: Path) -> list[str]:
    """What is left of engines that have trained, by case."""
    found = []
    for name, case in settings(folder, world).items():
        before, held = set(threading.enumerate()), unsettled()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        engine = polyreme.initialize(model, {"batch": {"size": 4}, **case}, loss_fn=nn.functional.mse_loss)
        x = torch.ones(4 // engine.mesh.dp.size, WIDTH)
        engine.train_step((x, x))
        engine.wait()
        if "pipeline" not in name:
            engine(x[:1])  # whose backward does not come
        watched = {"engine": weakref.ref(engine), "model": weakref.ref(model)}
        threads = [
            each
            for each in threading.enumerate()
            if each not in before and each.name.startswith(("tier", "offload"))
        ]
        del engine, model
        gc.collect()
        for each in threads:
            each.join(TIMEOUT)
        until = time.monotonic() + TIMEOUT
        while (
            own := len([each for each in unsettled() if all(each is not other for other in held)])
        ) and time.monotonic() < until:
            time.sleep(1e-3)  # the others drop their engines, too
        found += [f"{name}: {own} inputs of exchanges"] * bool(own)
        found += [f"{name}: {what}" for what, known in watched.items() if known() is not None]
        found += [f"{name}: thread {each.name}" for each in threads if each.is_alive()]
        found += [] if threads or "files" not in name else [f"{name}: no threads to look at"]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_is_gone_leaves_nothing(ranks: Ranks, tmp_path: Path, world: int) -> None:
    assert ranks(world, left, tmp_path) == [[]] * world


def refers(what: str, engine: polyreme.Engine) -> None:
    """Have something of the model's hold the engine, as a script's own functions often do."""
    module, seen = engine.module, lambda *_: (engine, None)[1]
    first = next(module.parameters())
    act: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "an attribute": lambda: vars(module).update(engine=engine),
        "a hook of the model": lambda: module.register_forward_hook(seen),
        "a hook of a block": lambda: module[0].register_full_backward_hook(seen),
        "a hook of a parameter": lambda: first.register_hook(seen),
        "an attribute of a parameter": lambda: vars(first).update(engine=engine),
        "a callback": lambda: setattr(engine, "on_gradients", seen),
        "the loss function": lambda: probe.loss_fn(engine).holds.append(engine),
    }
    act[what]()


HOLDERS = ("nothing", "an attribute", "a hook of the model", "a callback", "the loss function")
IN_GRAPHS = ("a hook of a block", "a hook of a parameter", "an attribute of a parameter")
"""What autograd's graph leads to, which no collector can free while a forward waits for its backward."""


class Loss(nn.MSELoss):
    def __init__(self) -> None:
        super().__init__()
        self.holds: list[object] = []


def referred(rank: int, world: int) -> list[str]:
    """What is left of engines that the model or the loss function refers to."""
    found = []
    for stage in (0, 3):
        for what in (*HOLDERS, *IN_GRAPHS):
            engine = polyreme.initialize(
                network(), {"batch": {"size": 4}, "zero": {"stage": stage, "min_bucket": 0}}, loss_fn=Loss()
            )
            refers(what, engine)
            x = torch.ones(4 // world, WIDTH) + rank
            engine.train_step((x, x))
            nn.functional.mse_loss(engine(x), x).backward()
            if what not in IN_GRAPHS:
                engine.step()
                engine(x)  # whose backward does not come
            of = {"engine": engine, "model": engine.module, **probe.renewed(engine)}
            known = {name: weakref.ref(each) for name, each in of.items()}
            del engine, of
            gc.collect()
            found += [f"stage {stage}, {what}: {name}" for name, each in known.items() if each() is not None]
    return found + ["torch.autograd.backward is not torch's own"] * (torch.autograd.backward is not BACKWARD)


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_its_model_refers_to_is_freed(ranks: Ranks, world: int) -> None:
    assert ranks(world, referred) == [[]] * world


def late(rank: int, world: int) -> None:
    x = torch.ones(2, WIDTH)
    loss = polyreme.initialize(network(), {"batch": {"size": 4}, "zero": {"stage": 3}})(x).sum()
    gc.collect()
    with pytest.raises(ModelError, match="an engine that is gone"):
        loss.backward()


def test_a_backward_behind_its_engine_is_refused(ranks: Ranks) -> None:
    ranks(2, late)


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def changed(model: nn.Module) -> list[str]:
    """Hooks and forwards of a model's modules, and what its parameters have that plain ones do not."""
    found = [
        f"{name}.{kind}" for name, each in model.named_modules() for kind in HOOKS if getattr(each, kind)
    ]
    found += [f"{name}.forward" for name, each in model.named_modules() if "forward" in vars(each)]
    for name, each in model.named_parameters():
        found += [f"{name}: {type(each).__name__}"] * (type(each) is not nn.Parameter)
        found += [f"{name}: hooks"] * bool(each._post_accumulate_grad_hooks or each._backward_hooks)
    return found


def held() -> tuple[int, list[str], bool]:
    """Open files, threads but for those of the whole process, and whether autograd's function is its own."""
    gc.collect()
    threads = [each.name for each in threading.enumerate() if not each.name.startswith("polyreme")]
    return (
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        sorted(threads),
        torch.autograd.backward is BACKWARD,
    )


BACKWARD = torch.autograd.backward


def network() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def train(engine: polyreme.Engine) -> float:
    dtype = next(engine.module.parameters()).dtype
    x = torch.ones(engine.config.batch.size // engine.mesh.dp.size, WIDTH, dtype=dtype) + engine.mesh.dp.rank
    loss = engine.train_step((x, x)).loss
    if engine.mesh.pp.size == 1:
        engine(x[: engine.config.batch.micro])  # whose backward does not come
    return loss


def closed(rank: int, world: int, folder: Path) -> list[str]:
    """What closed engines have left, one after the other and two at once, by case; the first one opens what
    all share."""
    found = []
    with polyreme.initialize(network(), {"batch": {"size": 4}}, loss_fn=nn.functional.mse_loss) as first:
        train(first)
    before = held()
    for name, case in settings(folder, world).items():
        config = {**case, "batch": {"size": 8, "micro": 2 if "batch" in case else 8 // world}}
        pair = [network(), network()]
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss))
                for model in pair[: 1 if "files" in name else 2]
            ]
            for engine in engines:
                train(engine)
                engine.save(folder / "saved" / name, wait=False)
            in_use = [probe.parts(engine) for engine in engines]  # as a traceback may
        assert engines[0].state.step == 1
        with pytest.raises(ModelError, match="closed"):
            engines[0].train_step(torch.ones(1))
        engines[0].ask_to_stop()
        engines[0].close()
        if "stage 3" not in name and config.get("zero", {}).get("stage") != 3 and "pipeline" not in name:
            found += [f"{name}: {what}" for model in pair for what in changed(model)]
        files, threads, backward = held()
        assert in_use
        # fewer than before is no fault: what earlier tests of this process left may go at any time
        found += [f"{name}: {files} files, {before[0]} before"] * (files > before[0])
        found += [f"{name}: threads {threads}, {before[1]} before"] * bool(
            Counter(threads) - Counter(before[1])
        )
        found += [f"{name}: torch.autograd.backward is not torch's own"] * (not backward)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_closed_engines_leave_nothing(ranks: Ranks, tmp_path: Path, world: int) -> None:
    assert ranks(world, closed, tmp_path) == [[]] * world


def reused(rank: int, world: int) -> list[str]:
    """What becomes of models after their engines: whole ones train on, divided ones refuse."""
    told = []
    for config in ({"zero": {"stage": 2}}, {"memory": {"activations": "recompute"}, "zero": {"stage": 0}}):
        torch.manual_seed(0)
        model, plain = network().double(), network().double()
        plain.load_state_dict(model.state_dict())
        both = {"batch": {"size": 4}, "precision": {"compute": "fp64"}, **config}
        losses = []
        for _ in range(2):
            with polyreme.initialize(model, both, loss_fn=nn.functional.mse_loss) as engine:
                losses.append(train(engine))
        twice = [p.detach().clone() for p in model.parameters()]
        x = torch.ones(4, WIDTH, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twice, strict=True))
        assert losses[1] < losses[0]
        copy.deepcopy(model)
    shards: list[dict[str, Any]] = [{"zero": {"stage": 3}, "memory": {"params": "host"}}]
    shards += [{"zero": {"stage": 3}}] * (world > 1)
    for config in shards:
        model = network()
        polyreme.initialize(model, {"batch": {"size": 4}, **config}, loss_fn=nn.functional.mse_loss).close()
        for use in (
            lambda model=model: model(torch.ones(2, WIDTH)),
            lambda model=model: polyreme.initialize(model, {"batch": {"size": 4}}),
        ):
            with pytest.raises(ModelError) as error:
                use()
            told.append(str(error.value))
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_models_of_closed_engines(ranks: Ranks, world: int) -> None:
    for told in ranks(world, reused):
        assert all("closed" in each for each in told), told


def gathered(rank: int, world: int) -> None:
    """A model in shards or in host memory is whole and ordinary behind `close(gather=True)`."""
    for config in ({"zero": {"stage": 3}}, {"zero": {"stage": 3}, "memory": {"params": "host"}}):
        model = network().double()
        both = {"batch": {"size": 4}, "precision": {"compute": "fp64"}, **config}
        engine = polyreme.initialize(model, both, loss_fn=nn.functional.mse_loss)
        train(engine)
        weights = engine.state_dict()
        engine.close(gather=True)
        assert changed(model) == []
        assert all(
            type(p) is nn.Parameter and torch.equal(p, weights[n]) for n, p in model.named_parameters()
        )
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        train(polyreme.initialize(model, both, loss_fn=nn.functional.mse_loss))


def test_models_that_are_gathered_at_the_end(ranks: Ranks) -> None:
    ranks(2, gathered)


def divided(rank: int, world: int) -> str:
    model = models.build("llama")
    polyreme.initialize(model, training.config(world, mesh={"tp": 2})).close()
    with pytest.raises(ModelError, match="divided by an engine that is closed"):
        polyreme.initialize(model, training.config(world))
    with pytest.raises(ModelError) as error:
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    return str(error.value)


def test_a_divided_model_of_a_closed_engine_refuses_calls(ranks: Ranks) -> None:
    assert all("engine is closed" in each for each in ranks(2, divided))


class Lost:
    """An operation of a backend whose other ranks have gone."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def after_a_failure(rank: int, world: int) -> list[str]:
    """What engines leave whose exchanges failed."""
    found = []
    for stage, exchange in ((0, "reduce_scatter"), (2, "reduce_scatter"), (3, "all_gather")):
        model = network()
        config = {"batch": {"size": 4}, "zero": {"stage": stage, "min_bucket": 0}}
        with polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss) as engine:
            train(engine)
            lost = mock.patch.object(Axis, exchange, lambda *_, **__: Work([Lost()], what=exchange))
            with lost, pytest.raises(TransportError, match="connection closed by peer"):
                train(engine)
        found += [f"{exchange}: {what}" for what in changed(model)] if stage < 3 else []
    return found


def test_an_engine_closes_after_a_failed_exchange(ranks: Ranks) -> None:
    assert ranks(2, after_a_failure) == [[]] * 2
