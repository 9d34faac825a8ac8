"""The options of optimizers in each step, set by the config's schedule, a torch scheduler, or the caller's
optimizer. Pure: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyreme.config import Progress
from polyreme.errors import ConfigError, ModelError, Problem, warn
from polyreme.optim.groups import Recipe
from polyreme.optim.lr_schedule import LRSchedule
from polyreme.optim.saved_options import (
    Groups,
    like,
    lost,
    options_of,
    options_to_restore,
    plain,
    put,
    restore_options,
    unlike,
)
from polyreme.optim.torch_scheduler import TorchScheduler

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A torch scheduler, or a function that builds one on an optimizer."""
SWITCHES = ("momentum", "amsgrad", "centered")
"""Options of torch's optimizers that add a state when they are on."""


class Options:
    """The options of every group in the next step (lr, betas, ...), which the optimizers of all shards use.

    The learning rate is each group's own times the factor of `schedule`; or, with `scheduler`, that of a
    torch scheduler. This may be a scheduler on any optimizer of the caller's (with one group, to whose
    learning rate all groups stay in proportion, or with as many groups as the recipe), or a factory that
    builds one on the optimizer it is given, which has the recipe's groups. ReduceLROnPlateau is stepped by
    `observe`.

    With `led_by`, the caller's own optimizer, whose groups the recipe has, each step uses the options that it
    has then. A script may also set options in `groups`; once it sets a learning rate, the schedule sets none
    any more.

    Raises ConfigError for any other scheduler, and for a schedule beside `led_by`.
    """

    def __init__(
        self,
        made: Recipe,
        schedule: LRSchedule,
        scheduler: Scheduler | None = None,
        led_by: Optimizer | None = None,
    ) -> None:
        self._schedule, self._own = schedule, led_by is not None
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
        self._members = [(group["params"], tuple(group["params"])) for group in self.groups]
        self._made = [options_of(group) for group in self.groups]
        self._base = self._rates
        self._set = self._base  # the rates that the schedule set last
        self._led = False  # whether a script sets rates in its place
        self._scheduler = None if scheduler is None else TorchScheduler(self._built(scheduler))
        self.needs_tokens = scheduler is None and schedule.in_tokens
        """Whether the learning rate depends on the number of tokens, which only batches with `input_ids`
        have."""
        self._follow(Progress(0, 0, 0))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options of each group of the recipe, as in torch's `param_groups`."""
        return self._lead.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of options that a group does not set."""
        return self._lead.defaults

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.groups[0]["lr"])

    @property
    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.groups]

    @property
    def _is_led(self) -> bool:
        """Whether a script has set learning rates itself, so that the schedule sets none any more."""
        return self._scheduler is None and (self._led or self._rates != self._set)

    def regrouped(self, thorough: bool) -> bool:
        """Whether the groups, or the parameters in them, changed since this was made. thorough: compare each
        parameter; else only in groups whose list was replaced. Raises ModelError where a script changed the
        engine's own groups."""
        changed = len(self.groups) != len(self._members) or any(
            len(group["params"]) != len(members)
            or ((thorough or group["params"] is not held) and not all(map(is_, group["params"], members)))
            for group, (held, members) in zip(self.groups, self._members, strict=True)
        )
        if changed and not self._own:
            raise ModelError(
                "engine.optimizer.param_groups has other groups, or parameters in them, than the engine made "
                "of the model: add the parameters to the module, or unfreeze them, and call "
                "engine.refresh(), or give initialize an optimizer of your own, whose groups are followed"
            )
        return changed

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters in the groups when this was made."""
        return [parameter for _, members in self._members for parameter in members]

    def add_group(self, group: dict[str, Any]) -> bool:
        """Add a group to the caller's optimizer; returns False, with nothing done, where the groups are the
        engine's own."""
        if self._own:
            self._lead.add_param_group(group)
        return self._own

    def check(self, made: Recipe) -> None:
        """Raise ModelError where the torch scheduler cannot be used with the groups of a new recipe; and warn
        where options that a script has set are lost with the old groups."""
        scheduler, count, now = self._scheduler, len(self._made), len(made.groups)
        if now == count:
            return
        if scheduler is not None and (self._leads_all or len(scheduler.made.optimizer.param_groups) > 1):
            raise ModelError(f"lr_scheduler goes by the optimizer's {count} groups, "
                             f"and of the model as it is now it has {now}: use a "
                             "factory that makes the same groups, the config's "
                             "lr_schedule, or leave lr_scheduler out and step the "
                             "scheduler in the script")  # fmt: skip
        if not self._own and (self._is_led or [*map(options_of, self.groups)] != self._made):
            warn(
                f"the optimizer has {now} groups, and had {count}: what the script set in "
                "engine.optimizer.param_groups is left behind, so set it again"
            )

    def release(self) -> None:
        """Give a torch scheduler back to the caller."""
        if self._scheduler is not None:
            self._scheduler.release()

    def advance(self, progress: Progress) -> None:
        """Set the options for the step that follows `progress`; a torch scheduler makes one step, unless it
        waits for a metric."""
        if self._scheduler is not None:
            self._scheduler.advance()
        self._lead._opt_called = True  # type: ignore[attr-defined]  # torch schedulers check this
        self._follow(progress)

    def skip(self) -> None:
        """Note that a step was skipped, so that a torch scheduler makes none."""
        if self._scheduler is not None:
            self._scheduler.skip()

    def on_metric(self, observe: Callable[[float], object]) -> None:
        """Set the function that is called when the script steps ReduceLROnPlateau itself."""
        if self._scheduler is not None:
            self._scheduler.on_metric = observe

    def observe(self, metric: float) -> None:
        """Step ReduceLROnPlateau. Raises ConfigError where the scheduler is another one."""
        if self._scheduler is None or not self._scheduler.waits_for_metric:
            name = "the config's schedule" if self._scheduler is None else self._scheduler.name
            raise ConfigError([Problem("lr_scheduler", name, "it waits for no metric, and "
                                                             "goes on with each step by itself",
                                       "pass lr_scheduler=ReduceLROnPlateau, "
                                       "or leave plateau() out")])  # fmt: skip
        self._scheduler.observe(metric)
        self._follow(Progress(0, 0, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON can hold them, the options of all groups now and when they were made, and a torch
        scheduler's state. The config's schedule needs no state but the progress of training."""
        steps = self._scheduler
        state: dict[str, Any] = {
            "groups": [options_of(group) for group in self.groups],
            "made": [*self._made, *({} for _ in self.groups)][: len(self.groups)],
            "led": self._is_led,
            "lost": sorted({key for group in self.groups for key in lost(group)}),
            "scheduler": {},
        }
        if steps is not None:
            knows = steps.made.state_dict()
            state |= {"scheduler": plain(knows), "by": steps.name}
            state["lost"] += [f"lr_scheduler.{key}" for key in lost(knows)]
            if not self._leads_all:
                state["followed"] = [options_of(group) for group in steps.made.optimizer.param_groups]
        return state

    def ways(self, state: Mapping[str, Any]) -> list[Sequence[Mapping[str, Any]]]:
        """List options by group under which the saved states may have been made, as options decide which
        states there are: those that the optimizer was made with (an empty sequence), the present ones, those
        that `load_state_dict(state)` would set, and the present ones with a switch on that was off in
        `state`."""
        found: list[Sequence[Mapping[str, Any]]] = [(), [*self.groups]]
        groups, now = state.get("groups", []), [options_of(group) for group in self.groups]
        if len(groups) == len(now):
            saved = Groups(groups, [*state.get("made", ()), *({} for _ in groups)][: len(groups)])
            given = options_to_restore(Groups(now, self._made), saved, self._own)
            found.append([like(group, own) for group, own in zip(self.groups, given, strict=True)])
            for key in [k for k in SWITCHES if any(k in then and not then[k] for then in groups)]:
                found.append([{**group, key: True} for group in self.groups])
        return found

    def unusable(self, state: Mapping[str, Any]) -> str:
        """Say which option in a saved `state` has an impossible value, such as a text for a number; empty if
        none has."""
        found = []
        groups = state.get("groups", [])
        if len(groups) == len(self.groups):
            found += [
                unlike(options_of(group), then) for group, then in zip(self.groups, groups, strict=True)
            ]
        if self._scheduler is not None and state.get("by") == self._scheduler.name:
            found.append(unlike(plain(self._scheduler.made.state_dict()), state.get("scheduler", {})))
            ours = self._scheduler.made.optimizer.param_groups
            found += map(unlike, map(options_of, ours), state.get("followed", ()))
        return next(filter(None, found), "")

    def load_state_dict(self, state: Mapping[str, Any], progress: Progress) -> list[str]:
        """Restore `state`, saved at `progress`. Options of the caller's own optimizer, and those that a
        script had set, come from `state`; all others stay as they were made here. Returns notes for the
        user."""
        if self._scheduler is not None:
            self._scheduler.restart()
        groups = state.get("groups", [])
        if not groups or ("made" not in state and not self._own and self._scheduler is None):
            self._follow(progress)
            return []
        made = [*state.get("made", ()), *({} for _ in groups)][: len(groups)]
        notes = [
            f"{key} is as the script has it now: a checkpoint cannot keep it" for key in state.get("lost", ())
        ]
        if len(groups) == len(self.groups):
            return notes + self._take(Groups(groups, made), state, progress)
        notes.append(
            f"the optimizer has {len(self.groups)} groups, and had {len(groups)}: their options are of now"
        )
        if self._scheduler is not None:
            notes += [f"lr_scheduler, {self._scheduler.name}, begins anew"]
        self._follow(progress)
        return notes

    def _take(self, saved: Groups, state: Mapping[str, Any], progress: Progress) -> list[str]:
        led, before, here = self._is_led, self._rates, [options_of(group) for group in self.groups]
        notes = self._take_schedule(state)
        rates = self._own or (
            bool(state.get("scheduler")) if self._scheduler is not None else bool(state.get("led"))
        )
        self._led = not self._own and self._scheduler is None and bool(state.get("led"))
        notes += restore_options(self.groups, Groups(here, self._made), saved, self._own, rates)
        if not rates or not self._own:
            self._set = self._rates  # rates that a script has set meanwhile do not count any more
        if not rates:
            self._follow(progress)
        if led and not rates and self._rates != before:
            notes.append(
                f"the learning rates are {self._rates}, as the config says, and not {before}, which were set "
                "before load(): set them after it"
            )
        if not state.get("scheduler") and any("initial_lr" in group for group in saved.now):
            notes.append(
                "a torch scheduler of the script's own changed the learning rate, and goes on where the "
                "script keeps its state_dict() in engine.save(..., extra=) and loads it from there, or "
                "gives it to initialize as lr_scheduler="
            )
        return notes

    def _take_schedule(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a torch scheduler's state. Returns notes, where the checkpoint or this engine has none."""
        steps, saved = self._scheduler, state.get("scheduler")
        if steps is None:
            return [f"the checkpoint's lr_scheduler, {state.get('by')}, is not followed any more"] * bool(
                saved
            )
        if not saved:
            return [f"lr_scheduler, {steps.name}, begins anew: the checkpoint has none"]
        steps.made.load_state_dict(like(steps.made.state_dict(), saved))
        if not self._leads_all:
            for group, then in zip(
                steps.made.optimizer.param_groups, state.get("followed", state["groups"]), strict=False
            ):
                put(group, then)
        was = state.get("by", steps.name)
        return (
            []
            if was == steps.name
            else [f"lr_scheduler is a {steps.name}, and goes on at the count of a {was}"]
        )

    @property
    def _leads_all(self) -> bool:
        """Whether the torch scheduler is on the very optimizer that has the groups."""
        return self._scheduler is not None and self._scheduler.made.optimizer is self._lead

    def _follow(self, progress: Progress) -> None:
        """Set the learning rates for `progress`, unless the scheduler or the caller sets them itself."""
        if self._scheduler is None:
            self._led = self._is_led  # a script that changed a rate sets them from now on
            if self._own or self._led:
                return
            factor = self._schedule.factor(progress)
            rates = [base * factor for base in self._base]
        elif not self._leads_all:
            self._refuse_rates()
            rates = [float(group["lr"]) for group in self._scheduler.made.optimizer.param_groups]
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

    def _refuse_rates(self) -> None:
        """Raise ConfigError where a script has set learning rates that are copied from another
        optimizer's."""
        assert self._scheduler is not None
        if self._rates != self._set:
            reason = (
                "the script has set a learning rate in engine.optimizer, which follows another optimizer's"
            )
            fix = "set it in scheduler.optimizer.param_groups, or give initialize a function that builds it"
            raise ConfigError([Problem("lr_scheduler", self._scheduler.name, reason, fix)])

    def _built(self, scheduler: Any) -> LRScheduler:
        """Return the caller's torch scheduler, or build it. Raises ConfigError for one that cannot be
        followed."""
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
