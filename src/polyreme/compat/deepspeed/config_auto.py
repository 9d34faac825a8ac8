"""Replace "auto" in a DeepSpeed config by what transformers' Trainer writes for it, with the defaults of its
TrainingArguments.

This is for a config that is only shown: in a run the Trainer replaces "auto" itself, by the script's
arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

TRAINER: Mapping[str, tuple[Any, str]] = {
    "train_micro_batch_size_per_gpu": (8, "per_device_train_batch_size"),
    "gradient_accumulation_steps": (1, "gradient_accumulation_steps"),
    "gradient_clipping": (1.0, "max_grad_norm"),
    "bf16.enabled": (False, "bf16"),
    "fp16.enabled": (False, "fp16"),
    "optimizer.params.lr": (5e-5, "learning_rate"),
    "optimizer.params.betas": ([0.9, 0.999], "adam_beta1 or adam_beta2"),
    "optimizer.params.eps": (1e-8, "adam_epsilon"),
    "optimizer.params.weight_decay": (0.0, "weight_decay"),
    "scheduler.params.warmup_min_lr": (0, ""),
    "scheduler.params.warmup_max_lr": (5e-5, "learning_rate"),
    "scheduler.params.warmup_num_steps": (1, "warmup_steps"),
    "scheduler.params.total_num_steps": (1000, "max_steps or num_train_epochs"),
}
"""The default of each key that the Trainer fills in, and the argument that changes it. The length of a run
has no default, for which 1000 steps stand."""
BATCH = "train_batch_size"


def fill(tree: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a copy of `tree` with values in place of "auto", for `ranks` ranks, and for each key that was
    filled in a text that names the arguments that change it. An "auto" that the Trainer does not replace
    stays."""
    filled, said = copy.deepcopy(dict(tree)), {}
    for path, (value, argument) in TRAINER.items():
        *sections, name = path.split(".")
        table: Any = filled
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and table.get(name) == "auto":
            table[name], said[path] = copy.copy(value), f" unless {argument} is set" if argument else ""
    if filled.get(BATCH) == "auto":
        sizes = (
            filled.get("train_micro_batch_size_per_gpu", 8),
            filled.get("gradient_accumulation_steps", 1),
        )
        if all(isinstance(size, int) for size in sizes):
            filled[BATCH] = sizes[0] * sizes[1] * ranks
            said[BATCH] = " unless per_device_train_batch_size or gradient_accumulation_steps is set"
    return filled, said
