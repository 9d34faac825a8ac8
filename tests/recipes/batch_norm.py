"""What examples/recipes/batch_norm.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    images, classes = torch.randn(32, 3, 8, 8), torch.randint(5, (32,))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, nn.functional.cross_entropy(model.eval()(images), classes).item()]
