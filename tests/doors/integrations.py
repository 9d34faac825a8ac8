"""Scripts of polyreme.integrations: `integrations.py FOLDER CASE ...`. Each case writes FOLDER/CASE.json, the
losses and what else must be those of the same script without Polyreme."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from polyreme.integrations import PolyremeTrainer
from polyreme.integrations.accelerate import prepare


def llama() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def rows(samples: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples of 16 tokens, each of its own number of labels."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for i in range(samples):
        ids = torch.randint(64, (16,), generator=draw)
        labels = ids.clone()
        labels[: i % 5 + 1] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(out: Path, ranks: int) -> TrainingArguments:
    """So that a step has 8 samples and a batch of evaluation 4, over `ranks` of data parallelism."""
    return TrainingArguments(
        str(out), per_device_train_batch_size=2, gradient_accumulation_steps=4 // ranks, num_train_epochs=2,
        learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5, weight_decay=0.1, logging_steps=1,
        save_steps=4, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4 // ranks,
        report_to=[], use_cpu=True, disable_tqdm=True, load_best_model_at_end=True, save_total_limit=3,
    )  # fmt: skip


def of(log: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {
        key: [each[key] for each in log if key in each]
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss")
    }


def trainer(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """A run, the whole of it again from its checkpoint in the middle, and what was saved of it."""
    world = int(os.environ["WORLD_SIZE"])
    mesh = (config or {}).get("mesh", {})
    ranks = world // (mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("cp", 1))

    def made() -> Trainer:
        data = {"train_dataset": rows(28), "eval_dataset": rows(8, seed=1)}
        args = arguments(folder, ranks)
        if config is None:
            return Trainer(llama(), args, **data)
        return PolyremeTrainer(llama(), args, polyreme=config, **data)

    run = made()
    run.train()
    facts = of(run.state.log_history)
    again = made()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert of(again.state.log_history) == facts, (of(again.state.log_history), facts)
    again.save_model(str(folder / "final"))
    again.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(folder / "final")
    facts["weights"] = [parameter.double().norm().item() for parameter in saved.parameters()]
    return facts


def loop(folder: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """A loop over Accelerate's objects, and over ours."""
    model: Any = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader: Any = DataLoader(rows(28), batch_size=2)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    facts: dict[str, Any] = {"losses": [], "rates": []}
    if config is not None:
        model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler, config=config)
        for batch in loader:
            loss = model(**batch).loss
            model.backward(loss)
            facts["rates"].append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
        return facts
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            facts["rates"].append(scheduler.get_last_lr()[0])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        facts["losses"].append(accelerator.gather(loss.detach()).mean().item())
    return facts


LOOP = {"batch": {"size": 8, "micro": 2, "mean": "ranks"}, "optimizer": {"clip": 0.5}}
CASES: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "trainer": (trainer, None),
    "zero2": (trainer, {"zero": {"stage": 2}}),
    "zero3": (trainer, {"zero": {"stage": 3}}),
    "tp": (trainer, {"mesh": {"tp": 2}}),
    "pp": (trainer, {"mesh": {"pp": 2}}),
    "cp": (trainer, {"mesh": {"cp": 2}}),
    "loop": (loop, None),
    "loop3": (loop, {**LOOP, "zero": {"stage": 3}}),
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        function, given = CASES[name]
        found = function(Path(sys.argv[1]) / name, given)
        if torch.distributed.get_rank() == 0:
            (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(found))
