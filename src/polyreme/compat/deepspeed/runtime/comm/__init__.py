"""DeepSpeed's names of collectives over several tensors at once."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
