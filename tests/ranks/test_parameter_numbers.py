"""Masters, gradients and states of single parameters, read and written through the engine, beside plain
torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import models
import polyreme
import probe
import threads
import training
from cover import some
from polyreme.errors import BatchError, ModelError
from polyreme.offload import optimizer_states
from polyreme.offload.host_transfer import HostTransfer
from pool import Ranks

WIDTH = 12
PARTS = 2  # micro-batches of a step


class Net(nn.Module):
    """Three layers, of which two share a matrix, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x).tanh())).tanh())


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank + 10 * step + 1000 * part)
    x, y = torch.randn((2, 4, WIDTH), generator=draw, dtype=torch.float64)
    return x, y


def random(like: Tensor, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(like.shape, generator=draw, dtype=like.dtype)


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(trained(model), lr=0.01, betas=(0.8, 0.9)),
    "adafactor": lambda model: torch.optim.Adafactor(trained(model), lr=0.01),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Pair:
    """A model in plain torch, and the same one under an engine: each step and each write goes to both."""

    def __init__(self, rank: int, world: int, optimizer: str, **config: Any) -> None:
        self.rank, self.world, self.at = rank, world, 0
        self.plain, model = network(), network()
        self.optimizer = OPTIMIZERS[optimizer](self.plain)
        sizes = {"size": 4 * world * PARTS, "micro": 4}
        options = {"batch": sizes, "precision": {"compute": "fp64"}, "optimizer": {"clip": 1.0}, **config}
        self.engine = polyreme.initialize(model, options, optimizer=OPTIMIZERS[optimizer](model))
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]

    def parameter(self, name: str) -> nn.Parameter:
        return self.plain.get_parameter(name)

    def numbers(self, name: str) -> Any:
        return self.engine.numbers(self.engine.module.get_parameter(name))

    def backward(self) -> None:
        for rank in range(self.world):
            for part in range(PARTS):
                x, y = batch(rank, self.at, part)
                (nn.functional.mse_loss(self.plain(x), y) / self.world / PARTS).backward()
        for part in range(PARTS):
            x, y = batch(self.rank, self.at, part)
            self.engine.backward(nn.functional.mse_loss(self.engine(x), y), weight=1.0)
            if part < PARTS - 1:
                assert self.numbers(self.names[0]).whole("gradient") is None

    def step(self) -> None:
        norm = nn.utils.clip_grad_norm_(trained(self.plain), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert abs(self.engine.step().grad_norm - norm.item()) < 1e-12
        self.at += 1

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor | None]]:
        """What plain torch has of a parameter."""
        p = self.parameter(name)
        yield "master", p.detach()
        yield "gradient", p.grad
        yield from self.optimizer.state[p].items()

    def compare(self) -> None:
        for name in self.names:
            for kind, wanted in self.tensors(name):
                found = self.numbers(name).whole(kind)
                if wanted is None:
                    assert found is None, (name, kind)
                    continue
                assert found.shape == wanted.shape, (name, kind, found.shape)
                assert (found - wanted).abs().max() < 1e-12, (name, kind, (found - wanted).abs().max())

    def write(self, name: str, kind: str, seed: int, local: bool = False) -> None:
        """Set a tensor of both: whole, where rank 0's counts, or by doubling what each rank has."""
        old = dict(self.tensors(name))[kind]
        assert old is not None
        numbers = self.numbers(name)
        if local:
            old.mul_(2)
            numbers.set_local(kind, numbers.local(kind) * 2)
            return
        old.copy_(random(old, seed))
        numbers.set_whole(kind, None if self.rank else old.clone())


