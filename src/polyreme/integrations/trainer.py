"""Hugging Face's Trainer on Polyreme's engine: the Trainer does data, logs, evaluation and callbacks, and has
its arguments; the engine does the step and the checkpoint, with every mesh, ZeRO stage and memory tier of the
config.

A step's micro-batches are collected and trained together (`Engine.train_step`), so that a pipeline can
process them in any order. Communication: the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.initialization import initialize
from polyreme.integrations.shared import (
    EngineOptimizer,
    Source,
    completed,
    data_parallel,
    data_rank,
    is_given,
)
from polyreme.sequence.documents import DROPPED

FOLDER = "polyreme"
"""The folder in a Trainer's checkpoint-N with the engine's checkpoint."""
_OPTIMIZER = ("name", "lr", "betas", "eps", "momentum", "weight_decay", "no_decay", "groups", "options")


class PolyremeTrainer(Trainer):
    """A Trainer whose model is trained by a Polyreme engine.

    polyreme: the config: a file, a mapping, or a Config. Batch sizes, accumulation, optimizer, schedule,
    clipping, seed and bf16 come from TrainingArguments; mesh, zero, memory and precision from the config.
    Other arguments are Trainer's. The loss is the model's own, a mean over all labels of a step.

    Raises ConfigError where the two contradict each other, and for options that the engine does not
    support."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *more: Any,
        polyreme: Source,
        **options: Any,
    ) -> None:
        self.engine: Engine | None = None
        """The engine that trains the model; None before `train`."""
        self._config = Config.load(polyreme)
        self._waiting: list[Any] = []
        super().__init__(model, args, *more, **options)
        if problems := self._unsupported():
            raise ConfigError(problems)
        self._config = completed(self._config, self._trainer_settings())

    @property
    def gather_function(self) -> Any:
        """The function by which evaluation gathers a tensor of each rank: of ranks with the same data only
        the first one's is kept."""
        return self._gather if self.get_tp_size() == 1 else self._gathered

    @gather_function.setter
    def gather_function(self, gather: Any) -> None:
        self._gather = gather

    def _gathered(self, data: Any) -> Any:
        world, state = self.args.world_size, self.accelerator.gradient_state
        places = [data_rank(self._config, world, rank) for rank in range(world)]
        first = [places.index(place) for place in range(data_parallel(self._config, world))]

        def of_first(tensor: Tensor) -> Tensor:
            chunks = tensor.chunk(world)
            whole = torch.cat([chunks[rank] for rank in first])
            return whole[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else whole

        return pytree.tree_map_only(Tensor, of_first, self.accelerator.gather(data))

    def _unsupported(self) -> list[Problem]:
        args, found = self.args, []
        divided = self._config.mesh.tp > 1 or self._losses_alone
        own_loss = type(self).compute_loss is not Trainer.compute_loss or self.compute_loss_func is not None
        for name, wrong, reason, fix in (
            ("deepspeed", args.deepspeed, "is another engine", "leave it out: polyreme= is the config"),
            ("fsdp", args.fsdp, "is another way to shard", "leave it out: zero.stage shards"),
            (
                "fp16",
                args.fp16,
                "is said by the config",
                'set precision.compute = "fp16" or "autocast-fp16" there',
            ),
            (
                "auto_find_batch_size",
                args.auto_find_batch_size,
                "cannot go on after an error",
                "leave it out",
            ),
            (
                "compute_loss",
                own_loss,
                "is not called: the engine calls the model",
                "return the loss in forward",
            ),
            (
                "label_smoothing_factor",
                args.label_smoothing_factor,
                "is not applied",
                "smooth in the model's loss",
            ),
            (
                "compute_metrics",
                divided and self.compute_metrics is not None,
                "needs whole outputs of the ranks' own samples, which mesh.tp, mesh.pp, mesh.cp, a "
                "context.method and data.pack divide",
                "leave it out, or evaluate what was saved",
            ),
        ):
            if wrong:
                found.append(Problem(f"Trainer's {name}", wrong, reason, fix))
        for key in _OPTIMIZER:
            if is_given(self._config, f"optimizer.{key}"):
                value = self._config.value(f"optimizer.{key}")
                fix = "remove it, and set learning_rate, optim, ... or optimizers="
                found.append(Problem(f"optimizer.{key}", value, "the Trainer's arguments say it", fix))
        return found

    def _trainer_settings(self) -> dict[str, tuple[Any, str]]:
        args, micro = self.args, self.args.per_device_train_batch_size
        size = micro * args.gradient_accumulation_steps * data_parallel(self._config, args.world_size)
        settings: dict[str, tuple[Any, str]] = {
            "batch.micro": (micro, "per_device_train_batch_size"),
            "batch.size": (size, "the batch of TrainingArguments"),
        }
        if args.max_grad_norm and args.max_grad_norm > 0:
            settings["optimizer.clip"] = (args.max_grad_norm, "max_grad_norm")
        elif not is_given(self._config, "optimizer.clip"):
            settings["optimizer.clip"] = ("none", "max_grad_norm")
        if args.bf16 and not is_given(self._config, "precision.compute"):
            settings["precision.compute"] = ("autocast-bf16", "bf16")
        if not is_given(self._config, "seed"):
            settings["seed"] = (args.seed, "seed")
        return settings

    # ---- data: one share for each data-parallel rank

    def _set_signature_columns_if_needed(self) -> None:
        """Keep what tells documents, too, which the engine reads, and the model does not take."""
        super()._set_signature_columns_if_needed()
        if self._config.computes_attention:
            columns: Any = self._signature_columns
            columns += [name for name in DROPPED if name not in columns]

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same data."""
        return self.args.world_size // data_parallel(self._config, self.args.world_size)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if self.get_tp_size() == 1:
            return super()._get_dataloader(*args, **kwargs)
        self.accelerator.prepare = self._shared_out
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            del self.accelerator.prepare

    def _shared_out(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        world, own = self.args.world_size, self.accelerator.dataloader_config
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=data_parallel(self._config, world),
            process_index=data_rank(self._config, world, self.args.process_index),
            put_on_device=True,
            rng_types=self.accelerator.rng_types.copy(),
            even_batches=own.even_batches,
            use_seedable_sampler=own.use_seedable_sampler,
            data_seed=own.data_seed,
        )

    # ---- the step

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if self.engine is not None:
            self.engine.close(gather=True)
            self.optimizer = None
        model: Any = self.model
        given: Any = self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps, optimizer=given)
        scheduler: Any = self.lr_scheduler
        self.engine = initialize(model, self._config, optimizer=given)
        self._own = EngineOptimizer(self.engine)
        self.model_wrapped, self.optimizer = model, self._own
        # so that Accelerate wraps neither of them
        self.accelerator._models, self.accelerator._optimizers = [self.model], [self.optimizer]
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            for group, rate in zip(given.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._waiting.clear()
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect a micro-batch; with the last one of a step, train on all of them. Returns the step's mean
        loss then, and zero before."""
        engine = self._trained()
        self._waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        batch, self._waiting = self._waiting, []
        self._own.last = result = engine.train_step(batch)
        return torch.tensor(result.loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        norm = float("nan") if self._own.last is None else self._own.last.grad_norm
        return torch.tensor(norm, dtype=torch.float64)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Predict as Trainer does; over a pipeline, and where the engine computes attention, only the
        loss."""
        if self.engine is None or not self._losses_alone:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss = self.engine.eval_step([self._prepare_inputs(inputs)]).loss
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device), None, None

    @property
    def _losses_alone(self) -> bool:
        """Whether evaluation has only losses, as no rank has whole outputs."""
        return self._config.mesh.pp > 1 or self._config.computes_attention

    def _trained(self) -> Engine:
        if self.engine is None:
            raise ModelError("there is no engine before train(): call trainer.train()")
        return self.engine

    # ---- weights and checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights for `from_pretrained`. All ranks must call."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir, state_dict=self.engine.state_dict(rank0_only=True))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._trained().save(Path(output_dir) / FOLDER)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._trained().load(Path(checkpoint) / FOLDER)
            state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            raise ModelError(
                f"{resume_from_checkpoint} has no folder {FOLDER!r}: no PolyremeTrainer wrote it. Give its "
                "weights to from_pretrained, and train anew"
            )

    def _load_best_model(self) -> None:
        self._trained().load(Path(str(self.state.best_model_checkpoint)) / FOLDER, weights_only=True)
