"""Errors of the DeepSpeed door: what DeepSpeed has and this door does not do, and arguments that cannot be.

Invariant: each is a PolyremeError and also the built-in type that DeepSpeed raises in its place, so that a
script that catches one of them works as before."""

from __future__ import annotations

from polyreme.errors import PolyremeError


class UnsupportedError(PolyremeError, NotImplementedError):
    """A part of DeepSpeed that this door does not have."""


class ArgumentError(PolyremeError, ValueError):
    """An argument whose value cannot be."""


class OrderError(PolyremeError, AssertionError):
    """A call before the one that it needs."""


def refused(name: str, reason: str, fix: str) -> UnsupportedError:
    """The error for `name`, to be raised: which, why, and what to do instead."""
    return UnsupportedError(f"{name} is not available: {reason}\n    fix: {fix}")
