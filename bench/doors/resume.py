"""Saves a checkpoint in the middle, and goes on from it with a new engine."""

from typing import Any

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, MICRO, FOLDER = 256, 16, "checkpoints"

CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 12}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
}


def start(seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 10)
    )
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def main() -> None:
    deepspeed.init_distributed()
    engine = start(0)
    rank = engine.global_rank
    meter = Meter()
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save_checkpoint(FOLDER, client_state={"step": step})
            engine = start(1)
            _, state = engine.load_checkpoint(FOLDER)
            assert state["step"] == step and engine.global_steps == step
            meter.pause()
        draw = torch.Generator().manual_seed(2 * step + rank)
        x = torch.randn(MICRO, WIDTH, generator=draw)
        loss = nn.functional.cross_entropy(engine(x), x[:, :10].argmax(1))
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
