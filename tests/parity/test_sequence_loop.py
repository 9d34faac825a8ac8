"""A loop of the user's own, over sequences that are divided (`mesh.cp`) or packed, computes what plain
transformers computes in one process: float64, to 1e-10."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sequence_parity import IGNORED, STEPS, Wide, batch_of, model_of, plain, settings
from torch import Tensor

import models
import polyreme
import threads
from examples import whole
from polyreme.errors import BatchError, ModelError

Batch = dict[str, Tensor]
Backward = Callable[[Any, Any, Batch], object]
"""The backward of an engine's output for a micro-batch."""

WAYS: dict[str, Backward] = {
    "engine.backward": lambda engine, output, micro: engine.backward(output.loss),
    "loss.backward": lambda engine, output, micro: output.loss.backward(),
    "weight=": lambda engine, output, micro: engine.backward(output.loss, weight=labels_in(micro)),
}


def labels_in(micro: Batch) -> int:
    """Labels that are predicted, of documents that are whole samples."""
    return int((micro["labels"][:, 1:] != IGNORED).sum())


def micro_batches(batch: Batch, engine: Any) -> Iterator[Batch]:
    mine = models.share(batch, engine.mesh.dp.rank, engine.mesh.dp.size)
    count = engine.config.batch.micro
    for start in range(0, len(mine["input_ids"]), count):
        yield {name: value[start : start + count] for name, value in mine.items()}


def looped(rank: int, world: int, kind: str, config: dict[str, Any], way: str) -> tuple[Any, ...]:
    with polyreme.initialize(model_of("llama"), config) as engine, Wide():
        records = []
        for step in range(STEPS):
            for micro in micro_batches(batch_of(kind, step), engine):
                output = engine(**micro)
                with torch.no_grad():  # whose tokens lie elsewhere, before the backward recomputes
                    engine({name: value[:1, :6] for name, value in batch_of("plain", step).items()})
                WAYS[way](engine, output, micro)
            result = engine.step()
            records.append((result.loss, result.grad_norm))
            assert result.samples == 4
            assert (result.context is not None) == engine.config.computes_attention
            batch = batch_of(kind, step)
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            assert result.tokens == int(mask.sum())
        weights = engine.state_dict()
        engine.eval()
        with torch.no_grad():
            return records, weights, engine(batch_of(kind, STEPS)).loss.item()


def check(kind: str, config: dict[str, Any], way: str = "engine.backward") -> None:
    size = config["mesh"].get("cp", 1) * config["mesh"].get("dp", 1) * config["mesh"].get("tp", 1)
    expected, weights, evaluated = plain("llama", kind)
    for records, found, loss in threads.run(size, looped, kind, config, way):
        for one, other in zip(records, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-10, rel=0)
        assert loss == pytest.approx(evaluated, abs=1e-10, rel=0)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("kind", "mesh", "sections", "way"),
    [
        (
            "packed",
            {"cp": 2},
            {"zero": {"stage": 3}, "memory": {"activations": "recompute"}},
            "engine.backward",
        ),
        ("labels of a few", {"cp": 2}, {"zero": {"stage": 0}}, "loss.backward"),
        ("labels of a few", {"cp": 2}, {}, "weight="),
        ("packed", {}, {"data": {"pack": True}}, "engine.backward"),
        *(
            pytest.param(kind, mesh, {"zero": {"stage": stage}, **sections}, way, marks=whole)
            for kind, mesh, stage, sections, way in [
                ("packed", {"cp": 2, "dp": 2}, 3, {}, "engine.backward"),
                ("labels of a few", {"cp": 2, "dp": 2}, 0, {}, "engine.backward"),
                ("padded", {"cp": 2, "dp": 2}, 2, {"memory": {"activations": "host"}}, "loss.backward"),
                ("left padded", {"cp": 3}, 1, {}, "engine.backward"),
                ("plain", {"cp": 4}, 3, {"context": {"method": "ulysses"}}, "weight="),
                ("packed", {"cp": 2, "tp": 2}, 1, {}, "engine.backward"),
                ("packed", {"cp": 2, "tp": 2}, 3, {"memory": {"activations": "recompute"}}, "loss.backward"),
                ("packed", {"cp": 2}, 1, {"context": {"loss_chunk": 4, "mlp_tile": 4}}, "engine.backward"),
                ("padded", {}, 0, {"context": {"method": "gather"}}, "loss.backward"),
            ]
        ),
    ],
    ids=str,
)
def test_a_loop_of_the_users_own_is_a_plain_one(
    kind: str, mesh: dict[str, Any], sections: dict[str, Any], way: str
) -> None:
    check(kind, settings(mesh, **sections), way)


