# examples/recipes/gnn.py: graphs of unlike sizes, each a micro-batch of its own; the loss is the mean over
# all their nodes.
import torch
from torch import nn

import polyreme


class GraphNet(nn.Module):
    """One round of messages: (nodes [N, 4], edges [2, E]) to a number for each node."""

    def __init__(self):
        super().__init__()
        self.message, self.head = nn.Linear(4, 16), nn.Linear(20, 1)

    def forward(self, nodes, edges):
        sent = torch.tanh(self.message(nodes))[edges[0]]
        received = sent.new_zeros(len(nodes), 16).index_add(0, edges[1], sent)
        return self.head(torch.cat([nodes, received], dim=1))


torch.manual_seed(0)
sizes = (5, 9, 3, 12, 7, 4, 10, 6)
graphs = [(torch.randn(n, 4), torch.randint(0, n, (2, 3 * n)), torch.randn(n, 1)) for n in sizes]
config = {"batch": {"size": 8, "micro": 1}, "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None}}
engine = polyreme.initialize(GraphNet(), config, loss_fn=nn.functional.mse_loss)

mine = graphs[engine.mesh.dp.rank :: engine.mesh.dp.size]
losses = [engine.train_step(mine).loss for _ in range(5)]  # a list of micro-batches
