"""DeepSpeed's operations: optimizers by its names, and the names of what it compiles."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.ops.op_builder import ALL_OPS

__compatible_ops__ = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
__getattr__ = lazily(__name__)
