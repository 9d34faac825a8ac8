"""Read Hjson, a form of JSON in which DeepSpeed's configs may be written. It has names and texts without
quotation marks, line ends in place of commas, comments, texts over several lines, and needs no outermost
braces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from polyreme.config.loading import distinct

SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
NAME = re.compile(r"[^\s{}\[\],:\"']+")
QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'")
LITERAL = re.compile(
    r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)[ \t]*(?=$|[,\]}#]|//|/\*)", re.MULTILINE
)
"""The pattern of an unquoted value that is a number or a word of JSON. Any other unquoted value is a text up
to the end of its line."""
LINE = re.compile(r"[^\n]+")
LINES = re.compile(r"'''(.*?)'''", re.DOTALL)
ESCAPE = re.compile(r"\\(.)|\"")


def loads(text: str) -> Any:
    """Return the value of `text`. Raises ValueError, which names the line, if it is no Hjson, or a name comes
    twice in one table."""
    reader = _Reader(text)
    value = reader.value() if reader.next() in ("{", "[") else distinct(reader.until("", reader.member))
    if reader.next():
        raise reader.wrong("something comes after the end")
    return value


class _Reader:
    """A place in a text, which moves forward as the text is read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def wrong(self, reason: str) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, self.at) + 1}: {reason}")

    def next(self) -> str:
        """Return the next character that is neither space nor in a comment; "" at the end."""
        self.take(SPACE)
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str], otherwise: str = "") -> str | None:
        """Read the text that matches `pattern` here, and return it. Raises ValueError, with the reason
        `otherwise`, if none does."""
        if (found := pattern.match(self.text, self.at)) is None:
            if otherwise:
                raise self.wrong(otherwise)
            return None
        self.at = found.end()
        return found[found.lastindex or 0]

    def until(self, end: str, read: Callable[[], Any]) -> list[Any]:
        """Call `read` again and again up to `end`, and return what it read. There may be commas between."""
        found = []
        while self.next() != end:
            found.append(read())
            self.at += self.next() == ","
        self.at += len(end)
        return found

    def value(self) -> Any:
        first = self.next()
        if first in ("{", "["):
            self.at += 1
            return distinct(self.until("}", self.member)) if first == "{" else self.until("]", self.value)
        if self.text.startswith("'''", self.at):
            return self.lines()
        if first in ("'", '"'):
            return self.quoted()
        if (literal := self.take(LITERAL)) is not None:
            return json.loads(literal)
        if first in ("", ",", "}", "]", ":"):
            raise self.wrong(f"a value is missing before {first!r}")
        return str(self.take(LINE)).strip()

    def member(self) -> tuple[str, Any]:
        """Read a name and its value, and return both."""
        first = self.next()
        missing = f"a name is missing before {first!r}" if first else "no } ends it"
        name = self.quoted() if first in ("'", '"') else self.take(NAME, missing)
        if self.next() != ":":
            raise self.wrong(f"no colon follows {name!r}")
        self.at += 1
        return str(name), self.value()

    def quoted(self) -> str:
        found = str(self.take(QUOTED, "a text has no second quotation mark"))
        if found[0] == "'":
            same = {"\\'": "'", '"': '\\"'}
            found = f'"{ESCAPE.sub(lambda each: same.get(each[0], each[0]), found[1:-1])}"'
        return str(json.loads(found))

    def lines(self) -> str:
        """Read a text between triple quotation marks, and return it without the indentation of the first
        mark."""
        indent = self.at - (self.text.rfind("\n", 0, self.at) + 1)
        first, *rest = str(self.take(LINES, "a text has no second '''")).split("\n")
        lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in rest]
        if lines and not lines[-1].strip():
            del lines[-1]
        return "\n".join([first, *lines] if first.strip() else lines)
