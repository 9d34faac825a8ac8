"""What a script changes of a model after `initialize`: taken in by `engine.refresh()`, exactly as plain
PyTorch goes on, or refused."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import models
import polyreme
import probe
import training
from cover import some
from polyreme.checkpoint.open import open_source
from polyreme.errors import BatchError, ModelError
from pool import Ranks

Change = Callable[[nn.Module], None]


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * ((x @ self.down.T) @ self.up.T)


def adapt(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)


def unfreeze(model: nn.Module) -> None:
    model.model.layers[1].requires_grad_(True)
    model.lm_head.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model.model.layers[2].requires_grad_(False)


def freeze_and_unfreeze(model: nn.Module) -> None:
    freeze(model)
    unfreeze(model)


def new_head(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    model.lm_head = nn.Linear(24, models.VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(models.VOCABULARY, 24, generator=generator))
        model.lm_head.bias.zero_()


def fewer_layers(model: nn.Module) -> None:
    del model.model.layers[2]


def resized(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.resize_token_embeddings(models.VOCABULARY + 3, mean_resizing=False)


def tied(model: nn.Module) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


CHANGES: dict[str, Change] = {
    "unfrozen": unfreeze,
    "frozen": freeze,
    "both": freeze_and_unfreeze,
    "adapters": adapt,
    "head": new_head,
    "layers": fewer_layers,
    "vocabulary": resized,
    "tied": tied,
}


def base() -> nn.Module:
    model = models.build("llama")
    model.model.layers[1].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


def plain(change: Change) -> list[float]:
    """Two steps, the change, two more; AdamW's states of what stays go on, clipping at 1."""
    model = base()

    def optimizer_of(before: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        made = torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.dim() >= 2]},
                {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )
        made.state.update({p: before.state[p] for p in trained if before is not None and p in before.state
                           and before.state[p]["exp_avg"].shape == p.shape})  # fmt: skip
        return made

    losses = []
    optimizer = optimizer_of(None)
    for step in range(4):
        if step == 2:
            change(model)
            model.double()
            optimizer = optimizer_of(optimizer)
        batch = models.tokens(training.SAMPLES, seed=step)
        total, weight = models.causal_loss(model(**batch), batch)
        loss = total / weight
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        del loss, total  # its graph knows the shapes of now
    return losses


def refreshed(
    rank: int, world: int, settings: list[dict[str, Any]], changes: list[str], folder: Path
) -> dict[str, list[list[float]]]:
    """By change, the losses under some of the settings; the change made beside full parameters, so that it
    may read them."""
    found: dict[str, list[list[float]]] = {name: [] for name in changes}
    for at, name in enumerate(changes):
        for config in (settings * len(changes))[at::2][:2]:
            engine = polyreme.initialize(base(), config, loss_fn=models.causal_loss)
            losses = []
            for step in range(4):
                batch = models.share(
                    models.tokens(training.SAMPLES, seed=step), engine.mesh.dp.rank, engine.mesh.dp.size
                )
                if step == 2:
                    with engine.full_parameters() as model:
                        CHANGES[name](model)
                    if name != "frozen":  # a frozen parameter is left alone anyway
                        with pytest.raises(ModelError, match="call engine"):
                            engine.train_step(batch)
                        with pytest.raises(ModelError, match="call engine"):
                            engine(**batch)
                    engine.refresh()
                losses.append(engine.train_step(batch).loss)
            assert engine.state.step == 4
            found[name].append(losses)
        if engine.mesh.tp.size == 1:
            path = engine.save(folder / name)
            engine.train_step(batch)
            after = engine.state_dict(master=True)
            engine.load(path)
            engine.train_step(batch)
            assert all(
                torch.equal(tensor, after[key]) for key, tensor in engine.state_dict(master=True).items()
            ), name
    return found


def settings(world: int) -> list[dict[str, Any]]:
    fp64 = {"precision": {"compute": "fp64"}}
    return [
        training.config(world, zero={"stage": 0}, **fp64),
        training.config(world, accumulation=2, zero={"stage": 2}, **fp64),
        training.config(world, zero={"stage": 3}, memory={"activations": "recompute"}, **fp64),
        training.config(
            world,
            zero={"stage": 3},
            memory={"states": "host", "params": "host", "activations": "host"},
            **fp64,
        ),
    ]


def all_plain(rank: int, world: int) -> dict[str, list[float]]:
    return {name: plain(change) for name, change in CHANGES.items()}


@pytest.fixture(scope="module")
def expected(ranks: Ranks) -> dict[str, list[float]]:
    """The losses of plain PyTorch, by change."""
    [found] = ranks(1, all_plain)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_as_plain_pytorch_does(
    world: int, ranks: Ranks, tmp_path: Path, expected: dict[str, list[float]]
) -> None:
    for found in ranks(world, refreshed, settings(world), list(CHANGES)[:: 3 - world], tmp_path):
        for name, runs in found.items():
            for losses in runs:
                assert losses == pytest.approx(expected[name], rel=1e-10), name


