"""What DeepSpeed's engine does for torch.autocast: ours does it, from the config."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from polyreme.compat.deepspeed.refusal import absent
from polyreme.compat.deepspeed.utils.logging import warning_once

LOWER_PRECISION_SAFE_MODULES = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The classes whose gradients DeepSpeed sends in fewer bits if the config names none."""
    return [f"{cls.__module__}.{cls.__name__}" for cls in LOWER_PRECISION_SAFE_MODULES]


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """Have that autocast around a forward of the engine which its config names, and none of the script's."""
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


_WHY = (
    "all parameters and gradients travel in the format that they have",
    'write {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}} in the config, which is all it needs',
)
init_autocast_params = absent("deepspeed.runtime.torch_autocast.init_autocast_params", *_WHY)
get_comm_dtype = absent("deepspeed.runtime.torch_autocast.get_comm_dtype", *_WHY)
has_comm_dtype = absent("deepspeed.runtime.torch_autocast.has_comm_dtype", *_WHY)
