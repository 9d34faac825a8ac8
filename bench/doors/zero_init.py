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


class Block(nn.Module):
    """Not torch's own layer, which sets a bias of its child to 0: DeepSpeed's zero.Init has divided that bias
    before, and the 0 is lost."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
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
