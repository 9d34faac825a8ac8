"""Blocks whose activations are computed again in backward, by deepspeed.checkpointing."""

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, LENGTH, VOCABULARY, MICRO = 128, 64, 512, 4

CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "zero_optimization": {"stage": 2},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=CONFIG)
    torch.manual_seed(1 + engine.global_rank)
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for _ in range(STEPS):
        loss = engine(torch.randint(VOCABULARY, (MICRO, LENGTH), generator=draw))
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
