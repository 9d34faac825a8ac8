"""Read a DeepSpeed config from a mapping, a JSON file or base64 of JSON, and give every key its value.

Invariant: `values` returns every key of the table, with a value of its kind, and leaves nothing out that was
written: a key that is not in the table is a problem."""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed import hjson
from polyreme.compat.deepspeed.config_keys import KEYS, NAMES, OLD_SECTIONS, TABLES, Key, find, in_words
from polyreme.config.loading import check_bounds, distinct, members, text_of, working_folder
from polyreme.config.schema import SECTIONS
from polyreme.errors import ConfigError, Problem

Source = str | os.PathLike[str] | Mapping[str, Any]

RENAMED = {
    "fp32_allreduce": 'communication_data_type = "fp32"',
    "max_grad_norm": "gradient_clipping",
    "gradient_clip_val": "gradient_clipping",
    "batch_size": "train_batch_size",
    "lr_scheduler": "scheduler",
    "zero": "zero_optimization",
}
"""Keys that users write by a wrong name, which another library or an older version has for them."""
OF_TRL = "zero_optimization.stage3_param_persistence_threshold"
"""The path that TRL writes as one name, at the top of the config of a reference model."""
SKIPPED = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')
"""Patterns of what DeepSpeed's JSON files may have besides JSON: comments, and commas before a closing
bracket. The group matches strings, which may contain both."""


class DeepSpeedConfigError(ConfigError, ValueError, AssertionError):
    """The error of a DeepSpeed config that cannot run here. It is also one of the types that DeepSpeed raises
    for a wrong config, for scripts that catch these."""


@dataclass(frozen=True)
class Values:
    """The values of a config. of: the value of every key by its path, DeepSpeed's default for those that were
    left out. written: those that were written, as they were written."""

    of: dict[str, Any]
    written: dict[str, Any]

    def __getitem__(self, path: str) -> Any:
        return self.of[path]


def read(source: Source) -> dict[str, Any]:
    """Return a config as a dictionary of dictionaries. Raises DeepSpeedConfigError if `source` is no
    config."""

    def failed(reason: str, fix: str) -> DeepSpeedConfigError:
        return DeepSpeedConfigError([Problem("config", source, reason, fix)])

    wrong = "neither a mapping, nor the path of a JSON file, nor base64 of one"
    fix = "give a dict, or the path of a DeepSpeed JSON"
    try:
        if isinstance(source, Mapping):
            check_bounds(source, members)
            return dict(source)
        name = os.fspath(source)
        path = Path(name).expanduser() if len(name) < 4096 else None
        if path is not None and path.exists():
            wrong, fix = "the file cannot be read", "correct it"
            tree = parse(text_of(path))
        elif "." in name or "/" in name:  # which base64 does not have
            raise failed("there is no such file", f"check the path; it is taken from {working_folder()}")
        else:
            tree = parse(base64.b64decode(name, altchars=b"-_", validate=True).decode("utf-8"))
    except DeepSpeedConfigError:
        raise
    except (ValueError, RecursionError, RuntimeError, OSError, TypeError) as error:
        raise failed(f"{wrong}: {error}", fix) from None
    if not isinstance(tree, dict):
        raise failed("it holds no table of keys", "write keys and values at the top level")
    return tree


