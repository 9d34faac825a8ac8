# examples/recipes/unfreezing.py: train the last layer, then one more at a time (Howard and Ruder, 2018).
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
model[:4].requires_grad_(False)
config = {
    "zero": {"stage": 3},
    "batch": {"size": 64},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)

mine = slice(
    engine.mesh.dp.rank * 64 // engine.mesh.dp.size, (engine.mesh.dp.rank + 1) * 64 // engine.mesh.dp.size
)
losses = []
for layer in (4, 2, 0):
    engine.module[layer].requires_grad_(True)
    engine.refresh()  # every rank; what trained before keeps its optimizer states
    losses += [engine.train_step((inputs[mine], targets[mine])).loss for _ in range(3)]
