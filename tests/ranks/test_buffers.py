"""State that forwards write, in layers that are not torch's BatchNorm: found in the first step, and with
`buffers` the same on all ranks; against plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
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
from polyreme.errors import ModelError

WIDTH, STEPS = 6, 4


class Codebook(nn.Module):
    """A VQ-VAE's codes: running means of what is next to each, and of how often that is so."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(4))
        self.register_buffer("total", torch.randn(4, WIDTH))
        self.register_buffer("times", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        codes = self.total / self.size.clamp(min=0.1).unsqueeze(1)
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 4).to(x.dtype)
            self.size.lerp_(chosen.mean(0), 0.1)
            self.total = self.total.lerp(chosen.T @ x.detach() / len(x), 0.1)
            self.times += 1
        return x + (codes[nearest] - x).detach() * 0.5


class Unnoticed(nn.Module):
    """A normalisation of its own, whose running means torch changes without counting that."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.mix(x), self.mean, self.var, training=self.training)


class Frozen(nn.Module):
    """What Keras' BatchNormalization does with torch: running means in parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.moving_mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        before = self.moving_mean.clone()
        if self.training:
            with torch.no_grad():
                self.moving_mean.copy_(self.moving_mean * 0.9 + x.mean(0) * 0.1)
        return torch.tanh(x - before)


class Instances(nn.InstanceNorm1d):
    def __init__(self) -> None:
        super().__init__(2, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (2, -1))).flatten(1)


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )


