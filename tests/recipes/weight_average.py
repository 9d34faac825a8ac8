"""What examples/recipes/weight_average.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)
    outputs = torch.func.functional_call(model, average, (inputs,))
    return [*losses, nn.functional.mse_loss(outputs, targets).item()]
