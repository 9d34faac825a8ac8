"""What examples/recipes/own_clipping.py computes, in one process of plain PyTorch."""

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
    optimizer, losses, norms = adamw(model), [], []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        weight = model[2].weight
        assert weight.grad is not None
        weight.grad *= min(1.0, 0.1 / weight.grad.norm().item())
        norms.append(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), sum(norms) / len(norms))
        optimizer.step()
        losses.append(loss.item())
    return losses
