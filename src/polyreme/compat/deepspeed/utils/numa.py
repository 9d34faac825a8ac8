"""Lists of CPU cores, in the form that DeepSpeed's launcher takes."""

from __future__ import annotations

import re
from itertools import pairwise

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.errors import LaunchError

__getattr__ = lazily(__name__)


class CoresError(LaunchError, ValueError):
    """The error of a list of cores that is written in another form."""

    exit_status = 2


def parse_range_list(range_str: str) -> list[int]:
    """Return the cores of a list such as `3,5-7,9`. Raises CoresError unless it is of numbers and ranges that
    go up."""
    words = [re.fullmatch(r"(\d+)(?:-(\d+))?", word) for word in range_str.split(",")]
    cores = [n for word in words if word for n in range(int(word[1]), int(word[2] or word[1]) + 1)]
    upwards = all(before < after for before, after in pairwise(cores))
    if not upwards or not all(word and int(word[1]) <= int(word[2] or word[1]) for word in words):
        raise CoresError(f"the cores {range_str!r}: write each once, from the lowest up, such as 3,5-7,9")
    return cores
