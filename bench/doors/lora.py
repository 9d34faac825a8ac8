"""Adapters on a frozen Llama, by peft."""

from typing import Any

import deepspeed
import torch
from meter import STEPS, Meter
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

MICRO, LENGTH, VOCABULARY = 4, 128, 1024


def main() -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
            intermediate_size=512, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    model = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (MICRO, LENGTH), generator=draw) // 2
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