def net(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return Net([nn.Sequential(kind(), nn.Tanh()) for _ in range(2)]).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    x = torch.randn(training.SAMPLES, WIDTH, dtype=torch.float64)
    return 2 * x + 1, x.sin()


def plain(kind: Callable[[], nn.Module], accumulation: int = 1, lines: int = 1) -> Any:
    """Losses and state in one process, of a step's micro-batches, each of the shares of all ranks."""
    model = net(kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        parts = torch.arange(len(x)).view(lines, accumulation, -1).transpose(0, 1).reshape(accumulation, -1)
        optimizer.zero_grad()
        total = [F.mse_loss(model(x[at]), y[at]) / accumulation for at in parts]
        sum(total).backward()
        optimizer.step()
        losses.append(sum(loss.item() for loss in total))
    return losses, model.state_dict()


def config(world: int, accumulation: int, sections: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in sections.items() if isinstance(value, dict)}
    made = training.config(world, accumulation, precision={"compute": "fp64"}, **own)
    made["optimizer"] |= {"weight_decay": 0.0, "clip": None}
    return {**made, **{key: value for key, value in sections.items() if key not in own}}


def trained(rank: int, world: int, kind: Callable[[], nn.Module], accumulation: int, sections: Any) -> Any:
    dp = world // sections.get("mesh", {}).get("tp", 1) // sections.get("mesh", {}).get("pp", 1)
    engine = polyreme.initialize(net(kind), config(dp, accumulation, sections), loss_fn=F.mse_loss)
    at = engine.mesh.dp
    losses = [engine.train_step(models.share(batch(step), at.rank, at.size)).loss for step in range(STEPS)]
    state = engine.state_dict()
    engine.close()
    return losses, state


def same(found: Any, expected: Any) -> None:
    losses, state = expected
    for got, weights in found:
        assert got == pytest.approx(losses, rel=1e-10)
        assert weights.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_spectral_norms_are_one_process_by_themselves(stage: int) -> None:
    same(threads.run(2, trained, spectral, 1, {"zero": {"stage": stage}}), plain(spectral))


@pytest.mark.parametrize("kind", [Codebook, Unnoticed, Frozen, Instances])
def test_what_ranks_write_differently_is_an_error_on_all_that_names_the_key(kind: type[nn.Module]) -> None:
    def refused(rank: int, world: int) -> str:
        engine = polyreme.initialize(net(kind), config(world, 1, {}), loss_fn=F.mse_loss)
        before = [p.clone() for p in engine.module.parameters() if p.requires_grad]
        with pytest.raises(
            ModelError, match=rf"2 data-parallel.*blocks.0.0.* of {kind.__name__}.*buffers = "
        ) as e:
            engine.train_step(models.share(batch(0), rank, world))
        assert all(map(torch.equal, before, (p for p in engine.module.parameters() if p.requires_grad)))
        return str(e.value)

    one, other = threads.run(2, refused)
    assert one == other


AVERAGED: list[tuple[int, Any, int, dict[str, Any]]] = [
    (2, Codebook, 1, {"zero": {"stage": 0}}),
    (2, Codebook, 1, {"zero": {"stage": 3}, "batch_norm": "sync"}),
    (2, Codebook, 2, {"mesh": {"pp": 2}}),
    (4, Instances, 2, {"mesh": {"pp": 2}, "zero": {"stage": 2}}),
    (2, Frozen, 1, {"zero": {"stage": 0}}),
    (2, Frozen, 1, {"zero": {"stage": 2}}),
    (2, Frozen, 1, {"zero": {"stage": 3, "persistence_threshold": WIDTH}}),
    (1, Frozen, 1, {"zero": {"stage": 3}}),
    (2, Instances, 2, {"zero": {"stage": 3}}),
]


@pytest.mark.parametrize("world, kind, accumulation, sections", AVERAGED)
def test_averaged_running_means_are_one_process(
    world: int, kind: Any, accumulation: int, sections: Any
) -> None:
    lines = world // sections.get("mesh", {}).get("pp", 1)
    found = threads.run(world, trained, kind, accumulation, {**sections, "buffers": "average"})
    same(found, plain(kind, accumulation, lines))


def test_a_parameter_that_zero_divides_is_found_and_the_way_named() -> None:
    sections = {"zero": {"stage": 3}, "buffers": "average"}
    with pytest.raises(
        threads.RanksFailed, match=r"moving_mean of Frozen, .*zero\.persistence_threshold = 6"
    ) as e:
        threads.run(2, trained, Frozen, 1, sections)
    assert all(isinstance(error, ModelError) for error in e.value.exceptions.values())


def test_rank_0s_and_each_its_own() -> None:
    def states(rank: int, world: int, way: str) -> dict[str, Tensor]:
        engine = polyreme.initialize(net(Codebook), config(world, 1, {"buffers": way}), loss_fn=F.mse_loss)
        for step in range(STEPS):
            engine.train_step(models.share(batch(step), rank, world))
        return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}

    for way, alike in (("rank0", True), ("local", False)):
        one, other = threads.run(2, states, way)
        for name, buffer in one.items():
            assert torch.equal(buffer, other[name]) == (alike or "times" in name), (way, name)


class Later(nn.Module):
    """A buffer that is the same on all ranks at first, and not after the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        self.scale.add_(x.detach().mean() if self.times > 2 else 1.0)
        return self.mix(x)


def test_what_is_no_longer_alike_is_told_of() -> None:
    def drift(rank: int, world: int) -> int:
        engine = polyreme.initialize(net(Later), config(world, 1, {}), loss_fn=F.mse_loss)
        with pytest.raises(ModelError, match="scale of Later"):
            for step in range(10):
                engine.train_step(models.share(batch(step), rank, world))
        return engine.state.step

    assert threads.run(2, drift) == [3, 3]


class Unused(nn.Module):
    """A scale that the script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.scale


class Divided(nn.Module):
    """A running scale of activations that tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.training:
            self.scale.lerp_(x.detach().abs().max(), 0.1)
        return self.down(x / self.scale)


def test_a_scale_of_divided_activations_is_refused() -> None:
    mesh = {"tp": 2, "tp_plan": {"blocks.*.0.up": "colwise", "blocks.*.0.down": "rowwise"}}
    for way in ("error", "average"):
        with pytest.raises(threads.RanksFailed, match=r"mesh\.tp"):
            threads.run(2, trained, Divided, 1, {"mesh": mesh, "buffers": way})


def test_what_a_script_writes_is_shared_too() -> None:
    def written(rank: int, world: int, alike: bool) -> None:
        engine = polyreme.initialize(net(Unused), config(world, 1, {}), loss_fn=F.mse_loss)
        for step in range(4):
            engine.module.blocks[0][0].scale.fill_(step + (rank and not alike and step > 1))
            engine.train_step(models.share(batch(step), rank, world))

    threads.run(2, written, True)
    with pytest.raises(threads.RanksFailed, match=r"scale of Unused, .*\(or a script on some ranks alone\)"):
        threads.run(2, written, False)


def test_resuming_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    def run(rank: int, world: int, kind: Any, way: str) -> list[dict[str, Tensor]]:
        made, found = config(world, 1, {"buffers": way}), []
        for resumed in (False, True):
            engine = polyreme.initialize(net(kind), made, loss_fn=F.mse_loss)
            if resumed:
                engine.load(tmp_path / kind.__name__)
            for step in range(2 if resumed else 0, STEPS):
                engine.train_step(models.share(batch(step), rank, world))
                if step == 1:
                    engine.save(tmp_path / kind.__name__)
            found.append(copy.deepcopy(engine.state_dict()))
            engine.close()
        return found

    for kind, way in ((Codebook, "average"), (Frozen, "rank0")):
        for whole, resumed in threads.run(2, run, kind, way):
            assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_micro_batches_are_told_of_once() -> None:
    def told(sections: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trained(0, 1, Codebook, 2, sections)
        return [str(each.message) for each in found if "micro-batch" in str(each.message)]

    (text,) = told({})
    assert "blocks.0.0.size of Codebook" in text and "2 times a step" in text and "times of" not in text
    assert told({"buffers": "average"}) == []


class Lazy(nn.Module):
    """Running means that the first forward makes, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("filled", None)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.cache = x.detach()[0]
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros_like(mean))
        # what is read is what all ranks had before
        moved = x - self.made - (0 if self.filled is None else self.filled)
        self.made.mul_(0.5).add_(mean, alpha=0.5)
        self.filled = mean if self.filled is None else self.filled * 0.5 + mean * 0.5
        return self.mix(moved)


