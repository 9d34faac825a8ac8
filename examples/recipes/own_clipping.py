# examples/recipes/own_clipping.py: clip to the mean norm of the steps so far, and the last layer by itself.
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]


x, y = share(x), share(y)
losses, norms = [], []
for _ in range(5):
    engine.backward(nn.functional.mse_loss(engine(x), y))
    gradients = engine.gradients()  # all ranks call, as for step()
    norm = gradients.norms()["2.weight"]
    gradients.scale_({"2.weight": min(1.0, 0.1 / norm)})
    norms.append(gradients.norm)
    gradients.clip_(sum(norms) / len(norms))
    losses.append(engine.step().loss)
