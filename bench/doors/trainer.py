"""Hugging Face's Trainer, with the JSON of --deepspeed_config and its "auto" values."""

import argparse
import os
from typing import Any

import torch
from accelerate import PartialState
from meter import STEPS, Meter
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LENGTH, VOCABULARY = 128, 1024


class Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=draw) // 2
        return {"input_ids": tokens, "labels": tokens}


class Told(TrainerCallback):
    """Hands what Trainer logs to the meter."""

    def __init__(self) -> None:
        self.meter = Meter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.meter.step(logs["loss"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed_config")
    args = parser.parse_args()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # Accelerate takes ranks without GPUs for one process each unless told so
    arguments = TrainingArguments(
        output_dir="out", deepspeed=args.deepspeed_config, max_steps=STEPS, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=5e-4, warmup_steps=4, lr_scheduler_type="cosine",
        weight_decay=0.1, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
        accelerator_config={"use_configured_state": True},
        disable_tqdm=True, seed=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=384, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip
    told = Told()
    Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[told]).train()
    told.meter.done()


main()
