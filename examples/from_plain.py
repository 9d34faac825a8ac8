# examples/from_plain.py: a plain PyTorch script, moved; polyreme launch -n 2 examples/from_plain.py
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import polyreme

torch.manual_seed(0)
images = torch.randn(640, 3, 8, 8)
classes = (images[:, 0].mean(dim=(1, 2)) > images[:, 1].mean(dim=(1, 2))).long()
train, held_out = TensorDataset(images[:512], classes[:512]), (images[512:], classes[512:])
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=4 * 16)

config = {"batch": {"size": 32}, "optimizer": {"clip": 1.0}, "batch_norm": "sync"}
engine = polyreme.initialize(
    model, config, optimizer=optimizer, lr_scheduler=scheduler, loss_fn=nn.functional.cross_entropy
)
dp = engine.mesh.dp


def share(batch):
    """This rank's part of a global batch, which every rank has read."""
    return tuple(part[dp.rank :: dp.size] for part in batch)


best = float("inf")
for epoch in range(4):
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).tolist()
    for batch in DataLoader(Subset(train, order), batch_size=32):  # alike on every rank
        engine.train_step(share(batch))  # forward, backward, clipping, update, schedule
    validation = engine.eval_step(share(held_out)).loss  # the mean over all ranks
    if engine.mesh.rank == 0:
        print(f"epoch {epoch}: validation loss {validation:.9f}")
    if validation < best:
        best = validation
        engine.save("run/from_plain/best")  # model.safetensors has the weights

engine.load("run/from_plain/best")
with engine.full_parameters() as whole, torch.no_grad():
    right = (whole.eval()(held_out[0]).argmax(1) == held_out[1]).float().mean()
if engine.mesh.rank == 0:
    print(f"{right:.1%} are right")
