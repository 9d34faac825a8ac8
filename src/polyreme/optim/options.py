"""The options that optimizers have in each step, by the config's schedule, a torch scheduler, or the caller's
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
from polyreme.optim.saved_options import Groups, coming, like, lost, options_of, plain, put, take, unlike
from polyreme.optim.torch_scheduler import TorchScheduler

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A torch scheduler, or what builds one on an optimizer."""
SWITCHES = ("momentum", "amsgrad", "centered")
"""Options of torch's optimizers without which they have one state less."""


class Options:
    """The options of every group in the coming step (lr, betas, ...), which the optimizers of all shards
    follow.

    The learning rate is each group's own times the factor of `schedule`; or, with `scheduler`, what that
    torch scheduler makes of it: a scheduler on any optimizer of the caller's (with one group, whose learning
    rate leads all groups in proportion, or with as many as the recipe), or a factory that builds one on the
    optimizer that it is given, which has the recipe's groups. ReduceLROnPlateau goes on by what `observe` is
    told.

    With `led_by`, an optimizer that the caller made and has the groups of, its options are those of every
    step, as they are then. So are those that a script sets in `groups`: learning rates, too, which the
    schedule sets no more from then on.

    Raises ConfigError for anything else.
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
        self._set = self._base  # the rates that the schedule gave last
        self._led = False  # whether a script has set rates in its place
        self._scheduler = None if scheduler is None else TorchScheduler(self._built(scheduler))
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

    @property
    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.groups]

    @property
    def _is_led(self) -> bool:
        """Whether a script has set learning rates, and goes on to."""
        return self._scheduler is None and (self._led or self._rates != self._set)

    def regrouped(self, thorough: bool) -> bool:
        """Whether the caller's optimizer has other groups than were taken over, or other parameters in them.
        `thorough`: look at each parameter, which else is done where a group has another list. Raises
        ModelError where the groups are the engine's."""
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
        """Those in the groups as they were taken over."""
        return [parameter for _, members in self._members for parameter in members]

    def add_group(self, group: dict[str, Any]) -> bool:
        """Add a group to the caller's optimizer, if that has the groups."""
        if self._own:
            self._lead.add_param_group(group)
        return self._own

    def check(self, made: Recipe) -> None:
        """Raise ModelError where the torch scheduler could not go on with the groups of a recipe that is to
        take this one's place; and warn where options that a script has set are not those of any group."""
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
        """Let a torch scheduler be the caller's alone."""
        if self._scheduler is not None:
            self._scheduler.release()

    def advance(self, progress: Progress) -> None:
        """Go to the step that follows `progress`, by one step of the torch scheduler where there is one that
        waits for no metric."""
        if self._scheduler is not None:
            self._scheduler.advance()
        self._lead._opt_called = True  # type: ignore[attr-defined]  # for torch schedulers, which look
        self._follow(progress)

    def skip(self) -> None:
        """Stay where this is: the step was skipped."""
        if self._scheduler is not None:
            self._scheduler.skip()

    def on_metric(self, observe: Callable[[float], object]) -> None:
        """Have `observe` called where the script steps ReduceLROnPlateau itself."""
        if self._scheduler is not None:
            self._scheduler.on_metric = observe

    def observe(self, metric: float) -> None:
        """Step ReduceLROnPlateau. Raises ConfigError where the scheduler is another one."""
        if self._scheduler is None or not self._scheduler.waits:
            name = "the config's schedule" if self._scheduler is None else self._scheduler.name
            raise ConfigError([Problem("lr_scheduler", name, "it waits for no metric, and "
                                                             "goes on with each step by itself",
                                       "pass lr_scheduler=ReduceLROnPlateau, "
                                       "or leave plateau() out")])  # fmt: skip
        self._scheduler.observe(metric)
        self._follow(Progress(0, 0, 0))

    def state_dict(self) -> dict[str, Any]:
        """The options of all groups now and as they were made, and what a torch scheduler knows of the past,
        as JSON can hold them; the config's schedule follows from how far training has come."""
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
        """The options by group with which the optimizer may have its states: those that it was made with (an
        empty sequence), those of now, those that `load_state_dict` of `state` would give, and those of now
        with one that was off when it was saved, and that a script may have set before."""
        found: list[Sequence[Mapping[str, Any]]] = [(), [*self.groups]]
        groups, now = state.get("groups", []), [options_of(group) for group in self.groups]
        if len(groups) == len(now):
            saved = Groups(groups, [*state.get("made", ()), *({} for _ in groups)][: len(groups)])
            given = coming(Groups(now, self._made), saved, self._own)
            found.append([like(group, own) for group, own in zip(self.groups, given, strict=True)])
            for key in [k for k in SWITCHES if any(k in then and not then[k] for then in groups)]:
                found.append([{**group, key: True} for group in self.groups])
        return found

    def unusable(self, state: Mapping[str, Any]) -> str:
        """What of a saved `state` could never have been an option here, such as a text for a number; empty
        where there is nothing."""
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
        """Go on from `state`, and from `progress`. Options that a script had set by then count, and those of
        the caller's own optimizer; all others are as they were made here. Returns what there is to say of
        it."""
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
        notes += take(self.groups, Groups(here, self._made), saved, self._own, rates)
        if not rates or not self._own:
            self._set = self._rates  # those that a script has set meanwhile are not its any more
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
        """What a torch scheduler knew; where there was or is none, what becomes of the learning rate."""
        steps, knew = self._scheduler, state.get("scheduler")
        if steps is None:
            return [f"the checkpoint's lr_scheduler, {state.get('by')}, is not followed any more"] * bool(
                knew
            )
        if not knew:
            return [f"lr_scheduler, {steps.name}, begins anew: the checkpoint has none"]
        steps.made.load_state_dict(like(steps.made.state_dict(), knew))
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
        """Whether the torch scheduler is one on the optimizer that has the groups."""
        return self._scheduler is not None and self._scheduler.made.optimizer is self._lead

    def _follow(self, progress: Progress) -> None:
        """Set the learning rates, unless the scheduler or the caller sets them."""
        if self._scheduler is None:
            self._led = self._is_led  # whoever changed a rate sets them from now on
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
        """Raise ConfigError where a script has set learning rates that follow another optimizer's."""
        assert self._scheduler is not None
        if self._rates != self._set:
            reason = (
                "the script has set a learning rate in engine.optimizer, which follows another optimizer's"
            )
            fix = "set it in scheduler.optimizer.param_groups, or give initialize a function that builds it"
            raise ConfigError([Problem("lr_scheduler", self._scheduler.name, reason, fix)])

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
