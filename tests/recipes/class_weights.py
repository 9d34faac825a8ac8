"""What examples/recipes/class_weights.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    classes = (inputs[:, 0] > 1).long() + (inputs[:, 1] > 1).long()
    classes[::7] = -100
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = loss_fn(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
