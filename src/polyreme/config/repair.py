"""Guesses the value that was meant by one that a key does not take.

Invariant: a proposal is a value that the key takes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from polyreme.config.describe import example
from polyreme.config.duration import Duration
from polyreme.config.schema import SECTIONS, Keys

LONGEST = 64
"""Most characters of a name or value that is compared with others, as the time grows with their square."""
NUMBER = re.compile(r"[+-]?\d[\d_,' ]*(?:\.\d*)?(?:[eE][+-]?\d+)?|[+-]?\.\d+(?:[eE][+-]?\d+)?")
THOUSANDS = re.compile(r"(?<=\d)[,_' ](?=\d{3}(?!\d))")
WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
FORMATS = {
    **dict.fromkeys(("float64", "double", "f64"), "fp64"),
    **dict.fromkeys(("float32", "float", "single", "f32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("int8", "uint8"), "8bit"),
    "bf16-mixed": "autocast-bf16",
    "16-mixed": "autocast-fp16",
}
"""Number formats by torch's names, and Lightning's."""
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
SIZES = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
LENGTHS = ("steps", "samples", "tokens")


def meant(key: str, field: FieldInfo, value: object) -> object:
    """Return the most likely value that `key` takes for `value`, or else an example of its values."""
    return next((each for each in _candidates(field, value) if is_taken(key, each)), example(field))


def is_taken(key: str, value: object) -> bool:
    """Whether `key` may have this value."""
    section, _, name = key.rpartition(".")
    try:
        (SECTIONS[section] if section else Keys).model_validate({name: value})
    except (ValidationError, OverflowError):
        return False
    return True


def nearest(word: str, choices: list[str]) -> list[str]:
    """Return the one or two of `choices` that are most like a word; none if none is like it."""
    lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), lower, n=2) if len(word) <= LONGEST else []
    return [lower[each] for each in found]


def _candidates(field: FieldInfo, value: object) -> Iterator[Any]:
    kinds = list(_kinds(field.annotation))
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
        yield value
    if type(value).__name__ == "dtype":  # torch's: such as torch.float64
        value = str(value)
    if isinstance(value, str) and len(value) <= LONGEST:
        word = value.strip().strip("'\"").strip()
        yield from (FORMATS[each] for each in (word.lower().removeprefix("torch."),) if each in FORMATS)
        yield from nearest(word, [each for each in kinds if isinstance(each, str)])
        yield from (WORDS[each] for each in (word.lower(),) if each in WORDS and bool in kinds)
        yield from _quantities(word, kinds)
        if str in kinds:
            yield word
    elif isinstance(value, int | float) and bool in kinds and value in (0, 1):
        yield bool(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _numbers(value, field)
        if str in kinds:
            yield str(value)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that a key takes, and the words and numbers that it takes literally."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (list, tuple, dict):
        return
    elif get_args(annotation):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation


def _quantities(word: str, kinds: list[Any]) -> Iterator[Any]:
    """Yield the values that a text with a number in it can mean."""
    found = NUMBER.search(word)
    if found is None:
        return
    digits = THOUSANDS.sub("", found[0]).replace("_", "").strip(" ,'").replace(",", ".")
    try:
        number = float(digits)
    except ValueError:
        return
    rest = word[found.end() :].strip()
    if Duration in kinds:
        unit = nearest(rest, [*LENGTHS]) if rest else ["steps"]
        yield from (f"{digits} {each}" for each in unit)
        return  # hours or epochs cannot be converted to steps
    if rest.startswith("%"):
        yield number / 100
    if ByteSize in kinds:
        yield from (f"{digits} {each}" for each in nearest(rest, [*SIZES]))
    scaled = number * UNITS.get(rest[:1].lower(), 1) if len(rest) == 1 else number
    yield from _numbers(scaled, None)


def _numbers(number: float, field: FieldInfo | None) -> Iterator[Any]:
    """Yield a number as int or float, as a percentage, and the limits of the key."""
    if abs(number) < 1e18:  # false for infinity and NaN
        yield from (int(number), number) if number == int(number) else (number, round(number))
    if 2 <= number <= 100:
        yield number / 100  # percent
    if field is not None:
        yield from _limits(field.annotation, field.metadata)


def _limits(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    """Yield the least and the largest number that a key takes, where it has limits."""
    for each in metadata:
        yield from (getattr(each, name) for name in ("ge", "le") if getattr(each, name, None) is not None)
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _limits(
            inner, [m for it in more for m in (it.metadata if isinstance(it, FieldInfo) else [it])]
        )
    else:
        for each in get_args(annotation):
            if get_origin(each) is Annotated:
                yield from _limits(each, [])
