"""DeepSpeed's logger, and functions that write a message on some ranks only."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import ArgumentError

log_levels = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")
}


class StdoutHandler(logging.StreamHandler):
    """A handler that writes to `sys.stdout` as it is at the time, also if a test or a script has replaced
    it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


class LoggerFactory:
    """A maker of loggers that write to standard output, whatever the root logger does."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger of this name, which writes what is at least of this level. Raises ArgumentError
        without a name."""
        if name is None:
            raise ArgumentError("create_logger without a name, by which loggers are found: give one")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        handler = StdoutHandler()
        handler.setLevel(level)
        place = "[%(filename)s:%(lineno)d:%(funcName)s]"
        handler.setFormatter(logging.Formatter(f"[%(asctime)s] [%(levelname)s] {place} %(message)s"))
        made.addHandler(handler)
        return made


logger: Any = LoggerFactory.create_logger("DeepSpeed")


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Log a warning, unless the same one was logged before."""
    logger.warning(*args, **kwargs)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return `message` with the rank before it; None on a rank that is not of `ranks` ([-1]: all). A process
    without a group always speaks."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    return f"[Rank {rank}] {message}" if rank < 0 or (ranks and {rank, -1} & set(ranks)) else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks ([-1]: on all of them; None or []: on none)."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks, whatever the log level."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, unless the same one was logged before."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


logger.warning_once, logger.log_dist_once = warning_once, log_dist_once


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the level of this name. Raises ArgumentError for one that is none."""
    if (name := log_level_str.lower()) not in log_levels:
        raise ArgumentError(
            f"{log_level_str!r} names no level of logging: take one of {', '.join(log_levels)}"
        )
    return log_levels[name]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (by default DeepSpeed's) and of its handlers."""
    level, changed = get_log_level_from_string(log_level_str), custom_logger or logger
    for each in (changed, *changed.handlers):
        each.setLevel(level)


__getattr__ = lazily(__name__)
