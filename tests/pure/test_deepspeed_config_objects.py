"""DeepSpeed's configuration by its names: DeepSpeedConfig and the objects of its sections."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError
from polyreme.compat.deepspeed.refusal import OrderError, UnsupportedError
from polyreme.compat.deepspeed.runtime import config_utils
from polyreme.compat.deepspeed.runtime.config import PLACES, DeepSpeedConfig
from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from polyreme.compat.deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaler,
)
from polyreme.compat.deepspeed.runtime.precision_config import (
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)
from polyreme.compat.deepspeed.runtime.zero import utils as zero_utils
from polyreme.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from polyreme.errors import CheckpointError


class Section(config_utils.DeepSpeedConfigModel):
    minutes: int | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "seconds", "new_param_fn": lambda m: 60 * m}
    )  # type: ignore[arg-type]
    seconds: int = 30
    hosts: list[str] = Field([], alias="nodes")


def test_a_config_has_deepspeeds_attributes() -> None:
    source = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": "logs"},
    }
    config = DeepSpeedConfig(source)
    assert config.train_micro_batch_size_per_gpu == 4
    assert (config.zero_enabled, config.zero_optimization_stage) == (True, 2)
    assert config.zero_config.reduce_bucket_size == 500_000_000
    assert config.bfloat16_config.enabled
    assert config.float16_config.enabled is False
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 0.1})
    assert config.gradient_clipping == 1.0
    assert config.monitor_config.csv_monitor.output_path == "logs"
    assert config.flops_profiler_config["profile_step"] == 1
    assert config.wall_clock_breakdown is False
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = config.nothing_of_the_kind


def test_attributes_that_have_another_name_than_their_key_are_there() -> None:
    made = DeepSpeedConfig({"train_batch_size": 8})
    assert all(hasattr(made, name) for name in PLACES)
    assert made.use_data_before_expert_parallel_ is False and made.gradient_predivide_factor == 1.0


def test_a_config_works_out_batch_sizes_again() -> None:
    config = DeepSpeedConfig({"train_batch_size": 4})
    config.train_batch_size, config.gradient_accumulation_steps = 32, 4
    config.train_micro_batch_size_per_gpu = None
    config._configure_train_batch_size()
    assert config.train_micro_batch_size_per_gpu == 8
    config.gradient_accumulation_steps = 5
    with pytest.raises(AssertionError, match="train_batch_size"):
        config._configure_train_batch_size()


def test_the_ranks_of_an_mpu_count() -> None:
    class Mpu:
        def get_data_parallel_world_size(self) -> int:
            return 4

    config = DeepSpeedConfig({"train_batch_size": 8}, mpu=Mpu())
    assert (config.world_size, config.train_micro_batch_size_per_gpu) == (4, 2)


def test_an_unknown_key_is_an_error_of_every_kind_that_deepspeed_raises() -> None:
    for kind in (DeepSpeedConfigError, ValueError, AssertionError):
        with pytest.raises(kind, match="train_batch"):
            DeepSpeedConfig({"train_batch": 8})


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "prefetch_bucket_size"])
def test_zero_keys_have_two_names(key: str) -> None:
    assert DeepSpeedZeroConfig(**{key: 77_000}).prefetch_bucket_size == 77_000


def test_old_names_of_zero_keys() -> None:
    config = DeepSpeedZeroConfig(cpu_offload=True, cpu_offload_param=True)
    assert config.offload_optimizer is not None
    assert config.offload_param is not None
    assert (config.offload_optimizer.device, config.offload_param.device) == ("cpu", "cpu")
    assert DeepSpeedZeroConfig(cpu_offload=False).offload_optimizer is None
    old: Any = {"stage3_gather_fp16_weights_on_model_save": True}
    assert DeepSpeedZeroConfig(**old).gather_16bit_weights_on_model_save
    assert get_zero_config({"zero_optimization": True}).stage == 1
    assert get_zero_config({}).stage == 0


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (2, False), (3, True)])
def test_communication_overlaps_by_default_at_stage_3(stage: int, overlaps: bool) -> None:
    assert DeepSpeedZeroConfig(stage=stage).overlap_comm is overlaps


def test_a_zero_value_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        DeepSpeedZeroConfig(reduce_bucket_size=0)


def test_either_name_of_bf16() -> None:
    assert get_bfloat16_config({"bf16": {"enabled": True}}).enabled
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert not get_bfloat16_config({}).enabled


@pytest.mark.parametrize("scale", [math.inf, math.nan, True])
def test_a_loss_scale_is_finite(scale: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        DeepSpeedFP16Config(loss_scale=scale)
    with pytest.raises(DeepSpeedConfigError, match="loss_scale"):
        DeepSpeedConfig({"train_batch_size": 1, "fp16": {"enabled": True, "loss_scale": scale}})


def test_a_loss_scale_is_not_below_zero() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        DeepSpeedFP16Config(loss_scale=-1.0)
    with pytest.raises(ValidationError, match="loss_scale_window"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)


def test_a_section_takes_old_names_and_aliases() -> None:
    assert (Section().seconds, Section(minutes=2).seconds, Section(seconds="auto").seconds) == (30, 120, 30)
    assert Section(hosts=["a"]).hosts == Section(nodes=["a"]).hosts == ["a"]
    with pytest.raises(OrderError, match="minutes is an old name of seconds"):
        Section(minutes=2, seconds=5)
    with pytest.raises(ValidationError, match="hours"):
        Section(hours=1)


def test_helpers_of_sections() -> None:
    with pytest.raises(ValueError, match="more than once"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=config_utils.dict_raise_error_on_duplicate_keys)


def _scaler(**changes: Any) -> DynamicLossScaler:
    args = get_float16_config({"fp16": {"initial_scale_power": 8, "loss_scale_window": 2, **changes}})
    made = CreateLossScaler(torch.half, 0, True, args.dynamic_loss_scale_args())
    assert isinstance(made, DynamicLossScaler)
    return made


def test_a_dynamic_loss_scale_moves() -> None:
    scaler = _scaler(hysteresis=2)
    seen = []
    for overflow in (True, True, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [256, 128, 128, 128, 256]


def test_consecutive_hysteresis_forgets_an_overflow() -> None:
    scaler = _scaler(hysteresis=2, consecutive_hysteresis=True, loss_scale_window=100)
    for _ in range(3):
        scaler.update_scale(True)
        scaler.update_scale(False)
    assert scaler.loss_scale == 256


def test_an_overflow_at_the_least_loss_scale_is_an_error() -> None:
    scaler = _scaler(hysteresis=1, initial_scale_power=0)
    with pytest.raises(OrderError, match="least loss scale"):
        scaler.update_scale(True)


def test_a_loss_scale_is_one_without_fp16() -> None:
    assert CreateLossScaler(torch.bfloat16, 128, False, None).loss_scale == 1
    assert isinstance(CreateLossScaler(torch.half, 128, False, None), LossScaler)
    assert LossScaleConfig(torch.bfloat16, False, 128, None).cur_scale == 1
    dynamic = LossScaleConfig(torch.half, True, 0, None)
    assert (dynamic.cur_scale, dynamic.scale_window, dynamic.dynamic_loss_scale) == (2.0**32, 1000, True)


def test_wrappers_of_optimizers_say_why_there_are_none() -> None:
    with pytest.raises(UnsupportedError, match="FP16_Optimizer"):
        FP16_Optimizer(None)


def test_names_around_zero() -> None:
    assert zero_utils.ZeRORuntimeException is CheckpointError
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert zero_utils.is_zero_supported_optimizer(torch.optim.AdamW([parameter]))
    assert not zero_utils.is_zero_supported_optimizer(torch.optim.SGD([parameter], lr=1.0))
    assert not zero_utils.is_zero_param(parameter)
