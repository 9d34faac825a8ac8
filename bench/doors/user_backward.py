"""`loss.backward()` as torch has it, and the learning rate set by hand."""

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, MICRO = 384, 16


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 10)
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
        },
    )
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / STEPS)
        x = torch.randn(MICRO, WIDTH, generator=draw)
        loss = nn.functional.cross_entropy(engine(x), x[:, :10].argmax(1))
        loss.backward()
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
