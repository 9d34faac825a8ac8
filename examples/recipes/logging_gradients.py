# examples/recipes/logging_gradients.py: the norm of every gradient and weight.
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
engine = polyreme.initialize(model, config, loss_fn=nn.functional.mse_loss)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]


batch, losses = (share(x), share(y)), []
engine.on_gradients = lambda gradients: losses.extend(gradients.norms().values())
for _ in range(3):
    engine.train_step(batch)
    losses += [weight.norm().item() for _, weight in sorted(engine.state_dict(master=True).items())]
