"""What examples/recipes/wgan_gp.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    real, noise = torch.randn(16, 4) + 2, torch.randn(16, 4)
    mix = torch.rand(16, 1)
    generating, judging = adamw(generator), adamw(critic)
    losses = []
    for _ in range(5):
        fake = generator(noise)
        between = torch.lerp(real, fake.detach(), mix).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        judging.zero_grad()
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        judging.step()
        losses.append(loss.item())
        generating.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        generating.step()
        losses.append(loss.item())
    return losses
