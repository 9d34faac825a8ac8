"""Gradients in the user's hands: the loop's backward, however it is called, engines in one graph, hooks, and
derivatives of derivatives."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import polyreme
import threads
import training
from cover import some
from polyreme.errors import ModelError, OrderError
from pool import Ranks

RATE = 0.1
SGD = {"name": "sgd", "lr": RATE, "momentum": 0.0, "weight_decay": 0.0, "clip": None}


class Net(nn.Module):
    """Blocks of `width` x `width` with a head."""

    def __init__(self, width: int = 6, outputs: int = 6, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, outputs)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def cases(world: int, *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of the product of `values`: on two ranks every two of them are in a case, on one rank each is."""
    return some(world, *values)


def engine_of(
    model: nn.Module, world: int, stage: int, accumulation: int = 1, loss_fn: Any = None, **sections: Any
) -> polyreme.Engine:
    changes = {"zero": {"stage": stage}, "precision": {"compute": "fp64"}, "optimizer": SGD, **sections}
    return polyreme.initialize(model, training.config(world, accumulation, **changes), loss_fn=loss_fn)


def data(seed: int, width: int = 6) -> Tensor:
    """A global batch."""
    return torch.randn(
        training.SAMPLES, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def part(x: Tensor, rank: int, world: int, micro: int = 0, accumulation: int = 1) -> Tensor:
    """Of a global batch."""
    return x.chunk(world)[rank].chunk(accumulation)[micro]


def descend(model: nn.Module) -> float:
    """A step of plain SGD on gradients that are there; the norm of these."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= RATE * p.grad
                p.grad = None
    return norm


def same(engine: polyreme.Engine, model: nn.Module) -> None:
    """The weights of both are equal."""
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(
            tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(polyreme.PolyremeError) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


# ---- loss.backward()


def own_backward(rank: int, world: int) -> None:
    """Micro-batches whose backward the user calls, all of them or every other, and those in which a hook
    listens."""
    x, y = data(0), data(1)
    kinds_of = ("user", "engine, user", "user, engine", "hook")
    for stage, accumulation, kinds in cases(world, (0, 2, 3), (1, 4), kinds_of):
        engine, plain, seen = engine_of(Net(), world, stage, accumulation), Net(), []
        if kinds == "hook":
            engine.module.head.bias.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        for _ in range(2):
            for micro in range(accumulation):
                mine = [part(t, rank, world, micro, accumulation) for t in (x, y)]
                loss = F.mse_loss(engine(mine[0]), mine[1])
                kind = kinds.split(", ")[micro % len(kinds.split(", "))]
                loss.backward() if kind == "user" else engine.backward(loss)
            result = engine.step()
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            case = (stage, accumulation, kinds)
            assert result.grad_norm == pytest.approx(descend(plain), rel=1e-10), case
            assert result.loss == pytest.approx(loss.item(), rel=1e-10), case
        same(engine, plain)
        if kinds == "hook":
            assert len(seen) == 2 * accumulation


def test_a_backward_of_the_users_is_one_of_the_engine(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, own_backward)


def hooked(rank: int, world: int) -> None:
    """Hooks see, and change, the gradient of the micro-batch's mean loss."""
    x, y = data(0), data(1)
    for stage in (0, 2, 3):
        engine, plain = engine_of(Net(), world, stage, 2), Net()
        seen: list[Tensor] = []
        late: list[Tensor] = []
        engine.module.head.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        engine.module.head.weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        engine.module.head.bias.register_post_accumulate_grad_hook(
            lambda p, late=late: late.append(p.grad.clone())
        )
        sums = torch.zeros_like(plain.head.weight)
        for r in range(world):
            for micro in range(2):
                plain.zero_grad()
                F.mse_loss(plain(part(x, r, world, micro, 2)), part(y, r, world, micro, 2)).backward()
                sums += plain.head.weight.grad.clamp(-0.01, 0.01) / (2 * world)
                if r == rank:
                    expected = plain.head.weight.grad.clamp(-0.01, 0.01), plain.head.bias.grad.clone()
                    mine = [part(t, rank, world, micro, 2) for t in (x, y)]
                    engine.backward(F.mse_loss(engine(mine[0]), mine[1]))
                    torch.testing.assert_close((seen[-1], late[-1]), expected, rtol=1e-10, atol=1e-14)
        engine.step()
        torch.testing.assert_close(
            engine.state_dict()["head.weight"],
            Net().head.weight.detach() - RATE * sums,
            rtol=1e-10,
            atol=1e-12,
        )


def modules_hooked(rank: int, world: int) -> None:
    """Backward hooks of modules see the gradient of the micro-batch's mean loss, however its backward is
    called."""
    x, y = data(0), data(1)
    for stage, how in cases(world, (0, 2, 3), ("train_step", "engine.backward", "loss.backward")):
        engine, plain = engine_of(Net(), world, stage, 2, loss_fn=F.mse_loss), Net()
        seen: dict[str, list[Tensor]] = {"module": [], "before": [], "plain": []}
        engine.module.head.register_full_backward_hook(
            lambda _, grads, out, seen=seen: seen["module"].append(out[0].clone())
        )
        engine.module.blocks[0].register_full_backward_pre_hook(
            lambda _, out, seen=seen: seen["before"].append(out[0].clone())
        )
        plain.head.register_full_backward_hook(
            lambda _, grads, out, seen=seen: seen["plain"].append(out[0].clone())
        )
        mine = [[part(t, rank, world, micro, 2) for t in (x, y)] for micro in range(2)]
        if how == "train_step":
            engine.train_step([tuple(pair) for pair in mine])
        else:
            for inputs, targets in mine:
                loss = F.mse_loss(engine(inputs), targets)
                engine.backward(loss) if how == "engine.backward" else loss.backward()
            engine.step()
        for inputs, targets in mine:
            F.mse_loss(plain(inputs), targets).backward()
        torch.testing.assert_close(seen["module"], seen["plain"], rtol=1e-10, atol=1e-14)
        assert len(seen["before"]) == 2
        plain = Net()
        F.mse_loss(plain(x), y).backward()
        descend(plain)
        same(engine, plain)


def test_hooks_of_modules_see_mean_gradients() -> None:
    for world in (1, 2):
        threads.run(world, modules_hooked)


def test_hooks_of_parameters_see_mean_gradients() -> None:
    for world in (1, 2):
        threads.run(world, hooked)


def refused(rank: int, world: int, stage: int) -> dict[str, str]:
    x = part(data(0), rank, world)
    engine = engine_of(Net(), world, stage)
    parameters = list(engine.module.parameters())
    assert parameters[0].grad is None
    early = error_of(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    engine(x).square().mean().backward()
    found = {
        "early clip": early,
        "clip": error_of(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)),
        "value": error_of(lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0)),
        "read": error_of(lambda: parameters[0].grad),
        "zero": error_of(lambda: engine.module.zero_grad()),
        "write": error_of(lambda: setattr(parameters[0], "grad", torch.zeros(parameters[0].shape))),
        "none": error_of(lambda: setattr(parameters[0], "grad", None)),
        "second": error_of(lambda: engine(x).square().mean().backward()),
    }
    engine.zero_grad()
    engine.module.zero_grad()
    engine(x).square().mean().backward()
    engine.step()
    found["late clip"] = error_of(lambda: torch.nn.utils.clip_grad_value_(engine.parameters(), 1.0))
    found["no forward"] = error_of(lambda: engine.module(x).square().mean().backward())
    half = engine_of(Net(), world, stage, precision={"compute": "fp16"})
    found["fp16"] = error_of(lambda: half(x).float().square().mean().backward())
    return found


