# examples/recipes/gan.py: two engines in one graph.
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
discriminator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
real, noise = torch.randn(16, 4) + 2, torch.randn(16, 4)
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
generator = polyreme.initialize(generator, config)
discriminator = polyreme.initialize(discriminator, config)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(generator.mesh.dp.size)[generator.mesh.dp.rank]


real, noise = share(real), share(noise)
loss_of = nn.functional.binary_cross_entropy_with_logits
ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
losses = []
for _ in range(5):
    fake = generator(noise)
    # a second loss of this step follows
    discriminator.backward(loss_of(discriminator(real), ones), last=False)
    discriminator.backward(loss_of(discriminator(fake.detach()), zeros))
    losses.append(discriminator.step().loss)
    generator.backward(loss_of(discriminator(fake), ones))  # the discriminator gets no gradient of it
    losses.append(generator.step().loss)
