# examples/recipes/class_weights.py: rare classes count more, and some samples have no class.
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
inputs = torch.randn(64, 8)
classes = (inputs[:, 0] > 1).long() + (inputs[:, 1] > 1).long()
classes[::7] = -100  # not known
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
config = {"batch": {"size": 64, "micro": 16}, "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None}}
loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
engine = polyreme.initialize(model, config, loss_fn=loss_fn)

mine = slice(
    engine.mesh.dp.rank * 64 // engine.mesh.dp.size, (engine.mesh.dp.rank + 1) * 64 // engine.mesh.dp.size
)
losses = [engine.train_step((inputs[mine], classes[mine])).loss for _ in range(5)]
