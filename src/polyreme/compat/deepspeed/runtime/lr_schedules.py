"""DeepSpeed's five learning-rate schedules by their names.

Invariant: the rate of a group at an iteration is a function of the constructor's arguments and of
`last_batch_iteration` alone, bit for bit that of DeepSpeed 0.19.8; so a schedule's state is that number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.errors import PolyremeError

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
Rates = float | Sequence[float]
"""One of each group, or one for all."""

__getattr__ = lazily(__name__)


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the groups' rates to those of `lrs`, and return them; a rate that is a tensor is written into, as a
    compiled optimizer reads it there."""
    for group, lr in zip(param_groups, lrs, strict=False):
        old = group["lr"]
        group["lr"] = old.copy_(torch.as_tensor(lr).view_as(old)) if torch.is_tensor(old) else lr
    return [group["lr"] for group in param_groups]


class NoOptimizerError(PolyremeError, TypeError):
    """An object to steer that is no optimizer."""


def get_torch_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that `optimizer` is or wraps: what has the groups to steer. Raises
    NoOptimizerError."""
    for each in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(each, Optimizer):
            return each
    if hasattr(optimizer, "param_groups"):
        return optimizer
    raise NoOptimizerError(
        f"a schedule of a {type(optimizer).__name__}, which is no torch optimizer, wraps none and has no "
        "param_groups: pass the optimizer whose rate is to change"
    )


class _Schedule:
    """Steers the rates of an optimizer's groups: sets what `get_lr` returns for `last_batch_iteration`; -1 is
    the beginning."""

    optimizer: Any
    last_batch_iteration: int
    _last_lr: list[Any] | None = None

    def __post_init__(self) -> None:
        """Read the arguments, and set the first rates, unless the schedule goes on from an iteration."""
        self.optimizer = get_torch_optimizer(self.optimizer)
        self._prepare()
        if self.last_batch_iteration == -1:
            self._set()

    def _prepare(self) -> None:
        """Check the arguments, and note what follows from them."""

    def _each(self, name: str) -> list[Any]:
        """Return the argument `name` for each group. Raises ArgumentError for a list of another length."""
        value, groups = getattr(self, name), len(self.optimizer.param_groups)
        values = list(value) if isinstance(value, list | tuple) else [value] * groups
        if len(values) != groups:
            raise ArgumentError(
                f"{name} has {len(values)} values, and the optimizer {groups} groups: give each group one, "
                "or a number for all"
            )
        return values

    def _steps(self, name: str) -> int:
        """Return the argument `name`. Raises ArgumentError unless it is a number of steps."""
        if not isinstance(value := getattr(self, name), int) or value <= 0:
            raise ArgumentError(f"{name}={value!r} is no number of steps: write a whole number above 0")
        return value

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that were set last. Raises OrderError before there are any."""
        if self._last_lr is None:
            # transformers' Trainer knows this error by "need to call step"
            raise OrderError("a schedule that goes on has set no rate yet: you need to call step() before")
        return self._last_lr

    def _set(self) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def step(self, batch_iteration: int | None = None, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of the one that is given by either name."""
        given = last_batch_iteration if batch_iteration is None else batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else given
        self._set()

    def state_dict(self) -> dict[str, int]:
        """Return where the schedule is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Go on from `sd`; the rates follow at the next step."""
        self.last_batch_iteration = sd["last_batch_iteration"]


@dataclass(eq=False, repr=False)
class LRRangeTest(_Schedule):
    """Raises the rate from a low one without end, to see where training diverges (Smith, "A disciplined
    approach to neural network hyper-parameters", 2018): min_lr · (1 + rate · intervals done)."""

    optimizer: Any
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        self.min_lr = self._each("lr_range_test_min_lr")
        self.step_size = self._steps("lr_range_test_step_size")

    def get_lr(self) -> list[Any]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        done = math.floor(intervals) if self.lr_range_test_staircase else intervals
        return [low * (1 + self.lr_range_test_step_rate * done) for low in self.min_lr]


@dataclass(eq=False, repr=False)
class OneCycle(_Schedule):
    """Raises the rate and lowers it again, once, while the first momentum coefficient does the opposite; then
    both decay (Smith 2018, as above). The rate is at its peak after `cycle_first_step_size` steps.

    A stair count above 0 divides its half into so many stairs, on each of which the rate stays. Momentum is
    left alone, with a warning, where the optimizer has no `betas`."""

    optimizer: Any
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        sizes = self.cycle_first_step_size, self.cycle_second_step_size
        first, second = (float(sizes[0] if size is None else size) for size in sizes)
        if first <= 0 or second < 0:
            raise ArgumentError(
                f"cycle_first_step_size and cycle_second_step_size are {first} and {second} steps: the first "
                "half must have some, and the second none or more"
            )
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        stairs = self.cycle_first_stair_count, self.cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = (stairs[0] if n is None else n for n in stairs)
        self.min_lrs, self.max_lrs = self._each("cycle_min_lr"), self._each("cycle_max_lr")
        self.min_moms = [(low, 0.99) for low in self._each("cycle_min_mom")]
        self.max_moms = [(high, 0.99) for high in self._each("cycle_max_mom")]
        defaults = getattr(self.optimizer, "defaults", self.optimizer.param_groups[0])
        if self.cycle_momentum and "betas" not in defaults:
            self.cycle_momentum = False
            name = type(self.optimizer).__name__
            logger.warning(f"{name} has no betas: cycle_momentum moves the rate alone")

    def _height(self) -> float | None:
        """Return how high in the cycle: 0 at its ends, 1 at its peak; None behind it."""
        if self.last_batch_iteration >= self.total_size:
            return None
        at = self.last_batch_iteration + 1
        x = 1.0 + at / self.total_size - math.floor(1 + at / self.total_size)
        rising = x <= self.step_ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)
        # from whole steps: the quotient above can lie a hair below a stair
        inside = at % self.total_size
        if inside <= self.first_step_size:
            return math.floor(inside * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - inside) * stairs / self.second_step_size) / stairs

    def _decay(self, rate: float) -> float:
        """Return the factor of the decay so far."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        past = self.last_batch_iteration - self.total_size + 1
        return 1 + rate * (past / self.decay_step_size)

    def get_lr(self) -> list[Any]:
        if (height := self._height()) is None:
            decay = self._decay(self.decay_lr_rate)
            return [low / decay for low in self.min_lrs]
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`; None where momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if (height := self._height()) is None:
            decay = self._decay(self.decay_mom_rate)
            return [(beta * decay, other) for beta, other in self.max_moms]
        both = zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * height, other) for (low, other), (high, _) in both]

    def _set(self) -> None:
        super()._set()
        # the first step is taken with the lowest, although the cycle begins with the highest
        begins = self.cycle_momentum and self.last_batch_iteration < 0
        momenta = self.min_moms if begins else self.get_mom()
        for group, betas in zip(self.optimizer.param_groups, momenta or (), strict=False):
            group["betas"] = betas


class _Warmup(_Schedule):
    """Begins with a warmup, along a logarithm or a line."""

    warmup_num_steps: int
    warmup_type: str
    total_num_steps: int

    def _prepare(self) -> None:
        self.warmup_num_steps = max(2, self._steps("warmup_num_steps"))
        if self.warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning(f"warmup_type {self.warmup_type!r} is unknown: the warmup is {WARMUP_LOG_RATE}")
            self.warmup_type = WARMUP_LOG_RATE
        total = getattr(self, "total_num_steps", self.warmup_num_steps)
        if total < self.warmup_num_steps:
            logger.warning(f"the schedule ends at total_num_steps={total}, inside of its warmup of "
                           f"warmup_num_steps={self.warmup_num_steps}")  # fmt: skip

    def _warmed(self) -> float | None:
        """Return how much of the warmup is done, from 0 to 1; None after it."""
        at, steps = self.last_batch_iteration, self.warmup_num_steps
        if at >= steps:
            return None
        return (
            at / steps if self.warmup_type == WARMUP_LINEAR_RATE else 1.0 / math.log(steps) * math.log(at + 1)
        )


@dataclass(eq=False, repr=False)
class WarmupLR(_Warmup):
    """Raises the rate from a low one to a high one (None: each group's own), along a logarithm or a line, and
    keeps it there."""

    optimizer: Any
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = WARMUP_LOG_RATE
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        super()._prepare()
        own = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = self._each("warmup_min_lr")
        self.max_lrs = own if self.warmup_max_lr is None else self._each("warmup_max_lr")
        self.delta_lrs = [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]

    def _after(self) -> float:
        """Return the share of the difference of both rates after the warmup."""
        return 1.0

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        warmed = self._warmed()
        share = self._after() if warmed is None else warmed
        return [low + delta * share for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """A WarmupLR whose rate then falls along a line, to the low one at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _after(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


@dataclass(eq=False, repr=False)
class WarmupCosineLR(_Warmup):
    """Raises each group's own rate from a share of it to all of it, and lets it fall along half a cosine to
    `cos_min_ratio` of it at `total_num_steps`, where it stays."""

    optimizer: Any
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = WARMUP_LOG_RATE
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        super()._prepare()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.org_lrs = [rate.clone() if torch.is_tensor(rate) else rate for rate in rates]

    def get_lr_ratio(self) -> float:
        """Return the share of its own rate that each group has at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return 0.0
        if (warmed := self._warmed()) is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        past = self.last_batch_iteration - self.warmup_num_steps + 1
        done = min(1.0, past / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


for _schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupCosineLR):
    # DeepSpeed's constants for the keys of "params": WARMUP_NUM_STEPS is "warmup_num_steps"
    globals().update({key.name.upper(): key.name for key in fields(_schedule)[1:-1]})
