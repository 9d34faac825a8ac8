"""Compares the memory that dry runs say of a GPU with what torch's allocator takes of one, in a step of one
rank.

    python bench/plan_cuda.py --write bench/results/plan-cuda.md

allocated: the most bytes of tensors, as `torch.cuda.max_memory_allocated` has them. reserved: those of the
allocator's segments, `torch.cuda.max_memory_reserved`. context: what the driver says is used beyond them, an
input of plans. Exit status 1 where a GPU is missing."""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polyreme
from polyreme.config import Config
from polyreme.planner.dry_run import STEPS, dry_run

LENGTH = 1024
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"compute": "bf16"}},
    "bf16, recomputed": {"precision": {"compute": "bf16"}, "memory": {"activations": "recompute"}},
    "bf16, stage 3": {"precision": {"compute": "bf16"}, "zero": {"stage": 3}},
    "bf16, 4 micro-batches": {"precision": {"compute": "bf16"}, "batch": {"size": 16, "micro": 4}},
    "bf16, states on the host": {"precision": {"compute": "bf16"}, "memory": {"states": "host"}},
    "bf16, activations on the host": {"precision": {"compute": "bf16"}, "memory": {"activations": "host"}},
}


def llama(layers: int) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
        )
    )


def batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 32000, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def measured(model: partial[nn.Module], config: Config) -> tuple[int, int, int]:
    """The most bytes allocated and reserved in a second step, and those used beside them."""
    with polyreme.initialize(model, config) as engine:
        share = batch(config.share)
        for _ in range(STEPS - 1):
            engine.train_step(share)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(share)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return allocated, reserved, context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--write", type=Path, help="the file for the table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use")
    warnings.simplefilter("ignore")
    name, lines = torch.cuda.get_device_name(), []
    for case, sections in CASES.items():
        config = Config.load({"batch": {"size": 4, "micro": 4}, **sections}).resolve(1)
        model = partial(llama, args.layers)
        said = dry_run(model, config, 0, batch=batch, device="cuda").memory
        allocated, reserved, context = measured(model, config)
        figures = " | ".join(
            f"{real / 2**20:.1f} | {plan / real - 1:+.2%}"
            for plan, real in ((said.peak, allocated), (said.reserved, reserved))
        )
        lines.append(f"| {case} | {figures} | {context / 2**20:.0f} |")
        print(lines[-1], flush=True)
    head = (
        "# Predicted and measured memory of a GPU\n\n"
        f"{name}, torch {torch.__version__}, {args.layers} blocks.\n\n"
        "| case | allocated, MiB | predicted | reserved, MiB | predicted | context, MiB |\n"
        "|---|---|---|---|---|---|\n"
    )
    if args.write:
        args.write.write_text(head + "\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
