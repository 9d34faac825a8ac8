"""Loops of other libraries over sequences that are divided (`mesh.cp`) compute what plain transformers, or
the library itself, computes in one process: float64, to 1e-10. And what cannot be is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_sequence_parity import IGNORED, STEPS, Wide, batch_of, model_of, plain, settings, tiny
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import threads
from examples import whole
from polyreme.compat.deepspeed.json_config import translate
from polyreme.errors import ConfigError, PolyremeError
from polyreme.integrations import PolyremeStrategy, PolyremeTrainer, accelerate

# ---- Accelerate


def samples(kind: str) -> list[dict[str, Tensor]]:
    """Those of all steps, one after the other."""
    batches = [batch_of(kind, step) for step in range(STEPS)]
    return [{name: value[i] for name, value in batch.items()} for batch in batches for i in range(4)]


def looped(rank: int, world: int, kind: str, config: dict[str, Any]) -> Any:
    loader: Any = DataLoader(samples(kind), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, _ = accelerate.prepare(model_of("llama"), None, loader, config=config)
    records = []
    with model.engine as engine, Wide():
        for batch in loader:
            model.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.last is not None:
                records.append((optimizer.last.loss, optimizer.last.grad_norm))
                optimizer.last = None
        return records, engine.state_dict()


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("packed", {"cp": 2}),
        pytest.param("padded", {"cp": 2, "dp": 2}, marks=whole),
        pytest.param("labels of a few", {"cp": 2, "dp": 2}, marks=whole),
        pytest.param("packed", {"cp": 2, "tp": 2}, marks=whole),
    ],
    ids=str,
)
def test_a_loop_of_accelerate(kind: str, mesh: dict[str, int]) -> None:
    expected, weights, _ = plain("llama", kind)
    size = mesh["cp"] * mesh.get("dp", 1) * mesh.get("tp", 1)
    for records, found in threads.run(size, looped, kind, settings(mesh, zero={"stage": 3})):
        for one, other in zip(records, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-10, rel=0)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-10, msg=name)


# ---- Hugging Face's Trainer


def rows(packed: bool) -> list[dict[str, Tensor]]:
    """Four samples of two documents each, or each document by itself; they have unlike numbers of labels."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for i in range(8):
        ids = torch.randint(3, 64, (8,), generator=draw)
        labels = ids.clone()
        labels[: i % 5 + 1] = IGNORED
        found.append({"input_ids": ids, "labels": labels, "document_ids": torch.full((8,), i)})
    if not packed:
        return [{name: each[name] for name in ("input_ids", "labels")} for each in found]
    pairs = zip(found[::2], found[1::2], strict=True)
    return [{name: torch.cat([one[name], other[name]]) for name in one} for one, other in pairs]


def trained(rank: int, world: int, folder: str, mesh: dict[str, int] | None) -> Any:
    """Logs and weights of a run in which each step has all samples."""
    dp = (mesh or {}).get("dp", 1)
    samples, micro = rows(mesh is not None), (4 if mesh is None else 2 // dp)
    args = TrainingArguments(
        folder, per_device_train_batch_size=micro, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, max_grad_norm=0.05, weight_decay=0.1, logging_steps=1, save_strategy="no",
        eval_strategy="epoch", per_device_eval_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples}
    with Wide():
        if mesh is None:
            trainer = Trainer(model_of("llama"), args, **data)
        else:
            config = {"mesh": mesh, "precision": {"compute": "fp64"}, "zero": {"stage": 1}}
            trainer = PolyremeTrainer(model_of("llama"), args, polyreme=config, **data)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        log = [[each[name] for each in trainer.state.log_history if name in each] for name in names]
        if mesh is None:
            return log, {name: each.detach() for name, each in trainer.model.named_parameters()}
        with trainer.engine as engine:
            return log, engine.state_dict()


def of_threads(size: int, *args: Any) -> Any:
    """Results of `trained` on threads, of which Trainer sees that each is a rank."""
    rank = property(lambda self: threads.HERE.rank)
    whole_world = property(lambda self: size)
    with patch.multiple(TrainingArguments, world_size=whole_world, process_index=rank):
        return threads.run(size, trained, *args)


@pytest.mark.parametrize(
    "mesh",
    [{"cp": 2}, *(pytest.param({"cp": 2, name: 2}, marks=whole) for name in ("dp", "tp", "pp"))],
    ids=str,
)
def test_trainer(mesh: dict[str, int], tmp_path: Path) -> None:
    """Samples have several documents, of which only the engine knows; plain Trainer gets each by itself."""
    ((expected, weights),) = of_threads(1, str(tmp_path), None)
    size = 2 * max({**mesh, "cp": 1}.values())
    for log, found in of_threads(size, str(tmp_path), mesh):
        assert [*itertools.chain(*log)] == pytest.approx([*itertools.chain(*expected)], abs=1e-10, rel=0)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-10, msg=name)


# ---- what is refused


def test_what_a_door_cannot_divide_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.cp = 2: training_step calls"):
        PolyremeStrategy({"mesh": {"cp": 2}})
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    metrics: dict[str, Any] = {"compute_metrics": lambda found: {}}
    for config in ({"mesh": {"cp": 2}}, {"data": {"pack": True}}):
        with (
            patch.object(TrainingArguments, "world_size", property(lambda self: 2)),
            pytest.raises(ConfigError, match="compute_metrics"),
        ):
            PolyremeTrainer(tiny("llama")(), args, polyreme=config, **metrics)
    with pytest.raises(ConfigError, match=r"mesh\.cp = 'auto': data are shared out before"):
        PolyremeTrainer(tiny("llama")(), args, polyreme={"mesh": {"cp": "auto"}})
    with pytest.raises(PolyremeError, match=r"sequence_parallel_size = 2: scripts cut .*\n.*mesh\.cp"):
        translate({"train_batch_size": 2, "sequence_parallel_size": 2}, 2)
    with pytest.raises(PolyremeError, match=r"mesh = .*no such key\n.*give it to polyreme\.initialize"):
        translate({"train_batch_size": 2, "mesh": {"cp": 2}}, 2)
