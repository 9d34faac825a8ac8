"""The loss scale of an engine as DeepSpeed's objects tell of it: always as it is now, and not to be set."""

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


def scaler(engine: DeepSpeedEngine) -> LossScalerBase:
    """`optimizer.loss_scaler`."""
    config, dtype = _config(engine.translation)
    dynamic = is_dynamic(engine.translation)
    return _live(
        CreateLossScaler(dtype, config.loss_scale, dynamic, config.dynamic_loss_scale_args()), engine
    )


def scale_config(engine: DeepSpeedEngine) -> LossScaleConfig:
    """`optimizer.loss_scale_config`."""
    config, dtype = _config(engine.translation)
    dynamic = is_dynamic(engine.translation)
    return _live(LossScaleConfig(dtype, dynamic, 1.0, config.dynamic_loss_scale_args()), engine)


def _live(made: T, engine: DeepSpeedEngine) -> T:
    """`made`, whose scale and count of steps are the engine's."""
    facts = {
        "cur_scale": property(lambda _: engine.polyreme.state.loss_scale),
        "cur_iter": property(lambda _: engine.global_steps),
    }
    made.__class__ = type(type(made).__name__, (type(made),), facts)
    return made


def is_dynamic(translation: Translation) -> bool:
    """Whether the loss scale moves."""
    fp16 = translation.values["fp16.enabled"] and translation.values["fp16.loss_scale"] == 0
    return bool(fp16) or _is_autocast(translation)


def _is_autocast(translation: Translation) -> bool:
    """Whether the scale is that of torch's GradScaler, for autocast."""
    return translation.config["precision"]["compute"] == "autocast-fp16"


def _config(translation: Translation) -> tuple[DeepSpeedFP16Config, torch.dtype]:
    if _is_autocast(translation):
        of_scaler = DeepSpeedFP16Config(enabled=True, hysteresis=1, loss_scale_window=2000)
        return of_scaler, torch.float16
    dtype = torch.float16 if translation.values["fp16.enabled"] else torch.float32
    return DeepSpeedFP16Config(**translation.section("fp16")), dtype