def refused_at_stages(rank: int, world: int) -> list[dict[str, str]]:
    gc.unfreeze()  # engines of other tests, which may be garbage since the pool froze them
    return [refused(rank, world, stage) for stage in (2, 3)]


def test_what_cannot_work_says_what_does(ranks: Ranks) -> None:
    for world in (1, 2):
        for found in chain(*ranks(world, refused_at_stages)):
            for case, words in {
                "early clip": "no gradient of blocks.0.0.weight",
                "late clip": "call engine.backward(loss) before",
                "clip": "optimizer.clip",
                "value": "engine.gradients()",
                "read": "blocks.0.0.weight.grad is read between backward and step",
                "zero": "engine.zero_grad()",
                "write": "blocks.0.0.weight.grad is set",
                "none": "blocks.0.0.weight.grad is set to None",
                "second": "zero_grad()",
                "no forward": "call engine(...) in the place of the model itself",
                "fp16": "call engine.backward(loss)",
            }.items():
                assert words in found[case], (case, found[case])
            assert found["second"].startswith(OrderError.__name__) and found["read"].startswith(
                ModelError.__name__
            )


def earlier(rank: int, world: int) -> None:
    """Backwards of forwards that are not the last one count for their own micro-batches, or are refused."""
    gc.unfreeze()  # engines of other tests, which may be garbage since the pool froze them
    config = {"batch": {"size": 4 * world, "micro": 2}}
    x = data(0)[:, None].expand(-1, 3, -1).clone()
    y = torch.randint(6, (training.SAMPLES, 3), generator=torch.Generator().manual_seed(1))
    y[1, 1:] = y[4 * world - 1, :] = -100

    def rows(micro: int) -> slice:
        return slice(4 * rank + 2 * micro, 4 * rank + 2 * micro + 2)

    def loss_of(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    for stage in (0, 2, 3):
        engine, plain = engine_of(Net(), world, stage, **config), Net()
        outputs = [engine(x[rows(micro)]) for micro in range(2)]
        for micro in range(2):
            engine.backward(loss_of(outputs[micro], y[rows(micro)]))
        result, loss = engine.step(), loss_of(plain(x[: 4 * world]), y[: 4 * world])
        loss.backward()
        assert result.grad_norm == pytest.approx(descend(plain), rel=1e-10) and result.loss == pytest.approx(
            loss.item(), rel=1e-10
        )
        same(engine, plain)
        outputs = [engine(x[rows(micro)]) for micro in range(2)]
        engine.backward(loss_of(outputs[1], y[rows(1)]))
        assert "the backward of each before" in error_of(
            lambda: engine.backward(loss_of(outputs[0], y[rows(0)]))
        )

        for first in ("user", "engine"):  # means over samples
            engine, plain = engine_of(Net(), world, stage, **config), Net()
            outputs = [engine(x[rows(micro), 0]) for micro in range(2)]
            for micro in range(2):
                loss = outputs[micro].square().mean()
                loss.backward() if (first == "user") == (micro == 0) else engine.backward(loss)
            engine.step()
            plain(x[: 4 * world, 0]).square().mean().backward()
            descend(plain)
            same(engine, plain)

        engine = engine_of(Net(), world, stage, **config)
        output, _ = engine(x[rows(0), 0]), engine(x[rows(1), 0][:1])
        assert "a forward before the last one" in error_of(lambda: engine.backward(output.square().mean()))
        engine.zero_grad()
        output = engine(x[rows(0), 0])
        aside = engine.module(x[rows(1), 0])
        assert "is of engine.module(...)" in error_of(lambda: engine.backward(aside.square().mean()))
        engine.zero_grad()
        engine(x[rows(0), 0])
        aside = engine.module(x[rows(1), 0])
        assert "is of engine.module(...)" in error_of(lambda: aside.square().mean().backward())
        engine.zero_grad()
        output = engine(x[rows(0), 0])
        engine.backward(output.square().mean(), last=False)
        assert "add the losses of one forward up" in error_of(lambda: engine.backward(output.abs().mean()))
        engine.zero_grad()
        engine.backward(engine(x[rows(0), 0]).square().mean())


def test_backwards_of_earlier_forwards(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, earlier)


def frozen_between(rank: int, world: int) -> None:
    """A parameter that is frozen after the first micro-batch has the gradient of that one, and none in the
    next step."""
    x, y = data(0), data(1)
    for stage in (0, 2, 3):
        engine, plain = engine_of(Net(), world, stage, 2), Net()
        for _ in range(2):
            for micro in range(2):
                engine.backward(
                    F.mse_loss(engine(part(x, rank, world, micro, 2)), part(y, rank, world, micro, 2))
                )
                engine.module.head.weight.requires_grad_(False)
                rows = [torch.cat([part(t, r, world, micro, 2) for r in range(world)]) for t in (x, y)]
                (F.mse_loss(plain(rows[0]), rows[1]) / 2).backward()
                plain.head.weight.requires_grad_(False)
            engine.step()
            descend(plain)
        same(engine, plain)


def test_a_parameter_frozen_between_micro_batches() -> None:
    for world in (1, 2):
        threads.run(world, frozen_between)


def by_hand(rank: int, world: int) -> list[str]:
    """What a script does to an engine and its module as to those of others."""
    found = []
    for stage in (0, 2, 3):
        for compute in ("fp64", "bf16"):
            engine = engine_of(Net().float(), world, stage, precision={"compute": compute})
            x = part(data(0), rank, world)
            engine.backward(engine(x).float().square().mean())
            engine.step()
            found += [error_of(act) for act in (lambda: pickle.dumps(engine), lambda: copy.deepcopy(engine))]
            found += [
                error_of(lambda: setattr(engine.state, "lr", 1.0)),
                error_of(lambda: setattr(engine.config.optimizer, "lr", 1.0)),
            ]
            engine.backward(engine(x).float().square().mean())
            engine.step()
            assert engine.state.lr == RATE and engine.state.step == 2
            found += [error_of(lambda: (engine.module.to(torch.float32), engine(x)))]
    return found


def test_what_is_done_to_an_engine_by_hand(ranks: Ranks) -> None:
    told = [
        "engine.save(path)",
        "engine.save(path)",
        "engine.state.lr = 1.0",
        "lr = 1.0: a config does not change",
        "precision.compute",
    ]
    for world in (1, 2):
        for found in ranks(world, by_hand):
            for words, error in zip(told * 6, found, strict=True):
                assert words in error or error.startswith("ModelError: to of parameter")  # which is released


def failed(rank: int, world: int) -> None:
    """A backward that ends in an error, in its middle: the step can be begun again, and only so."""
    x = data(0)
    for stage in (0, 2, 3):
        engine, plain, armed = engine_of(Net(), world, stage), Net(), [True]

        def fail(gradient: Tensor, armed: list[bool] = armed) -> None:
            if armed.pop() if armed else False:
                raise ValueError("once")

        engine.module.blocks[1][0].weight.register_hook(fail)
        for own in (True, False):
            armed[:] = [True]
            mine = part(x, rank, world)
            act = partial(backward_of, engine, mine, own)
            with pytest.raises(ValueError, match="once"):
                act()
            assert "ended in an error" in error_of(act)
            engine.zero_grad()
            act()
            plain(x).square().mean().backward()
            assert engine.step().grad_norm == pytest.approx(descend(plain), rel=1e-10), stage
        same(engine, plain)


def backward_of(engine: polyreme.Engine, x: Tensor, own: bool) -> None:
    loss = engine(x).square().mean()
    loss.backward() if own else engine.backward(loss)


def test_a_backward_that_failed_is_begun_again(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, failed)


def losses_of(model: Callable[[Tensor], Tensor], style: str, a: Tensor, b: Tensor) -> list[Tensor]:
    """Of one micro-batch: several, as of a GAN's discriminator; of two forwards; of a forward of a
    forward."""
    if style == "losses":
        return [model(a).square().mean(), (model(b) - 1).square().mean()]
    if style == "forwards":
        return [(model(a) - model(b)).square().mean() + model(a).mean()]
    return [model(model(a)).square().mean()]


def several(rank: int, world: int) -> None:
    x, y = data(0), data(1)
    for stage, style, accumulation in cases(world, (0, 2, 3), ("losses", "forwards", "again"), (1, 2)):
        engine, plain = engine_of(Net(), world, stage, accumulation), Net()
        for _ in range(2):
            for micro in range(accumulation):
                mine = [part(t, rank, world, micro, accumulation) for t in (x, y)]
                losses = losses_of(engine, style, *mine)
                for loss in losses[:-1]:
                    engine.backward(loss, last=False)
                engine.backward(losses[-1])
            result = engine.step()
            loss = torch.stack(losses_of(plain, style, x, y)).sum()
            loss.backward()
            assert result.grad_norm == pytest.approx(descend(plain), rel=1e-10), (stage, style, accumulation)
            assert result.loss == pytest.approx(loss.item(), rel=1e-10)
        same(engine, plain)


def test_several_losses_and_forwards_of_a_micro_batch() -> None:
    for world in (1, 2):
        threads.run(world, several)


# ---- engines in one graph


class Pair:
    """Two models, their engines or themselves, as a GAN has them."""

    def __init__(self, rank: int, world: int, stage: int | None, accumulation: int) -> None:
        self.accumulation = accumulation
        self.modules = [Net(seed=3), Net(outputs=1, seed=4)]
        self.engines = (
            [engine_of(module, world, stage, accumulation) for module in self.modules]
            if stage is not None
            else []
        )
        self.generate, self.judge = self.engines or self.modules
        self.z, self.real = (
            [part(data(seed), rank, world, i, accumulation) for i in range(accumulation)]
            if stage is not None
            else [data(seed)]
            for seed in (5, 6)
        )

    def backward(self, at: int, loss: Tensor) -> None:
        """For the model `at`: as it would be without engines, or with them."""
        self.engines[at].backward(loss) if self.engines else loss.backward()

    def step(self, at: int) -> float:
        return self.engines[at].step().grad_norm if self.engines else descend(self.modules[at])

    def zero_grad(self, at: int) -> None:
        (self.engines or self.modules)[at].zero_grad()

    def tutorial(self, own: bool) -> list[float]:
        """A step of each. own: by `loss.backward()`, and the generator first, so that its backward leaves
        gradients in the judge."""
        norms = []
        for z, _ in zip(self.z, self.real, strict=True):
            loss = F.softplus(-self.judge(self.generate(z))).mean()
            loss.backward() if own else self.backward(0, loss)
        norms.append(self.step(0))
        self.zero_grad(1)
        for z, real in zip(self.z, self.real, strict=True):
            fake = self.generate(z)
            self.zero_grad(0)
            loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
            loss.backward() if own else self.backward(1, loss)
        norms.append(self.step(1))
        return norms


def adversaries(rank: int, world: int) -> None:
    for stage, accumulation, own in cases(world, (0, 2, 3), (1, 2), (False, True)):
        plain, pair = Pair(rank, world, None, 1), Pair(rank, world, stage, accumulation)
        expected = [plain.tutorial(own) for _ in range(2)]
        found = [pair.tutorial(own) for _ in range(2)]
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=0, msg=lambda m, c=(stage, accumulation, own): f"{c}: {m}"
        )
        for engine, module in zip(pair.engines, plain.modules, strict=True):
            same(engine, module)


