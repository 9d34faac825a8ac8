"""Reads Hjson, the JSON for people in which DeepSpeed's configs may be written: names and texts without
quotation marks, line ends in place of commas, comments, texts over several lines, no outermost braces."""

from __future__ import annotations

import json
import re
from typing import Any

from polyreme.config.loading import distinct

SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
NAME = re.compile(r"[^\s{}\[\],:\"']+")
QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'")
LITERAL = re.compile(
    r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)[ \t]*(?=$|[,\]}#]|//|/\*)", re.MULTILINE
)
"""A number or a word of JSON with nothing else before the value's end; other unquoted values are texts that
end with their line."""
ESCAPE = re.compile(r"\\(.)|\"")


def loads(text: str) -> Any:
    """The value that `text` writes. Raises ValueError, with the line, where it is none, or where a name comes
    twice in a table."""
    reader = _Reader(text)
    value = reader.value() if reader.next() in ("{", "[") else reader.members("")
    if reader.next():
        raise reader.wrong("something comes after the end")
    return value


class _Reader:
    """A place in a text, which goes forward over what is read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def wrong(self, reason: str) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, self.at) + 1}: {reason}")

    def next(self) -> str:
        """What comes next but space and comments; "" at the end."""
        found = SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """The text of `pattern`, if it is next."""
        if (found := pattern.match(self.text, self.at)) is None:
            return None
        self.at = found.end()
        return found[found.lastindex or 0]

    def value(self) -> Any:
        first = self.next()
        if first in ("{", "["):
            self.at += 1
            return self.members("}") if first == "{" else self.items()
        if self.text.startswith("'''", self.at):
            return self.lines()
        if first in ("'", '"'):
            return self.quoted()
        if (literal := self.take(LITERAL)) is not None:
            return json.loads(literal)
        if first in ("", ",", "}", "]", ":"):
            raise self.wrong(f"a value is missing before {first!r}")
        end = self.text.find("\n", self.at)
        start, self.at = self.at, len(self.text) if end < 0 else end
        return self.text[start : self.at].strip()

    def members(self, end: str) -> dict[str, Any]:
        """Names and values up to `end`."""
        found = []
        while self.next() != end:
            name = self.quoted() if self.next() in ("'", '"') else self.take(NAME)
            if name is None:
                raise self.wrong(
                    f"a name is missing before {self.next()!r}" if self.next() else "no } ends it"
                )
            if self.next() != ":":
                raise self.wrong(f"no colon follows {name!r}")
            self.at += 1
            found.append((name, self.value()))
            self.comma()
        self.at += len(end)
        return distinct(found)

    def items(self) -> list[Any]:
        found = []
        while self.next() != "]":
            found.append(self.value())
            self.comma()
        self.at += 1
        return found

    def comma(self) -> None:
        self.at += self.next() == ","

    def quoted(self) -> str:
        if (found := self.take(QUOTED)) is None:
            raise self.wrong("a text has no second quotation mark")
        if found[0] == "'":
            inner = ESCAPE.sub(lambda each: "'" if each[1] == "'" else '\\"' if each[0] == '"' else each[0],
                               found[1:-1])  # fmt: skip
            found = f'"{inner}"'
        return json.loads(found)

    def lines(self) -> str:
        """A text between three marks, without what its lines are indented by at the first mark."""
        indent = self.at - (self.text.rfind("\n", 0, self.at) + 1)
        end = self.text.find("'''", self.at + 3)
        if end < 0:
            raise self.wrong("a text has no second '''")
        first, *rest = self.text[self.at + 3 : end].split("\n")
        self.at = end + 3
        lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in rest]
        if lines and not lines[-1].strip():
            del lines[-1]
        return "\n".join([first, *lines] if first.strip() else lines)
