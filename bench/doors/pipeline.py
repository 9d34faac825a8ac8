"""Layers of a PipelineModule over two stages."""

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from meter import STEPS, Meter
from torch import nn

WIDTH, MICRO, ACCUMULATION = 384, 8, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(MICRO, WIDTH, generator=draw)
        yield x, x[:, :10].argmax(1)


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [*(LayerSpec(Block, WIDTH) for _ in range(7)), LayerSpec(nn.Linear, WIDTH, 10)]
    net = PipelineModule(
        layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=2, partition_method="uniform", base_seed=7,
        seed_layers=True, activation_checkpoint_interval=0,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        config={
            "train_batch_size": MICRO * ACCUMULATION,
            "train_micro_batch_size_per_gpu": MICRO,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "gradient_clipping": 0.0,  # DeepSpeed takes the norm of the first stage for that of all
            "steps_per_print": 1000,
        },
    )
    data = batches()
    meter = Meter()
    for _ in range(STEPS):
        meter.step(engine.train_batch(data_iter=data).item())
    meter.done()


main()
