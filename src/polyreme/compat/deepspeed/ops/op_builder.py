"""Builders of DeepSpeed's compiled operations, by name. Nothing is compiled here: a builder says whether its
operation works without (`is_compatible`), and its `load` raises UnsupportedError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from polyreme.compat.deepspeed.refusal import refused

__deepspeed__ = True
_OPERATIONS = """
AsyncIO=async_io CCLComm=deepspeed_ccl_comm CPUAdagrad=cpu_adagrad CPUAdam=cpu_adam CPULion=cpu_lion
EvoformerAttn=evoformer_attn FPQuantizer=fp_quantizer FusedAdam=fused_adam FusedLamb=fused_lamb
FusedLion=fused_lion GDS=gds Inference=transformer_inference InferenceCore=inference_core_ops
InferenceCutlass=cutlass_ops NotImplemented=deepspeed_not_implemented PinMemory=pin_memory
Quantizer=quantizer RaggedOps=ragged_ops RaggedUtils=ragged_device_ops RandomLTD=random_ltd
ShareMemComm=deepspeed_shm_comm SpatialInference=spatial_inference
StochasticTransformer=stochastic_transformer Transformer=transformer Utils=utils
"""
"""The beginning of each builder's name, and its operation."""
_INSTEAD = {
    "cpu_adagrad": "adagrad.DeepSpeedCPUAdagrad",
    "cpu_adam": "adam.DeepSpeedCPUAdam",
    "cpu_lion": "lion.DeepSpeedCPULion",
    "fused_adam": "adam.FusedAdam",
    "fused_lion": "lion.FusedLion",
}
"""The optimizers that do an operation's work without compilation."""


class OpBuilder:
    """A builder of one operation: its NAME, and INSTEAD what does its work, or nothing."""

    NAME, INSTEAD = "", ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the work of the operation is done without compiling it."""
        return bool(self.INSTEAD)

    def load(self, verbose: bool = False) -> NoReturn:
        """Raise UnsupportedError: no operation is compiled."""
        raise refused(
            f"the compiled operation {self.name}",
            "Polyreme compiles nothing at run time",
            f"use {self.INSTEAD}, which works as it is" if self.INSTEAD else "train without it",
        )


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


ALL_OPS: dict[str, OpBuilder] = {}
"""A builder of each operation, by its name."""
for _class, _, _name in (_each.partition("=") for _each in _OPERATIONS.split()):
    _about = {"NAME": _name, "__module__": __name__}
    if _name in _INSTEAD:
        _about["INSTEAD"] = f"deepspeed.ops.{_INSTEAD[_name]}"
    globals()[f"{_class}Builder"] = type(f"{_class}Builder", (OpBuilder,), _about)
    ALL_OPS[_name] = globals()[f"{_class}Builder"]()
__op_builders__ = list(ALL_OPS.values())
