"""Llama, pre-trained from its config; the JSON says how."""

import argparse

import deepspeed
import torch
from meter import STEPS, Meter
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 128, 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, intermediate_size=512, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    draw = torch.Generator().manual_seed(1 + engine.global_rank)
    meter = Meter()
    for _ in range(STEPS):
        shape = engine.train_micro_batch_size_per_gpu(), LENGTH
        tokens = torch.randint(VOCABULARY, shape, generator=draw) // 2
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        meter.step(loss.item())
    meter.done()


main()
