"""The package `deepspeed.checkpoint`, with constants and functions around checkpoints."""

from polyreme.compat.deepspeed.checkpoint import constants
from polyreme.compat.deepspeed.checkpoint.constants import *  # noqa: F403
from polyreme.compat.deepspeed.lazy import lazily

__all__ = [name for name in dir(constants) if name.isupper()]

__getattr__ = lazily(__name__)
