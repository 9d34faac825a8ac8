"""Reads docstrings for the API reference (`make docs`).

Parameters stand in them as `name: what it is`, one a line, which Markdown would join to one paragraph: they
become a list."""

from __future__ import annotations

import re

import griffe


class Parameters(griffe.Extension):
    """Writes the parameters that a docstring tells of as a list."""

    def on_function_instance(self, *, func: griffe.Function, **_: object) -> None:
        listed(func, [parameter.name.lstrip("*") for parameter in func.parameters])

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        made = cls.members.get("__init__")
        names = [p.name for p in made.parameters] if isinstance(made, griffe.Function) else []
        listed(cls, [*names, *cls.members])


def listed(of: griffe.Object, names: list[str]) -> None:
    """Make a list item of each line that begins with one of `names` and a colon, with the lines below it."""
    if of.docstring is None:
        return
    begins = "|".join(map(re.escape, names)) or "(?!)"
    lines, inside = [], False
    for line in of.docstring.value.split("\n"):
        if re.match(rf"({begins}): ", line):
            lines += [] if inside else [""]
            name, _, text = line.partition(": ")
            lines.append(f"- `{name}`: {text}")
            inside = True
        elif inside and line.strip():
            lines.append(f"    {line.strip()}")
        else:
            lines.append(line)
            inside = False
    of.docstring.value = "\n".join(lines)
