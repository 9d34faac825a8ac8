"""How many samples a micro-batch has, where the config leaves it open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import polyreme
import threads
import training
from polyreme.config import Config
from polyreme.job import fit
from polyreme.job.fit import GIB, USED
from polyreme.step.kept import Kept, kept

LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4}


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
    found = kept(model, settings, training.SAMPLES, torch.device("cpu"))
    engine = polyreme.initialize(models.build("gpt2", torch.float32), settings)
    engine.train_step(models.batch_of("gpt2", training.SAMPLES))
    real = engine.memory()["activations"]
    engine.close()
    assert isinstance(found, Kept) and found.largest < real
    if activations == "keep":
        assert real <= found.bytes < 1.05 * real
    else:
        assert real < found.bytes < 6 * real


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
    monkeypatch.setattr(fit, "own_memory", lambda: 60 << 20)
    plenty = config(2)

    def agree(rank: int, world: int) -> tuple[Any, Any]:
        found, (reason,) = fit.agreed(plenty, 512)
        return found.resolve(world).batch.micro, reason

    (first, reason), second = threads.run(2, agree)
    assert second == (first, reason) and 1 < first < 24 and reason.endswith("of 0.0293 GiB")


def test_what_fits_where_it_cannot_be_told() -> None:
    """Without a model, and for micro-batches that the config says."""
    unknown = Config.load({"model": {"path": "no/such"}, "batch": {"size": 8}}).resolve(1)
    assert fit.fit(unknown, GIB) == fit.Fit(None, "what fits is not known, as the model is not")
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
