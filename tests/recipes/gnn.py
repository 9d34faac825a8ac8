"""What examples/recipes/gnn.py computes, in one process of plain PyTorch: the graphs joined into one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(4, 16), nn.Linear(20, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = torch.tanh(self.message(nodes))[edges[0]]
        received = sent.new_zeros(len(nodes), 16).index_add(0, edges[1], sent)
        return self.head(torch.cat([nodes, received], dim=1))


def plain() -> list[float]:
    torch.manual_seed(0)
    sizes = (5, 9, 3, 12, 7, 4, 10, 6)
    graphs = [(torch.randn(n, 4), torch.randint(0, n, (2, 3 * n)), torch.randn(n, 1)) for n in sizes]
    model = GraphNet()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes, targets = (torch.cat([graph[i] for graph in graphs]) for i in (0, 2))
    edges = torch.cat([graph[1] + start for graph, start in zip(graphs, starts, strict=True)], dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(nodes, edges), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
