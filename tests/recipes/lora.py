"""What examples/recipes/lora.py computes, in one process of plain PyTorch."""

from __future__ import annotations

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def plain() -> list[float]:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()
    tokens = torch.randint(0, 64, (8, 16))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, model(input_ids=tokens, labels=tokens).loss.item()]
