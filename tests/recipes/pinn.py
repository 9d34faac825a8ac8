"""What examples/recipes/pinn.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    points = 3 * torch.rand(16, 1)
    optimizer, x, losses = adamw(model), points.requires_grad_(), []
    for _ in range(5):
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        optimizer.zero_grad()
        loss = (second + u).square().mean() + (model(torch.zeros(len(x), 1)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
