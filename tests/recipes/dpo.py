"""What examples/recipes/dpo.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(16, 32), nn.Tanh(), nn.Linear(32, 16))  # of the next token
    reference = copy.deepcopy(policy).requires_grad_(False)
    prompts, chosen, rejected = torch.randint(16, (3, 16))
    optimizer, losses = adamw(policy), []
    for _ in range(5):
        margins = []
        for model in (policy, reference):
            scores = model(prompts).log_softmax(dim=-1)
            margins.append(
                (scores.gather(1, chosen[:, None]) - scores.gather(1, rejected[:, None])).squeeze(1)
            )
        optimizer.zero_grad()
        loss = -nn.functional.logsigmoid(0.1 * (margins[0] - margins[1])).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
