"""DeepSpeed's engine over Polyreme's: its methods, translated.

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
from polyreme.compat.deepspeed.monitor.monitor import MonitorMaster
from polyreme.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
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
    """What `deepspeed.initialize` returns first. `module` is the user's model, `config` the DeepSpeed config
    as a dictionary, `polyreme` the engine that trains."""

    def __init__(
        self,
        engine: polyreme.Engine,
        translation: Translation,
        basic: Optimizer | type[Optimizer] | None,
        mpu: Any = None,
    ) -> None:
        """basic: the optimizer that the engine has taken over; None: the engine is for forwards alone."""
        super().__init__(engine, translation)
        self.translation, self.mpu = translation, mpu
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
        """What the last step did."""
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

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed config, as it was given."""
        return self.translation.source

    @property
    def config_dict(self) -> dict[str, Any]:
        """The DeepSpeed config, as it was given."""
        return self.translation.source

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.polyreme.mesh.device

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch. Raises OrderError where the engine has ended."""
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
        """Backward of a micro-batch's loss, which is first divided by the accumulation steps unless
        `scale_wrt_gas` is false. Returns the loss that was differentiated. retain_graph: another backward
        of the same forward may come, and is added."""
        self._refuse_inference("backward")
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._set_boundary()
        with self.telemetry.timed(BACKWARD):
            self.polyreme.backward(loss, retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: the last backward of a window reduces gradients."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale of fp16, for a `backward()` of the user's own that comes next."""
        self._refuse_inference("scale")
        return self.polyreme.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """The optimizer's step at the end of a window, and nothing else before; then that of the learning
        rate scheduler, unless an overflow skipped the step. With `managed_gradient_accumulation` false, each
        call ends a window."""
        self._refuse_inference("step")
        if not self._syncs:
            raise OrderError(
                "It is illegal to call Engine.step() inside no_sync context manager, whose gradients are not "
                "reduced: call it behind"
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
        """Take note of a step, and go on in the learning rate schedule."""
        self.last, self._applied = result, not result.skipped
        self.global_steps += 1
        self.global_samples += self.train_batch_size() // self.gradient_accumulation_steps() * self._taken()
        if result.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.telemetry.end_step()

    @property
    def monitor(self) -> MonitorMaster:
        """The monitors that the config names."""
        return self.telemetry.monitor

    @property
    def timers(self) -> Any:
        """Timers of forward, backward and step, which run with wall_clock_breakdown."""
        return self.telemetry.timers

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The flops profiler, where the config enables it."""
        return self.telemetry.profiler

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window, and those of parameters that the optimizer leaves out.
        Raises OrderError where the engine has ended."""
        self._refuse_ended()
        if self.optimizer is not None:
            self.polyreme.zero_grad(set_to_none)
            self.module.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights: not within a window."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first step."""
        return None if self.last is None else self.last.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """The `type` of each group, where a script gave one."""
        return [group.get("type") for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _refuse_inference(self, call: str) -> None:
        if self.optimizer is None:
            raise OrderError(
                f"must provide optimizer during init in order to use {call}: give deepspeed.initialize an "
                "optimizer, or the config an optimizer section"
            )

    # ---- sizes

    def train_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.batch.micro

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return (
            self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()
        )  # fmt: skip

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Have windows be of as many micro-batches as make these samples over all ranks; the count of
        micro-batches goes on, so that the first one may be shorter. Raises ArgumentError where that is no
        whole number."""
        once = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < once or train_batch_size % once:
            raise ArgumentError(
                f"Train batch size must be divisible by micro-batch data parallelism: {train_batch_size} "
                f"is no multiple of {once}"
            )
        self.batch = replace(self.batch, size=train_batch_size, accumulation=train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Have `train_batch_size` count micro-batches of so many samples, which the loop then gives."""
        size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self.batch = replace(self.batch, size=size, micro=micro_batch_size)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.polyreme.mesh.world_size

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.polyreme.mesh.dp.size

    @property
    def mp_world_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.polyreme.mesh.tp.size

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.polyreme.mesh.rank

    # ---- weights and checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir`/`tag` (by default global_stepN), a Hugging Face directory with all that
        `load_checkpoint` goes on from, and `save_dir`/latest. All ranks must call."""
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
        """Go on from what `save_checkpoint` or DeepSpeed's own left, with any number of ranks and any stage.
        Returns the path and the client state, or (None, None) where there is no checkpoint. All ranks must
        call."""
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
        """Write the whole model's weights, in the dtype that it computes in, to one file of torch's. All
        ranks must call."""
        return saving.save_weights(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The whole model's weights, on every rank. All ranks must call."""
        return saving.whole(self, exclude_frozen_parameters, rank0_only=False, prefix=prefix)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The whole model's weights on rank 0, None on others. All ranks must call."""
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
        """Set the weights from whole tensors by name, or a checkpoint with them in "module"; custom_load_fn
        does it in place of the module, given both as `src` and `dst`. All ranks must call."""
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
        """Compile the module's forward in place, as `torch.nn.Module.compile` does."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled

    def destroy(self) -> None:
        """Give back what the engine holds: `polyreme.Engine.close`."""
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
        """A loader of this rank's micro-batches of `dataset`, read in this process unless
        `num_local_io_workers` says so."""
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

    def empty_partition_cache(self) -> None:
        """Free what is gathered. Polyreme keeps nothing gathered between steps."""

    def get_sequence_parallel_group(self) -> None:
        """None: there is no sequence parallelism over ranks."""


def _refuse_unused(engine: DeepSpeedEngine) -> None:
    """Raise OrderError where DeepSpeed does, for a parameter that no backward of the window came to."""
    off = engine.translation.config.get("memory", {}).get("states", "device") != "device"
    for name, parameter in engine.module.named_parameters() if off and engine.translation.stage < 3 else ():
        numbers = engine.polyreme.numbers(parameter)
        if parameter.requires_grad and numbers.trains and not numbers.arrived:
            raise OrderError(
                f"{name} got no gradient in this window, and zero_optimization.ignore_unused_parameters "
                "is false: use it in the loss, freeze it, or write true"
            )
