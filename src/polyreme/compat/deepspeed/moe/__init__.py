"""The package `deepspeed.moe`: names around mixtures of experts that scripts import."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
