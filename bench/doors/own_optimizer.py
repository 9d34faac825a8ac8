"""The script's own optimizer, of two groups, and its own schedule on it."""

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, MICRO = 384, 16


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(6)),
        nn.Linear(WIDTH, 10),
    )
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for _ in range(STEPS):
        x = torch.randn(MICRO, WIDTH, generator=draw)
        loss = nn.functional.cross_entropy(engine(x), x[:, :10].argmax(1))
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
