"""A `prepare` like Accelerate's, with a Polyreme config: returns objects that a loop over model, optimizer,
loader and scheduler can call, and that an engine stands behind."""

from __future__ import annotations

from typing import Any, NamedTuple

from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from polyreme.config import Config
from polyreme.engine import Engine
from polyreme.errors import ConfigError, Problem
from polyreme.initialization import initialize
from polyreme.integrations.shared import EngineOptimizer, Source


class Prepared(NamedTuple):
    """The result of `prepare`, in the order of its arguments."""

    model: Model
    optimizer: StepOptimizer
    dataloader: Any
    scheduler: Any


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    dataloader: Any = None,
    scheduler: Any = None,
    *,
    config: Source,
) -> Prepared:
    """Make an engine that trains `model` by the config, in a loop as for Accelerate:

        for batch in dataloader:
            loss = model(**batch).loss
            model.backward(loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

    optimizer: a torch optimizer of the model's parameters; None: the config's. dataloader: a torch DataLoader
    of micro-batches, of which each data-parallel rank gets its own; its batch_size must be batch.micro.
    scheduler: a torch scheduler on that optimizer; None: the config's. The engine steps it after each step,
    and `scheduler.step()` does nothing, except `scheduler.step(metric)` of ReduceLROnPlateau. Every
    `batch.size / (dp x micro)`-th call of `optimizer.step()` makes a step, and the one after the loader's
    last batch. Raises ConfigError for a pipeline, as no rank can call its whole model."""
    own = Config.load(config)
    if own.mesh.pp > 1 or "mesh.pp" in own.searched:
        fix = "set 1, or call Engine.train_step, or take PolyremeTrainer"
        pp = "auto" if own.mesh.pp == 1 else own.mesh.pp
        raise ConfigError([Problem("mesh.pp", pp, "a loop calls the whole model, which is cut", fix)])
    engine = initialize(model, own, optimizer=optimizer, lr_scheduler=scheduler)
    loader = None if dataloader is None else _shared_out(dataloader, engine)
    steps = StepOptimizer(engine, loader)
    return Prepared(Model(engine), steps, loader, Scheduler(engine, scheduler))


def _shared_out(loader: DataLoader[Any], engine: Engine) -> DataLoader[Any]:
    micro = int(engine.config.batch.micro)
    if loader.batch_size != micro:
        reason, fix = f"the loader's batch_size is {loader.batch_size}", "make them equal"
        raise ConfigError([Problem("batch.micro", micro, reason, fix)])
    dp = engine.mesh.dp
    return prepare_data_loader(
        loader, engine.mesh.device, num_processes=dp.size, process_index=dp.rank, put_on_device=True,
        use_seedable_sampler=True, data_seed=engine.config.seed,
    )  # fmt: skip


class Model:
    """The model for the loop to call. engine: the engine; other attributes are those of the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for one micro-batch."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a micro-batch's mean loss; `loss.backward()` does the same."""
        self.engine.backward(loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.module, name)


class StepOptimizer(EngineOptimizer):
    """The engine's optimizer, whose `step` makes a step once all its micro-batches were given."""

    def __init__(self, engine: Engine, loader: Any) -> None:
        super().__init__(engine)
        self._steps, self._loader, self._calls = engine, loader, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the engine's step after the last micro-batch of a step, or of the loader; else do nothing."""
        self._calls += 1
        ends = self._loader is not None and bool(self._loader.end_of_dataloader)
        if ends or self._calls == self._steps.config.accumulation:
            self._calls = 0
            self.last = self._steps.step(last=ends)


class Scheduler:
    """The schedule, which the engine steps itself: `step` does nothing without a metric."""

    def __init__(self, engine: Engine, scheduler: Any) -> None:
        self._engine, self._scheduler = engine, scheduler

    def step(self, *metric: Any) -> None:
        """Step ReduceLROnPlateau by the metric; do nothing for others, which the engine steps."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._engine.plateau(*metric)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
