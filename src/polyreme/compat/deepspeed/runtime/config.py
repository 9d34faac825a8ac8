"""A DeepSpeed config as an object with DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme.compat.deepspeed import comm
from polyreme.compat.deepspeed.config_keys import KEYS
from polyreme.compat.deepspeed.config_optimizer import OWN
from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError
from polyreme.compat.deepspeed.json_config import Translation, translate
from polyreme.compat.deepspeed.monitor.config import DeepSpeedCommsConfig, get_monitor_config
from polyreme.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from polyreme.compat.deepspeed.runtime.getters import getter
from polyreme.compat.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from polyreme.compat.deepspeed.runtime.zero.config import ZeroStageEnum, get_zero_config
from polyreme.compat.deepspeed.utils.logging import logger

# ADAM_OPTIMIZER = "adam", and so on
globals().update({f"{name.upper()}_OPTIMIZER": name for name in OWN})
DEEPSPEED_OPTIMIZERS = [*OWN]
TORCH_ADAM_PARAM, ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "torch_adam", "adam_w_mode", True

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedConfigModel", "ZeroStageEnum"]

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
"""The config section that each of these attributes is, as a dictionary with every key."""
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
"""The key that each of these attributes is the value of, where it has another name."""


class Section(dict[str, Any]):
    """A config section as a dictionary, whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the largest norm of gradients that a config allows: 1 if it says none; 0 means no limit."""
    return float(param_dict.get("gradient_clipping", KEYS["gradient_clipping"].default))


class DeepSpeedConfig:
    """A DeepSpeed config for a number of ranks, with DeepSpeed's attributes: `train_batch_size`,
    `zero_config`, `float16_config`, `optimizer_name`, and so on.

    Raises DeepSpeedConfigError with every key that is unknown, wrong or refused."""

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """Read `config`, a dictionary, the path of a file, or base64. mpu: the object that tells the number
        of data-parallel ranks; None: all ranks are."""
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
        self.zero_optimization_stage, self.zero_enabled = translation.stage, translation.stage > 0
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
        """Work out those of the three batch sizes that are None. Raises DeepSpeedConfigError if they do not
        fit together."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        batch = translate({name: getattr(self, name) for name in names}, self.world_size).batch
        for name, size in zip(names, (batch.size, batch.micro, batch.accumulation), strict=True):
            setattr(self, name, size)

    def print(self, name: str) -> None:
        """Write the value of every key to the log, below the heading `name`."""
        logger.info("\n".join([f"{name}:", *(f"  {key} = {value!r}" for key, value in self._values())]))

    def _values(self) -> list[tuple[str, Any]]:
        return sorted(self._translation.values.items())
