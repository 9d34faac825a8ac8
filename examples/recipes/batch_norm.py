# examples/recipes/batch_norm.py: BatchNorm over the batch of all ranks.
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
images, classes = torch.randn(32, 3, 8, 8), torch.randint(5, (32,))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 5),
)
config = {
    "batch_norm": "sync",
    "batch": {"size": 32},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config, loss_fn=nn.functional.cross_entropy)

mine = slice(
    engine.mesh.dp.rank * 32 // engine.mesh.dp.size, (engine.mesh.dp.rank + 1) * 32 // engine.mesh.dp.size
)
losses = [engine.train_step((images[mine], classes[mine])).loss for _ in range(5)]
losses.append(engine.eval_step((images[mine], classes[mine])).loss)  # by the running statistics
