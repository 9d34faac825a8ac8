"""How many samples a micro-batch has, where the config leaves it open."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import polyreme
import threads
import training
from cover import ALL
from polyreme.config import Config
from polyreme.job import fit
from polyreme.step.memory import fit as step
from polyreme.step.memory.fit import GIB, USED, Fit
from polyreme.step.memory.kept import Kept, kept
from polyreme.step.settings import run_settings

LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4}


SIZE = 32


def config(world: int, **sections: Any) -> Config:
    given = {"model": {"config": LLAMA}, "data": {"sequence": 64}, "batch": {"size": 48}, **sections}
    return Config.load(given).resolve(world)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_is_kept_is_what_an_engine_measures(activations: str) -> None:
    """And attention masks, which transformers makes of fake tensors only. Of recomputed blocks their inputs;
    and one of them, which the engine does not count."""
    settings = Config.load(
        training.config(1, memory={"activations": activations}, data={"sequence": 12})
    ).resolve(1)
    with torch.device("meta"):
        model = models.build("gpt2", torch.float32)
    found = kept(model, run_settings(settings).forward, training.SAMPLES, torch.device("cpu"))
    engine = polyreme.initialize(models.build("gpt2", torch.float32), settings)
    engine.train_step(models.batch_of("gpt2", training.SAMPLES))
    real = engine.memory()["activations"]
    engine.close()
    assert isinstance(found, Kept) and found.largest < real
    if activations == "keep":
        assert real <= found.bytes < 1.05 * real
    else:
        assert real < found.bytes < 6 * real


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_is_computed_over_tiles_is_counted_once(activations: str) -> None:
    """The loss of 16 tokens of 96, and MLPs over 16 of them, take as much less as an engine measures."""
    found, real = list[Kept](), list[int]()
    for context in ({}, {"loss_chunk": 16, "mlp_tile": 16}):
        sections = {"memory": {"activations": activations}, "data": {"sequence": 12}, "context": context}
        settings = Config.load(training.config(1, **sections)).resolve(1)
        with torch.device("meta"):
            model = models.build("llama", torch.float32)
        counted = kept(model, run_settings(settings).forward, training.SAMPLES, torch.device("cpu"))
        assert isinstance(counted, Kept)
        found.append(counted)
        with polyreme.initialize(models.build("llama", torch.float32), settings) as engine:
            engine.train_step(models.tokens(training.SAMPLES))
            real.append(engine.memory()["activations"])
    whole, light = found
    assert all(each.bytes >= measured for each, measured in zip(found, real, strict=True))
    if activations == "keep":
        assert whole.bytes - light.bytes == pytest.approx(real[0] - real[1], rel=0.01)
    logits, tokens = 4 * models.VOCABULARY, 12 * training.SAMPLES
    assert whole.bytes - light.bytes > tokens * logits
    assert light.largest < tokens * logits <= whole.largest
    assert whole.tile == 0 and 2 * 16 * logits < light.tile < 6 * 16 * logits


def test_more_samples_fit_where_the_loss_is_in_chunks() -> None:
    wide = {"model": {"config": {**LLAMA, "vocab_size": 4096}}}
    contexts: list[dict[str, int]] = [{}, {"loss_chunk": 64}, {"loss_chunk": 64, "mlp_tile": 64}]
    found = [fit.fit(config(1, context=each, **wide), 64 << 20).micro or 48 for each in contexts]
    assert found == sorted({*found})


def test_as_many_samples_as_fit() -> None:
    """The fewest parts of a rank's 24 samples that fit; it stays so when the config is resolved again."""
    plenty = config(2)
    assert plenty.batch.micro == 24
    found = fit.fit(plenty, 64 * GIB)
    assert found.micro is None and found.reason.startswith("all fits: 24 samples keep ")
    least = fit.fit(plenty, 1)
    assert least.micro == 1 and not least.fits and "not even one sample" in least.reason
    need = float(least.reason.split(": ")[1].split()[0]) * GIB
    seen = set()
    for factor in (1.2, 2, 4, 8, 16, 32):
        found = fit.fit(plenty, int(need * factor / USED))
        fitted = plenty if found.micro is None else plenty.fitted(found.micro)
        seen.add(fitted.batch.micro)
        assert 24 % int(fitted.batch.micro) == 0 and fitted.origins["batch.micro"] == "derived"
        assert fitted.resolve(2) == fitted and fitted.resolve(2).batch.micro == fitted.batch.micro
        assert fitted.resolve(1).batch.micro <= 2 * int(fitted.batch.micro)
    assert len(seen) > 3 and max(seen, key=int) == 24


