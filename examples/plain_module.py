# examples/plain_module.py: any nn.Module and any dataset; polyreme launch -n 2 examples/plain_module.py
import torch
from torch import nn

import polyreme

points = torch.rand(2048, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()  # is a point in the circle?
dataset = torch.utils.data.TensorDataset(points, inside)

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
config = {"zero": {"stage": 2}, "batch": {"size": 64}, "optimizer": {"lr": 1e-2}}
engine = polyreme.initialize(model, config, loss_fn=nn.functional.cross_entropy)

for batch in engine.loader(dataset, epochs=4):  # this rank's share of each global batch of 64
    result = engine.train_step(batch)
    if engine.mesh.rank == 0 and result.step % 32 == 0:
        print(f"step {result.step}: loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")

with engine.full_parameters() as whole, torch.no_grad():
    right = (whole(points).argmax(dim=1) == inside).float().mean()
path = engine.save("run/plain_module")
if engine.mesh.rank == 0:
    print(f"{right:.1%} of the points are classified right; {path}/model.safetensors")
