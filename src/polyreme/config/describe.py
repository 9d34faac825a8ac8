"""Describes the values of a key, in words and in TOML."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from polyreme.config.duration import Duration

BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""
HUGE = 2**31 - 1
"""Limits from here on only refuse mistakes, and are not described."""


def default(field: FieldInfo) -> Any:
    """Return the default value of a key."""
    return field.get_default(call_default_factory=True)


def example(field: FieldInfo) -> Any:
    """Return an example of a key's value: the field's own where it has one, else its default."""
    return field.examples[0] if field.examples else default(field)


def expects(field: FieldInfo) -> str:
    """Describe the values that a key takes, in words: 'an integer of at least 1 or "auto"'."""
    return _type_description(field.annotation, field.metadata)


def _type_description(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        flat = [m for item in inner for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _type_description(annotation, flat)
    limits = [
        f"{text} {limit if isinstance(limit, int) else f'{limit:g}'}"
        for kind, attribute, text in (
            (annotated_types.Ge, "ge", "of at least"), (annotated_types.Gt, "gt", "above"),
            (annotated_types.Le, "le", "of at most"), (annotated_types.Lt, "lt", "below"),
        )
        for m in metadata if isinstance(m, kind) and (limit := getattr(m, attribute)) < HUGE
    ]  # fmt: skip
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_description(arg) for arg in args)
    if origin is Literal:
        return " or ".join(toml(value) for value in args)
    if origin is tuple:
        return (
            "a list of names" if str in args else f"a list of {len(args)}, each {_type_description(args[0])}"
        )
    if origin is dict and args[1] is not Any:
        names = f" of {_type_description(args[0])}" if get_origin(args[0]) is Literal else ""
        return f"a table{names}, each {_type_description(args[1])}"
    if origin is list:
        return f"a list, each {_type_description(args[0])}"
    simple = {
        int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: '"none"',
        Duration: '"100 steps", "5000 samples" or "1e6 tokens"', ByteSize: 'bytes (1048576 or "1 MiB")',
    }  # fmt: skip
    return " ".join([simple.get(annotation, "a table"), " and ".join(limits)]).strip()


def toml(value: object) -> str:
    """Return `value` as TOML writes it."""
    if value is None:
        return '"none"'
    if isinstance(value, ByteSize):
        return toml(value.human_readable(separator=" ").replace(".0 ", " "))
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{k if BARE.fullmatch(str(k)) else toml(str(k))} = {toml(v)}" for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=not str(value).isprintable())
