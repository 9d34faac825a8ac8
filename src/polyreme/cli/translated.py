"""Show the translation of a DeepSpeed JSON key by key, and write a config as a TOML file. Rendering only:
`polyreme.compat.deepspeed.json_config` translates."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyreme.config import Config
from polyreme.config.describe import BARE, toml
from polyreme.errors import PolyremeError, printable, shortened

if TYPE_CHECKING:
    from polyreme.compat.deepspeed.json_config import Note

STYLES = {"translated": "bold green", "kept": "green", "warned": "bold yellow", "nothing to do": "dim"}
WIDTH = 42
"""Columns for a key and its value; the rest of 80 shows what it became."""


def load(
    path: Path, overrides: Sequence[str], ranks: int, fill_auto: bool = False
) -> tuple[Config, list[Note]]:
    """Return the config in a file, and for a DeepSpeed JSON notes on what became of its keys for a number of
    ranks. `fill_auto`: "auto" stands for the Trainer's default.

    Raises ConfigError."""
    if path.suffix.lower() == ".json":
        from polyreme.compat.deepspeed.json_config import is_deepspeed, translate

        if is_deepspeed(path):
            found = translate(path, ranks, fill_auto=fill_auto)
            return Config.load(found.standalone(), overrides), found.notes
    return Config.load(path, overrides), []


def render(found: Sequence[Note]) -> Group:
    """Return a table of what became of each key, section by section; empty for a config of Polyreme."""
    if not found:
        return Group()
    table = Table(title="keys of DeepSpeed", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", overflow="fold", max_width=WIDTH)
    table.add_column("what it became", overflow="fold")
    sections: dict[str, list[Note]] = {}
    for note in found:
        sections.setdefault(note.key.partition(".")[0] if "." in note.key else "", []).append(note)
    for section, notes in sections.items():
        if section:
            table.add_row(Text(printable(section), style="bold"), "")
        for note in notes:
            name = note.key.removeprefix(f"{section}.")
            value = shortened(lambda each: json.dumps(each, ensure_ascii=False), note.value)
            text = note.text if note.outcome == "translated" else f"{note.outcome}: {note.text}"
            indent = "  " if section else ""
            table.add_row(
                Text(printable(f"{indent}{name} = {value}")),
                Text(printable(text), style=STYLES[note.outcome]),
            )
    return Group(table)


def as_toml(config: Config) -> str:
    """Return the keys of a config that are set, as TOML that `Config.load` reads to the same."""
    tree: dict[str, Any] = config.model_dump(exclude_unset=True)
    lines = [f"{key} = {toml(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, keys in tree.items():
        if isinstance(keys, dict) and keys:
            lines += ["", f"[{section}]"]
            lines += [f"{k if BARE.fullmatch(k) else toml(k)} = {toml(v)}" for k, v in keys.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def write(config: Config, file: Path, source: Path) -> None:
    """Write `config` as TOML into a new file. Raises PolyremeError where there is one already."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(f"# {file.name}: from {printable(source.name)}\n\n{as_toml(config)}")
    except FileExistsError:
        raise PolyremeError(_THERE.format("--write", file)) from None


def refuse_existing(file: Path, option: str = "--write") -> None:
    """Raise PolyremeError where there is something at the path that `option` says to write to."""
    if os.path.lexists(file):
        raise PolyremeError(_THERE.format(option, file))


_THERE = "{} {}: it is there already; name another file, or move it"
