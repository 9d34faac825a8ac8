# examples/recipes/dpo.py: a policy, and a frozen reference as an engine of its own (Rafailov et al., 2023).
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import polyreme

torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(16, 32), nn.Tanh(), nn.Linear(32, 16))  # of the next token
reference = copy.deepcopy(policy).requires_grad_(False)
prompts, chosen, rejected = torch.randint(16, (3, 16))
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
policy, reference = polyreme.initialize(policy, config), polyreme.initialize(reference, config)


def margin(model: Callable[[Tensor], Tensor], prompts: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """By how much the model prefers what was chosen."""
    scores = model(prompts).log_softmax(dim=-1)
    return (scores.gather(1, chosen[:, None]) - scores.gather(1, rejected[:, None])).squeeze(1)


rank, ranks = policy.mesh.dp.rank, policy.mesh.dp.size
batch = [each.chunk(ranks)[rank] for each in (prompts, chosen, rejected)]
losses = []
for _ in range(5):
    gain = margin(policy, *batch) - margin(reference, *batch)
    policy.backward(-nn.functional.logsigmoid(0.1 * gain).mean())
    losses.append(policy.step().loss)
