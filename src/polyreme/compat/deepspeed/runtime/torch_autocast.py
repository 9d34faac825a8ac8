"""The names of DeepSpeed's support of torch.autocast, which the engine's forward applies as the config
says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.utils.logging import warning_once

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the classes, as "module.name", whose gradients DeepSpeed sends in fewer bits if the config names
    none."""
    return [".".join((each.__module__, each.__name__)) for each in LOWER_PRECISION_SAFE_MODULES]


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """Run the block under the autocast that the engine's config asks for. One of the script's own is off in
    it, with a warning if the config asks for none."""
    kind, dtype = engine.device.type, engine.torch_autocast_dtype()
    enabled = engine.torch_autocast_enabled()
    if torch.is_autocast_enabled(kind) and not enabled:
        warning_once(
            "torch.autocast is on around the engine's forward, and off in it: the config decides, whose key "
            "for it is torch_autocast"
        )
    elif not enabled:
        yield
        return
    with torch.autocast(kind, dtype, enabled=enabled):
        yield


__getattr__ = lazily(__name__)
