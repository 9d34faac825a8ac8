"""The errors of the package: for parts of DeepSpeed that it does not have, and for calls and arguments that
it cannot take.

Invariant: each is a PolyremeError, and also the built-in type that DeepSpeed raises in its place, so that
scripts that catch that type work unchanged."""

from __future__ import annotations

from typing import Any, NoReturn

from polyreme.errors import CheckpointError, PolyremeError


class UnsupportedError(PolyremeError, NotImplementedError):
    """The error of a part of DeepSpeed that Polyreme does not have."""


class ArgumentError(PolyremeError, ValueError):
    """The error of an argument that has a wrong value."""


class CallError(PolyremeError, RuntimeError):
    """The error of a call that cannot be answered with these arguments, or at this time."""


class OrderError(PolyremeError, AssertionError):
    """The error of a call that comes before another one that it needs, or where it must not come."""


class TagError(CheckpointError, AssertionError):
    """The error of ranks that save one checkpoint under different tags."""


class GatherError(PolyremeError, RuntimeError):
    """The error of a change of gathered parameters that would be lost."""


def refused(name: str, reason: str, fix: str) -> UnsupportedError:
    """Return the error that says that `name` is missing, why, and what to do instead."""
    return UnsupportedError(f"{name} is not available: {reason}\n    fix: {fix}")


class _Absent(type):
    """The metaclass of stand-ins for missing classes and functions. A stand-in has every attribute that it is
    asked for, each of which is another one; calling it raises UnsupportedError."""

    _refused: tuple[str, str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(*cls._refused)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        where, reason, fix = cls._refused
        return absent(f"{where}.{name}", reason, fix)


def absent(name: str, reason: str, fix: str) -> Any:
    """Return a stand-in for the class or function `name`, which can be imported and derived from. Calling it,
    or an attribute of it, raises `refused(name, reason, fix)`."""
    about = {"__doc__": f"Raises UnsupportedError: {reason}.", "_refused": (name, reason, fix)}
    return _Absent(name.rpartition(".")[2], (), about)
