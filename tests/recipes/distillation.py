"""What examples/recipes/distillation.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    inputs, classes = torch.randn(16, 8), torch.randint(5, (16,))
    teacher = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 5)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        scores = student(inputs)
        soft = [(each / 2.0).log_softmax(dim=-1) for each in (scores, teacher(inputs))]
        distance = nn.functional.kl_div(*soft, reduction="batchmean", log_target=True)
        loss = 4 * distance + nn.functional.cross_entropy(scores, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
