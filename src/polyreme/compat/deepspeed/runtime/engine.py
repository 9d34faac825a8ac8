"""An engine with the methods of DeepSpeed's, which calls Polyreme's engine for each of them.

A window of micro-batches, whose end `is_gradient_accumulation_boundary` tells, is one step: losses are
divided by `gradient_accumulation_steps` in `backward`, added up over the window, and averaged over the
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import polyreme
from polyreme.compat.deepspeed import saving
from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError, refused
from polyreme.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from polyreme.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from polyreme.compat.deepspeed.runtime.getters import FACTS, getter, place
from polyreme.compat.deepspeed.runtime.telemetry import BACKWARD, FORWARD, STEP, Telemetry
from polyreme.compat.deepspeed.runtime.torch_autocast import autocast_if_enabled
from polyreme.compat.deepspeed.runtime.windows import Windows
from polyreme.compat.deepspeed.utils.logging import set_log_level_from_string
from polyreme.step.step import StepResult


class DeepSpeedEngine(Windows):
    """The engine that `deepspeed.initialize` returns. `module` is the user's model, `config` the DeepSpeed
    config as a dictionary, and `polyreme` the engine that trains."""

    def __init__(
        self,
        engine: polyreme.Engine,
        translation: Translation,
        basic: Optimizer | type[Optimizer] | None,
        mpu: Any = None,
    ) -> None:
        """Make the engine over Polyreme's `engine`. basic: the optimizer that `engine` has taken over, or its
        class; None: there is none, and this engine runs forwards alone."""
        super().__init__(engine, translation)
        self.translation: Translation = translation
        self.mpu = mpu
        self.module: nn.Module = engine.module
        self.optimizer = None if basic is None else DeepSpeedOptimizer(self, basic)
        self.basic_optimizer = self.optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.training_data: Any = None
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.collate_fn: Callable[..., Any] | None = None
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self.last: StepResult | None = None
        """The result of the last step; None before the first."""
        self._compiled = self._destroyed = self._applied = False
        if level := translation.values["log_level"]:
            set_log_level_from_string(level)
        self.telemetry = Telemetry(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in FACTS:
                return FACTS[name](self)
            if "polyreme" in self.__dict__ and (found := place(self, name)) is not None:
                return found
            translation = self.__dict__.get("translation")
            if translation is not None and (found := getter(translation, name)) is not None:
                return found
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for one micro-batch. Raises OrderError after `destroy`."""
        self._refuse_ended()
        if self.optimizer is not None and torch.is_grad_enabled():
            self._set_boundary()
            self.telemetry.begin_forward()
        with self.telemetry.timed(FORWARD), autocast_if_enabled(self):
            return self.polyreme(*args, **kwargs)

    def _refuse_ended(self) -> None:
        if self._destroyed:
            raise OrderError(
                "this engine has ended, by destroy(), which Accelerate calls as a Trainer that trained or "
                "evaluated begins to train: make a new Trainer, or call deepspeed.initialize again"
            )

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any
    ) -> Tensor:
        """Divide a micro-batch's loss by the accumulation steps, unless `scale_wrt_gas` is false, and add its
        gradients to those of the window. Returns the loss that was differentiated. retain_graph: keep the
        graph, so that another backward of the same forward may follow."""
        self._refuse_inference("backward")
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._set_boundary()
        with self.telemetry.timed(BACKWARD):
            self.polyreme.backward(loss, retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times fp16's loss scale. Of what this returns the script itself calls
        `backward()`."""
        self._refuse_inference("scale")
        return self.polyreme.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters if this call ends a window; else only count it. The learning rate scheduler
        steps after the update, unless an overflow skipped it. With `managed_gradient_accumulation` false each
        call ends a window. Raises OrderError inside of `no_sync`."""
        self._refuse_inference("step")
        if not self._syncs:
            raise OrderError(
                "step() inside of no_sync(), whose gradients are of this rank alone: call it behind that"
            )
        ends = not self._managed or self.is_gradient_accumulation_boundary()
        self._applied = False
        self.micro_steps += 1
        if not ends:
            return
        if not self.zero_ignore_unused_parameters():
            _refuse_unused(self)
        self._stepping = True
        try:
            with self.telemetry.timed(STEP):
                result = self.polyreme.step()
            self._took(result, lr_kwargs)
        finally:
            self._stepping = False

    def _took(self, result: StepResult, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a step that was made, move the learning rate scheduler on, and report the step."""
        self.last, self._applied = result, not result.skipped
        self.global_steps += 1
        self.global_samples += self.batch.size // self.batch.accumulation * self._taken()
        self.skipped_steps += result.skipped
        if self.lr_scheduler is not None and not result.skipped:
            arguments = {} if lr_kwargs is None else lr_kwargs
            self.lr_scheduler.step(**arguments)
        self.telemetry.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window, and those of parameters that the optimizer leaves out. Raises
        OrderError after `destroy`."""
        self._refuse_ended()
        if self.optimizer is not None:
            self.polyreme.zero_grad(set_to_none)
            self.module.zero_grad(set_to_none)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group of the optimizer."""
        return [float(group["lr"]) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _refuse_inference(self, call: str) -> None:
        if self.optimizer is None:
            raise OrderError(
                f"{call}() of an engine that updates nothing, having no optimizer: give deepspeed.initialize "
                "one, or the config a section optimizer"
            )

    # ---- sizes

    def train_batch_size(self) -> int:
        """Return the number of samples in one step, over all ranks."""
        return self.batch.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in one micro-batch on one rank."""
        return self.batch.micro

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a window, so that a step is of `train_batch_size` samples
        over all ranks. Micro-batches are counted on, so the window under way may be shorter. Raises
        ArgumentError unless the samples are a whole number of micro-batches."""
        once = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < once or train_batch_size % once:
            raise ArgumentError(
                f"train_batch_size={train_batch_size} is no whole number of micro-batches, {once} samples "
                f"over all ranks: choose a multiple of {once}"
            )
        self.batch = replace(self.batch, size=train_batch_size, accumulation=train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples in a micro-batch on one rank, which `train_batch_size` is worked out
        from. The script's loop has to give micro-batches of that size."""
        size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self.batch = replace(self.batch, size=size, micro=micro_batch_size)

    # ---- weights and checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint into `save_dir`/`tag` (by default global_stepN) and its name into
        `save_dir`/latest. The folder is one that Hugging Face's libraries load, with all that
        `load_checkpoint` needs to resume. All ranks must call. Returns True."""
        return saving.save(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint that `save_checkpoint` or DeepSpeed wrote, on any number of ranks and at
        any stage. Returns its path and the client state, or (None, None) if there is no checkpoint. All ranks
        must call."""
        if custom_load_fn is not None:
            raise refused(
                "load_checkpoint(custom_load_fn=...)", "weights are read shard by shard", "leave it out"
            )
        parts = saving.Parts(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
        )
        return saving.load(self, load_dir, tag, parts)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights of the whole model, in the dtype that it computes in, to one file by
        `torch.save`. All ranks must call."""
        return saving.save_weights(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Return the weights of the whole model on every rank. All ranks must call."""
        return saving.whole(self, exclude_frozen_parameters, rank0_only=False, prefix=prefix)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Return the weights of the whole model on rank 0, and None elsewhere. All ranks must call."""
        found = saving.whole(self, exclude_frozen_parameters, rank0_only=True)
        return found if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Load whole tensors by name into the model, from `checkpoint` or from its entry "module". All ranks
        must call. custom_load_fn: called with the tensors as `src` and the model as `dst`, in place of
        `load_state_dict`."""
        weights = checkpoint.get("module", checkpoint)
        with self.polyreme.full_parameters(write=True) as module:
            if custom_load_fn is not None:
                custom_load_fn(src=weights, dst=module)
            else:
                module.load_state_dict(weights, strict=strict)

    # ---- the rest

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Compile the model's forward in place by `torch.nn.Module.compile`."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    def destroy(self) -> None:
        """End the engine, and release what it holds, by `polyreme.Engine.close`."""
        self._destroyed = True
        self.polyreme.close()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's micro-batches of `dataset`, which reads them in this process, or in
        `num_local_io_workers` others."""
        dp = self.polyreme.mesh.dp
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory and self.device.type == "cuda",
            local_rank=0,
            tput_timer=None,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers or 0,
            data_sampler=data_sampler,
            data_parallel_world_size=dp.size,
            data_parallel_rank=dp.rank,
            dataloader_drop_last=self.translation.values["dataloader_drop_last"],
        )


def _refuse_unused(engine: DeepSpeedEngine) -> None:
    """Raise OrderError for a parameter that got no gradient in the window, if the optimizer's states are off
    the device below stage 3: where DeepSpeed fails, too."""
    off = engine.translation.config.get("memory", {}).get("states", "device") != "device"
    for name, parameter in engine.module.named_parameters() if off and engine.translation.stage < 3 else ():
        numbers = engine.polyreme.numbers(parameter)
        if parameter.requires_grad and numbers.trains and not numbers.arrived:
            raise OrderError(
                f"{name} got no gradient in this window, and zero_optimization.ignore_unused_parameters "
                "is false: use it in the loss, freeze it, or write true"
            )
