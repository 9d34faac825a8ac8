"""DeepSpeed's five learning-rate schedules by their names, with their command-line arguments.

Invariant: the rate of a group at an iteration is a function of the constructor's arguments and of
`last_batch_iteration` alone, bit for bit that of DeepSpeed 0.19.8; so a schedule's state is that number."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.errors import PolyremeError

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

_SWITCH = None
_ARGUMENTS: tuple[tuple[str, type | None, Any, str], ...] = (
    (LR_SCHEDULE, str, None, f"one of {', '.join(VALID_LR_SCHEDULES)}"),
    (LR_RANGE_TEST_MIN_LR, float, 0.001, "rate at which the range test begins"),
    (LR_RANGE_TEST_STEP_RATE, float, 1.0, "part of the first rate that each interval adds"),
    (LR_RANGE_TEST_STEP_SIZE, int, 1000, "steps of an interval of the range test"),
    (LR_RANGE_TEST_STAIRCASE, _SWITCH, False, "raise the rate once an interval, not at every step"),
    (CYCLE_FIRST_STEP_SIZE, int, 1000, "steps of the rising half of the cycle"),
    (CYCLE_FIRST_STAIR_COUNT, int, None, "stairs of the rising half"),
    (CYCLE_SECOND_STEP_SIZE, int, None, "steps of the falling half"),
    (CYCLE_SECOND_STAIR_COUNT, int, None, "stairs of the falling half"),
    (DECAY_STEP_SIZE, int, 1000, "steps of an interval of the decay after the cycle"),
    (CYCLE_MIN_LR, float, 0.01, "lowest rate of the cycle"),
    (CYCLE_MAX_LR, float, 0.1, "highest rate of the cycle"),
    (DECAY_LR_RATE, float, 0.0, "decay of the rate after the cycle"),
    (CYCLE_MOMENTUM, _SWITCH, False, "let momentum run against the rate"),
    (CYCLE_MIN_MOM, float, 0.8, "lowest momentum of the cycle"),
    (CYCLE_MAX_MOM, float, 0.9, "highest momentum of the cycle"),
    (DECAY_MOM_RATE, float, 0.0, "decay of momentum after the cycle"),
    (WARMUP_MIN_LR, float, 0, "rate at which the warmup begins"),
    (WARMUP_MAX_LR, float, 0.001, "rate at which the warmup ends"),
    (WARMUP_NUM_STEPS, int, 1000, "steps of the warmup"),
    (WARMUP_TYPE, str, WARMUP_LOG_RATE, f"{WARMUP_LOG_RATE} or {WARMUP_LINEAR_RATE}"),
    (WARMUP_MIN_RATIO, float, 0.01, "share of each group's rate at which a cosine's warmup begins"),
    (COS_MIN_RATIO, float, 0.01, "share of each group's rate at which the cosine ends"),
)
"""Name, type (None: a switch), default and help of each command-line argument."""

_RANGE_TEST = (
    LR_RANGE_TEST_MIN_LR,
    LR_RANGE_TEST_STEP_RATE,
    LR_RANGE_TEST_STEP_SIZE,
    LR_RANGE_TEST_STAIRCASE,
)
_CYCLE = (
    CYCLE_FIRST_STEP_SIZE,
    CYCLE_FIRST_STAIR_COUNT,
    CYCLE_SECOND_STEP_SIZE,
    CYCLE_SECOND_STAIR_COUNT,
    DECAY_STEP_SIZE,
    CYCLE_MIN_LR,
    CYCLE_MAX_LR,
    DECAY_LR_RATE,
    CYCLE_MOMENTUM,
    CYCLE_MIN_MOM,
    CYCLE_MAX_MOM,
    DECAY_MOM_RATE,
)
_WARMUP = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_COSINE = (WARMUP_NUM_STEPS, WARMUP_TYPE, WARMUP_MIN_RATIO, COS_MIN_RATIO)

Params = MutableMapping[str, Any]
Answer = tuple[Any, str | None]
"""A value and why there is none."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`parser` with an argument for each option of the schedules."""
    group = parser.add_argument_group("Convergence Tuning", "the learning-rate schedule")
    for name, kind, default, text in _ARGUMENTS:
        if kind is _SWITCH:
            group.add_argument(f"--{name}", action="store_true", default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The schedules' arguments of this process's command line, and those that are not theirs."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: Any, params: Params, names: Sequence[str]) -> None:
    """Write into `params` what `args` has of `names`."""
    params.update({name: value for name in names if (value := getattr(args, name, None)) is not None})


def override_lr_range_test_params(args: Any, params: Params) -> None:
    """Write a range test's arguments of the command line into `params`."""
    _override(args, params, _RANGE_TEST)


def override_1cycle_params(args: Any, params: Params) -> None:
    """Write a cycle's arguments of the command line into `params`."""
    _override(args, params, _CYCLE)


def override_warmupLR_params(args: Any, params: Params) -> None:
    """Write a warmup's arguments of the command line into `params`."""
    _override(args, params, _WARMUP)


def override_warmupCosineLR_params(args: Any, params: Params) -> None:
    """Write a cosine's arguments of the command line into `params`; it takes ratios, and no rates."""
    _override(args, params, _COSINE)


def override_params(args: Any, params: Params) -> None:
    """Write all arguments of the command line into `params`."""
    _override(args, params, (*_RANGE_TEST, *_CYCLE, *_WARMUP, *_COSINE))


def get_config_from_args(args: Any) -> Answer:
    """The `scheduler` section that the command line describes, or None and why there is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    names = {LR_RANGE_TEST: _RANGE_TEST, ONE_CYCLE: _CYCLE, WARMUP_COSINE_LR: _COSINE}.get(name, _WARMUP)
    params: dict[str, Any] = {}
    _override(args, params, names)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> Answer:
    """The highest rate of a `scheduler` section, or None and why it has none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} takes shares of the optimizer's own rates: its params name none"
    return params[{LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(name, WARMUP_MAX_LR)], ""


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """The groups' rates, each set to that of `lrs`; a rate that is a tensor is written into."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr.squeeze() if torch.is_tensor(lr) else lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


class NoOptimizerError(PolyremeError, TypeError):
    """What a schedule is to steer is no optimizer."""


def get_torch_optimizer(optimizer: Any) -> Any:
    """The optimizer that `optimizer` is or wraps: what has the groups to steer. Raises NoOptimizerError."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(wrapped := getattr(optimizer, "optimizer", None), Optimizer):
        return wrapped
    if hasattr(optimizer, "param_groups"):
        return optimizer
    raise NoOptimizerError(
        f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer, wraps none and has no "
        "param_groups: pass the optimizer whose rate is to change"
    )


def _each(optimizer: Any, value: Any, name: str) -> list[Any]:
    """`value` for each group of the optimizer. Raises ArgumentError for a list of another length."""
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups
    if len(value) != groups:
        raise ArgumentError(
            f"expected {groups} value for {name}, got {len(value)}: give one for each group of the optimizer"
        )
    return list(value)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ArgumentError(f"{name} must be a positive integer, got {value}")
    return value


class _Schedule:
    """What all schedules share: where they are, and the groups that they steer."""

    optimizer: Any
    last_batch_iteration: int
    _last_lr: list[Any] | None = None

    def get_lr(self) -> list[Any]:
        """The rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """The rates that were set last. Raises OrderError before there are any."""
        if self._last_lr is None:
            raise OrderError("need to call step() first: a schedule that goes on has set no rate yet")
        return self._last_lr

    def _advance(self, to: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if to is None else to
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """Where the schedule is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Go on from `sd`; the rates follow at the next step."""
        self.last_batch_iteration = sd["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """Raises the rate from a low one without end, to see where training diverges (Smith, "A disciplined
    approach to neural network hyper-parameters", 2018): min_lr · (1 + rate · intervals done)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.min_lr = _each(self.optimizer, lr_range_test_min_lr, LR_RANGE_TEST_MIN_LR)
        self.step_size = _positive(LR_RANGE_TEST_STEP_SIZE, lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.min_lr)

    def get_lr(self) -> list[Any]:
        intervals: float = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [low * (1 + self.step_rate * intervals) for low in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of `batch_iteration`."""
        self._advance(batch_iteration)


class OneCycle(_Schedule):
    """Raises the rate and lowers it again, once, while the first momentum coefficient does the opposite; then
    both decay (Smith 2018, as above). The rate is at its peak after `cycle_first_step_size` steps.

    A stair count above 0 divides its half into so many stairs, on each of which the rate stays. Momentum is
    left alone, with a warning, where the optimizer has no `betas`."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self._shape(cycle_first_step_size, cycle_second_step_size)
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.min_lrs = _each(self.optimizer, cycle_min_lr, CYCLE_MIN_LR)
        self.max_lrs = _each(self.optimizer, cycle_max_lr, CYCLE_MAX_LR)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        if begins := last_batch_iteration == -1:
            update_lr(self.optimizer.param_groups, self.min_lrs)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if self.cycle_momentum:
            self._momenta(cycle_min_mom, cycle_max_mom, begins)
        self.last_batch_iteration = last_batch_iteration

    def _shape(self, first: float, second: float | None) -> None:
        self.first_step_size = float(first)
        self.second_step_size = self.first_step_size if second is None else float(second)
        if self.first_step_size <= 0:
            raise ArgumentError(f"{CYCLE_FIRST_STEP_SIZE} must be positive, got {self.first_step_size}")
        if self.second_step_size < 0:
            raise ArgumentError(f"{CYCLE_SECOND_STEP_SIZE} must be non-negative, got {self.second_step_size}")
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size

    def _has_betas(self) -> bool:
        if "betas" in getattr(self.optimizer, "defaults", self.optimizer.param_groups[0]):
            return True
        logger.warning(
            f"cycle_momentum is disabled: {type(self.optimizer).__name__} has no betas among its defaults"
        )
        return False

    def _momenta(self, low: Any, high: Any, begins: bool) -> None:
        self.min_moms = [(each, 0.99) for each in _each(self.optimizer, low, CYCLE_MIN_MOM)]
        self.max_moms = [(each, 0.99) for each in _each(self.optimizer, high, CYCLE_MAX_MOM)]
        if begins:
            self._set_betas(self.min_moms)

    def _set_betas(self, momenta: Sequence[tuple[float, float]]) -> None:
        for group, betas in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = betas

    def _height(self) -> float:
        """How high in the cycle: 0 at its ends, 1 at its peak."""
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

    def _decay(self, rate: float) -> float | None:
        """The factor of the decay so far; None: nothing decays."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return None
        past = self.last_batch_iteration - self.total_size + 1
        return 1 + rate * (past / self.decay_step_size)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = self._decay(self.decay_lr_rate)
        return self.min_lrs if decay is None else [low / decay for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at `last_batch_iteration`; None where momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [
                (high[0] - (high[0] - low[0]) * height, low[1])
                for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        decay = self._decay(self.decay_mom_rate)
        return self.max_moms if decay is None else [(beta * decay, other) for beta, other in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set rates and momenta of the next iteration, or of `batch_iteration`."""
        self._advance(batch_iteration)
        if (momenta := self.get_mom()) is not None:
            self._set_betas(momenta)


class _Warmup(_Schedule):
    """What schedules that begin with a warmup share: its form."""

    def _warm_up(self, steps: int, form: str) -> None:
        self.warmup_num_steps = max(2, _positive(WARMUP_NUM_STEPS, steps))
        if form not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning(f"warmup_type {form!r} is unknown: the warmup is {WARMUP_LOG_RATE}")
            form = WARMUP_LOG_RATE
        self.warmup_type = form
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _warmed(self) -> float | None:
        """How much of the warmup is done, from 0 to 1; None after it."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == WARMUP_LOG_RATE:
            return self.inverse_log_warm_up * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps

    def _unstarted(self) -> bool:
        if self.last_batch_iteration < 0:
            logger.warning("Attempting to get learning rate from scheduler before it has started")
        return self.last_batch_iteration < 0

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of `last_batch_iteration`."""
        self._advance(last_batch_iteration)


def _short(total: int, warmup: int) -> None:
    logger.warning(f"total_num_steps {total} is less than warmup_num_steps {warmup}")


class WarmupLR(_Warmup):
    """Raises the rate from a low one to a high one (None: each group's own), along a logarithm or a line, and
    keeps it there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        _positive(WARMUP_NUM_STEPS, warmup_num_steps)
        self.optimizer = get_torch_optimizer(optimizer)
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = _each(self.optimizer, warmup_min_lr, "min_lr")
        self.max_lrs = _each(self.optimizer, warmup_max_lr, "max_lr")
        self.delta_lrs = [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]
        self._warm_up(warmup_num_steps, warmup_type)
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _after(self) -> float:
        """The share of the difference of both rates after the warmup."""
        return 1.0

    def _get_gamma(self) -> float:
        warmed = self._warmed()
        return self._after() if warmed is None else warmed

    def get_lr(self) -> list[Any]:
        if self._unstarted():
            return self.min_lrs
        gamma = self._get_gamma()
        return [low + delta * gamma for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """A WarmupLR whose rate then falls along a line, to the low one at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        if total_num_steps < self.warmup_num_steps:
            _short(total_num_steps, warmup_num_steps)

    def _after(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """Raises each group's own rate from a share of it to all of it, and lets it fall along half a cosine to
    `cos_min_ratio` of it at `total_num_steps`, where it stays."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._warm_up(warmup_num_steps, warmup_type)
        self.optimizer = get_torch_optimizer(optimizer)
        self.total_num_steps, self.last_batch_iteration = total_num_steps, last_batch_iteration
        self.cos_min_ratio, self.warmup_min_ratio = cos_min_ratio, warmup_min_ratio
        if total_num_steps < self.warmup_num_steps:
            _short(total_num_steps, warmup_num_steps)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.org_lrs = [rate.clone() if torch.is_tensor(rate) else rate for rate in rates]
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def get_lr_ratio(self) -> float:
        """The share of its own rate that each group has at `last_batch_iteration`."""
        if self._unstarted():
            return 0.0
        if (warmed := self._warmed()) is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        past = self.last_batch_iteration - self.warmup_num_steps + 1
        done = min(1.0, past / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[Any]:
        if self._unstarted():
            return [0.0 for _ in self.org_lrs]
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]
