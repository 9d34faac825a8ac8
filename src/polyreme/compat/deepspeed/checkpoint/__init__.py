"""DeepSpeed's helpers around checkpoints."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
