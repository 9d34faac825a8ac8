"""PolyremeTrainer and `integrations.accelerate.prepare` against Trainer and Accelerate over
DistributedDataParallel; and what they refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from door_scripts import run, same
from examples import whole
from polyreme import Config
from polyreme.errors import ConfigError
from polyreme.integrations.shared import completed, data_rank

CASES = ("trainer", "zero2", "zero3", "tp", "pp", "cp", "loop", "loop3")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("integrations")
    return run(folder / "facts", "integrations.py", CASES, door=False)


@whole
@pytest.mark.parametrize("case", ["zero2", "zero3", "tp", "pp", "cp"])
def test_trainer(facts: Any, case: str) -> None:
    same(facts[case], facts["trainer"], 2e-6)


@whole
def test_loop(facts: Any) -> None:
    same(facts["loop3"], facts["loop"])


def test_two_who_say_different_things() -> None:
    config = Config.load({"batch": {"size": 8}, "mesh": {"tp": 2}})
    told = {
        "batch.size": (8, "a loader"),
        "batch.micro": (2, "a loader"),
        "optimizer.clip": (0.5, "a trainer"),
    }
    made = completed(config, told)
    assert (made.batch.micro, made.optimizer.clip, made.mesh.tp) == (2, 0.5, 2)
    with pytest.raises(ConfigError, match=r"batch.size = 8: a loader says 16") as caught:
        completed(config, {**told, "batch.size": (16, "a loader")})
    assert len(caught.value.problems) == 1
    assert [data_rank(config, 4, rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("norm", "clip"), [(0.0, None), (0.5, 0.5)])
def test_trainers_that_do_not_clip_are_not_clipped(tmp_path: Path, norm: float, clip: float | None) -> None:
    import lightning.pytorch
    from transformers import TrainingArguments

    from doors.integrations import llama
    from polyreme.integrations import PolyremeStrategy, PolyremeTrainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_grad_norm=norm)
    assert PolyremeTrainer(llama(), args, polyreme={})._config.optimizer.clip == clip

    class Module(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = PolyremeStrategy({})
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.pytorch.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=1, gradient_clip_val=norm or None,
        default_root_dir=tmp_path, **dict.fromkeys(shown, False),
    )  # fmt: skip
    with patch.dict(os.environ):  # in which Lightning says where ranks meet
        trainer.fit(Module(), DataLoader([torch.ones(2)] * 2, batch_size=2))  # type: ignore[arg-type]
    torch.distributed.destroy_process_group()
    assert strategy.engine is not None and strategy.engine.config.optimizer.clip == clip


def test_trainer_refuses(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from doors.integrations import llama
    from polyreme.integrations import PolyremeTrainer

    class Own(PolyremeTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            return None

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    with pytest.raises(ConfigError) as caught:
        Own(llama(), args, polyreme={"optimizer": {"lr": 1.0}})
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["Trainer's compute_loss", "Trainer's label_smoothing_factor", "optimizer.lr"]


def test_loop_refuses() -> None:
    from polyreme.integrations import PolyremeStrategy, accelerate

    model = nn.Linear(1, 1)
    for make in (lambda c: accelerate.prepare(model, config=c), PolyremeStrategy):
        with pytest.raises(ConfigError, match=r"mesh.pp = 2"):
            make({"mesh": {"pp": 2}})
    loader = DataLoader([torch.zeros(1)] * 4, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the loader's batch_size is 4"):
        accelerate.prepare(model, None, loader, config={"batch": {"size": 8, "micro": 2}})


def test_a_loops_plateau_goes_on_by_its_metric() -> None:
    from polyreme.integrations import accelerate

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    found = accelerate.prepare(model, optimizer, None, plateau, config={"batch": {"size": 2}})
    for metric in (1.0, 2.0):
        found.scheduler.step(metric)
    assert found.scheduler.get_last_lr() == [0.05]
    found.model.engine.close()