def test_a_backward_through_another_engine() -> None:
    for world in (1, 2):
        threads.run(world, adversaries)


class Keeping(nn.Module):
    """Leaves losses of its own as attributes, made of its blocks' inside and of its output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = x + self.linear(x).tanh()
            self.aux = [self.gate(self.linear(x).sin()).square().mean()]
            return out

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head, self.gate = nn.Linear(6, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.gate(torch.tanh(self.gate.weight.sum() * x)).square().mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def losses(self, which: str, output: Tensor) -> Tensor:
        of_blocks = sum(block.aux[0] for block in self.blocks)
        return {"model": self.aux, "blocks": of_blocks, "all": output.square().mean() + self.aux + of_blocks}[
            which
        ]


def kept(rank: int, world: int) -> None:
    """Losses that a forward leaves as attributes of modules are differentiated alone, too, where their
    parameters are released."""
    x = data(0)
    mine = part(x, rank, world)
    placed = ((2, "auto"), (3, "auto"), (3, "always"))
    for (stage, release), which, own in cases(world, placed, ("model", "blocks", "all"), (False, True)):
        engine = engine_of(Keeping(), world, stage, zero={"stage": stage, "release": release})
        plain = Keeping()
        for _ in range(2):
            loss = engine.module.losses(which, engine(mine))
            loss.backward() if own else engine.backward(loss)
            engine.step()
            plain.losses(which, plain(x)).backward()
            descend(plain)
        same(engine, plain)


def test_losses_kept_as_attributes() -> None:
    for world in (1, 2):
        threads.run(world, kept)


def stale(rank: int, world: int) -> None:
    """A backward through weights that another step has changed since the forward; plain torch refuses it,
    too."""
    for stage, own in cases(world, (0, 2, 3), (False, True)):
        generator, critic = engine_of(Net(seed=1), world, stage), engine_of(Net(seed=2), world, stage)
        mine = part(data(0), rank, world)
        before = generator.state_dict()
        loss = critic(generator(mine)).square().mean()
        critic.backward(critic(mine).square().mean())
        critic.step()
        said = error_of(loss.backward if own else partial(generator.backward, loss))
        assert "changed the weights between this forward and its backward" in said or (
            own and "without a forward" in said
        )
        generator.zero_grad()
        generator.backward(critic(generator(mine)).square().mean())  # the forward done again
        generator.step()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in generator.state_dict().items())


def test_a_backward_through_weights_that_changed_since_is_refused(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, stale)


def both(rank: int, world: int) -> None:
    """One loss of two engines that both train, as an actor's and a critic's; and of a frozen one."""
    for stage in (0, 2, 3):
        actor, critic, frozen = Net(seed=1), Net(outputs=1, seed=2), Net(seed=3)
        engines = engine_of(Net(seed=1), world, stage), engine_of(Net(outputs=1, seed=2), world, stage)
        mine = part(data(0), rank, world)
        teacher = engine_of(Net(seed=3).requires_grad_(False), world, stage)
        for _ in range(2):
            losses = []
            for a, c, t, x in ((*engines, teacher, mine), (actor, critic, frozen, data(0))):
                action = a(x)
                losses.append(
                    F.mse_loss(action, t(x)) + F.mse_loss(t(action), t(x)) + (c(x) - 1).square().mean()
                )
                losses[-1].backward()
            norms = [engine.step().grad_norm for engine in engines]
            assert norms == pytest.approx([descend(actor), descend(critic)], rel=1e-10), stage
        for engine, module in zip(engines, (actor, critic), strict=True):
            same(engine, module)
        same(teacher, frozen)
        with torch.no_grad():
            torch.testing.assert_close(teacher(mine), frozen(mine))
        assert "frozen" in error_of(partial(teacher.train_step, mine)) and "frozen" in error_of(teacher.step)


def test_one_loss_of_several_engines(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, both)


def teachers(rank: int, world: int, folder: str) -> None:
    """Frozen models whose parameters are in a tier, or divided over tensor-parallel ranks, and the gradient
    that comes through them."""
    batch = models.batch_of("llama", training.SAMPLES)
    plain = models.llama().double().eval().requires_grad_(False)
    table = plain.get_input_embeddings().weight.clone().requires_grad_()
    expected = plain(inputs_embeds=F.embedding(batch["input_ids"], table)).logits
    (whole,) = torch.autograd.grad(expected.square().mean(), table)
    cases: list[dict[str, Any]] = [
        {"zero": {"stage": 3}, "memory": {"params": home}} for home in ("host", folder)
    ]
    cases += [{"mesh": {"tp": world}, "zero": {"stage": stage}} for stage in (0, 3)] if world > 1 else []
    for sections in cases:
        engine = polyreme.initialize(
            copy.deepcopy(plain), {"batch": {"size": 2 * world}, **sections, "precision": {"compute": "fp64"}}
        )
        mine = table.detach().requires_grad_()
        for _ in range(2):
            found = engine(inputs_embeds=F.embedding(batch["input_ids"], mine)).logits
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        found.square().mean().backward()
        torch.testing.assert_close(mine.grad, whole, rtol=1e-10, atol=1e-14)
        assert "frozen" in error_of(partial(engine.train_step, batch))


def test_frozen_models_in_tiers_and_divided(ranks: Ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks(world, teachers, str(tmp_path / str(world)))


def inside(rank: int, world: int) -> None:
    """Parameters are not lent inside a forward, where they come and go."""
    engine, x = engine_of(Net(), world, 3), part(data(0), rank, world)

    def lend(*_: Any) -> None:
        with engine.full_parameters():
            pass

    for module in (engine.module.blocks[0], engine.module.head):
        handle = module.register_forward_hook(lend)
        assert "inside a forward of the module" in error_of(lambda: engine(x))
        handle.remove()
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()


def test_parameters_are_not_lent_inside_a_forward(ranks: Ranks) -> None:
    ranks(2, inside)


def copied(rank: int, world: int) -> None:
    engine = polyreme.initialize(models.llama(), {"mesh": {"tp": world}, "batch": {"size": 4}})
    with engine.full_parameters() as module:
        assert "engine.state_dict() has whole copies" in error_of(partial(copy.deepcopy, module))


def part_of_a_pipeline(rank: int, world: int) -> None:
    """A stage's module has a part of the entries, so that none are given."""
    engine = polyreme.initialize(models.llama(), {"mesh": {"pp": world}, "batch": {"size": 4, "micro": 2}})
    module = engine.module
    for act in (
        module.state_dict,
        partial(module.state_dict, keep_vars=True),
        partial(copy.deepcopy, module),
        partial(pickle.dumps, module),
    ):
        assert "which this rank has only its pipeline stage" in error_of(act)
    assert engine.state_dict().keys() == models.llama().state_dict().keys()


