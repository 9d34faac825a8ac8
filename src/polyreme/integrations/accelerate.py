"""Accelerate's `prepare` for those who have a config of Polyreme's: what a loop over model, optimizer, loader
and scheduler calls, done by an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from polyreme.config import Config
from polyreme.engine import Engine, initialize
from polyreme.errors import ConfigError, Problem
from polyreme.integrations.shared import EngineOptimizer, Source


class Prepared(NamedTuple):
    """What `prepare` returns, in the order in which it is given."""

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
    """Have an engine train `model` as the config says, in a loop as for Accelerate:

        for batch in dataloader:
            loss = model(**batch).loss
            model.backward(loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

    optimizer: one of the model's parameters, or None: the config's. dataloader: a torch DataLoader of
    micro-batches, of which each data-parallel rank gets its own; its batch_size is batch.micro. scheduler: a
    torch scheduler on that optimizer, or None: the config's; the engine steps it after each step, and
    `scheduler.step()` does nothing, but for `scheduler.step(metric)` of ReduceLROnPlateau. A step is made by
    every `batch.size / (dp x micro)`-th `optimizer.step()`, and by the last of the loader. Raises ConfigError
    for a pipeline, whose whole model nobody can call."""
    own = Config.load(config)
    if own.mesh.pp > 1:
        fix = "set 1, or call Engine.train_step, or take PolyremeTrainer"
        raise ConfigError(
            [Problem("mesh.pp", own.mesh.pp, "a loop calls the whole model, which is cut", fix)]
        )
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
    """The model to be called. `engine` is the engine; other attributes are those of the module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Backward of a micro-batch's mean loss; `loss.backward()` is the same."""
        self.engine.backward(loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.module, name)


class StepOptimizer(EngineOptimizer):
    """The engine's optimizer, which makes a step when its micro-batches are there."""

    def __init__(self, engine: Engine, loader: Any) -> None:
        super().__init__(engine)
        self._steps, self._loader, self._calls = engine, loader, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the engine's step with the last micro-batch of one, or of the loader; else nothing."""
        self._calls += 1
        ends = self._loader is not None and bool(self._loader.end_of_dataloader)
        if ends or self._calls == self._steps.config.accumulation:
            self._calls = 0
            self.last = self._steps.step(last=ends)


class Scheduler:
    """The schedule, which the engine follows: `step` does nothing without a metric."""

    def __init__(self, engine: Engine, scheduler: Any) -> None:
        self._engine, self._scheduler = engine, scheduler

    def step(self, *metric: Any) -> None:
        """Do nothing, as the engine has stepped it; of ReduceLROnPlateau, go on by the metric."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._engine.plateau(*metric)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
