"""TRL scripts as users write them: `hf_trl.py FOLDER CASE ...`, with or without DeepSpeed. Each case writes
FOLDER/CASE.json, the numbers in its trainer's log."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
TEXT = "the a people state house law peace debt road made kept paid built found lost and of in to for"
WORDS = TEXT.split()
ZERO2, ZERO3 = (
    {"stage": 2},
    {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *WORDS])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=own, **special)


def llama(kind: Any, seed: int = 0, **more: Any) -> Any:
    set_seed(seed)
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return kind(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=2, eos_token_id=3, **more))


def sentence(i: int, words: int) -> str:
    return " ".join(WORDS[(i * 7 + j * (i % 3 + 1)) % len(WORDS)] for j in range(words))


def arguments(out: Path, zero: dict[str, Any]) -> dict[str, Any]:
    batch = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    more = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": zero}
    return {
        "output_dir": str(out), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "learning_rate": 1e-3, "logging_steps": 1, "seed": 0, "report_to": [],
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "max_length": 32,
        "activation_checkpointing": False, **({"deepspeed": {**batch, **more}} if DEEPSPEED else {}),
    }  # fmt: skip


def sft(out: Path, zero: dict[str, Any]) -> Any:
    rows = Dataset.from_list([{"text": sentence(i, 6 + i % 9)} for i in range(26)])
    args = SFTConfig(**arguments(out, zero))
    return SFTTrainer(
        model=llama(LlamaForCausalLM), args=args, train_dataset=rows, processing_class=tokenizer()
    )


def packed(out: Path, zero: dict[str, Any]) -> Any:
    """Prompts and completions, of which the completions alone count; a LoRA adapter is trained."""
    from peft import LoraConfig

    rows = Dataset.from_list(
        [{"prompt": sentence(i, 4), "completion": " " + sentence(i + 1, 3 + i % 5)} for i in range(24)]
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    args = SFTConfig(**arguments(out, zero))
    return SFTTrainer(
        model=llama(LlamaForCausalLM),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(),
        peft_config=lora,
    )


def pairs() -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": sentence(i, 4),
                "chosen": " " + sentence(i + 1, 3 + i % 4),
                "rejected": " " + sentence(i + 2, 3 + i % 3),
            }
            for i in range(24)
        ]
    )


def dpo(out: Path, zero: dict[str, Any]) -> Any:
    args = DPOConfig(**arguments(out, zero))
    return DPOTrainer(
        model=llama(LlamaForCausalLM), ref_model=llama(LlamaForCausalLM, seed=1), args=args,
        train_dataset=pairs(), processing_class=tokenizer(),
    )  # fmt: skip


def reward(out: Path, zero: dict[str, Any]) -> Any:
    # before the arguments: at stage 3 transformers would make the inner model inside of zero.Init
    model = llama(LlamaForSequenceClassification, num_labels=1)
    args = RewardConfig(**arguments(out, zero))
    return RewardTrainer(model=model, args=args, train_dataset=pairs(), processing_class=tokenizer())


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft2": (sft, ZERO2),
    "sft3": (sft, ZERO3),
    "lora3": (packed, ZERO3),
    "dpo2": (dpo, ZERO2),
    "dpo3": (dpo, ZERO3),
    "reward2": (reward, ZERO2),
    "reward3": (reward, ZERO3),
}
KEYS = ("loss", "grad_norm", "learning_rate", "rewards/margins", "margin")


def run(folder: Path, case: str) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    function, zero = CASES[case]
    trainer = function(folder / case, zero)
    trainer.train()
    trainer.save_model(str(folder / case / "final"))
    log = trainer.state.log_history
    facts = {key: [entry[key] for entry in log if key in entry] for key in KEYS}
    if trainer.args.process_index == 0:
        (folder / f"{case}.json").write_text(json.dumps(facts))
    del trainer
    gc.collect()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name)