def penalised(rank: int, world: int, backward: Callable[[Any, Tensor], object]) -> list[Any]:
    """Losses with a term of weights, then scaled ones; the second micro-batch has no label, the first has
    few."""
    found: list[Any] = []
    with polyreme.initialize(model_of("llama"), settings({"cp": world}, zero={"stage": 1})) as engine, Wide():
        for step in range(2):
            batch = batch_of("labels of a few", step)
            batch["labels"][2:] = IGNORED
            for micro in micro_batches(batch, engine):
                loss = engine(**micro).loss
                found.append(loss.item())
                term = 0.1 * engine.module.lm_head.weight.square().mean()
                backward(engine, 1.5 * loss if step else loss + term)
            result = engine.step()
            found += [result.loss, result.grad_norm]
        return found


def test_a_loss_made_of_the_models_own_counts_once() -> None:
    expected = threads.run(1, penalised, polyreme.Engine.backward)[0]
    assert not math.isnan(expected[-1])
    for backward in (polyreme.Engine.backward, lambda engine, loss: loss.backward()):
        for found in threads.run(2, penalised, backward):
            assert found == pytest.approx(expected, abs=1e-10, rel=0, nan_ok=True)


def own_losses(rank: int, world: int, packed: bool) -> list[float]:
    """Cross entropy that the script computes of whole logits, in micro-batches with unequal labels."""
    found = []
    with polyreme.initialize(model_of("llama"), settings({}, data={"pack": packed})) as engine, Wide():
        for step in range(2):
            batch = batch_of("plain", step)
            batch["labels"][2:, 4:] = IGNORED
            for micro in micro_batches(batch, engine):
                logits = engine(**micro).logits[:, :-2]
                engine.backward(F.cross_entropy(logits.flatten(0, 1), micro["labels"][:, 2:].flatten()))
            result = engine.step()
            found += [result.loss, result.grad_norm]
    return found


def test_a_loss_of_the_scripts_own_over_whole_sequences_is_weighted_by_its_labels() -> None:
    expected, found = (threads.run(1, own_losses, packed)[0] for packed in (False, True))
    assert found == pytest.approx(expected, abs=1e-10, rel=0)


def checkpointed(rank: int, world: int, reentrant: bool) -> list[float]:
    """Losses and norms where transformers recomputes blocks, in backwards behind another forward."""
    model: Any = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = []
    with polyreme.initialize(model, settings({"cp": world})) as engine, Wide():
        for step in range(STEPS):
            for micro in micro_batches(batch_of("packed", step), engine):
                loss = engine(**micro).loss
                with torch.no_grad():
                    engine({name: value[:1, :6] for name, value in batch_of("plain", step).items()})
                loss.backward()
            result = engine.step()
            found += [result.loss, result.grad_norm]
    return found


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=whole)])
def test_blocks_that_transformers_recomputes_are_those_of_their_forward(reentrant: bool) -> None:
    expected = [number for record in plain("llama", "packed")[0] for number in record]
    for found in threads.run(2, checkpointed, reentrant):
        assert found == pytest.approx(expected, abs=1e-10, rel=0)


def seen(rank: int, world: int) -> None:
    batch = batch_of("plain", 0)
    config = {"mesh": {"cp": world}, "batch": {"size": 4}, "precision": {"compute": "fp64"}}
    with polyreme.initialize(model_of("llama"), config) as engine, Wide():
        output = engine(**batch, output_hidden_states=True)
        part = (4, 7)  # of 13 tokens, and one of padding
        assert output.logits.shape[:2] == part
        assert {hidden.shape[:2] for hidden in output.hidden_states} == {part}
        first, *_ = engine(**batch, return_dict=False)
        assert first.item() == output.loss.item()
        ids = {"input_ids": batch["input_ids"]}
        assert engine(ids).loss is None
        # a loss of the script's own counts as a mean over the samples, and over the ranks
        engine.backward(engine(ids).logits.square().mean())
        assert engine.step().loss > 0
        for name in ("use_cache", "output_attentions"):
            with pytest.raises(BatchError, match=f"{name} would be of the keys of whole sequences"):
                engine(**batch, **{name: True})
        with pytest.raises(BatchError, match="logits_to_keep = 1 would be of this rank's part"):
            engine(**ids, logits_to_keep=1)
        for call in (lambda: engine(batch["input_ids"]), lambda: engine(batch["input_ids"], labels=None)):
            with pytest.raises(BatchError, match=r"cannot be cut over mesh\.cp"):
                call()
        with pytest.raises(ModelError, match=r"outside of train_step, eval_step and engine\(\.\.\.\)"):
            engine.module(**ids)


def test_an_output_is_of_this_ranks_part_but_for_the_loss() -> None:
    threads.run(2, seen)