@pytest.mark.parametrize(
    "sections", [{"zero": {"stage": 0}}, {"zero": {"stage": 3}}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}]
)
def test_buffers_that_the_first_forward_makes_are_averaged(sections: Any) -> None:
    if "tp" in sections.get("mesh", {}):
        sections = {"mesh": {"tp": 2, "tp_plan": {"blocks.*.0.mix": "colwise_gather_output"}}}
    count = sections.get("mesh", {}).get("pp", 1)
    found = threads.run(2, trained, Lazy, count, {**sections, "buffers": "average"})
    lines = 1 if "mesh" in sections else 2
    same(found, plain(Lazy, count, lines))


def test_what_the_first_forward_makes_is_not_lost_on_resuming_without_a_word(tmp_path: Path) -> None:
    def resumed(rank: int, world: int, early: bool) -> list[Any]:
        found: list[Any] = []
        for again in (False, True):
            made = config(world, 1, {"buffers": "average"})
            engine = polyreme.initialize(net(Lazy), made, loss_fn=F.mse_loss)
            if again and not early:
                with pytest.raises(polyreme.PolyremeError, match="made"):
                    engine.load(tmp_path / "saved")
                return found
            engine.train_step(models.share(batch(0), rank, world))
            if again:
                found.append(not engine.load(tmp_path / "saved").notes)
            else:
                engine.save(tmp_path / "saved")
            engine.train_step(models.share(batch(1), rank, world))
            found.append(engine.state_dict())
        return found

    for first, is_exact, second in threads.run(2, resumed, True):
        assert is_exact and all(torch.equal(first[name], second[name]) for name in first)
    threads.run(2, resumed, False)


def test_buffers_that_the_first_forward_makes_are_told_of() -> None:
    with pytest.raises(
        threads.RanksFailed, match=r"blocks\.0\.0\.(filled|made) of Lazy.*blocks\.1\.0\..* of Lazy"
    ) as e:
        threads.run(2, trained, Lazy, 1, {})
    assert all("cache" not in str(error) for error in e.value.exceptions.values())


