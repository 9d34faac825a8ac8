"""TRL's supervised fine-tuning of a Llama, from text."""

import argparse
import os
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from meter import STEPS, Meter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{i}" for i in range(500)]


class Told(TrainerCallback):
    """Hands what Trainer logs to the meter."""

    def __init__(self) -> None:
        self.meter = Meter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.meter.step(logs["loss"])


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<unk>", "<pad>", "<s>", "</s>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed_config")
    args = parser.parse_args()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # Accelerate takes ranks without GPUs for one process each unless told so
    arguments = SFTConfig(
        output_dir="out", deepspeed=args.deepspeed_config, max_steps=STEPS, per_device_train_batch_size=4,
        learning_rate=5e-4, max_length=96, logging_steps=1, save_strategy="no", report_to="none",
        accelerator_config={"use_configured_state": True}, bf16=False,
        gradient_checkpointing=True, disable_tqdm=True, seed=3, dataset_num_proc=None,
    )  # fmt: skip
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    texts = [
        " ".join(WORDS[i] for i in torch.randint(250, (40 + n % 50,), generator=draw)) for n in range(128)
    ]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS) + 4, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=384, max_position_embeddings=128, pad_token_id=1, bos_token_id=2,
            eos_token_id=3,
        )
    )  # fmt: skip
    told = Told()
    SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(), callbacks=[told],
    ).train()  # fmt: skip
    told.meter.done()


main()
