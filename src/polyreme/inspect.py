"""A config as people and programs read it. Rendering only: every fact comes from `polyreme.config`.

`python -m polyreme.inspect docs/config.md` writes the key reference into that page again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from polyreme.config import Config
from polyreme.config.keys import LEAVES, SECTIONS, default, expects, toml

BEGIN, END = "<!-- keys: begin, written by python -m polyreme.inspect -->", "<!-- keys: end -->"
STYLES = {"user": "bold green", "derived": "cyan", "default": "dim"}


def render(config: Config, world_size: int) -> Table:
    """The resolved config as a table of key, value, origin and description. Raises ConfigError where it cannot run."""
    resolved = config.resolve(world_size)
    origins: dict[str, str] = dict(resolved.origins)
    table = Table(title=f"config for {world_size} rank{'s' if world_size > 1 else ''}", title_justify="left")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin")
    table.add_column("description", overflow="fold")
    for key, field in LEAVES.items():
        # Text, not str: a value may hold brackets, which rich would take for markup.
        value = Text(toml(resolved.value(key)), style=STYLES[origins[key]])
        table.add_row(Text(key), value, origins[key], Text(field.description or ""))
        if key == "batch.micro":
            count = Text(str(resolved.accumulation), style=STYLES["derived"])
            table.add_row(Text("(accumulation)"), count, "derived", "Micro-batches of one step on one rank.")
    return table


def as_json(config: Config, world_size: int) -> str:
    """The same as a JSON object: world_size, accumulation, config, and origins by dotted key."""
    resolved = config.resolve(world_size)
    told: dict[str, Any] = {
        "world_size": world_size,
        "accumulation": resolved.accumulation,
        "config": resolved.model_dump(mode="json"),
        "origins": resolved.origins,
    }
    return json.dumps(told, indent=2, ensure_ascii=False)


def reference() -> str:
    """Every key in Markdown: a table for each section, of what the key takes, its default and its description."""
    root = [key for key in LEAVES if "." not in key]
    lines = ["### Top level", "", *_rows(root)]
    for name, section in SECTIONS.items():
        lines += ["", f"### [{name}]", "", section.__doc__ or "", ""]
        lines += _rows([key for key in LEAVES if key.startswith(f"{name}.")])
    return "\n".join(lines)


def _rows(keys: list[str]) -> list[str]:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        field = LEAVES[key]
        cells = (f"`{key}`", expects(field), f"`{toml(default(field))}`", field.description or "")
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return rows


def with_reference(page: str) -> str:
    """`page` with the key reference between its two marks renewed."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{reference()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_reference(target.read_text(encoding="utf-8")), encoding="utf-8")
