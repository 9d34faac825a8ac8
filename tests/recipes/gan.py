"""What examples/recipes/gan.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    discriminator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    real, noise = torch.randn(16, 4) + 2, torch.randn(16, 4)
    generating, judging = adamw(generator), adamw(discriminator)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    losses = []
    for _ in range(5):
        fake = generator(noise)
        judging.zero_grad()
        loss = loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)
        loss.backward()
        judging.step()
        losses.append(loss.item())
        generating.zero_grad()
        loss = loss_of(discriminator(fake), ones)
        loss.backward()
        generating.step()
        losses.append(loss.item())
    return losses
