"""The loss scale of an engine as objects of DeepSpeed's classes, which always show its present value and
cannot set it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    LossScaleConfig,
    LossScalerBase,
)
from polyreme.compat.deepspeed.runtime.precision_config import DeepSpeedFP16Config

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

T = TypeVar("T")


def is_dynamic(given: Translation) -> bool:
    """Return whether the config asks for a loss scale that moves."""
    return _is_autocast(given) or (given.values["fp16.enabled"] and given.values["fp16.loss_scale"] == 0)


def _is_autocast(given: Translation) -> bool:
    """Return whether the engine computes under autocast in fp16, whose loss scale is torch's GradScaler."""
    return given.config["precision"]["compute"] == "autocast-fp16"


def _config(given: Translation) -> tuple[DeepSpeedFP16Config, torch.dtype]:
    if _is_autocast(given):
        return DeepSpeedFP16Config(enabled=True, hysteresis=1, loss_scale_window=2000), torch.float16
    dtype = torch.float16 if given.values["fp16.enabled"] else torch.float32
    return DeepSpeedFP16Config(**given.section("fp16")), dtype


def scaler(engine: DeepSpeedEngine) -> LossScalerBase:
    """Return the attribute `loss_scaler` of an engine's optimizer."""
    config, dtype = _config(engine.translation)
    args = config.dynamic_loss_scale_args()
    return _live(CreateLossScaler(dtype, config.loss_scale, is_dynamic(engine.translation), args), engine)


def scale_config(engine: DeepSpeedEngine) -> LossScaleConfig:
    """Return the attribute `loss_scale_config` of an engine's optimizer."""
    config, dtype = _config(engine.translation)
    args = config.dynamic_loss_scale_args()
    return _live(LossScaleConfig(dtype, is_dynamic(engine.translation), 1.0, args), engine)


def _live(made: T, engine: DeepSpeedEngine) -> T:
    """Make the scale and the count of steps of `made` read the engine's, and return it."""
    facts = {
        "cur_scale": property(lambda _: engine.polyreme.state.loss_scale),
        "cur_iter": property(lambda _: engine.global_steps),
    }
    made.__class__ = type(type(made).__name__, (type(made),), facts)
    return made
