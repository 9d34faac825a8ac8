# examples/recipes/recommender.py: bags of items that users had, and how much each of their next choices
# counts.
import torch
from torch import nn

import polyreme


class Recommender(nn.Module):
    """Scores of an item for users: (items of all users [N], where each user's begin [B], the item [B]) to
    [B]."""

    def __init__(self):
        super().__init__()
        self.taste, self.item = nn.EmbeddingBag(50, 16, mode="mean"), nn.Embedding(50, 16)

    def forward(self, items, begins, item):
        return (self.taste(items, begins) * self.item(item)).sum(dim=1)


def weighted(scores, target):
    choices, counts = target.unbind(dim=1)
    each = nn.functional.binary_cross_entropy_with_logits(scores, choices, reduction="none")
    return (each * counts).sum(), counts.sum()  # a mean over the weights, not over the users


torch.manual_seed(0)
batches = []  # of four users each
for _ in range(4):
    lengths = torch.randint(1, 9, (4,))
    items, begins = torch.randint(0, 50, (int(lengths.sum()),)), lengths.cumsum(0) - lengths
    target = torch.stack([torch.randint(0, 2, (4,)).to(torch.get_default_dtype()), torch.rand(4)], dim=1)
    batches.append((items, begins, torch.randint(0, 50, (4,)), target))
config = {"batch": {"size": 16, "micro": 4}, "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None}}
engine = polyreme.initialize(Recommender(), config, loss_fn=weighted)

mine = batches[engine.mesh.dp.rank :: engine.mesh.dp.size]
losses = [engine.train_step(mine).loss for _ in range(5)]  # a list of micro-batches: bags cannot be cut
