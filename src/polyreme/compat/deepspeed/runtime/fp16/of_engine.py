"""The loss scale of an engine as DeepSpeed's objects tell of it. They are made anew each time, and changing
one changes nothing."""

from __future__ import annotations

import torch

from polyreme.compat.deepspeed.json_config import Translation
from polyreme.compat.deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    LossScaleConfig,
    LossScalerBase,
)
from polyreme.compat.deepspeed.runtime.precision_config import DeepSpeedFP16Config


def scaler(translation: Translation, scale: float, steps: int) -> LossScalerBase:
    """`optimizer.loss_scaler` after `steps` steps, with `scale`."""
    config, dtype = _config(translation)
    made = CreateLossScaler(dtype, scale, is_dynamic(translation), config.dynamic_loss_scale_args())
    made.cur_scale = scale
    if made.dynamic:
        vars(made)["cur_iter"] = steps
    return made


def scale_config(translation: Translation, scale: float, steps: int) -> LossScaleConfig:
    """`optimizer.loss_scale_config` after `steps` steps, with `scale`."""
    config, dtype = _config(translation)
    made = LossScaleConfig(dtype, is_dynamic(translation), scale, config.dynamic_loss_scale_args())
    made.cur_scale, made.cur_iter = scale, steps
    return made


def is_dynamic(translation: Translation) -> bool:
    """Whether the loss scale moves."""
    return bool(translation.values["fp16.enabled"]) and translation.values["fp16.loss_scale"] == 0


def _config(translation: Translation) -> tuple[DeepSpeedFP16Config, torch.dtype]:
    dtype = torch.float16 if translation.values["fp16.enabled"] else torch.float32
    return DeepSpeedFP16Config(**translation.section("fp16")), dtype
