# examples/recipes/pinn.py: a network that solves u'' = -u, u(0) = 1 (Raissi et al., 2019).
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
points = 3 * torch.rand(16, 1)
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]


x, losses = share(points).requires_grad_(), []
for _ in range(5):
    u = engine(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    engine.backward((second + u).square().mean() + (engine(torch.zeros(len(x), 1)) - 1).square().mean())
    losses.append(engine.step().loss)
