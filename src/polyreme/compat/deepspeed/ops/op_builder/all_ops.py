"""All builders by the names of their operations."""

from polyreme.compat.deepspeed.ops.op_builder import ALL_OPS, OpBuilder

__op_builders__: list[OpBuilder] = list(ALL_OPS.values())
