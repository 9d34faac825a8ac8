"""DeepSpeed's logger, and messages that only some ranks write."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polyreme.compat.deepspeed.refusal import ArgumentError

log_levels = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")
}


class StdoutHandler(logging.StreamHandler):
    """Writes to what is standard output at the time, also where that is captured or redirected."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


class LoggerFactory:
    """Makes loggers that write lines to standard output, whatever the root logger does."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """The logger of this name, which writes what is at least of this level. Raises ArgumentError without
        a name."""
        if name is None:
            raise ArgumentError("name for logger cannot be None: give it one")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        handler = StdoutHandler()
        handler.setLevel(level)
        handler.setFormatter(
            logging.Formatter(
                "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
            )
        )
        made.addHandler(handler)
        return made


logger: Any = LoggerFactory.create_logger("DeepSpeed")


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Warn, but not twice of the same."""
    logger.warning(*args, **kwargs)


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of `args` by name."""
    logger.info(f"{name}:")
    for key, value in sorted(vars(args).items()):
        logger.info(f"  {key} {'.' * (29 - len(key))} {value}")


def _speaks(ranks: Sequence[int] | None) -> tuple[bool, int]:
    """Whether this rank is one of `ranks` ([-1]: all), and which it is; a process without a group always
    is."""
    if not dist.is_initialized():
        return True, -1
    rank = dist.get_rank()
    return bool(ranks) and (ranks is not None and (ranks[0] == -1 or rank in ranks)), rank


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """`message` with the rank before it; None on a rank that is not of `ranks`."""
    speaks, rank = _speaks(ranks)
    return f"[Rank {rank}] {message}" if speaks else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks ([-1]: on all; none without any)."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, whatever the log level."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks, but not twice of the same."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


logger.warning_once, logger.log_dist_once = warning_once, log_dist_once


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: Any = None) -> None:
    """Write `message` and the rank to the file `path`, on these ranks."""
    speaks, rank = _speaks(ranks)
    if speaks:
        message["rank"] = rank
        with Path(path).open("w") as file:
            json.dump(message, file)
            file.flush()
            os.fsync(file.fileno())


def get_log_level_from_string(log_level_str: str) -> int:
    """The level of this name. Raises ArgumentError for one that is none."""
    if (name := log_level_str.lower()) not in log_levels:
        raise ArgumentError(
            f"{name} is not one of the valid logging levels: take one of {', '.join(log_levels)}"
        )
    return log_levels[name]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (by default DeepSpeed's) and of its handlers."""
    level, changed = get_log_level_from_string(log_level_str), custom_logger or logger
    for each in (changed, *changed.handlers):
        each.setLevel(level)


def get_current_level() -> int:
    """The level of DeepSpeed's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most this one. Raises ArgumentError for what is no level."""
    if not isinstance(max_log_level_str, str):
        raise ArgumentError(f"{max_log_level_str} is not a string: give a level by its name")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
