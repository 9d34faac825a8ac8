"""The package of DeepSpeed's names around fp16."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
