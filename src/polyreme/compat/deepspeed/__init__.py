"""DeepSpeed's names over Polyreme: what `import deepspeed` finds once `install` was called, or under
`polyreme launch --deepspeed`."""

from __future__ import annotations

import importlib
from typing import Any

from polyreme.compat import finder

__version__ = version = finder.VERSIONS["deepspeed"]
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))

# modules that are imported when they are first asked for, and names of theirs
_MODULES = ("git_version_info", "launcher")
_ELSEWHERE = {"git_hash": "git_version_info", "git_branch": "git_version_info"}


def install() -> None:
    """Have `import deepspeed` find this package, and `importlib.metadata` DeepSpeed 0.19.8, in this process
    and in the Python processes that it starts: for the top of a script or notebook. Again is harmless.

    Raises `polyreme.compat.finder.DoorError` where another DeepSpeed is imported already, or transformers or
    accelerate have looked for it."""
    finder.install("deepspeed")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in ("__git_hash__", "__git_branch__"):
        name = name.strip("_")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
