# examples/recipes/wgan_gp.py: a critic with a penalty on its gradient by the input (Gulrajani et al., 2017).
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
real, noise = torch.randn(16, 4) + 2, torch.randn(16, 4)
mix = torch.rand(16, 1)
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
generator = polyreme.initialize(generator, config)
critic = polyreme.initialize(critic, config)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(generator.mesh.dp.size)[generator.mesh.dp.rank]


real, noise, mix = share(real), share(noise), share(mix)
losses = []
for _ in range(5):
    fake = generator(noise)
    between = torch.lerp(real, fake.detach(), mix).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    critic.backward(critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty)
    losses.append(critic.step().loss)
    generator.backward(-critic(fake).mean())
    losses.append(generator.step().loss)
