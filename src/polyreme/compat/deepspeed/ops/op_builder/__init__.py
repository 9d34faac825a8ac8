"""Builders of DeepSpeed's compiled operations, by name. Nothing is compiled here: a builder says whether its
operation works without (`is_compatible`), and its `load` raises UnsupportedError."""

from __future__ import annotations

from typing import NoReturn

from polyreme.compat.deepspeed.refusal import refused

__deepspeed__ = True


class OpBuilder:
    """One operation: its NAME, and in INSTEAD what does its work without compilation, if anything does."""

    NAME, INSTEAD = "", ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the work of the operation is done without compiling it."""
        return bool(self.INSTEAD)

    def load(self, verbose: bool = False) -> NoReturn:
        """Raise UnsupportedError: no operation is compiled."""
        raise refused(
            f"the compiled operation {self.name}",
            "Polyreme compiles nothing at run time",
            f"use {self.INSTEAD}, which works as it is" if self.INSTEAD else "train without it",
        )


class CPUAdamBuilder(OpBuilder):
    NAME, INSTEAD = "cpu_adam", "deepspeed.ops.adam.DeepSpeedCPUAdam"


class CPUAdagradBuilder(OpBuilder):
    NAME, INSTEAD = "cpu_adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad"


class CPULionBuilder(OpBuilder):
    NAME, INSTEAD = "cpu_lion", "deepspeed.ops.lion.DeepSpeedCPULion"


class FusedAdamBuilder(OpBuilder):
    NAME, INSTEAD = "fused_adam", "deepspeed.ops.adam.FusedAdam"


class FusedLionBuilder(OpBuilder):
    NAME, INSTEAD = "fused_lion", "deepspeed.ops.lion.FusedLion"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


class GDSBuilder(OpBuilder):
    NAME = "gds"


class UtilsBuilder(OpBuilder):
    NAME = "utils"


class PinMemoryBuilder(OpBuilder):
    NAME = "pin_memory"


class CCLCommBuilder(OpBuilder):
    NAME = "deepspeed_ccl_comm"


class ShareMemCommBuilder(OpBuilder):
    NAME = "deepspeed_shm_comm"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class StochasticTransformerBuilder(OpBuilder):
    NAME = "stochastic_transformer"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class InferenceCoreBuilder(OpBuilder):
    NAME = "inference_core_ops"


class InferenceCutlassBuilder(OpBuilder):
    NAME = "cutlass_ops"


class RaggedOpsBuilder(OpBuilder):
    NAME = "ragged_ops"


class RaggedUtilsBuilder(OpBuilder):
    NAME = "ragged_device_ops"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class FPQuantizerBuilder(OpBuilder):
    NAME = "fp_quantizer"


class RandomLTDBuilder(OpBuilder):
    NAME = "random_ltd"


class SpatialInferenceBuilder(OpBuilder):
    NAME = "spatial_inference"


class EvoformerAttnBuilder(OpBuilder):
    NAME = "evoformer_attn"


class NotImplementedBuilder(OpBuilder):
    NAME = "deepspeed_not_implemented"


ALL_OPS = {kind.NAME: kind() for kind in OpBuilder.__subclasses__()}
"""A builder of each operation, by its name."""
