"""The package `deepspeed.runtime`, whose names are Polyreme's own underneath."""

from polyreme.compat.deepspeed.lazy import lazily

__getattr__ = lazily(__name__)