def follow(rank: int, world: int, optimizer: str, config: dict[str, Any]) -> None:
    pair = Pair(rank, world, optimizer, **config)
    states = ["exp_avg", "exp_avg_sq"] if optimizer == "adamw" else ["row_var", "col_var"]
    for kind in (*states, "gradient", "step"):
        assert pair.numbers("first.weight").whole(kind) is None, kind
    pair.compare()
    pair.backward()
    pair.compare()
    pair.write("first.weight", "gradient", seed=1)
    pair.write("norm.bias", "gradient", seed=2, local=True)
    pair.compare()
    assert pair.engine.gradients().norm > 1
    pair.step()
    pair.compare()

    pair.write("first.weight", "master", seed=3)
    pair.write("first.bias", "master", seed=4, local=True)
    for kind in states:
        pair.write("first.weight", kind, seed=5)
    pair.write("norm.weight", "step", seed=6)
    pair.compare()
    pair.backward()
    pair.compare()
    pair.write("last.bias", "master", seed=7)  # between backward and step
    pair.write("first.weight", states[0], seed=8, local=True)
    pair.step()
    pair.compare()

    frozen = pair.numbers("frozen.weight")
    value = random(pair.plain.frozen.weight, 9)
    assert torch.equal(frozen.whole("master"), pair.plain.frozen.weight)
    assert frozen.whole(states[0]) is None and frozen.whole("gradient") is None
    pair.plain.frozen.weight.data.copy_(value)
    frozen.set_whole("master", value)
    assert torch.equal(frozen.whole("master"), value)
    for _ in range(2):
        pair.backward()
        pair.step()
    pair.compare()
    for name in pair.names:  # parts are whole together, and the module has the masters
        parts = pair.engine.mesh.gather_objects(pair.numbers(name).local("master").tolist())
        whole = pair.numbers(name).whole("master").flatten().tolist()
        assert whole in ([each for part in parts for each in part], parts[0])
    tied = pair.engine.module
    assert tied.last.weight is tied.first.weight and "last.weight" not in pair.names
    with pair.engine.full_parameters():
        for name in pair.names:
            assert (pair.engine.module.get_parameter(name) - pair.parameter(name)).abs().max() < 1e-12
    pair.engine.close()


def sections(stage: int, **memory: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, "min_bucket": 0}, "memory": memory}


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_are_those_of_plain_torch(ranks: Ranks, world: int) -> None:
    for stage, states in some(min(world, 2), range(4), ("device", "host")):
        threads.run(world, follow, "adamw", sections(stage, states=states))
    ranks(world, follow, "adamw", sections(3, states="host", params="host"))


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_of_whole_tensors(ranks: Ranks, world: int) -> None:
    for config in (sections(0), sections(2, states="host"), sections(3)):
        ranks(world, follow, "adafactor", config)


def follow_in_files(rank: int, world: int, folder: Path) -> None:
    with patch.object(optimizer_states, "EXTENT", 64):  # several extents for each parameter
        for stage in (2, 3):
            home = str(folder / f"tier{stage}")
            config = sections(stage, states=home, gradients=home, **({"params": home} if stage == 3 else {}))
            config["zero"]["reduce_every"] = "microbatch"
            follow(rank, world, "adamw", config)


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_in_files(ranks: Ranks, world: int, tmp_path: Path) -> None:
    ranks(world, follow_in_files, tmp_path)


def follow_beside_a_device(rank: int, world: int) -> None:
    with probe.updated_elsewhere(HostTransfer):
        for stage, params in ((0, "device"), (2, "device"), (3, "host")):
            follow(rank, world, "adamw", sections(stage, states="host", params=params))


def test_numbers_that_the_cpu_updates_for_a_device(ranks: Ranks) -> None:
    ranks(2, follow_beside_a_device)


def masters_of_bf16(rank: int, world: int, memory: dict[str, Any]) -> None:
    for stage in range(4):
        model = network().float()
        config = {"batch": {"size": 4 * world}, "precision": {"compute": "bf16"}, **sections(stage, **memory)}
        engine = polyreme.initialize(model, config)

        def step(engine: polyreme.Engine = engine) -> None:
            x, y = batch(rank, 0, 0)
            engine.backward(nn.functional.mse_loss(engine(x.float()).float(), y.float()))
            gradient = engine.numbers(engine.module.first.weight).whole("gradient")
            assert gradient is not None and gradient.dtype == torch.float32 and gradient.abs().max() > 0
            engine.step()

        step()
        numbers = engine.numbers(model.first.weight)
        value = random(torch.empty(WIDTH, WIDTH), 1)
        numbers.set_whole("master", value.double())
        with engine.full_parameters():
            assert torch.equal(model.first.weight, value.bfloat16())
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        step()
        found = numbers.whole("master")
        assert found is not None and found.dtype == torch.float32 and torch.equal(found, value)
        state = numbers.whole("exp_avg")
        assert state is not None and state.dtype == torch.float32 and state.abs().max() > 0
        if stage < 3:
            with torch.no_grad():
                model.first.weight[0] = 0.25
            with pytest.raises(ModelError, match="was written to"):
                numbers.local("master")
            found = numbers.whole("master")
            assert found is not None and (found[0] == 0.25).all() and torch.equal(found[1:], value[1:])
            assert numbers.local("master") is not None
        engine.close()


