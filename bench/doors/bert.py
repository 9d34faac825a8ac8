"""BERT for the classification of sequences, with its dropout."""

from typing import Any

import deepspeed
import torch
from meter import STEPS, Meter
from transformers import BertConfig, BertForSequenceClassification

MICRO, LENGTH, VOCABULARY = 8, 64, 1000


def main() -> None:
    torch.manual_seed(0)
    of_all: dict[str, Any] = {"num_labels": 3}  # every config of transformers takes it
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=LENGTH, **of_all,
        )
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(1 + engine.global_rank)
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    engine.train()
    for _ in range(STEPS):
        tokens = torch.randint(5, VOCABULARY, (MICRO, LENGTH), generator=draw)
        mask = torch.ones_like(tokens)
        mask[:, LENGTH - 8 :] = 0
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens[:, 0] % 3).loss
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
