"""DeepSpeed's operations: optimizers by its names, and the names of what it compiles."""

from polyreme.compat.deepspeed.ops import adagrad, adam, lamb, lion, op_builder, transformer
from polyreme.compat.deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

__compatible_ops__ = {name: builder.is_compatible() for name, builder in op_builder.ALL_OPS.items()}

__all__ = [
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "adagrad",
    "adam",
    "lamb",
    "lion",
    "op_builder",
    "transformer",
]
