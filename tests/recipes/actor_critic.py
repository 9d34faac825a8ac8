"""What examples/recipes/actor_critic.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def plain() -> list[float]:
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    reference = copy.deepcopy(actor).requires_grad_(False)
    states, actions, returns = torch.randn(16, 4), torch.randint(3, (16, 1)), torch.randn(16, 1)
    optimizers, losses, old = [adamw(actor), adamw(critic)], [], None
    for _ in range(5):
        log_p, log_r = actor(states).log_softmax(dim=-1), reference(states).log_softmax(dim=-1)
        if old is None:
            old = log_p.gather(1, actions).detach()  # of the policy that acted
        ratio, value = (log_p.gather(1, actions) - old).exp(), critic(states)
        advantage = (returns - value).detach()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        drift = (log_p.exp() * (log_p - log_r)).sum(dim=-1).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        (0.1 * drift - surrogate + 0.5 * (returns - value).square().mean()).backward()
        for model, optimizer in zip((actor, critic), optimizers, strict=True):
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
            optimizer.step()
    return losses
