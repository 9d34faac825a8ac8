# examples/recipes/lora.py: train adapters of a language model (Hu et al., 2021), save them without it, and
# open them with PEFT.
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))  # in place of LlamaForCausalLM.from_pretrained(...)


model = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
tokens = torch.randint(0, 64, (8, 16))
config = {
    "zero": {"stage": 3},
    "batch": {"size": 8},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "clip": None},
}
engine = polyreme.initialize(model, config)

mine = tokens.chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]
losses = [engine.train_step({"input_ids": mine, "labels": mine}).loss for _ in range(5)]

# engine.load(path) goes on from it, with the base from where it was at first
path = engine.save("adapters", adapters_only=True)
tuned = peft.PeftModel.from_pretrained(base(), path)
with torch.no_grad():
    losses.append(tuned(input_ids=tokens, labels=tokens).loss.item())
