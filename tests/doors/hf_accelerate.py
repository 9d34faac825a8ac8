"""Accelerate scripts as users write them: `hf_accelerate.py FOLDER CASE ...`, with or without DeepSpeed.

Each case writes FOLDER/CASE.json: the losses and whatever else must be equal with and without."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
LAUNCHED = "ACCELERATE_USE_DEEPSPEED" in os.environ
"""Whether `accelerate launch` has said what plugin there is."""

ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def llama(seed: int) -> LlamaForCausalLM:
    set_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def loader(samples: int, seed: int = 0) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(64, (16,), generator=draw) for _ in range(samples)]
    return DataLoader([{"input_ids": ids, "labels": ids} for ids in rows], batch_size=2)  # type: ignore[arg-type]


def plugin(zero: dict[str, Any], clip: float | None = 0.5, **keys: Any) -> DeepSpeedPlugin:
    batch = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    more = {"gradient_accumulation_steps": "auto", "gradient_clipping": clip}
    return DeepSpeedPlugin(hf_ds_config={**batch, **more, "zero_optimization": zero, **keys})


def accelerator_of(**options: Any) -> Accelerator:
    """An Accelerator of CPU ranks. `cpu=True` is a plain one over DistributedDataParallel whatever is asked
    for, and without it and a backend Accelerate sees one process."""
    on_cpu = not torch.cuda.is_available()
    handlers = [InitProcessGroupKwargs(backend="gloo")] if on_cpu else []
    return Accelerator(cpu=on_cpu and not DEEPSPEED, kwargs_handlers=handlers, **options)


def loop(folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    """Accumulation over an epoch whose last window is shorter, clipping, a scheduler, evaluation, a
    checkpoint gone back to, and the weights."""
    given = {"deepspeed_plugin": plugin(zero)} if DEEPSPEED and not LAUNCHED else {}
    accelerator = accelerator_of(gradient_accumulation_steps=2, project_dir=str(folder), **given)
    model = llama(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, loader(26), loader(7, seed=1), scheduler
    )
    facts: dict[str, Any] = {"losses": [], "norms": [], "rates": []}

    def epoch() -> None:
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    facts["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
            facts["rates"].append(scheduler.get_last_lr()[0])

    epoch()
    accelerator.save_state(str(folder / "state"))
    epoch()
    model.eval()
    rows = []
    for batch in test:
        with torch.no_grad():
            logits = model(**batch).logits
        rows.append(accelerator.gather_for_metrics(logits.mean(dim=(1, 2))))
    facts["evaluation"] = torch.cat(rows).tolist()
    accelerator.load_state(str(folder / "state"))
    before = facts["losses"][-7:]
    epoch()
    assert facts["losses"][-7:] == before, (facts["losses"][-7:], before)
    weights = accelerator.get_state_dict(model)
    whole = accelerator.unwrap_model(model)
    assert isinstance(whole, LlamaForCausalLM)
    accelerator.wait_for_everyone()
    whole.save_pretrained(
        str(folder / "model"), is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=weights,
    )  # fmt: skip
    if accelerator.is_main_process:
        saved = load_file(folder / "model" / "model.safetensors")
        facts["weights"] = [saved[name].double().norm().item() for name in sorted(saved)]
        assert len(test.dataset) == len(facts["evaluation"])
    accelerator.save_model(model, str(folder / "shards"), max_shard_size="20KB")
    return facts


def dummies(folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    """Optimizer and schedule of the DeepSpeed config, filled in by what Dummy... say."""
    facts: dict[str, Any] = {"losses": []}
    model = llama(0)
    if DEEPSPEED:
        from accelerate.utils import DummyOptim, DummyScheduler

        sections = {"optimizer": ADAMW, "scheduler": WARMUP}
        accelerator = accelerator_of(deepspeed_plugin=plugin(zero, clip=1.0, **sections))
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=4)
    else:
        accelerator = accelerator_of(step_scheduler_with_optimizer=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, loader(24), scheduler)
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
    return facts


def teacher(folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    """A student learns from a frozen teacher that has an engine and a plugin of its own."""
    plugins = {
        "student": plugin(zero, clip=1.0),
        "teacher": plugin({"stage": 3, "stage3_param_persistence_threshold": 0}),
    }
    given = {"deepspeed_plugins": plugins} if DEEPSPEED else {}
    accelerator = accelerator_of(**given)
    student, old = llama(0), llama(1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, optimizer, train = accelerator.prepare(student, optimizer, loader(24))
    if DEEPSPEED:
        accelerator.state.select_deepspeed_plugin("teacher")
        plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        old = accelerator.prepare(old)
        accelerator.state.select_deepspeed_plugin("student")
    old.eval()
    facts: dict[str, Any] = {"losses": []}
    for batch in train:
        with torch.no_grad():
            wanted = old(**batch).logits.softmax(-1)
        loss = nn.functional.cross_entropy(student(**batch).logits.flatten(0, 1), wanted.flatten(0, 1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
    return facts


def two(folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    """Two models train in turn, each with an Accelerator, as Accelerate's page on several models says."""
    plugins = {"first": plugin(zero, clip=1.0), "second": plugin({"stage": 2}, clip=1.0)}
    given = {"deepspeed_plugins": plugins} if DEEPSPEED else {}
    first, second = accelerator_of(**given), accelerator_of()
    models: list[Any] = [llama(0), llama(1)]
    optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    models[0], optimizers[0], train = first.prepare(models[0], optimizers[0], loader(12))
    if DEEPSPEED:
        second.state.select_deepspeed_plugin("second")
        plugins["second"].deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    models[1], optimizers[1] = second.prepare(models[1], optimizers[1])
    facts: dict[str, Any] = {"losses": []}
    for batch in train:
        for accelerator, model, optimizer in zip((first, second), models, optimizers, strict=True):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
    return facts


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "loop2": (loop, {"stage": 2}),
    "loop3": (loop, ZERO3),
    "dummies": (dummies, {"stage": 2}),
    "teacher": (teacher, {"stage": 2}),
    "two": (two, ZERO3),
}


def run(folder: Path, case: str) -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    function, zero = CASES[case]
    facts = function(folder / case, zero)
    if torch.distributed.get_rank() == 0:
        (folder / f"{case}.json").write_text(json.dumps(facts))
    del facts
    gc.collect()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name)
    accelerator_of().end_training()
