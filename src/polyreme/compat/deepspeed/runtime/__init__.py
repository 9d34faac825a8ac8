"""DeepSpeed's `runtime` package: names over Polyreme's own."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