def test_masters_keep_digits_that_parameters_have_not(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, masters_of_bf16, {})
    ranks(2, masters_of_bf16, {"states": "host"})


def states_in_fewer_bits(rank: int, world: int, folder: Path) -> None:
    for states in ("bf16", "8bit"):
        for home in ("host", str(folder / "tier")):
            config = {"batch": {"size": 4 * world}, "optimizer": {"states": states}}
            model = network().float()
            engine = polyreme.initialize(model, {**config, **sections(2, states=home)})
            x, y = batch(rank, 0, 0)
            engine.backward(nn.functional.mse_loss(engine(x.float()), y.float()))
            engine.step()
            names = [p for p in model.parameters() if p.requires_grad]
            before = [engine.numbers(p).whole("exp_avg_sq") for p in names]
            value = random(names[0], 1) + 0.1
            engine.numbers(names[0]).set_whole("exp_avg_sq", value)
            found = [engine.numbers(p).whole("exp_avg_sq") for p in names]
            assert found[0] is not None and ((found[0] - value).abs() < 0.05 * value).all()
            for old, new in zip(before[1:], found[1:], strict=True):
                assert old is not None and new is not None and torch.equal(old, new)
            engine.close()


def test_states_in_fewer_bits(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, states_in_fewer_bits, tmp_path)


def refuse(rank: int, world: int) -> None:
    for stage in (0, 3):
        pair = Pair(rank, world, "adamw", **sections(stage))
        engine, numbers = pair.engine, pair.numbers("first.weight")
        value = torch.zeros(WIDTH, WIDTH)
        for kind in ("exp_avg", "gradient"):
            with pytest.raises(ModelError, match="cannot be set: it has a"):
                numbers.set_whole(kind, value)
            with pytest.raises(ModelError, match="cannot be set: it has a"):
                pair.numbers("first.weight" if not rank else "last.bias").set_local(kind, value)
        with pytest.raises(ModelError, match=r"'momentum'.*no such state.*exp_avg_sq"):
            numbers.whole("momentum")
        with pytest.raises(ModelError, match="frozen"):
            pair.numbers("frozen.weight").set_whole("exp_avg", value)
        with pytest.raises(ModelError, match="no parameter of this engine"):
            engine.numbers(nn.Parameter(value))
        with pytest.raises(ModelError, match=r"shape \[12\] by rank 0.*\[12, 12\]"):
            numbers.set_whole("master", torch.zeros(WIDTH))
        with pytest.raises(ModelError, match="by rank 0"):
            numbers.set_whole("master", None)
        with pytest.raises(ModelError, match="5 elements"):
            numbers.set_local("master", torch.zeros(5))
        with engine.full_parameters(write=True), pytest.raises(ModelError, match="full_parameters"):
            numbers.set_whole("master", value)

        def ask(*_: Any, numbers: Any = numbers) -> None:
            with pytest.raises(ModelError, match="inside of a"):
                numbers.whole("master")

        x, y = batch(rank, 0, 0)
        output = engine(x)
        output.register_hook(ask)
        numbers.set_whole("master", random(value, 1))
        with pytest.raises(BatchError, match=r"engine\.numbers\(\.\.\.\), changed the weights"):
            engine.backward(nn.functional.mse_loss(output, y), weight=1.0)
        engine.zero_grad()
        output = engine(x)
        output.register_hook(ask)
        engine.backward(nn.functional.mse_loss(output, y), weight=1.0)
        assert numbers.whole("gradient") is None
        engine.gradients(last=True)
        assert numbers.whole("gradient") is not None
        engine.step()
        assert numbers.whole("gradient") is None
        engine.close()
        with pytest.raises(ModelError, match="closed"):
            numbers.whole("master")


def test_errors(ranks: Ranks) -> None:
    ranks(2, refuse)


