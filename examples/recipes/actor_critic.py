# examples/recipes/actor_critic.py: an actor and a critic with one loss, and a frozen reference (Schulman et
# al., 2017).
import copy

import torch
from torch import nn

import polyreme

torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
reference = copy.deepcopy(actor).requires_grad_(False)
states, actions, returns = torch.randn(16, 4), torch.randint(3, (16, 1)), torch.randn(16, 1)
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
actor, critic, reference = (polyreme.initialize(model, config) for model in (actor, critic, reference))


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(actor.mesh.dp.size)[actor.mesh.dp.rank]


states, actions, returns = share(states), share(actions), share(returns)
losses, old = [], None
for _ in range(5):
    log_p, log_r = actor(states).log_softmax(dim=-1), reference(states).log_softmax(dim=-1)
    if old is None:
        old = log_p.gather(1, actions).detach()  # of the policy that acted
    ratio, value = (log_p.gather(1, actions) - old).exp(), critic(states)
    advantage = (returns - value).detach()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    drift = (log_p.exp() * (log_p - log_r)).sum(dim=-1).mean()
    (0.1 * drift - surrogate + 0.5 * (returns - value).square().mean()).backward()
    losses += [engine.step().grad_norm for engine in (actor, critic)]
