"""Lightning on Polyreme's engine: `Trainer(strategy=PolyremeStrategy("run.toml"))`, or `strategy="polyreme"`
once this module is imported.

Lightning runs the LightningModule's steps, hooks, logs and schedulers; the engine does forward, backward,
update and checkpoint. Losses are averaged over micro-batches and ranks, as in DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

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

ENGINE, REST = "engine", "lightning.ckpt"
"""The contents of a checkpoint's folder: the engine's checkpoint, and Lightning's file without weights and
states."""


class PolyremeStrategy(DDPStrategy):
    """Trains a LightningModule with one optimizer by an engine. engine: None before `fit`; it also validates
    and tests afterwards."""

    strategy_name = "polyreme"

    def __init__(self, config: Source | None = None, **options: Any) -> None:
        """config: a file, a mapping, or a Config; batch sizes, accumulation and clipping come from the
        Trainer. Raises ConfigError for a pipeline, as no rank can call its whole model, and for mesh.cp."""
        super().__init__(**options)
        self.config = Config.load({} if config is None else config)
        self.engine: Engine | None = None
        fix = "set 1, or take PolyremeTrainer or Engine.train_step"
        found = [
            Problem(f"mesh.{name}", size, reason, fix)
            for name, size, reason in (
                ("pp", self.config.mesh.pp, "training_step calls the whole model, which is cut"),
                (
                    "cp",
                    self.config.mesh.cp,
                    "training_step calls the model inside of it with whole sequences",
                ),
            )
            if size != 1
        ]
        if found:
            raise ConfigError(found)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of shares of the data, and this rank's share."""
        world = self.num_nodes * self.num_processes
        return {
            "num_replicas": data_parallel(self.config, world),
            "rank": data_rank(self.config, world, self.global_rank),
        }

    def setup(self, trainer: Any) -> None:
        """Make the engine for training; for anything else use the module as it is, or the engine of an
        earlier `fit`."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            if self.engine is None:
                super().setup(trainer)
            return
        if self.engine is not None:
            self.engine.close(gather=True)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not trainer.lightning_module.automatic_optimization:
            raise ModelError(
                f"{len(self.optimizers)} optimizers, or a manual optimization: PolyremeStrategy trains with "
                "one optimizer and Lightning's own loop; use Polyreme's engine itself for others"
            )
        config = completed(self.config, self._trainer_settings(trainer))
        self.engine = initialize(trainer.lightning_module, config, optimizer=self.optimizers[0])
        self._own = EngineOptimizer(self.engine)
        self.optimizers = [self._own]
        self.setup_precision_plugin()

    def _trainer_settings(self, trainer: Any) -> dict[str, tuple[Any, str]]:
        loader = trainer.fit_loop._data_source.dataloader()
        micro = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1
        replicas = self.distributed_sampler_kwargs["num_replicas"]
        settings: dict[str, tuple[Any, str]] = {
            "batch.micro": (micro, "the loader's batch_size"),
            "batch.size": (micro * trainer.accumulate_grad_batches * replicas, "accumulate_grad_batches"),
            "batch.mean": ("ranks", "Lightning's loop"),
        }
        if trainer.gradient_clip_val:
            if trainer.gradient_clip_algorithm == "value":
                fix = 'take gradient_clip_algorithm="norm"'
                raise ConfigError(
                    [Problem("gradient_clip_algorithm", "value", "gradients are in shards", fix)]
                )
            settings["optimizer.clip"] = (trainer.gradient_clip_val, "gradient_clip_val")
        elif not is_given(self.config, "optimizer.clip"):
            settings["optimizer.clip"] = ("none", "gradient_clip_val")
        if trainer.precision != "32-true":
            fix = 'leave precision out, and set precision.compute in the config: "bf16", "autocast-fp16", ...'
            raise ConfigError([Problem("Trainer's precision", trainer.precision, "the config says it", fix)])
        return settings

    # ---- the loop

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's training_step as a forward of the engine."""
        assert self.engine is not None and self.lightning_module is not None
        self.engine.set_boundary(not self.lightning_module.trainer.fit_loop._should_accumulate())
        return self._forward_redirection(self.engine, self.lightning_module, "training_step", *args, **kwargs)  # type: ignore[arg-type]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's validation_step as a forward of the module."""
        return self._called("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's test_step as a forward of the module."""
        return self._called("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's predict_step as a forward of the module."""
        return self._called("predict_step", *args, **kwargs)

    def _called(self, step: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        return self._forward_redirection(module, module, step, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the engine's backward, between Lightning's hooks."""
        assert self.engine is not None and self.lightning_module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.backward(loss)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the last forward and backward of a step, then the engine's step, which clips."""
        assert self.engine is not None and self.lightning_module is not None
        loss, trainer = closure(), self.lightning_module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        self._own.last = self.engine.step()
        return loss

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine, which reads the checkpoint, is made in `setup`."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores states."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; nothing once there is an engine, which writes them."""
        return super().lightning_module_state_dict() if self.engine is None else {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the weights; do nothing once there is an engine, which reads them."""
        if self.engine is None:
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine writes the states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder: the engine's checkpoint, a Hugging Face directory, and Lightning's own. All ranks
        must call."""
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(str(filepath)))
        self.engine.save(folder / ENGINE)
        rest = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        super().save_checkpoint(rest, folder / REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the engine's checkpoint, and return Lightning's. All ranks must call."""
        folder = Path(checkpoint_path)
        if self.engine is None or not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        strict = self.lightning_module.strict_loading
        self.engine.load(folder / ENGINE, strict=strict, weights_only=not fits)
        return super().load_checkpoint(folder / REST, weights_only)

    def teardown(self) -> None:
        """Leave the module where the engine has it."""
        if self.engine is None:
            super().teardown()
            return
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


StrategyRegistry.register(
    "polyreme", PolyremeStrategy, description="Polyreme's engine with its default config", override=True
)
