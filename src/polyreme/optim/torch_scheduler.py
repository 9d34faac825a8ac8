"""A torch scheduler that an engine follows: the engine steps it after each training step, and so does the
loop of most scripts.

Invariant: it is stepped once for each training step that was not skipped, whoever calls its `step`; a script
whose calls have another rhythm gets an error at the first of them that differs. No communication."""

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
    """Steps the scheduler `made`, whose own `step` asks here until `release`.

    A script's call after a training step counts as the engine's. ReduceLROnPlateau is stepped by metrics
    alone, and a script's metric goes to `on_metric`, where that is set."""

    def __init__(self, made: LRScheduler) -> None:
        self.made = made
        self.on_metric: Callable[[float], object] | None = None
        self._class = getattr(type(made), _PLAIN, type(made))
        self._ours = False  # the call is the engine's
        self._steps = self._skipped = 0  # training steps since the script's last call
        steps = [vars(cls).get("step") for cls in self._class.__mro__]
        self._codes = {step.__code__ for step in steps if isinstance(step, FunctionType)}
        made.__class__ = _asking(self._class, weakref.ref(self))

    @property
    def waits(self) -> bool:
        """Whether it goes on by a metric alone."""
        return isinstance(self.made, ReduceLROnPlateau)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self._class.__name__

    def advance(self) -> None:
        """Go on after a training step."""
        self._steps += 1
        if not self.waits:
            self._step()

    def skip(self) -> None:
        """Take note of a training step that was skipped."""
        self._skipped += 1

    def observe(self, metric: float) -> None:
        """Go on by a metric."""
        self._step(metric)

    def restart(self) -> None:
        """Forget the training steps up to here, as others are loaded."""
        self._steps = self._skipped = 0

    def release(self) -> None:
        """Let its `step` be its own again."""
        self.made.__class__ = self._class

    def called(self, step: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A call of its `step`, which is the script's unless the engine is at it. Raises ConfigError where
        the engine's steps and the script's have different rhythms."""
        if self._ours:
            step(*args, **named)
        elif self.waits:
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

    def look(self, code: CodeType) -> None:
        """Raise ConfigError where code that sets an attribute is that of its `step`, which nobody asked for
        here: a bound method that was taken before this was made goes past `called`."""
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
            with warnings.catch_warnings():  # that it is stepped before its optimizer: ours are others
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
"""In a class of `_asking`, the one that it is made of."""


def _asking(plain: type[LRScheduler], leader: weakref.ref[TorchScheduler]) -> type[LRScheduler]:
    """`plain` under its own name, whose `step` asks `leader`. Copies and pickles are of `plain`."""

    def step(self: Any, *args: Any, **named: Any) -> None:
        leads = leader()
        if leads is None or leads.made is not self:
            plain.step(self, *args, **named)
        else:
            leads.called(lambda *a, **n: plain.step(self, *a, **n), args, named)

    def setting(self: Any, name: str, value: Any) -> None:
        leads = leader()
        if leads is not None and leads.made is self:
            leads.look(sys._getframe(1).f_code)
        plain.__setattr__(self, name, value)

    def reduced(self: Any, protocol: Any) -> Any:
        found: Any = plain.__reduce_ex__(self, protocol)
        return (plain.__new__, (plain,), *found[2:])

    told = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    own = {"step": step, "__setattr__": setting, "__reduce_ex__": reduced, _PLAIN: plain}
    return type(plain.__name__, (plain,), told | own)
