"""The package `deepspeed.monitor`, which writes the figures of a run."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
