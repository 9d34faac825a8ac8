"""What examples/recipes/change_weights.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(5):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
            if step == 2:
                nn.init.eye_(model[2].weight)
            for p, followed in zip(target.parameters(), model.parameters(), strict=True):
                p.lerp_(followed, 0.1)
    with torch.no_grad():
        return [*losses, nn.functional.mse_loss(target(inputs), targets).item()]
