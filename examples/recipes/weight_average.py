# examples/recipes/weight_average.py: an exponential moving average of the weights (EMA).
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
config = {
    "zero": {"stage": 3},
    "batch": {"size": 64},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)

average = engine.state_dict(master=True)  # whole tensors, on every rank
mine = slice(
    engine.mesh.dp.rank * 64 // engine.mesh.dp.size, (engine.mesh.dp.rank + 1) * 64 // engine.mesh.dp.size
)
losses = []
for _ in range(5):
    losses.append(engine.train_step((inputs[mine], targets[mine])).loss)
    for name, weight in engine.state_dict(master=True).items():
        average[name].lerp_(weight, 0.1)

with torch.no_grad():
    outputs = torch.func.functional_call(
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), average, (inputs,)
    )
    losses.append(nn.functional.mse_loss(outputs, targets).item())