def parse(text: str) -> Any:
    """Return the value of a text in JSON, which may have comments and commas before closing brackets, or else
    in Hjson, as DeepSpeed reads it. Raises ValueError for another text, and for a key that comes twice."""
    plain = LAST_COMMA.sub(lambda match: match[1] or "", SKIPPED.sub(lambda match: match[1] or " ", text))
    try:
        tree = json.loads(plain, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        try:
            tree = hjson.loads(text)
        except ValueError as other:
            raise ValueError(f"as JSON {error}; as Hjson {other}") from None
    check_bounds(tree, members)
    return tree


def values(tree: Mapping[str, Any], problems: list[Problem]) -> Values:
    """Return the value of every key, and add to `problems` what is wrong with single keys."""
    found: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for path, value in _leaves(_new_form(tree, problems), problems):
        key = find(path)
        if key is None:
            problems.append(_unknown(path, value))
            continue
        path = NAMES.get(path, path)
        if path in written:
            problems.append(Problem(path, value, "it is given under two names", "leave one of them out"))
            continue
        try:
            found[path] = parsed(key, value)
        except ValueError as error:
            problems.append(Problem(path, value, str(error), key.fix or "correct it, or leave it out"))
            continue
        if value is not None or key.default is not None:
            written[path] = value
        if key.outcome == "refused" and not _among(found[path], key.but):
            problems.append(Problem(path, value, key.says, key.fix))
    defaults = {path: key.default for path, key in KEYS.items() if not path.endswith("*")}
    return Values({**defaults, **found}, written)


def _among(value: object, others: tuple[object, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in others)


def _new_form(tree: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Return `tree` with keys that are written in an older form in the present one."""
    made = dict(tree)
    if isinstance(made.get("zero_optimization"), bool):
        made["zero_optimization"] = {"stage": int(made["zero_optimization"])}
    for dotted in [name for name in made if "." in str(name)]:
        key = find(dotted)  # DeepSpeed takes such a name for none of its keys; TRL writes some
        if key is not None and (key.outcome == "nothing to do" or key.path == OF_TRL):
            del made[dotted]
    for old, new in OLD_SECTIONS.items():
        above, _, name = old.rpartition(".")
        owner = made.get(above) if above else made
        if not isinstance(owner, Mapping) or name not in owner:
            continue
        renamed = dict(owner)
        value, other = renamed.pop(name), new.rpartition(".")[2]
        if other in renamed:
            problems.append(Problem(old, value, f"{new} is given too", f"remove {old}"))
        renamed.setdefault(other, value)
        made = {**made, above: renamed} if above else renamed
    return made


def _leaves(tree: Mapping[str, Any], problems: list[Problem], above: str = "") -> Iterator[tuple[str, Any]]:
    """Return the path and the value of every key that was written and is no section of the table."""
    for name, value in tree.items():
        path = f"{above}{name}"
        if path not in TABLES:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, problems, f"{path}.")
        elif value is not None and path != "zero_optimization.zenflow":
            names = [key for key in KEYS if key.startswith(f"{path}.")]
            fix = f'write {{"{names[0].removeprefix(path + ".")}": ...}}, or leave it out'
            problems.append(Problem(path, value, "must be a table of keys", fix))


def parsed(key: Key, value: Any) -> Any:
    """Return `value` converted to the key's kind. Raises ValueError if it is not of that kind."""
    if value is None and key.default is None:
        return None
    if isinstance(value, str) and value == "auto" and key.default != "auto" and key.takes != "anything":
        if key.auto:
            return key.default
        raise ValueError('"auto" is for the Trainer and Accelerate to fill in, and nobody did')
    if isinstance(key.takes, tuple):
        plain = str(value).lower() if isinstance(key.takes[0], str) else _number(value)
        if not _among(plain, key.takes):
            raise ValueError(f"must be one of {in_words(key)}")
        return plain
    if not (kind := KINDS[key.takes])[0](value):
        raise ValueError(f"must be {'an' if in_words(key)[0] in 'aeiou' else 'a'} {in_words(key)}")
    return kind[1](value)


def _number(value: Any) -> Any:
    """Return the number that a text writes, as an integer if it is whole; another value as it is."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any, least: float = float("-inf")) -> bool:
    number = _number(value)
    return isinstance(number, int | float) and not isinstance(number, bool) and number >= least


def _is_integer(value: Any, least: float = float("-inf")) -> bool:
    return _is_number(value, least) and isinstance(_number(value), int)


def _bool(value: Any) -> bool:
    return value.lower() == "true" if isinstance(value, str) else bool(value)


KINDS: dict[str, tuple[Any, Any]] = {
    "bool": (lambda v: v in (0, 1) if not isinstance(v, str) else v.lower() in ("true", "false"), _bool),
    "integer": (_is_integer, _number),
    "positive integer": (lambda v: _is_integer(v, 1), _number),
    "count": (lambda v: _is_integer(v, 0), _number),
    "number": (_is_number, _number),
    "number >= 0": (lambda v: _is_number(v, 0), _number),
    "fraction": (lambda v: _is_number(v, 0) and _number(v) <= 1, _number),
    "text": (lambda v: isinstance(v, str | os.PathLike), os.fspath),
    "list": (lambda v: isinstance(v, list | tuple), list),
    "table": (lambda v: isinstance(v, Mapping), dict),
    "anything": (lambda v: True, lambda v: v),
}
"""The kinds of values, each with a test whether a value is of it, and a function that converts the value."""


def _unknown(path: str, value: object) -> Problem:
    """Return the problem of a key that DeepSpeed has not, with the key that it is likely to stand for."""
    above, _, name = path.rpartition(".")
    if path in SECTIONS:
        fix = "it is Polyreme's own: give it to polyreme.initialize, PolyremeTrainer or Accelerate's loop"
        return Problem(path, value, "DeepSpeed 0.19.8 has no such key", fix)

    def likeness(known: str) -> float:
        there, _, its_name = known.rpartition(".")
        alike = difflib.SequenceMatcher(None, name, its_name).ratio()
        return alike + (0.1 if there == above else 0)

    nearest = RENAMED.get(path) or max([*KEYS, *NAMES, *sorted(TABLES)], key=likeness)
    return Problem(path, value, "DeepSpeed 0.19.8 has no such key", f"did you mean {nearest}?")
