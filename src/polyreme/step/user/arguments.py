"""Arguments that calls of this kind take in other libraries, and not here.

Invariant: a call that Python would refuse is refused, also as a TypeError, with the way to write it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from polyreme.errors import BatchError, PolyremeError

P = ParamSpec("P")
T = TypeVar("T")
OPTIONS = {
    **dict.fromkeys(("criterion", "loss", "loss_function", "compute_loss"), "loss_fn"),
    **dict.fromkeys(("scheduler", "lr_schedule"), "lr_scheduler"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("cfg", "conf", "configuration", "config_path"), "config"),
}
"""Other libraries' names for arguments of `initialize`."""


class ArgumentsError(BatchError, TypeError):
    """A call with arguments that the method does not take."""


class OptionError(PolyremeError, TypeError):
    """An argument that the function has by another name."""


def one_batch(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method of an engine whose first argument is the whole batch."""
    signature = inspect.signature(method)
    names = ["(x, y)", *list(signature.parameters)[2:]]

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsError(
                f"{error}: a batch is one argument, such as engine.{method.__name__}({', '.join(names)}), or "
                "a mapping of the model's arguments in place of the tuple"
            ) from None
        return method(*args, **kwargs)

    return run


def named_as_ours(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose arguments others may call as in OPTIONS."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if (ours := OPTIONS.get(name)) is not None:
                raise OptionError(
                    f"{function.__name__}({name}=...): there is no such argument: write {ours}=..."
                )
        return function(*args, **kwargs)

    return run