def gradients_by_hook_and_boundary(rank: int, world: int) -> None:
    """In `on_gradients`, and where the caller says which backward is the last."""
    model = network()
    config = {"batch": {"size": 4 * world * PARTS, "micro": 4, "mean": "ranks"}, **sections(2)}
    engine = polyreme.initialize(model, {**config, "precision": {"compute": "fp64"}})
    numbers = engine.numbers(model.norm.bias)
    seen: list[float] = []

    def zero(gradients: Any) -> None:
        whole = gradients.whole()["norm.bias"]
        assert torch.equal(whole, numbers.whole("gradient"))
        numbers.set_whole("gradient", torch.zeros(WIDTH))
        seen.append(gradients.norms()["norm.bias"])
        rest = sum(norm**2 for norm in gradients.norms().values()) ** 0.5
        assert abs(gradients.norm - rest) < 1e-12

    engine.on_gradients = zero
    for is_last in (False, True):
        engine.set_boundary(is_last)
        x, y = batch(rank, 0, 0)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        assert (numbers.whole("gradient") is not None) is is_last
    engine.step()
    assert seen == [0.0] and not numbers.whole("exp_avg").any()  # type: ignore[union-attr]


def test_gradients_before_an_update(ranks: Ranks) -> None:
    ranks(2, gradients_by_hook_and_boundary)


def unused(rank: int, world: int) -> None:
    """A gradient that is set has its parameter updated, though no backward came to it."""
    for memory in ("device", "host"):
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "rest": nn.Linear(4, 4)}).double()
        model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
        config = {"batch": {"size": 4 * world}, "precision": {"compute": "fp64"}}
        engine = polyreme.initialize(model, {**config, **sections(2, states=memory)})
        numbers = engine.numbers(model["rest"].weight)
        for is_set in (False, True):
            before = numbers.whole("master")
            engine.backward(engine(torch.ones(4, 4)).square().mean(), weight=1.0)
            gradient = numbers.whole("gradient")
            assert gradient is not None and not gradient.any()
            if is_set:
                numbers.set_whole("gradient", torch.ones(4, 4))
            engine.step()
            after, state = numbers.whole("master"), numbers.whole("step")
            assert torch.equal(after, before) is not is_set  # type: ignore[arg-type]
            assert (state is not None) is is_set
            assert engine.numbers(model["rest"].bias).whole("step") is None


def test_a_parameter_without_a_gradient(ranks: Ranks) -> None:
    ranks(2, unused)


def saving(rank: int, world: int, folder: Path) -> None:
    pair = Pair(rank, world, "adamw", **sections(2))
    pair.backward()
    pair.step()
    numbers = pair.numbers("first.weight")
    wanted = {kind: numbers.whole(kind) for kind in ("master", "exp_avg")}
    pair.engine.save(folder / "saved", wait=False)
    for kind in wanted:
        numbers.set_whole(kind, torch.zeros(WIDTH, WIDTH))
    pair.engine.wait()
    pair.engine.load(folder / "saved")
    for kind, value in wanted.items():
        assert torch.equal(numbers.whole(kind), value)


def test_what_is_being_saved_stays(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, saving, tmp_path)


def divided(rank: int, world: int) -> None:
    config = training.config(world, precision={"compute": "fp64"}, mesh={"tp": 2}, zero={"stage": 2})
    config["batch"]["micro"] = "auto"
    model = models.build("llama", torch.float32)
    engine = polyreme.initialize(model, config, loss_fn=models.CASES["llama"][2])
    dp = engine.mesh.dp
    share = models.share(models.batch_of("llama", training.SAMPLES, 0, torch.float32), dp.rank, dp.size)
    engine.train_step(share)
    for name, parameter in model.named_parameters():
        whole = engine.state_dict(master=True)[name]
        numbers = engine.numbers(parameter)
        assert torch.equal(numbers.whole("master"), whole)
        value, state = random(whole, 1), random(whole, 2)
        numbers.set_whole("master", None if rank else value)
        numbers.set_whole("exp_avg", None if rank else state)
        assert torch.equal(engine.state_dict(master=True)[name], value)
        assert torch.equal(numbers.whole("exp_avg"), state)
    assert engine.train_step(share).loss > 0


def test_with_tensor_parallelism(ranks: Ranks) -> None:
    ranks(2, divided)
