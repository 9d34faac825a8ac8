"""A perceptron; all that is DeepSpeed's is in the JSON file of --deepspeed_config."""

import argparse

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, MICRO = 384, 16


class Perceptron(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Perceptron()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    draw = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    meter = Meter()
    for _ in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(MICRO, WIDTH, generator=draw)
            loss = engine(x, x[:, :10].argmax(1))
            engine.backward(loss)
            engine.step()
        meter.step(loss.item())
    meter.done()


main()
