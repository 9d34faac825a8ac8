"""A loop of Accelerate's, with accumulation, clipping and a schedule."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from meter import STEPS, Meter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

WIDTH, MICRO, ACCUMULATION = 256, 8, 2


def main() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=0.5)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 10)
    )
    x = torch.randn(MICRO * ACCUMULATION * 2 * STEPS, WIDTH)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=MICRO)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, 100)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    meter = Meter()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            meter.step(loss.item())
    meter.done()
    accelerator.end_training()


main()
