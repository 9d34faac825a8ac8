"""The options that optimizers have in each step, by the config's schedule, a torch scheduler, or the caller's
optimizer. Pure: the same on every rank."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from polyreme.config import Progress
from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.optim.groups import Recipe
from polyreme.optim.lr_schedule import LRSchedule

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A torch scheduler, or what builds one on an optimizer."""


class Options:
    """The options of every group in the coming step (lr, betas, ...), which the optimizers of all shards
    follow.

    The learning rate is each group's own times the factor of `schedule`; or, with `scheduler`, what that
    torch scheduler makes of it: a scheduler on any optimizer of the caller's (with one group, whose learning
    rate leads all groups in proportion, or with as many as the recipe), or a factory that builds one on the
    optimizer that it is given, which has the recipe's groups. ReduceLROnPlateau goes on by what `observe` is
    told.

    With `led_by`, an optimizer that the caller made and has the groups of, its options are those of every
    step, as they are then.

    Raises ConfigError for anything else.
    """

    def __init__(
        self,
        made: Recipe,
        schedule: LRSchedule,
        scheduler: Scheduler | None = None,
        led_by: Optimizer | None = None,
    ) -> None:
        self._schedule, self._led = schedule, led_by is not None
        if led_by is not None and not schedule.is_constant:
            reason = "the optimizer that was passed has the learning rate of each step"
            fix = "leave lr_schedule out, or pass the optimizer's class"
            raise ConfigError([Problem("lr_schedule", schedule.section.name, reason, fix)])
        probes = [group.optimizer([torch.zeros(2, 2)]) for group in made.groups]
        if led_by is None:
            self._lead = Optimizer([probe.param_groups[0] for probe in probes], probes[0].defaults)
            for group in self._lead.param_groups:
                group["lr"] = float(group["lr"])  # where the caller gave a tensor
        else:
            self._lead = led_by
        self._base = [float(group["lr"]) for group in self.groups]
        self._set = self._base  # the rates that the schedule gave last
        self._scheduler = None if scheduler is None else self._built(scheduler)
        self.needs_tokens = scheduler is None and schedule.in_tokens
        """Whether the learning rate follows the number of tokens, which only batches with `input_ids`
        carry."""
        self._follow(Progress(0, 0, 0))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options by group of the recipe."""
        return self._lead.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of groups that say nothing else."""
        return self._lead.defaults

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.groups[0]["lr"])

    def check(self, made: Recipe) -> None:
        """Raise ModelError where the torch scheduler could not go on with the groups of a recipe that is to
        take this one's place."""
        scheduler, count, now = self._scheduler, len(self._base), len(made.groups)
        if (
            scheduler is not None
            and now != count
            and (scheduler.optimizer is self._lead or len(scheduler.optimizer.param_groups) > 1)
        ):
            raise ModelError(f"lr_scheduler goes by the optimizer's {count} groups, "
                             f"and of the model as it is now it has {now}: use a "
                             "factory that makes the same groups, the config's "
                             "lr_schedule, or save, and initialize anew")  # fmt: skip

    def advance(self, progress: Progress) -> None:
        """Go to the step that follows `progress`, by one step of the torch scheduler where there is one that
        waits for no metric."""
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            with warnings.catch_warnings():  # that it is stepped before its optimizer: ours are others
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self._scheduler.step()
        self._lead._opt_called = True  # type: ignore[attr-defined]  # for torch schedulers, which look
        self._follow(progress)

    def observe(self, metric: float) -> None:
        """Step ReduceLROnPlateau. Raises ConfigError where the scheduler is another one."""
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            name = "the config's schedule" if self._scheduler is None else type(self._scheduler).__name__
            raise ConfigError([Problem("lr_scheduler", name, "it waits for no metric, and "
                                                             "goes on with each step by itself",
                                       "pass lr_scheduler=ReduceLROnPlateau, "
                                       "or leave plateau() out")])  # fmt: skip
        self._scheduler.step(metric)
        self._follow(Progress(0, 0, 0))

    def state_dict(self) -> dict[str, Any]:
        """What a torch scheduler knows of the past, as JSON can hold it; the config's schedule follows from
        how far training has come."""
        if self._scheduler is None and not self._led:
            return {}
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._followed.param_groups
        ]
        scheduler = {} if self._scheduler is None else _json(self._scheduler.state_dict())
        return {"groups": [_json(group) for group in groups], "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Go on from `state`, and from `progress`."""
        if (self._scheduler is not None or self._led) and state:
            if self._scheduler is not None:
                self._scheduler.load_state_dict(
                    {**self._scheduler.state_dict(), **state.get("scheduler", {})}
                )
            for group, before in zip(self._followed.param_groups, state.get("groups", ()), strict=False):
                group.update(
                    {key: tuple(value) if isinstance(value, list) else value for key, value in before.items()}
                )
        self._follow(progress)

    @property
    def _followed(self) -> Optimizer:
        """The optimizer whose options a scheduler or the caller sets."""
        return self._lead if self._scheduler is None else self._scheduler.optimizer

    def _follow(self, progress: Progress) -> None:
        """Set the learning rates, unless the scheduler or the caller sets them."""
        now = [float(group["lr"]) for group in self._lead.param_groups]
        if self._scheduler is None and (self._led or now != self._set):
            self._led = True  # whoever changed a rate sets them from now on
            return
        if self._scheduler is None:
            factor = self._schedule.factor(progress)
            rates = [base * factor for base in self._base]
        elif self._scheduler.optimizer is not self._lead:
            rates = [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]
            if len(rates) == 1:
                rates = [
                    rates[0] if base == self._base[0] else rates[0] * (base / self._base[0])
                    for base in self._base
                ]
        else:
            return
        for group, rate in zip(self._lead.param_groups, rates, strict=True):
            group["lr"] = rate
        self._set = rates

    def _built(self, scheduler: Any) -> LRScheduler:
        made, reason = scheduler, ""
        if not isinstance(made, LRScheduler) and callable(scheduler):
            try:
                made = scheduler(self._lead)
            except Exception as error:
                made, reason = scheduler, f"it fails on an optimizer of {len(self._base)} groups: {error}"
        if not isinstance(made, LRScheduler):
            reason = reason or "it is no torch scheduler"
        elif (count := len(made.optimizer.param_groups)) not in (1, len(self._base)):
            reason = f"it has {count} groups, but the optimizer {len(self._base)}"
        elif count == 1 < len(self._base) and not self._base[0]:
            reason = "the first group's learning rate is 0, so the others cannot be in proportion to it"
        elif getattr(made, "cycle_momentum", False) and made.optimizer is not self._lead:
            reason = (
                "it changes the momentum of the optimizer that it was made with, which is not the engine's"
            )
        if reason:
            fix = (
                "pass a function such as lambda optimizer: "
                "CosineAnnealingLR(optimizer, 1000), or use the config's lr_schedule"
            )
            raise ConfigError(
                [Problem("lr_scheduler", getattr(made, "__name__", type(made).__name__), reason, fix)]
            )
        return made


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of `values` JSON can hold."""
    found = {}
    for key, value in values.items():
        with suppress(TypeError, ValueError):
            found[key] = json.loads(json.dumps(value))
    return found
