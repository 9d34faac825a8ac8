"""What examples/recipes/logging_gradients.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    y = x.sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer, losses = adamw(model), []
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        losses += [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses += [p.norm().item() for _, p in sorted(model.named_parameters())]
    return losses
