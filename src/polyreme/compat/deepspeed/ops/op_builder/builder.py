"""The class of all builders."""

from polyreme.compat.deepspeed.ops.op_builder import OpBuilder

__all__ = ["OpBuilder"]
