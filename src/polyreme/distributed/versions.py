"""Compare the versions of software that can change numbers, as this process would import it, between ranks.

Imports no torch, as a launcher would wait for that. Communication: none."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from polyreme.errors import LaunchError, named
from polyreme.version import VERSION

DISTRIBUTIONS = ("torch", "transformers", "numba", "numpy")
NONE = "none"


@cache
def versions() -> dict[str, str]:
    """Return versions by name: Python's without the third number, Polyreme's with a digest of its files, and
    those of the libraries that compute."""
    python = platform.python_version().rpartition(".")[0]
    return {
        "python": python,
        "polyreme": f"{VERSION} ({_digest()})",
        **{n: _version(n) for n in DISTRIBUTIONS},
    }


def refuse_unlike(found: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Raise LaunchError where versions differ among these (host, versions) pairs."""
    by_name: dict[str, dict[str, dict[str, None]]] = {}
    for host, its in found:
        for name, version in its.items():
            by_name.setdefault(name, {}).setdefault(version, {})[host] = None
    differing = [
        f"{name} {', '.join(f'{version} on {named(list(hosts))}' for version, hosts in there.items())}"
        for name, there in by_name.items()
        if len(there) > 1
    ]
    if differing:
        raise LaunchError(
            f"ranks have different versions of what can change numbers: {'; '.join(differing)}; install the "
            "same on each host, or have all ranks use one environment that each host mounts"
        )


def _version(name: str) -> str:
    """Return the version of the module that is imported, or else of the installed one."""
    if isinstance(imported := getattr(sys.modules.get(name), "__version__", None), str):
        return str(imported)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NONE


def _digest() -> str:
    """Return a digest of Polyreme's source files, of eight letters."""
    digest, root = hashlib.blake2b(digest_size=4), Path(__file__).parents[1]
    for folder, folders, files in os.walk(root):
        folders.sort()
        for file in sorted(each for each in files if each.endswith(".py")):
            path = os.path.join(folder, file)  # noqa: PTH118  # pathlib takes ten times as long
            digest.update(os.path.relpath(path, root).encode() + b"\0")
            with open(path, "rb") as opened:  # noqa: PTH123
                digest.update(opened.read())
    return digest.hexdigest()