def test_over_tensor_parallelism_what_is_frozen_may_change(
    ranks: Ranks, tmp_path: Path, expected: dict[str, list[float]]
) -> None:
    config = training.config(1, mesh={"tp": 2}, precision={"compute": "fp64"})
    for found in ranks(2, refreshed, [config], ["unfrozen", "both"], tmp_path):
        for name, [losses] in found.items():
            assert losses == pytest.approx(expected[name], rel=1e-10), name


def left(rank: int, world: int) -> list[str]:
    """What is left of the division before, by stage."""
    found = []
    for stage in (0, 2, 3):
        engine = polyreme.initialize(
            base(), training.config(world, zero={"stage": stage}), loss_fn=models.causal_loss
        )
        old = {name: weakref.ref(each) for name, each in probe.renewed(engine).items()}
        unfreeze(engine.module)
        engine.refresh()
        gc.collect()
        found += [f"stage {stage}: {name}" for name, known in old.items() if known() is not None]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_left_of_the_division_before(world: int, ranks: Ranks) -> None:
    assert ranks(world, left) == [[]] * world


def frozen(rank: int, world: int) -> None:
    """Freezing alone needs no refresh: the optimizer leaves the parameter alone, weight decay included."""
    for stage in (0, 2, 3):
        engine = polyreme.initialize(
            base(), training.config(world, zero={"stage": stage}, precision={"compute": "fp64"})
        )
        batch = models.share(models.tokens(training.SAMPLES), rank, world)
        engine.train_step(batch)
        freeze(engine.module)
        before = engine.state_dict()
        engine.train_step(batch)
        after = engine.state_dict()
        changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert changed == {name for name, p in engine.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_frozen_meanwhile_is_left_alone(world: int, ranks: Ranks) -> None:
    ranks(world, frozen)


def refused(rank: int, world: int, folder: Path) -> None:
    batch = models.share(models.tokens(training.SAMPLES), rank, world)

    def engine_of(**sections: Any) -> polyreme.Engine:
        return polyreme.initialize(base(), training.config(world, **sections))

    engine = engine_of(zero={"stage": 3})
    engine.module.extra = nn.Linear(2, 2)
    says = r"added extra.weight, extra.bias\. To train it as it is now, call engine.refresh\(\)"
    for call in (
        lambda: engine.train_step(batch),
        lambda: engine(**batch),
        lambda: engine.save(folder / "none"),
        lambda: engine.load(folder / "none"),
        lambda: engine.eval_step(batch),
    ):
        with pytest.raises(ModelError, match=says):
            call()
    del engine.module.extra
    engine.module.extra = nn.Dropout()  # without parameters
    out = engine(**batch)
    engine.backward(out.loss)
    engine.module.lm_head.requires_grad_(True)
    with pytest.raises(ModelError, match=r"unfrozen lm_head.weight\."):
        engine.step()
    with pytest.raises(BatchError, match="in the middle of a step"):
        engine.refresh()
    engine.module.lm_head.requires_grad_(False)
    assert engine.step().step == 1
    if rank == 0:
        unfreeze(engine.module)
    with pytest.raises(ModelError, match="different models"):
        engine.refresh()
    unfreeze(engine.module)
    engine.refresh()
    engine.train_step(batch)

    files = engine_of(memory={"states": f"{folder}/"})
    unfreeze(files.module)
    with pytest.raises(ModelError, match="is in files"):
        files.refresh()
    freeze_again(files.module)
    files.train_step(batch)  # as before
    files.close()
    for mesh, change, says in (("pp", unfreeze, "mesh.pp"), ("tp", adapt, "mesh.tp its layers are divided")):
        cut = polyreme.initialize(base(), training.config(1, mesh={mesh: 2}))
        with pytest.raises(ModelError, match=says):
            if mesh == "pp":
                cut.module.requires_grad_(True)
            else:
                change(cut.module)
            cut.refresh()


def freeze_again(model: nn.Module) -> None:
    model.model.layers[1].requires_grad_(False)
    model.lm_head.requires_grad_(False)


def test_what_cannot_be_taken_in_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, refused, tmp_path)