def test_a_divided_model_is_not_copied(ranks: Ranks) -> None:
    ranks(2, copied)
    ranks(2, part_of_a_pipeline)


def taken(rank: int, world: int, folder: str) -> None:
    """What a hook takes of a parameter in a forward is right there, as its copies are for ever, and is
    refused behind the block."""
    for stage, memory in ((0, {}), (2, {}), (3, {}), (3, {"params": "host"}), (3, {"params": folder})):
        engine, x = engine_of(Net(), world, stage, memory=memory), part(data(0), rank, world)
        module, first = engine.module.blocks[1][0], Net().blocks[1][0]
        views: list[Tensor] = []
        copies: list[Tensor] = []

        def hook(views: list[Tensor], copies: list[Tensor], module: nn.Linear, *_: object) -> None:
            weight, bias = module.weight, module.bias
            views.extend(
                (
                    weight.detach(),
                    weight.data,
                    weight[:2],
                    weight.t().detach()[1],
                    weight.detach().unbind()[0],
                    bias.view(-1),
                )
            )
            copies.extend(
                (
                    weight.detach().clone(),
                    torch.from_numpy(weight.detach().numpy()),
                    weight.data.mean()[None],
                    weight * 1,
                )
            )
            assert (
                float(weight.detach()[0, 0]) == weight[0, 0].item()
                and int(weight.detach()[0, 0] * 0 + 3) == 3
            )
            assert int(weight.detach()[0, 0]) in (-1, 0, 1)

        handle = module.register_forward_hook(partial(hook, views, copies))
        engine.backward(engine(x).square().mean())
        handle.remove()
        for found, expected in zip(
            copies, (first.weight, first.weight, first.weight.mean()[None], first.weight), strict=True
        ):
            torch.testing.assert_close(found.detach(), expected.detach())
        released = stage == 3 and (bool(memory) or world > 1)
        engine.step()
        for view in views:
            for read in (
                view.sum,
                view.clone,
                view.detach().numpy if not released else view.numpy,
                partial(torch.add, 1, view),
            ):
                if released:
                    assert "in a forward or backward, where its memory is freed" in error_of(read)
                else:
                    read()
            assert repr(view) and view.shape
        if released:
            for write in (
                lambda m, _: setattr(m.weight, "data", m.weight.data * 2),
                lambda m, _: m.weight.data.mul_(2),
                lambda m, _: m.weight.detach().data.mul_(2),
                lambda m, _: m.weight.data.__iadd__(1),
                lambda m, _: setattr(m.weight.detach(), "data", m.weight * 2),
                lambda m, _: m.weight.detach().__setitem__(0, 1.0),
                lambda m, _: torch.add(m.bias, 1, out=m.bias.data),
            ):
                handle = module.register_forward_pre_hook(write)
                assert "writes to parameter blocks.1.0." in error_of(partial(engine, x))
                handle.remove()
                engine.zero_grad()
            engine.backward(engine(x).square().mean())
            engine.step()
            other = engine.module.blocks[0][0]  # gathered, beside a view of what is released
            handle = other.register_forward_hook(
                lambda m, *_, view=views[0]: torch.add(m.weight.detach()[0, 0], view)
            )
            assert "blocks.1.0.weight in a forward or backward" in error_of(partial(engine, x))
            handle.remove()
            engine.zero_grad()
        average = torch.zeros_like(first.weight)
        handle = module.register_forward_hook(
            lambda m, *_, average=average: [average.lerp_(m.weight.detach(), 0.5), None][1]
        )
        engine.backward(engine(x).square().mean())
        engine.step()
        handle.remove()
        assert average.any()


