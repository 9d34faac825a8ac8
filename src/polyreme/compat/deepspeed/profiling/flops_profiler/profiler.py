"""Floating-point operations, parameters and seconds of each module's forward.

Invariant: what is counted `counting` says; the numbers of a module include those of the modules in it, and a
module that is called twice counts twice. The model is as before once `end_profile` was called."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.profiling.flops_profiler.counting import RECURRENT, Count, Counter, recurrent
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

DEFAULT_PRECISION = 2
_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """A number in thousands (K), millions (M), ..., or in the given ones of these."""
    if units is None:
        fitting = (unit for unit, size in _MAGNITUDES.items() if num >= size)
        units = "" if num == 0 else next(fitting, "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Multiply-accumulate operations in words."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Operations per second in words."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Bytes in words, in powers of 1000."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Parameters in words, with B for a billion."""
    of_numbers = units.replace("B", "G") if units else units
    return number_to_string(params_num, of_numbers, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Seconds in words."""
    return f"{number_to_string(duration, units, precision)}s"


@dataclass
class _Profile:
    """What one module did since the profile began, and where its calls began that run now."""

    count: Count = field(default_factory=Count)
    seconds: float = 0.0
    calls: list[tuple[Count, float]] = field(default_factory=list)


class FlopsProfiler:
    """Profiles the forwards of `model` between `start_profile` and `stop_profile`; what it found can be asked
    until `end_profile`. `ds_engine` adds its times and sizes to what is printed."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.flops = self.macs = self.params = 0
        self._found: dict[nn.Module, _Profile] = {}
        self._running = contextlib.ExitStack()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin. Modules of the classes in `ignore_list` have no numbers of their own."""
        self.stop_profile()
        self.reset_profile()
        counter = Counter()
        self._running.enter_context(counter.counting())
        for module in self.model.modules():
            if type(module) not in (ignore_list or ()):
                self._watch(module, counter)
        self.started = True

    def _watch(self, module: nn.Module, counter: Counter) -> None:
        profile = self._found[module]

        def begin(module: nn.Module, inputs: Any) -> None:
            get_accelerator().synchronize()
            profile.calls.append((counter.count, time.perf_counter()))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            get_accelerator().synchronize()
            before, began = profile.calls.pop()
            if isinstance(module, RECURRENT):
                counter.count = before.plus(recurrent(module, inputs[0]))
            profile.count = profile.count.plus(counter.count).plus(before, -1)
            profile.seconds += time.perf_counter() - began

        self._running.callback(module.register_forward_pre_hook(begin).remove)
        self._running.callback(module.register_forward_hook(end).remove)

    def stop_profile(self) -> None:
        """Count no longer, and keep what was found."""
        self._running.close()

    def reset_profile(self) -> None:
        """Begin from zero."""
        self._found = {module: _Profile() for module in self.model.modules()}

    def end_profile(self) -> None:
        """Stop, and forget what was found."""
        self.stop_profile()
        self._found, self.started = {}, False

    def _of(self, module: nn.Module) -> _Profile:
        if module not in self._found:
            raise OrderError("there is no profile: call start_profile, then the model, before end_profile")
        return self._found[module]

    def _seconds(self, module: nn.Module) -> float:
        """A module's, or those of the modules in one that is never called itself, such as a ModuleList."""
        return self._of(module).seconds or sum(map(self._seconds, module.children()))

    def _count(self, module: nn.Module) -> Count:
        count = self._of(module).count
        return count if count.flops else reduce(Count.plus, map(self._count, module.children()), Count())

    def _macs(self, module: nn.Module) -> int:
        return self._count(module).macs

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the forwards."""
        flops = self._count(self.model).flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulate operations of the forwards."""
        macs = self._macs(self.model)
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forwards."""
        seconds = self._seconds(self.model)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the model's parameters, whole also where ZeRO 3 has released them."""
        params = _params(self.model)
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the summary, the modules that take most at each depth, and with `detailed` each module; to
        standard output, or to a file."""
        if not self.started:
            return
        self.flops, self.macs = self.get_total_flops(), self.get_total_macs()
        self.params = self.get_total_params()
        with _printing_to(output_file):
            print("\n-------------------------- DeepSpeed Flops Profiler --------------------------")
            print(f"Profile Summary at step {profile_step}:")
            for name, value in self._summary():
                print(f"{name + ': ':<70}  {value}")
            print("\n----------------------- Aggregated Profile per GPU -----------------------")
            self.print_model_aggregated_profile(module_depth, top_modules)
            if detailed:
                print("\n------------------------ Detailed Profile per GPU ------------------------")
                print("params, share of params, MACs, share of MACs, fwd latency, share of it, fwd FLOPS\n")
                print("\n".join(self._tree(self.model, "", 0)))

    def _summary(self) -> Iterator[tuple[str, Any]]:
        engine, seconds = self.ds_engine, self.get_total_duration()
        timed = engine is not None and engine.wall_clock_breakdown()
        if engine is not None:
            yield "world size", engine.world_size
            yield "data parallel size", engine.dp_world_size or engine.seq_dp_world_size
            yield "model parallel size", engine.mp_world_size
            yield "batch size per GPU", engine.train_micro_batch_size_per_gpu()
        if timed:
            seconds = engine.timers("fwd").elapsed(False) / 1000
        yield "params per GPU", params_to_string(self.params)
        yield "fwd MACs per GPU", macs_to_string(self.macs)
        yield "fwd flops per GPU", number_to_string(self.flops)
        yield "fwd latency", duration_to_string(seconds)
        yield "fwd FLOPS per GPU", flops_to_string(_per(self.flops, seconds))
        if timed:
            backward, step = (engine.timers(name).elapsed(False) / 1000 for name in ("bwd", "step"))
            factor, whole = 2 + self.recompute_fwd_factor, seconds + backward + step
            samples = engine.train_micro_batch_size_per_gpu() * engine.world_size
            yield "bwd latency", duration_to_string(backward)
            yield "bwd FLOPS per GPU", flops_to_string(_per(factor * self.flops, backward))
            yield "step latency", duration_to_string(step)
            yield "iter latency", duration_to_string(whole)
            yield "FLOPS per GPU", flops_to_string(_per((factor + 1) * self.flops, whole))
            yield "samples/second", round(_per(samples, whole), DEFAULT_PRECISION)

    def _tree(self, module: nn.Module, name: str, depth: int) -> Iterator[str]:
        """A line for the module and each below it."""
        params, macs, seconds = _params(module), self._macs(module), self._seconds(module)
        shares = ", ".join(
            f"{text} = {100 * _per(part, whole):.2f}% {of}"
            for text, part, whole, of in (
                (params_to_string(params), params, self.params, "Params"),
                (macs_to_string(macs), macs, self.macs, "MACs"),
                (duration_to_string(seconds), seconds, self.get_total_duration(), "latency"),
            )
        )
        speed = flops_to_string(_per(self._count(module).flops, seconds))
        own = f", {module.extra_repr()}" if module.extra_repr() else ""
        label = f"({name}): " if name else ""
        yield f"{'  ' * depth}{label}{type(module).__name__}({shares}, {speed}{own})"
        for child_name, child in module.named_children():
            yield from self._tree(child, child_name, depth + 1)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print which classes of modules take most at each depth, or (-1: at all) down to one."""
        levels = [[self.model]]
        while below := [child for module in levels[-1] for child in module.children()]:
            levels.append(below)
        print(f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:")
        for depth, modules in enumerate(levels[: module_depth if module_depth >= 0 else None]):
            print(f"depth {depth}:")
            for title, write, measure in (
                ("params", params_to_string, _params),
                ("MACs", macs_to_string, self._macs),
                ("fwd latency", duration_to_string, self._seconds),
            ):
                print(f"    {title:<11} - {_top(modules, measure, top_modules, write)}")


def _params(module: nn.Module) -> int:
    return sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())


def _per(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _top(
    modules: Sequence[nn.Module],
    measure: Callable[[nn.Module], float],
    count: int,
    write: Callable[[float], str],
) -> dict[str, str]:
    """The classes of modules with the largest sums of a measure, in words."""
    sums: dict[str, float] = {}
    for module in modules:
        name = type(module).__name__
        sums[name] = sums.get(name, 0) + measure(module)
    largest = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return {name: write(total) for name, total in largest}


@contextlib.contextmanager
def _printing_to(output_file: str | None) -> Iterator[None]:
    if not output_file:
        yield
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file, contextlib.redirect_stdout(file):
        yield


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, MACs and parameters of a call of the model, in evaluation mode as it is left, or (`mode`
    "generate") of its `generate`: with a tensor of `input_shape`, or with `args` and `kwargs`. Raises
    ArgumentError for other modes and for a call without arguments."""
    if mode not in ("forward", "generate"):
        raise ArgumentError(f'mode must be "forward" or "generate", got {mode!r}')
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ArgumentError(f"input_shape must be a tuple of at least one element, got {input_shape!r}")
        like = next(model.parameters(), torch.empty(()))
        args = (like.new_ones(input_shape),)
    if not args and not kwargs:
        raise ArgumentError("args and/or kwargs must be specified if input_shape is None")
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **(kwargs or {}))
        found = [profiler.get_total_flops(as_string), profiler.get_total_macs(as_string),
                 profiler.get_total_params(as_string)]  # fmt: skip
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
    return found[0], found[1], found[2]
