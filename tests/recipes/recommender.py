"""What examples/recipes/recommender.py computes, in one process of plain PyTorch: one bag after the other."""

from __future__ import annotations

import torch
from torch import nn


def plain() -> list[float]:
    torch.manual_seed(0)
    users = []
    for _ in range(4):
        lengths = torch.randint(1, 9, (4,))
        bags = torch.randint(0, 50, (int(lengths.sum()),)).split(lengths.tolist())
        choices, counts = torch.randint(0, 2, (4,)).to(torch.get_default_dtype()), torch.rand(4)
        users += zip(bags, torch.randint(0, 50, (4,)), choices, counts, strict=True)
    taste, item = nn.EmbeddingBag(50, 16, mode="mean"), nn.Embedding(50, 16)
    optimizer = torch.optim.AdamW(
        [*taste.parameters(), *item.parameters()], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0
    )
    counts = torch.stack([count for *_, count in users])
    losses = []
    for _ in range(5):
        scores = torch.stack([taste.weight[bag].mean(0) @ item.weight[which] for bag, which, _, _ in users])
        choices = torch.stack([choice for _, _, choice, _ in users])
        each = nn.functional.binary_cross_entropy_with_logits(scores, choices, reduction="none")
        loss = (each * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