def test_ranks_agree_on_what_fits_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on one host have a part of its memory each; an engine gets the config that all of them have."""
    monkeypatch.setattr(step, "own_memory", lambda: 60 << 20)
    plenty = config(2)

    def agree(rank: int, world: int) -> tuple[Any, Any]:
        found, (reason,) = fit.agreed(plenty, 512)
        return found.resolve(world).batch.micro, reason

    (first, reason), second = threads.run(2, agree)
    assert second == (first, reason) and 1 < first < 24 and reason.endswith("of 0.0293 GiB")


def test_what_fits_where_it_cannot_be_told() -> None:
    """Without a model, and for micro-batches that the config says."""
    unknown = Config.load({"model": {"path": "no/such"}, "batch": {"size": 8}}).resolve(1)
    assert fit.fit(unknown, GIB) == Fit(None, "what fits is not known, as the model is not")
    files = {"memory": {"states": "no/such", "gradients": "no/such"}, "zero": {"reduce_every": "step"}}
    found = fit.fit(config(2, **files), 30 << 20)
    assert found.micro is None and "not known: zero.reduce_every = 'step'" in found.reason
    said = config(1, batch={"size": 8, "micro": 4})
    assert fit.agreed(said, 512) == (said, [])


@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2, "sequence_parallel": True}},
        {"mesh": {"pp": 2}},
        {"zero": {"stage": 3}},
    ],
)
def test_a_divided_model_lets_more_samples_fit(sections: dict[str, Any]) -> None:
    world = 2
    alone = fit.fit(config(1, batch={"size": 16}), 40 << 20)
    divided = config(world, batch={"size": 16 if "mesh" in sections else 32}, **sections)
    found = fit.fit(divided, 40 << 20)
    assert (found.micro or divided.batch.micro) >= (alone.micro or 16) or "mesh" in sections
    assert found.fits and "keep" in found.reason


def layers() -> nn.Module:
    """Of torch's own."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1), nn.GroupNorm(7, 7), nn.GELU(), nn.Flatten(), nn.Linear(7 * 64, 5)
    )


# case, ranks, sections
FIRST: list[tuple[str, int, dict[str, Any]]] = [
    ("layers", 1, {}),
    ("layers", 2, {"zero": {"stage": 3}}),
    ("gpt2", 2, {"mesh": {"pp": 2}}),
]
if ALL in os.environ:
    FIRST += [
        ("gpt2", 1, {}),
        ("llama", 1, {"precision": {"compute": "bf16"}}),
        ("llama", 2, {"mesh": {"tp": 2}}),
        ("gpt2", 2, {"batch": {"mean": "ranks"}}),
        ("gpt2", 2, {"zero": {"stage": 0}, "memory": {"states": "host", "activations": "recompute"}}),
        ("llama", 2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}),
    ]


@pytest.mark.parametrize(("case", "world", "sections"), FIRST)
def test_the_first_batch_of_a_script_tells_what_fits(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    case: str,
    world: int,
    sections: dict[str, Any],
) -> None:
    """The steps are those of such micro-batches given by hand, to the last bit."""
    memory = 1
    monkeypatch.setattr(step, "own_memory", lambda: memory)
    monkeypatch.setitem(models.CASES, "layers", (layers, models.images, F.cross_entropy))

    def given(micro: int | str) -> dict[str, Any]:
        batch = {"size": SIZE, **sections.get("batch", {})}
        return training.config(world, **{**sections, "batch": batch | {"micro": micro}})

    def trained(rank: int, world: int, micro: int | str) -> tuple[training.Run, int]:
        model = models.build(case, torch.float32)
        engine = polyreme.initialize(model, given(micro), loss_fn=models.CASES[case][2])
        records = []
        for seed in range(2):
            batch = models.batch_of(case, SIZE, seed, torch.float32)
            result = engine.train_step(models.share(batch, engine.mesh.dp.rank, engine.mesh.dp.size))
            records.append((result.loss, result.grad_norm))
        return (records, engine.state_dict(master=True)), int(engine.config.batch.micro)

    def derived() -> tuple[int, list[str]]:
        """What ranks found, and what was said."""
        recwarn.clear()
        found = threads.run(world, trained, "auto")
        micro, said = found[0][1], [text for each in recwarn if "batch.micro" in (text := str(each.message))]
        for (run, mine), (expected, _) in zip(found, threads.run(world, trained, micro), strict=True):
            assert training.differences(run, expected) == [] and mine == micro
        return micro, said

    micro, (said,) = derived()
    assert micro == 1 and said.startswith("batch.micro = 1 is derived: not even one sample fits: ")
    memory = int(float(said.split("sample fits: ")[1].split()[0]) * GIB * 1.4 * world / USED)
    micro, (said,) = derived()
    most = Config.load(given("auto")).resolve(world).batch.micro
    assert 1 < micro < most and said.startswith(f"batch.micro = {micro} is derived: {micro} samples keep ")
    memory = 1 << 40
    assert derived() == (most, [])


