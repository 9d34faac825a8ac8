# examples/recipes/change_weights.py: clip the weights of a critic (WGAN), let a target follow softly (RL),
# begin a layer anew.
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
target = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))  # a plain module, whole on every rank
target.load_state_dict(engine.state_dict(master=True))

mine = slice(
    engine.mesh.dp.rank * 64 // engine.mesh.dp.size, (engine.mesh.dp.rank + 1) * 64 // engine.mesh.dp.size
)
losses = []
for step in range(5):
    losses.append(engine.train_step((inputs[mine], targets[mine])).loss)
    # every rank enters; what is changed stays
    with engine.full_parameters(write=True) as whole, torch.no_grad():
        for p in whole.parameters():
            p.clamp_(-0.3, 0.3)
        if step == 2:
            nn.init.eye_(whole[2].weight)  # of random numbers, those of rank 0 count
    with torch.no_grad():
        for name, weight in engine.state_dict(master=True).items():
            target.get_parameter(name).lerp_(weight, 0.1)

with torch.no_grad():
    losses.append(nn.functional.mse_loss(target(inputs), targets).item())
