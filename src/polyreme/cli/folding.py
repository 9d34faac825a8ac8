"""Names, lists and counts in tables that are too narrow for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

SHOWN = 8
"""Words of a list, such as the ranks of a line, that the terminal shows; JSON has all."""


@dataclass(frozen=True)
class Folded:
    """A name that is wrapped after a dot or a space, and within a word only where that is longer than a
    line."""

    name: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(cell_len, self._words()), default=0), cell_len(self.name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for word in self._words():
            if lines[-1] and cell_len(lines[-1] + word.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += word
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")

    def _words(self) -> list[str]:
        return re.split(r"(?<=[. ])", self.name)


def some(names: list[str], between: str) -> str:
    """Join the words; of a long list, only the first ones and the last."""
    return between.join(names if len(names) <= SHOWN else [*names[: SHOWN - 1], "...", names[-1]])


def count(number: int, what: str) -> str:
    """Return a number with its noun, in the plural if need be."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def binary(size: float) -> str:
    """Return a number of bytes in three digits."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def decimal(number: float) -> str:
    """Return a number in three digits."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T")).replace(" ", "")


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    return f"{number:.3g} {units[power]}"
