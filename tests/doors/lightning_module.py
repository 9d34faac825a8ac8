"""A Lightning script as users write it: `lightning_module.py FOLDER CASE ...`, with or without DeepSpeed.
Each case writes FOLDER/CASE.json."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


class OnCpuRanks(DeepSpeedStrategy):
    """Lightning's strategy without its question for a GPU."""

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.facts: dict[str, list[float]] = {"losses": [], "rates": [], "validation": []}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        whole = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.facts["losses"].append(whole.item())
        self.facts["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.facts["validation"].append(self.trainer.callback_metrics["validation"].item())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(samples: int, seed: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=draw)
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=4)


def fit(folder: Path, strategy: Any, epochs: int, start: str | None = None) -> tuple[Regression, Any]:
    module = Regression()
    best = ModelCheckpoint(str(folder), filename="{epoch}", monitor="validation", save_top_k=-1)
    trainer = L.Trainer(
        strategy=strategy, accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["WORLD_SIZE"]), max_epochs=epochs, accumulate_grad_batches=2,
        gradient_clip_val=0.5, callbacks=[best], logger=False, enable_progress_bar=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.validate(module, loader(16, 1), verbose=False)
    trainer.fit(module, loader(48, 0), loader(16, 1), ckpt_path=start)
    return module, trainer


def strategy(case: str) -> Any:
    """A new strategy for the Trainer: Lightning's own, its DeepSpeed's, or Polyreme's."""
    if case.startswith("stage"):
        return f"deepspeed_{case}" if torch.cuda.is_available() else OnCpuRanks(stage=int(case[-1]))
    if case == "ddp":
        return case
    import polyreme.integrations.lightning

    assert "polyreme" in StrategyRegistry
    stage = int(case[-1])
    return "polyreme" if stage == 0 else polyreme.integrations.PolyremeStrategy({"zero": {"stage": stage}})


def run(folder: Path, case: str) -> None:
    """Training, the same again from its first checkpoint, and a test of what was trained."""
    module, trainer = fit(folder / case, strategy(case), 3)
    facts = module.facts
    kept = min((folder / case).glob("epoch=0*"))
    resumed, _ = fit(folder / f"{case}-again", strategy(case), 3, str(kept))
    assert resumed.facts["losses"] == facts["losses"][6:]
    facts["test"] = [trainer.test(module, loader(16, 1), verbose=False)[0]["validation"]]
    facts["best"] = [trainer.checkpoint_callback.best_model_score.item()]
    if case.startswith("stage") and trainer.is_global_zero:
        single = folder / case / "single.pt"
        convert_zero_checkpoint_to_fp32_state_dict(kept, single)
        Regression.load_from_checkpoint(single, map_location="cpu", weights_only=False)
    if trainer.is_global_zero:
        (folder / f"{case}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name)