def test_what_is_taken_of_a_parameter_in_a_forward(ranks: Ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks(world, taken, str(tmp_path / str(world)))


# ---- higher derivatives


def penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of gradients by the input, as of a WGAN-GP or of a differential equation."""
    x = x.detach().requires_grad_()
    output = model(x)
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return output.square().mean() + first.square().mean() + second.square().mean()


def derivatives(rank: int, world: int) -> None:
    width = 400  # a block of more than 1 MiB
    x, rate = data(0, width), 1e-3
    ways = ((True, "auto", "keep"), (False, "always", "keep"), (False, "auto", "recompute"))
    for stage, (own, release, activations) in cases(world, (0, 2, 3), ways):
        changes: dict[str, Any] = {"optimizer": {**SGD, "lr": rate}, "memory": {"activations": activations}}
        engine = engine_of(Net(width), world, stage, 2, zero={"stage": stage, "release": release}, **changes)
        plain = Net(width)
        for _ in range(2):
            for micro in range(2):
                mine = part(x, rank, world, micro, 2).requires_grad_()
                torch.autograd.grad(engine(mine).sum(), mine)  # which trains nothing
                loss = penalty(engine, mine)
                loss.backward() if own else engine.backward(loss)
            result = engine.step()
            loss = penalty(plain, x)
            loss.backward()
            assert result.grad_norm == pytest.approx(descend_by(plain, rate), rel=1e-10), (stage, own)
        same(engine, plain)


def descend_by(model: nn.Module, rate: float) -> float:
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= rate / RATE
    return descend(model) * RATE / rate


def test_derivatives_of_derivatives() -> None:
    for world in (1, 2):
        threads.run(world, derivatives)


# ---- engine.gradients()


def gradients(rank: int, world: int, folder: Path) -> None:
    x, y = data(0), data(1)
    files = {"states": "host", "gradients": str(folder)}
    homes = ((1, {}), (2, {}), (2, {"states": "host"}), (1, files), (2, files))
    # own: the loop, or train_step
    for stage, (accumulation, memory), own in cases(world, (2, 3, 0), homes, (True, False)):
        if stage or memory is not files:  # at stage 0 no gradients are in files
            changes = {"memory": memory, "optimizer": {**SGD, "clip": 0.3}}
            plain = Net()
            engine = engine_of(Net(), world, stage, accumulation, F.mse_loss, **changes)
            seen: list[Any] = []

            def look(found: Any, seen: list[Any] = seen) -> None:
                seen += [found.norm, found.norms(), found.whole()]
                found.scale_({"head.bias": 0.5})
                seen += [found.norm, found.clip_(0.1)]

            engine.on_gradients = None if own else look
            if own:
                for micro in range(accumulation):
                    mine = [part(t, rank, world, micro, accumulation) for t in (x, y)]
                    F.mse_loss(engine(mine[0]), mine[1]).backward()
                look(kept := engine.gradients())
                result = engine.step()
                assert "are gone" in error_of(kept.norms)
            else:
                result = engine.train_step((part(x, rank, world), part(y, rank, world)))
            F.mse_loss(plain(x), y).backward()
            whole = {name: p.grad.clone() for name, p in plain.named_parameters()}
            norm = torch.nn.utils.get_total_norm(whole.values()).item()
            plain.head.bias.grad *= 0.5
            after = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
            descend(plain)
            expected = [norm, {name: g.norm().item() for name, g in whole.items()}, whole, after, after]
            torch.testing.assert_close(
                seen, expected, rtol=1e-10, atol=1e-14, msg=lambda m, c=(stage, memory, own): f"{c}: {m}"
            )
            assert result.grad_norm == pytest.approx(after, rel=1e-10)
            same(engine, plain)
    assert "no parameter" in error_of(partial(refuse_scale, engine_of(Net(), world, 3), part(x, rank, world)))
    assert "gradients() after 0 backward() calls" in error_of(engine_of(Net(), world, 0).gradients)


def divided(rank: int, world: int) -> None:
    """Over tensor-parallel ranks and pipeline stages, of which the last has a weight of the first."""
    for tied in (False, True):
        batch = models.batch_of("llama", training.SAMPLES)
        for mesh, stage in (("tp", 0), ("tp", 3), ("pp", 0), ("pp", 1)):
            torch.manual_seed(0)
            plain = models.llama(tie_word_embeddings=tied).double().train()
            changes = {
                "zero": {"stage": stage},
                "mesh": {mesh: world},
                "precision": {"compute": "fp64"},
                "optimizer": {**SGD, "clip": 0.3},
            }
            engine = polyreme.initialize(
                copy.deepcopy(plain), training.config(1, 2, **changes), loss_fn=models.causal_loss
            )
            seen: list[Any] = []

            def look(found: Any, seen: list[Any] = seen) -> None:
                seen += [found.norm, found.norms(), found.whole()]
                found.scale_({"model.norm.weight": 0.5})
                seen += [found.norm, found.clip_(0.1)]

            engine.on_gradients = look
            result = engine.train_step(batch)
            total, weight = models.causal_loss(plain(input_ids=batch["input_ids"]), batch)
            (total / weight).backward()
            whole = {name: p.grad.clone() for name, p in plain.named_parameters(remove_duplicate=False)}
            norms = {name: p.grad.norm().item() for name, p in plain.named_parameters()}
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
            plain.model.norm.weight.grad *= 0.5
            after = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
            descend(plain)
            expected = [norm, norms, whole, after, after]
            torch.testing.assert_close(
                seen, expected, rtol=1e-9, atol=1e-12, msg=lambda m, c=(mesh, stage, tied): f"{c}: {m}"
            )
            assert result.grad_norm == pytest.approx(after, rel=1e-10)
            same(engine, plain)


def test_gradients_are_the_same_over_tensor_parallel_ranks_and_stages(ranks: Ranks) -> None:
    ranks(2, divided)


def refuse_scale(engine: polyreme.Engine, x: Tensor) -> None:
    engine.backward(engine(x).mean())
    engine.gradients().scale_({"nothing": 1.0})


def test_gradients_are_those_of_plain_torch(ranks: Ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks(world, gradients, tmp_path / str(world))


def set_by_hand(rank: int, size: int, stage: int, scale: float) -> None:
    """Gradients that a script sets are those of the step, a mean over the ranks, and are gone after it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model)
    precision = {"compute": "fp16", "loss_scale": scale} if scale else {"compute": "fp32"}
    engine = polyreme.initialize(
        model, training.config(size, zero={"stage": stage}, precision=precision, optimizer=SGD)
    )
    for value in (1.0, 3.0):
        for parameter in engine.module.parameters():
            parameter.grad = torch.empty_like(parameter).fill_(value * (scale or 1.0))
            parameter.grad *= 2 * rank + 1
        assert engine.step().grad_norm == pytest.approx(size * value * 15**0.5)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        for parameter in reference.parameters():
            parameter.data -= RATE * value * size
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(
            tensor.float(), reference.state_dict()[name], rtol=1e-2 if scale else 1e-6, atol=1e-3
        )
    model.weight.grad = torch.zeros_like(model.weight)
    x = torch.ones(training.SAMPLES // size, 4)
    with pytest.raises(ModelError, match=r"weight\.grad was set, and a backward would add"):
        engine.backward(engine(x).mean())
    engine.zero_grad()
    assert model.weight.grad is None
    engine.backward(engine(x).mean())
    with pytest.raises(ModelError, match="is set between backward and step"):
        model.weight.grad = torch.zeros_like(model.weight)


@pytest.mark.parametrize(("stage", "scale"), [(0, 0.0), (2, 8.0)])
def test_gradients_that_a_script_sets_are_those_of_a_step(ranks: Ranks, stage: int, scale: float) -> None:
    ranks(2, set_by_hand, stage, scale)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("first", [False, True])
def test_a_loop_adds_nothing_to_a_train_step_that_failed(stage: int, first: bool) -> None:
    """first: before it had any gradients, to which nothing can add."""
    x, failing = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), [True]

    def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
        if failing[0] and torch.equal(batch, x[:2] if first else x[2:]):
            raise ValueError("of a micro-batch")
        return F.mse_loss(output, batch)

    engine = polyreme.initialize(
        nn.Linear(9, 9), {"batch": {"size": 4, "micro": 2}, "zero": {"stage": stage}}, loss_fn=loss_fn
    )
    with pytest.raises(ValueError, match="of a micro-batch"):
        engine.train_step((x, x))
    failing[0] = False
    if not first:
        with pytest.raises(OrderError, match="ended in an error"):
            engine.backward(F.mse_loss(engine(x[:2]), x[:2]))
        engine.zero_grad()
    whole = engine.eval_step((x, x)).loss
    for part in (x[:2], x[2:]):
        engine.backward(F.mse_loss(engine(part), part))
    result = engine.step()
    assert result.samples == 4 and result.loss == pytest.approx(whole)
