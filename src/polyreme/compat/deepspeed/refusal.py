"""Errors of the DeepSpeed door: what DeepSpeed has and this door does not do, and arguments that cannot be.

Invariant: each is a PolyremeError and also the built-in type that DeepSpeed raises in its place, so that a
script that catches one of them works as before."""

from __future__ import annotations

from typing import Any

from polyreme.errors import CheckpointError, PolyremeError


class UnsupportedError(PolyremeError, NotImplementedError):
    """A part of DeepSpeed that this door does not have."""


class ArgumentError(PolyremeError, ValueError):
    """An argument whose value cannot be."""


class CallError(PolyremeError, RuntimeError):
    """A call that has no answer, for its time or its arguments."""


class OrderError(PolyremeError, AssertionError):
    """A call before the one that it needs."""


class TagError(CheckpointError, AssertionError):
    """Ranks that save one checkpoint under different tags."""


class GatherError(PolyremeError, RuntimeError):
    """A change of gathered parameters that would be lost."""


def refused(name: str, reason: str, fix: str) -> UnsupportedError:
    """The error for `name`, to be raised: which, why, and what to do instead."""
    return UnsupportedError(f"{name} is not available: {reason}\n    fix: {fix}")


def absent(name: str, reason: str, fix: str) -> Any:
    """A class in place of the class or function `name`, which can be imported and asked for: to make one, or
    to call it, raises `refused(name, reason, fix)`."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise refused(name, reason, fix)

    short = name.rpartition(".")[2]
    return type(short, (), {"__init__": refuse, "__doc__": f"Raises UnsupportedError: {reason}."})
