# examples/recipes/distillation.py: a student learns from a frozen teacher, which is an engine too (Hinton et
# al., 2015).
import torch
from torch import nn

import polyreme

torch.manual_seed(0)
inputs, classes = torch.randn(16, 8), torch.randint(5, (16,))
teacher = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 5)).requires_grad_(False)
student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
config = {
    "zero": {"stage": 3},
    "batch": {"size": 16},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
teacher, student = polyreme.initialize(teacher, config), polyreme.initialize(student, config)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    return batch.chunk(student.mesh.dp.size)[student.mesh.dp.rank]


inputs, classes = share(inputs), share(classes)
losses, temperature = [], 2.0
for _ in range(5):
    goal, scores = teacher(inputs), student(inputs)
    soft = [(each / temperature).log_softmax(dim=-1) for each in (scores, goal)]
    distance = nn.functional.kl_div(*soft, reduction="batchmean", log_target=True)
    student.backward(temperature**2 * distance + nn.functional.cross_entropy(scores, classes))
    losses.append(student.step().loss)
