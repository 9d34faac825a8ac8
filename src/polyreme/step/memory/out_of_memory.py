"""Memory that ran out in a call of an engine, as one message: who asked for how much, what the rank has, and
what takes less.

Invariant: nothing is done before it happens. No communication: the other ranks end as after any error."""

from __future__ import annotations

import errno
import functools
import re
from collections.abc import Callable, Iterator, Mapping
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
Advise = Callable[[Any, Any, int, Any], str]
"""Says what would fit, for a resolved config, a mesh, the bytes that this rank has, and the batch of the call
(None where it has none)."""
P = ParamSpec("P")
T = TypeVar("T")
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""Texts of shortage errors that have no class of their own."""
PHASES = {
    "differentiate": "the backward",
    "differentiate_inputs": "the backward",
    "rest": "the backward",
    "reduce": "the reduction of gradients",
    "update_or_skip": "the update",
}
"""Functions of `step.step`, by what they do in a step."""


def explains_out_of_memory(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of an engine raise OutOfMemoryError where memory runs out in it."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, PolyremeError) or not _is_shortage(error):
                raise
            engine: Any = args[0]
            batch = args[1] if method.__name__ == "train_step" and len(args) > 1 else None
            raised = OutOfMemoryError(_message(engine, method.__name__, error, batch))
            for note in getattr(error, "__notes__", ()):
                raised.add_note(note)
            raise raised from error

    return run


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(word in str(error) for word in WORDS)


def _message(engine: Any, call: str, error: BaseException, batch: Any) -> str:
    said = (str(error).splitlines() or [""])[0]
    asked = re.search(r"tried to allocate ([\d.]+) ?(\w+)", said, re.IGNORECASE)
    size = f": {_size(asked[1], asked[2])} were asked for" if asked else ""
    where = CALLS.get(call, f"engine.{call}()")
    lines = [f"out of memory in {' of '.join([*_place(engine, error), where])}{size}"]
    has: dict[str, int] = {}
    with suppress(Exception):  # the engine may not be complete yet
        has = {name: size for name, size in engine.memory().items() if size}
    if has:
        lines.append(f"this rank has {listed(has)}")
    if planned := engine.config.plan.memory:
        lines.append(f"the plan has {listed(planned)} at the peak of a step")
    less = takes_less(engine.config, engine.mesh.world_size, engine.mesh.device.type == "cpu")
    more = "nothing in its config takes less: give it more ranks with zero.stage = 3, or a smaller model"
    lines.append(f"what takes less: {'; '.join(less)}" if less else more)
    if engine.advise is not None:
        lines.append(engine.advise(engine.config, engine.mesh, sum(has.values()), batch))
    if said:
        lines.append(f"{type(error).__name__}: {shortened(str, said)}")
    return "\n  ".join(lines)


def listed(memory: Mapping[str, int]) -> str:
    """Return bytes by category as text."""
    return ", ".join(f"{name} {_size(str(size), 'bytes')}" for name, size in memory.items())


def _size(number: str, unit: str) -> str:
    if unit != "bytes":
        return f"{number} {unit}"
    return re.sub(r"(?<=\d)(?=[A-Z])", " ", ByteSize(int(number)).human_readable())


def _place(engine: Any, error: BaseException) -> Iterator[str]:
    """Return what ran, innermost first: the forward of a module, then the forward, backward or update of the
    step."""
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