class Sometimes(Unused):
    """Makes a buffer for a batch of some kind alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.register_buffer("extra", torch.ones(()))
        return super().forward(x)


def test_a_buffer_that_one_rank_makes_is_an_error_on_all() -> None:
    def refused(rank: int, world: int) -> None:
        engine = polyreme.initialize(net(Sometimes), config(world, 1, {}), loss_fn=F.mse_loss)
        x, y = models.share(batch(0), rank, world)
        with pytest.raises(ModelError, match=r"extra of Sometimes on some ranks.*__init__"):
            engine.train_step((x.abs() * (1 if rank else -1), y))

    threads.run(2, refused)


class Samples(nn.Module):
    """Counts the samples it has seen, in one of several ways, and its forwards in others."""

    def __init__(self, add: Callable[[Any, int], None], dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.mix, self.add = nn.Linear(WIDTH, WIDTH), add
        self.register_buffer("n", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.add(self, len(x))
        return self.mix(x) / self.n


def in_place(module: Any, samples: int) -> None:
    module.n += samples


def anew(module: Any, samples: int) -> None:
    module.n = module.n + samples


def forwards(module: Any, samples: int) -> None:
    for _ in range(samples):  # as a module that is called so often in a forward
        module.n += 1


def once(module: Any, samples: int) -> None:
    module.n = module.n + 1


def made_late(module: Any, samples: int) -> None:
    if not hasattr(module, "late"):
        module.register_buffer("late", torch.zeros(2))
    module.late += samples
    module.n += 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_count_of_a_ranks_samples_is_an_error_and_one_of_forwards_none(accumulation: int) -> None:
    kinds = [lambda: Samples(in_place), lambda: Samples(anew, torch.float32), lambda: Samples(made_late)]
    for kind in kinds:
        with pytest.raises(threads.RanksFailed, match=r"add 4 to .*(n|late) of Samples.*mesh\.dp\.size") as e:
            threads.run(2, trained, kind, accumulation, {})
        assert all(isinstance(error, ModelError) for error in e.value.exceptions.values())
    threads.run(2, trained, kinds[0], accumulation, {"buffers": "rank0"})
    threads.run(1, trained, kinds[0], accumulation, {})
    for add in (forwards, once):
        threads.run(2, trained, lambda add=add: Samples(add), accumulation, {})


class Uncounted(nn.Module):
    """Writes what autograd does not count, from a step on."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("data", torch.zeros(WIDTH))
        self.register_buffer("numpy", torch.zeros(WIDTH))
        self.times, self.begin = 0, begin

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        x = x - self.data - self.numpy
        if self.times >= self.begin:
            self.data.data.lerp_(x.detach().mean(0), 0.5)
            self.numpy.numpy()[:] = x.detach().mean(0).numpy()
        return self.mix(x)


def test_writes_that_nothing_counts_are_found_now_and_then() -> None:
    found = threads.run(2, trained, lambda: Uncounted(2), 1, {"buffers": "average"})
    same(found, plain(lambda: Uncounted(2)))
    for way, text in (("error", r"data of Uncounted"), ("average", r"data of Uncounted for several steps")):
        with pytest.raises(threads.RanksFailed, match=text):
            threads.run(2, trained, lambda: Uncounted(3), 1, {"buffers": way})


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x + torch.rand(x.shape, dtype=x.dtype, generator=self.generator))


def test_generators_that_modules_hold_go_on(tmp_path: Path) -> None:
    def losses(rank: int, world: int, resumed: bool) -> tuple[list[float], list[str]]:
        engine = polyreme.initialize(net(Noise), config(world, 1, {}), loss_fn=F.mse_loss)
        notes = list(engine.load(tmp_path / "saved").notes) if resumed else []
        found = []
        for step in range(2 if resumed else 0, STEPS):
            if step == 2 and not resumed:
                engine.save(tmp_path / "saved")
            found.append(engine.train_step(models.share(batch(step), rank, world)).loss)
        return found[-2:], notes

    assert threads.run(2, losses, False) == threads.run(2, losses, True)
    ((_, notes),) = threads.run(1, losses, True)
    assert any("random numbers" in note for note in notes)
