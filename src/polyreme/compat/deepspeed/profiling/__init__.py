"""DeepSpeed's `profiling`."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
