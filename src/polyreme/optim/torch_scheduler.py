"""A torch scheduler that an engine follows: the engine steps it after each training step, and most scripts
call its `step` as well.

Invariant: it is stepped once for each training step that was not skipped, whoever calls its `step`; a script
that calls it in another rhythm gets an error at the first call that differs. No communication."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyreme.errors import ConfigError, Problem


class TorchScheduler:
    """Steps the scheduler `made`, whose own `step` comes to `called` until `release`.

    A script's call after a training step does nothing, as the engine has made that step. ReduceLROnPlateau is
    stepped by metrics only, and a script's metric goes to `on_metric`, where that is set."""

    def __init__(self, made: LRScheduler) -> None:
        self.made = made
        self.on_metric: Callable[[float], object] | None = None
        self._class = getattr(type(made), _PLAIN, type(made))
        self._ours = False  # whether the engine itself is calling `step`
        self._steps = self._skipped = 0  # training steps since the script's last call
        steps = [vars(cls).get("step") for cls in self._class.__mro__]
        self._codes = {step.__code__ for step in steps if isinstance(step, FunctionType)}
        made.__class__ = _stepped_by(self._class, weakref.ref(self))

    @property
    def waits_for_metric(self) -> bool:
        """Whether it is stepped by metrics only."""
        return isinstance(self.made, ReduceLROnPlateau)

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return self._class.__name__

    def advance(self) -> None:
        """Step the scheduler after a training step, unless it waits for a metric."""
        self._steps += 1
        if not self.waits_for_metric:
            self._step()

    def skip(self) -> None:
        """Note that a training step was skipped."""
        self._skipped += 1

    def observe(self, metric: float) -> None:
        """Step the scheduler by a metric."""
        self._step(metric)

    def restart(self) -> None:
        """Forget the training steps so far, as a checkpoint is loaded."""
        self._steps = self._skipped = 0

    def release(self) -> None:
        """Restore the scheduler's own class, and with it its own `step`."""
        self.made.__class__ = self._class

    def called(self, step: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Answer a call of the scheduler's `step`, by the engine or the script. Raises ConfigError where the
        script's calls have another rhythm than the engine's."""
        if self._ours:
            step(*args, **named)
        elif self.waits_for_metric:
            metric = float(args[0] if args else named["metrics"])
            self.observe(metric) if self.on_metric is None else self.on_metric(metric)
        elif args or named.get("epoch") is not None:
            raise self._refused("step(epoch), and the engine steps it after each training step, too")
        else:
            steps, skipped = self._steps, self._skipped
            self.restart()
            if steps > 1:
                raise self._refused(
                    f"step() after {steps} training steps, after each of which the engine stepped it already"
                )
            if not steps and not skipped:
                raise self._refused("step() with no training step since it was stepped last")

    def check_caller(self, code: CodeType) -> None:
        """Raise ConfigError where `code`, which sets an attribute of the scheduler, is its own `step`, but
        did not come through `called`: the script has a bound method from before."""
        if not self._ours and code in self._codes:
            fix = (
                "call it as scheduler.step(), such as by lambda: scheduler.step(), take scheduler.step after "
                "initialize(), or leave it out: the engine steps it after each training step"
            )
            reason = "the script calls a scheduler.step that it took before initialize()"
            raise ConfigError([Problem("lr_scheduler", self.name, reason, fix)])

    def _step(self, *metric: float) -> None:
        self._ours = True
        try:
            with warnings.catch_warnings():  # the engine steps other optimizers than the scheduler's
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.made.step(*metric)  # type: ignore[arg-type]
        finally:
            self._ours = False

    def _refused(self, what: str) -> ConfigError:
        fix = (
            "leave out scheduler.step(), or call it once after each engine.step() or train_step(); for a "
            "rhythm of the script's own, such as once an epoch, leave out lr_scheduler= and make the "
            "scheduler of the optimizer that is given to initialize(), or of engine.optimizer"
        )
        return ConfigError([Problem("lr_scheduler", self.name, f"the script calls {what}", fix)])


_PLAIN = "_polyreme_plain"
"""The attribute of a class of `_stepped_by` with the class that it was made of."""


def _stepped_by(plain: type[LRScheduler], leader: weakref.ref[TorchScheduler]) -> type[LRScheduler]:
    """Make a subclass of the scheduler class `plain`, with the same name, whose `step` calls `leader.called`
    in the place of the scheduler's own. Copies and pickles of an object are of `plain`."""

    def step(self: Any, *args: Any, **named: Any) -> None:
        leads = leader()
        if leads is None or leads.made is not self:
            plain.step(self, *args, **named)
        else:
            leads.called(lambda *a, **n: plain.step(self, *a, **n), args, named)

    def setting(self: Any, name: str, value: Any) -> None:
        leads = leader()
        if leads is not None and leads.made is self:
            leads.check_caller(sys._getframe(1).f_code)
        plain.__setattr__(self, name, value)

    def reduced(self: Any, protocol: Any) -> Any:
        found: Any = plain.__reduce_ex__(self, protocol)
        return (plain.__new__, (plain,), *found[2:])

    copied = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    own = {"step": step, "__setattr__": setting, "__reduce_ex__": reduced, _PLAIN: plain}
    return type(plain.__name__, (plain,), copied | own)
