"""A Trainer script as users write it: `hf_trainer.py FOLDER CASE ...`, with or without DeepSpeed.

Each case writes FOLDER/CASE/history.json, the log of its Trainer. Without DeepSpeed it has no config."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
LINEAR = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
               "warmup_num_steps": "auto", "warmup_type": "linear"},
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": ({"zero_optimization": {"stage": 1}}, {}),
    "zero2": ({"zero_optimization": {"stage": 2}}, {"gradient_accumulation_steps": 1}),
    "zero3": ({"zero_optimization": ZERO3}, {}),
    "zero3-resumed": ({"zero_optimization": ZERO3}, {"resume": "zero3"}),
    "offload": (
        {
            "zero_optimization": {
                **ZERO3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        },
        {},
    ),
    "bf16": ({"zero_optimization": {"stage": 2}}, {"bf16": True}),
    "ds-optimizer": ({"zero_optimization": ZERO3, "optimizer": ADAMW}, {}),
    "ds-scheduler": ({"zero_optimization": {"stage": 2}, "optimizer": ADAMW, "scheduler": LINEAR}, {}),
    "best": ({"zero_optimization": {"stage": 2}}, {"load_best_model_at_end": True}),
    "weights-alone": ({"zero_optimization": {"stage": 1}}, {"save_only_model": True}),
    "compiled": ({"zero_optimization": ZERO3}, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "lora": ({"zero_optimization": ZERO3}, {"lora": True}),
    "generate": ({"zero_optimization": ZERO3}, {"predict_with_generate": True, "generation_max_length": 8}),
}


def dataset(samples: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = [torch.randint(64, (16,), generator=draw) for _ in range(samples)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in found]


def seq2seq() -> Any:
    set_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def predicted(results: Any) -> dict[str, Any]:
    """Of generated tokens a digest."""
    return {"tokens": int((results.predictions * (1 + results.predictions)).sum())}


def model(lora: bool) -> Any:
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if not lora:
        return made
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def run(folder: Path, case: str, deepspeed: bool) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    config, options = CASES[case]
    options = dict(options)
    lora, resume = options.pop("lora", False), options.pop("resume", None)
    out = folder / case
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "num_train_epochs": 2, "learning_rate": 1e-3, "warmup_steps": 2, "logging_steps": 1, "seed": 0,
        "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "save_total_limit": 2, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "data_seed": 0,
    }  # fmt: skip
    arguments |= options | ({"deepspeed": AUTO | config} if deepspeed else {})
    data = dataset(26)
    if "predict_with_generate" in options:
        args: Any = Seq2SeqTrainingArguments(str(out), **arguments)
        kind, net, extra = Seq2SeqTrainer, seq2seq(), {"compute_metrics": predicted}
    else:
        args, kind, net, extra = TrainingArguments(str(out), **arguments), Trainer, model(lora), {}
    trainer = kind(model=net, args=args, train_dataset=data, eval_dataset=data[:6], **extra)
    trainer.train(resume_from_checkpoint=str(folder / resume / "checkpoint-4") if resume else None)
    trainer.evaluate()
    trainer.save_model(str(out / "final"))
    if args.process_index == 0:
        (out / "history.json").write_text(json.dumps(trainer.state.log_history))
    del trainer
    gc.collect()


if __name__ == "__main__":
    there = importlib.util.find_spec("deepspeed") is not None
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name, there)