def test_a_run_that_goes_on_has_the_micro_batches_that_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where its first batch is another, or the machine."""
    monkeypatch.setattr(step, "own_memory", lambda: 1)
    config = training.config(1, batch={"micro": "auto"})
    torch.manual_seed(0)
    with polyreme.initialize(nn.Sequential(nn.Linear(9, 9)), config, loss_fn=F.mse_loss) as engine:
        engine.save(tmp_path / "new")
        with pytest.warns(UserWarning, match="batch.micro = 1 is derived"):
            engine.train_step(models.vectors(training.SAMPLES))
        engine.save(tmp_path / "saved")
        expected = engine.train_step(models.vectors(training.SAMPLES, 1)).loss
    monkeypatch.setattr(step, "own_memory", lambda: 1 << 40)
    with polyreme.initialize(nn.Sequential(nn.Linear(9, 9)), config, loss_fn=F.mse_loss) as engine:
        engine.load(tmp_path / "saved")
        engine.save(tmp_path / "again")
        engine.load(tmp_path / "again")
        assert engine.train_step(models.vectors(training.SAMPLES, 1)).loss == expected
        assert engine.config.batch.micro == 1
    with polyreme.initialize(nn.Sequential(nn.Linear(9, 9)), config, loss_fn=F.mse_loss) as engine:
        engine.load(tmp_path / "new")
        engine.train_step(models.vectors(training.SAMPLES))
        assert engine.config.batch.micro == training.SAMPLES


@functools.lru_cache
def mask(size: int) -> torch.Tensor:
    """As scripts keep them outside of modules."""
    return torch.ones(size)


class Own(nn.Linear):
    """A script's own layer, which does what it likes."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Own.calls += 1
        return super().forward(x) * mask(9)

    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit("copied")


def by_value(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A forward that draws, as some of transformers', and looks at numbers."""
    random.random()
    return self.weight[0] * x if float(x.detach().sum()) > 0 else x + self.bias


@pytest.mark.parametrize(
    "what", ["own", "numbers", "patched", "hooked", "normalised", "list", "files", "own loop"]
)
def test_what_a_script_does_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """Where what fits cannot be known, all of a rank's share is one micro-batch; modules of a script's own
    classes are not copied or called for it, nothing is drawn, and no hook hears of what has no numbers."""
    monkeypatch.setattr(step, "own_memory", lambda: 1)
    monkeypatch.setattr(Own, "calls", 0)
    mask.cache_clear()
    tiers = {"states": str(tmp_path), "params": str(tmp_path), "gradients": str(tmp_path)}
    sections = {"memory": tiers, "zero": {"stage": 3}} if what == "files" else {}
    layer, seen = (Own if what == "own" else nn.Linear)(9, 9), []
    if what == "patched":
        forward = layer.forward
        layer.forward = lambda x: forward(x)
    elif what == "hooked":
        layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    elif what == "numbers":
        monkeypatch.setattr(nn.Linear, "forward", by_value)
    model = nn.Sequential(layer, *[nn.BatchNorm1d(9)] * (what == "normalised"), nn.Dropout(0.5))
    x, y = models.vectors(training.SAMPLES)
    engine = polyreme.initialize(
        model, training.config(1, batch={"micro": "auto"}, **sections), loss_fn=F.mse_loss
    )
    torch.manual_seed(1)
    random.seed(1)
    if what == "own loop":
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    elif what == "hooked":
        with pytest.warns(UserWarning, match="batch.micro = 1 is derived"):
            engine.train_step((x, y))
        assert len(seen) == training.SAMPLES and float(sum(seen).sum()) is not None
    else:
        engine.train_step([(x, y)] if what == "list" else (x, y))
    assert engine.config.batch.micro == (1 if what == "hooked" else training.SAMPLES)
    assert Own.calls == (what == "own")
    drawn = torch.rand(1), random.random()
    torch.manual_seed(1)
    random.seed(1)
    for _ in range(what == "numbers"):
        random.random()
    for _ in range(int(engine.config.accumulation)):
        nn.functional.dropout(torch.ones(training.SAMPLES // engine.config.accumulation, 9), 0.5)
    assert drawn == (torch.rand(1), random.random())
    engine.close()
