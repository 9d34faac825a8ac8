"""A DeepSpeed config as an object with DeepSpeed's attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed import comm
from polyreme.compat.deepspeed.comm.config import DeepSpeedCommsConfig
from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError, read
from polyreme.compat.deepspeed.json_config import Translation, translate
from polyreme.compat.deepspeed.monitor.config import get_monitor_config
from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from polyreme.compat.deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from polyreme.compat.deepspeed.runtime.getters import getter
from polyreme.compat.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from polyreme.compat.deepspeed.runtime.zero.config import ZeroStageEnum, get_zero_config
from polyreme.compat.deepspeed.utils.logging import logger

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER,
]  # fmt: skip
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedConfigModel", "DeepSpeedConfigWriter",
           "ZeroStageEnum"]  # fmt: skip

SECTIONS = {
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "autotuning_config": "autotuning",
    "checkpoint_config": "checkpoint",
    "compile_config": "compile",
    "data_efficiency_config": "data_efficiency",
    "expert_parallel_config": "expert_parallel",
    "flops_profiler_config": "flops_profiler",
    "hybrid_engine": "hybrid_engine",
    "pipeline": "pipeline",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
}
"""Attributes that are a section as a dictionary with every key."""
PLACES = {
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "param_dtype": "data_types.param_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "keep_in_fp32_modules": "data_types.keep_in_fp32_modules",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
}
"""Attributes whose key is called otherwise."""


class Section(dict[str, Any]):
    """A section, whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The largest norm of gradients that a config says; 1 where it does not, 0 for none."""
    return float(param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))


class DeepSpeedConfig:
    """What a config says, for the ranks there are. Attributes are DeepSpeed's: `train_batch_size`,
    `zero_config`, `float16_config`, `optimizer_name`, and so on.

    Raises DeepSpeedConfigError with every key that is unknown, wrong or refused."""

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """config: a dictionary, a file's path or base64. mpu: what says how many data-parallel ranks there
        are, where it is not all of them."""
        there = comm.is_initialized()
        self.global_rank = comm.get_rank() if there else 0
        if mpu is not None:
            self.world_size = int(mpu.get_data_parallel_world_size())
        else:
            self.world_size = comm.get_world_size() if there else 1
        translation = translate(config, self.world_size)
        self._translation: Translation = translation
        self._param_dict: dict[str, Any] = translation.source
        batch = translation.batch
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.size, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = get_zero_config(self._param_dict)
        self.zero_optimization_stage: int = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = get_float16_config(self._param_dict)
        self.bfloat16_config = get_bfloat16_config(self._param_dict)
        self.fp16_enabled, self.bfloat16_enabled = self.float16_config.enabled, self.bfloat16_config.enabled
        self.comms_config = DeepSpeedCommsConfig(self._param_dict)
        self.monitor_config = get_monitor_config(self._param_dict)
        profiled = translation.values["flops_profiler.enabled"]
        self.wall_clock_breakdown = bool(translation.values["wall_clock_breakdown"] or profiled)

    def __getattr__(self, name: str) -> Any:
        translation = self.__dict__.get("_translation")
        if translation is not None:
            if name in SECTIONS:
                return Section(translation.section(SECTIONS[name]))
            if name in PLACES:
                return translation.values[PLACES[name]]
            if (found := getter(translation, name)) is not None:
                return found()
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}")

    def _configure_train_batch_size(self) -> None:
        """Work out what of the three sizes is None, and check them. Raises DeepSpeedConfigError."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        batch = translate({name: getattr(self, name) for name in names}, self.world_size).batch
        for name, size in zip(names, (batch.size, batch.micro, batch.accumulation), strict=True):
            setattr(self, name, size)

    def print_user_config(self) -> None:
        """Write the config to the log as it was given."""
        shown = json.dumps(self._param_dict, sort_keys=True, indent=4, default=str)
        logger.info(f"  json = {shown}")

    def print(self, name: str) -> None:
        """Write every key's value to the log."""
        logger.info(f"{name}:")
        for key, value in sorted(self._translation.values.items()):
            logger.info(f"  {key} {'.' * max(1, 29 - len(key))} {value}")
        self.print_user_config()


class DeepSpeedConfigWriter:
    """A config that is put together key by key, and written."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = dict(data or {})

    def add_config(self, key: str, value: Any) -> None:
        """Set a key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Take the keys of a file in place of those there are. Raises DeepSpeedConfigError."""
        self.data = read(filename)

    def write_config(self, filename: str) -> None:
        """Write them to a file."""
        Path(filename).write_text(json.dumps(self.data), "utf-8")
