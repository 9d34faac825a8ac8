"""Memory that ran out in a call of an engine, as one message: who asked for how much, what the rank has, and
what takes less.

Invariant: nothing is done before it happens. No communication: the other ranks end as after any error."""

from __future__ import annotations

import errno
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from pydantic import ByteSize
from torch import nn

from polyreme.config.advice import takes_less
from polyreme.errors import OutOfMemoryError, PolyremeError, shortened
from polyreme.step import step

CALLS = {"__init__": "initialize()", "__call__": "engine(...)"}
P = ParamSpec("P")
T = TypeVar("T")
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""What an error says that is of no class of its own."""
PHASES = {
    "differentiate": "the backward",
    "differentiate_inputs": "the backward",
    "rest": "the backward",
    "reduce": "the reduction of gradients",
    "update": "the update",
}
"""Functions of `step.step`, and what they do."""


def tells_of_memory(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method of an engine raise OutOfMemoryError where memory runs out in it."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, PolyremeError) or not _is_shortage(error):
                raise
            told = OutOfMemoryError(_message(args[0], method.__name__, error))
            for note in getattr(error, "__notes__", ()):
                told.add_note(note)
            raise told from error

    return run


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(word in str(error) for word in WORDS)


def _message(engine: Any, call: str, error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0]
    asked = re.search(r"tried to allocate ([\d.]+) ?(\w+)", said, re.IGNORECASE)
    size = f": {_size(asked[1], asked[2])} were asked for" if asked else ""
    where = CALLS.get(call, f"engine.{call}()")
    lines = [f"out of memory in {' of '.join([*_place(engine, error), where])}{size}"]
    has: dict[str, int] = {}
    with suppress(Exception):  # an engine that is not made yet
        has = {name: size for name, size in engine.memory().items() if size}
    if has:
        told = ", ".join(f"{name} {_size(str(size), 'bytes')}" for name, size in has.items())
        lines.append(f"this rank has {told}")
    less = takes_less(engine.config, engine.mesh.world_size, engine.mesh.device.type == "cpu")
    more = "nothing in its config takes less: give it more ranks with zero.stage = 3, or a smaller model"
    lines.append(f"what takes less: {'; '.join(less)}" if less else more)
    if said:
        lines.append(f"{type(error).__name__}: {shortened(str, said)}")
    return "\n  ".join(lines)


def _size(number: str, unit: str) -> str:
    if unit != "bytes":
        return f"{number} {unit}"
    return re.sub(r"(?<=\d)(?=[A-Z])", " ", ByteSize(int(number)).human_readable())


def _place(engine: Any, error: BaseException) -> Iterator[str]:
    """What ran, the innermost first: of the module whose forward it was, and of the step."""
    modules: dict[int, str] = {}
    with suppress(AttributeError):
        modules = {id(module): name for name, module in engine.module.named_modules()}
    module, phase = None, None
    for frame in _frames(error):
        here = frame.f_locals.get("self")
        if isinstance(here, nn.Module) and id(here) in modules:
            module = f"the forward of {modules[id(here)] or 'the model'} ({type(here).__name__})"
        if frame.f_code.co_filename == step.__file__:
            phase = PHASES.get(frame.f_code.co_name, phase)
    yield from filter(None, (module, phase))


def _frames(error: BaseException) -> Iterator[FrameType]:
    frames = error.__traceback__
    while frames is not None:
        yield frames.tb_frame
        frames = frames.tb_next
