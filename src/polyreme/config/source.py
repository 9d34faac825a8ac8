"""From a file, a mapping and overrides to plain tables, and from pydantic's errors to problems a user can act on."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from polyreme.config.keys import LEAVES, SECTIONS, Section
from polyreme.config.words import example, expects, toml
from polyreme.errors import ConfigError, Problem


def plain(source: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that overrides may change: sections as mappings, and empty ones (YAML writes null) as empty ones."""

    def copied(value: Any) -> Any:
        if isinstance(value, Section):
            return value.model_dump(exclude_unset=True)
        return {k: copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return {key: {} if value is None and key in SECTIONS else copied(value) for key, value in source.items()}


def read(path: Path) -> dict[str, Any]:
    def failed(reason: str, fix: str) -> ConfigError:
        return ConfigError([Problem("config", str(path), reason, fix)])

    if not path.exists():
        raise failed("there is no such file", f"check the path; it is taken from {Path.cwd()}")
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise failed(f"cannot tell its format from the suffix {suffix!r}", "use a .toml, .yaml, .yml or .json file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise failed(f"cannot be read: {error}", "give a readable text file in UTF-8") from None
    try:
        tree = _parse(text, suffix)
        if tree is None:
            return {}
        if isinstance(tree, dict):
            return plain(tree)
    except (ValueError, RecursionError) as error:
        raise failed(f"not valid {suffix[1:].upper()}: {error}", "correct the file at that place") from None
    raise failed(f"holds {_named(tree)}, not a table of keys", "write keys and values at the top level")


def _parse(text: str, suffix: str) -> object:
    """Raises ValueError where `text` is not valid."""
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def override(tree: dict[str, Any], text: str) -> Problem | None:
    """Write one "section.key=value" into `tree`."""
    key, equals, raw = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        return Problem("override", text, "not of the form section.key=value", 'write for example "optimizer.lr=1e-3"')
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # A date is text here, and a line break could have smuggled in more keys.
    is_value = list(parsed) == ["value"] and isinstance(parsed["value"], bool | int | float | str | list | dict)
    table = tree
    for depth, part in enumerate(path[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(".".join(path[:depth]), table, f"not a table, so {key.strip()} cannot be set", "remove it")
    table[path[-1]] = parsed["value"] if is_value else raw.strip()
    return None


def problems_of(error: ValidationError, tree: Mapping[str, Any]) -> list[Problem]:
    """One problem per key of `tree`: pydantic reports each member of a union apart."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = detail["loc"][: 1 if detail["loc"][0] in LEAVES else 2]
        key, found = ".".join(map(str, path)), detail["input"]
        if key in problems:
            continue
        if detail["type"] != "invalid_key":
            found = tree[str(path[0])] if len(path) == 1 else tree[str(path[0])][path[1]]
        if detail["type"] in ("extra_forbidden", "invalid_key") and key not in LEAVES:
            problems[key] = _unknown(key, found)
        elif key in LEAVES:
            field = LEAVES[key]
            reason = f"must be {expects(field)}, not {_named(found)}"
            if detail["type"] == "axis_order":
                reason = detail["msg"]
            problems[key] = Problem(key, found, reason, f"write {key} = {toml(_nearest(field, found))}")
        else:
            keys = [k for k in LEAVES if k.startswith(f"{key}.")]
            fix = f"write for example {keys[0]} = {toml(example(LEAVES[keys[0]]))}"
            problems[key] = Problem(key, found, f"must be a table of keys, not {_named(found)}", fix)
    return list(problems.values())


def _nearest(field: FieldInfo, value: object) -> object:
    """The word that the key may have and that is most like `value`, or else an example of what it may have."""
    words = [word for word in get_args(field.annotation) if isinstance(word, str)] if get_origin(field.annotation) is Literal else []
    return next(iter(difflib.get_close_matches(str(value), words, n=1)), example(field))


def _unknown(key: str, value: object) -> Problem:
    section, _, name = key.rpartition(".")

    def likeness(candidate: str) -> float:
        there, _, its_name = candidate.rpartition(".")
        alike = difflib.SequenceMatcher(None, name, its_name).ratio()
        if there == section:  # which makes no names alike
            return alike + 0.1
        return max(alike, difflib.SequenceMatcher(None, key.replace(".", "_"), candidate.replace(".", "_")).ratio())

    best = max((candidate for candidate in [*LEAVES, *SECTIONS] if candidate != section), key=likeness)
    if likeness(best) >= 0.6:
        return Problem(key, value, "there is no such key", f'did you mean "{best}"?')
    valid = [k for k in LEAVES if k.startswith(f"{section}.")] if section else [*SECTIONS, "seed", "compile"]
    return Problem(key, value, "there is no such key", f"use one of {', '.join(valid)}")


def _named(value: object) -> str:
    if isinstance(value, int | float | str | list | tuple):
        return toml(value)
    return {dict: "a table", types.NoneType: "empty"}.get(type(value), type(value).__name__)
