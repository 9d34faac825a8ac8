"""What depends on torch's version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version lies between these."""
    version = TorchVersion(torch.__version__)
    return not (min_version and version < str(min_version)) and not (
        max_version and version > str(max_version)
    )


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Have `hook` called with `param` after each accumulation into its gradient."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, compiled by torch.compile at its first call."""
    return torch.compile(fn)
