"""A transformer whose parameters are divided as they are made."""

import deepspeed
import torch
from meter import STEPS, Meter
from torch import nn

WIDTH, LENGTH, VOCABULARY, MICRO = 128, 64, 512, 4

CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 1e6,
        "stage3_prefetch_bucket_size": 1e5,
        "reduce_bucket_size": 1e6,
    },
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            nn.init.normal_(model.head.weight, std=0.02)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for _ in range(STEPS):
        loss = engine(torch.randint(VOCABULARY, (MICRO, LENGTH), generator=draw))
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
