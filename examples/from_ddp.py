# examples/from_ddp.py: a script of DistributedDataParallel, moved; polyreme launch -n 2 examples/from_ddp.py
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import polyreme

torch.manual_seed(0)
images = torch.randn(640, 3, 8, 8)
classes = (images[:, 0].mean(dim=(1, 2)) > images[:, 1].mean(dim=(1, 2))).long()
train, held_out = TensorDataset(images[:512], classes[:512]), (images[512:], classes[512:])
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=4 * 16)

config = {"batch": {"size": 32}, "optimizer": {"clip": 1.0}, "zero": {"stage": 2}}
engine = polyreme.initialize(
    model, config, optimizer=optimizer, lr_scheduler=scheduler, loss_fn=nn.functional.cross_entropy
)
rank, ranks = engine.mesh.dp.rank, engine.mesh.dp.size
sampler = DistributedSampler(train, num_replicas=ranks, rank=rank)
loader = DataLoader(train, batch_size=32 // ranks, sampler=sampler)


def ask_to_stop(*_):
    engine.ask_to_stop()
    if engine.mesh.rank == 0:
        os.write(2, b"ending after this step or the next\n")  # print cannot interrupt itself


for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what a scheduler sends
    signal.signal(number, ask_to_stop)

last, best, stopped = Path("run/from_ddp/last"), float("inf"), False
if last.exists():
    best = engine.load(last).extra["best"]  # weights, optimizer, schedule, random numbers, steps
while engine.state.step < 4 * len(loader) and not stopped:
    epoch, done = divmod(engine.state.step, len(loader))
    sampler.set_epoch(epoch)
    for at, batch in enumerate(loader):
        if at >= done:  # those before it were trained on before the interruption
            result = engine.train_step(batch)  # forward, backward, clipping, update, schedule
            stopped = result.stop  # on every rank
            if stopped:
                break
    if engine.state.step % len(loader) == 0:  # the epoch has ended, even where the run stops now
        validation = engine.eval_step(tuple(part[rank::ranks] for part in held_out)).loss
        if engine.mesh.rank == 0:
            print(f"epoch {epoch}: validation loss {validation:.9f}")
        if validation < best:
            best = validation
            engine.save("run/from_ddp/best")  # model.safetensors has the weights
    engine.save(last, extra={"best": best})
