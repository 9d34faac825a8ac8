"""The distribution that `importlib.metadata` finds for a system whose names one of the doors has, which is
installed nowhere."""

from __future__ import annotations

import re
from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from typing import Any


def normalized(name: str) -> str:
    """Return a distribution's name in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class DoorDistribution(Distribution):
    """The distribution `name` of a `version`, with one top-level module of its name and no files."""

    def __init__(self, name: str, version: str) -> None:
        self._files = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                f"Summary: Polyreme's modules under the names of {name} {version}\n"
            ),
            "top_level.txt": f"{name}\n",
            "INSTALLER": "polyreme\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return Path(__file__).parent / path