def states(rank: int, world: int, folder: Path) -> None:
    """Of what stays, every number of weights, masters and states is to the last bit what it was, in whatever
    form it is kept."""
    forms: dict[str, dict[str, Any]] = {
        "8bit": {"optimizer": {"states": "8bit"}},
        "bf16": {"precision": {"compute": "bf16"}, "optimizer": {"states": "bf16"}, "zero": {"stage": 3}},
        "host": {
            "precision": {"compute": "bf16"},
            "memory": {"states": "host", "params": "host"},
            "zero": {"stage": 3},
        },
        "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}, "zero": {"stage": 0}},
    }
    for name, change, at in some(2, tuple(forms), ("both", "adapters"), (2, 1)):
        if at == world:
            engine = polyreme.initialize(base().float(), training.config(world, **forms[name]))
            batch = models.share(models.tokens(training.SAMPLES), rank, world)
            for _ in range(2):
                engine.train_step(batch)
            before = open_source(engine.save(folder / "before"))
            with engine.full_parameters() as model:
                CHANGES[change](model)
            engine.refresh()
            after = open_source(engine.save(folder / "after"))
            trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
            compared = 0
            for kind, tensors in before.tensors.items():
                for tensor, info in tensors.items():
                    kept = (
                        tensor.replace("proj.weight", "proj.base.weight")
                        if tensor not in after.tensors["model"]
                        else tensor
                    )
                    if kind != "model" and kept not in trained:
                        assert kept not in after.tensors.get(kind, {})
                        continue
                    size = math.prod(info.shape)
                    assert torch.equal(before.read(kind, tensor, 0, size), after.read(kind, kept, 0, size)), (
                        name,
                        kind,
                        tensor,
                    )
                    compared += kind not in ("model", "master", "step")
            assert compared >= 8
            engine.train_step(batch)


@pytest.mark.parametrize("world", [1, 2])
def test_states_of_all_forms_stay_to_the_last_bit(world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks(world, states, tmp_path)


def scheduled(rank: int, world: int, make: str) -> list[float]:
    """Learning rates of a torch scheduler that goes on over a refresh."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    given: dict[str, Any] = {
        "object": schedulers.ExponentialLR(optimizer, 0.5),
        "factory": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5),
        "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    }
    engine = polyreme.initialize(base(), training.config(world), lr_scheduler=given[make])
    batch = models.share(models.tokens(training.SAMPLES), rank, world)
    rates = []
    for step in range(4):
        if step == 2:
            freeze_and_unfreeze(engine.module)
            engine.refresh()
        engine.train_step(batch)
        if make == "plateau":
            engine.plateau(1.0)
        rates.append(engine.state.lr)
    return rates


def test_a_scheduler_goes_on(ranks: Ranks) -> None:
    for make in ("object", "factory", "plateau"):
        [rates] = ranks(1, scheduled, make)
        assert rates == pytest.approx([1e-2 * 0.5 ** (step + (make != "plateau")) for step in range(4)]), make


def by_dimension(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A group for each number of dimensions that there is."""
    groups: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.dim(), []).append(p)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-2)


def test_a_scheduler_of_other_groups_is_refused() -> None:
    config = {"batch": {"size": 4}, "precision": {"compute": "fp64"}}
    batch = torch.ones(4, 4).double(), torch.ones(4, 1).double()
    for scheduler in (None, lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].bias.requires_grad_(False)
        model[1].bias.requires_grad_(False)
        engine = polyreme.initialize(
            model, config, loss_fn=nn.functional.mse_loss, optimizer=by_dimension, lr_scheduler=scheduler
        )
        engine.train_step(batch)
        model[1].weight.requires_grad_(False)
        engine.refresh()  # one group, as before
        engine.train_step(batch)
        model[0].bias.requires_grad_(True)
        if scheduler is None:
            engine.refresh()
        else:
            with pytest.raises(
                ModelError, match=r"goes by the optimizer's 1 groups, and of the model as it is now it has 2"
            ):
                engine.refresh()
            model[0].bias.requires_grad_(False)
        engine.train_step(batch)


def normed(rank: int, world: int) -> None:
    """Running statistics go on, and those of a norm that is new begin with rank 0's."""
    for mode in ("sync", "broadcast", "rank"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
        model[0].requires_grad_(False)
        config = {**training.config(world, precision={"compute": "fp64"}), "batch_norm": mode}
        engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(training.SAMPLES, n, generator=generator, dtype=torch.float64) for n in (4, 1))
        mine = models.share((x, y), rank, world)
        before: dict[str, Tensor] = {}
        for step in range(4):
            if step == 2:
                before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
                engine.module[0].requires_grad_(True)
                engine.module.append(nn.BatchNorm1d(1, dtype=torch.float64))
                engine.module[4].running_mean.fill_(rank)
                engine.refresh()
                assert all(
                    torch.equal(buffer, before[name])
                    for name, buffer in engine.module.named_buffers()
                    if name in before
                )
                assert not engine.module[4].running_mean.any()
                del engine.module[4]
                engine.refresh()
            engine.train_step(mine)
        assert engine.module[1].num_batches_tracked == 4


@pytest.mark.parametrize("world", [1, 2])
def test_running_statistics_go_on(world: int, ranks: Ranks) -> None:
    ranks(world, normed)
