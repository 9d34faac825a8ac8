"""Floating-point operations, parameters and seconds of each module's forward.

Invariant: `counting` says which operations count; the numbers of a module include those of the modules in it,
and a module that is called twice counts twice. The model is as before once `end_profile` was called."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.profiling.counting import RECURRENT, Count, counting, recurrent
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError

DEFAULT_PRECISION = 2
_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Return a number in thousands (K), millions (M), ..., or in the given ones of these."""
    if units is None:
        fitting = (unit for unit, size in _MAGNITUDES.items() if num >= size)
        units = "" if num == 0 else next(fitting, "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def _in(unit: str) -> Callable[..., str]:
    """Return a function that writes a number with this unit."""

    def write(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
        return f"{number_to_string(num, units, precision)}{unit}"

    return write


macs_to_string, flops_to_string = _in("MACs"), _in("FLOPS")
bytes_to_string, duration_to_string = _in("B"), _in("s")


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Return parameters in words, with B for a billion."""
    of_numbers = "G" if units == "B" else units
    return number_to_string(params_num, of_numbers, precision).replace("G", "B").strip()


@dataclass
class _Profile:
    """The counts and seconds of one module since the profile began, and where its running calls began."""

    count: Count = field(default_factory=Counter)
    seconds: float = 0.0
    calls: list[tuple[Count, float]] = field(default_factory=list)


_WRITE: dict[str, Callable[..., str]] = {
    "params": params_to_string, "macs": macs_to_string, "duration": duration_to_string,
    "flops": number_to_string,
}  # fmt: skip
"""The figures of a module, and how each is written."""


def _total(what: str) -> Callable[..., Any]:
    """Return the method that returns a figure of the whole model: of the forwards, or of its parameters,
    whole also where ZeRO 3 has released them."""

    def get(profiler: FlopsProfiler, as_string: bool = False) -> Any:
        found = profiler._of(profiler.model, what)
        return _WRITE[what](found) if as_string else found

    return get


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
        count: Count = Counter()
        self._running.enter_context(counting(count))
        for module in self.model.modules():
            if type(module) not in (ignore_list or ()):
                self._watch(module, count)
        self.started = True

    def _watch(self, module: nn.Module, count: Count) -> None:
        profile = self._found[module]

        def begin(module: nn.Module, inputs: Any) -> None:
            get_accelerator().synchronize()
            profile.calls.append((count.copy(), time.perf_counter()))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            get_accelerator().synchronize()
            before, began = profile.calls.pop()
            if isinstance(module, RECURRENT):
                counted = before + recurrent(module, inputs[0])
                count.clear()
                count.update(counted)
            profile.count += count - before
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

    def _of(self, module: nn.Module, what: str) -> Any:
        """Return a figure of a module; of one that is never called itself, such as a ModuleList, those of the
        modules in it."""
        if what == "params":
            return sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())
        if module not in self._found:
            raise OrderError("there is no profile: call start_profile, then the model, before end_profile")
        profile = self._found[module]
        if what == "duration":
            found: Any = profile.seconds
        else:
            found = profile.count.total() if what == "flops" else profile.count["products"] // 2
        called = profile.seconds if what == "duration" else profile.count
        return found if called else sum(self._of(child, what) for child in module.children())

    get_total_flops, get_total_macs = _total("flops"), _total("macs")
    get_total_duration, get_total_params = _total("duration"), _total("params")

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
            print(f"\nForwards of {type(self.model).__name__} at step {profile_step}:")
            for name, value in self._summary():
                print(f"{name + ': ':<70}  {value}")
            print()
            self.print_model_aggregated_profile(module_depth, top_modules)
            if detailed:
                print("\nEach module, with its parameters, MACs and latency, their shares, and its FLOPS:")
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
        """Yield a line for the module and each below it."""
        figures = {what: self._of(module, what) for what in _WRITE}
        whole = {what: self._of(self.model, what) for what in _WRITE}
        shares = ", ".join(
            f"{_WRITE[what](figures[what])} = {100 * _per(figures[what], whole[what]):.2f}% {name}"
            for what, name in (("params", "Params"), ("macs", "MACs"), ("duration", "latency"))
        )
        speed = flops_to_string(_per(figures["flops"], figures["duration"]))
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
        print(f"Classes with the most, {top_modules} of each depth:")
        for depth, modules in enumerate(levels[: module_depth if module_depth >= 0 else None]):
            print(f"depth {depth}:")
            for title, what in (("params", "params"), ("MACs", "macs"), ("fwd latency", "duration")):
                print(f"    {title:<11} - {self._top(modules, what, top_modules)}")

    def _top(self, modules: Sequence[nn.Module], what: str, most: int) -> dict[str, str]:
        """Return the classes of modules with the largest sums of a figure, in words."""
        sums: Counter[str] = Counter()
        for module in modules:
            sums[type(module).__name__] += self._of(module, what)
        return {name: _WRITE[what](total) for name, total in sums.most_common(most)}


def _per(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
    """Return the operations, MACs and parameters of a call of the model, in evaluation mode as it is left, or
    (`mode` "generate") of its `generate`: with a tensor of `input_shape`, or with `args` and `kwargs`. Raises
    ArgumentError for other modes and for a call without arguments."""
    if mode not in ("forward", "generate"):
        raise ArgumentError(f'mode={mode!r}: give "forward", or "generate" for the method of that name')
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ArgumentError(f"input_shape={input_shape!r}: give the sizes of one tensor, such as (1, 3)")
        like = next(model.parameters(), torch.empty(()))
        args = (like.new_ones(input_shape),)
    if not args and not kwargs:
        raise ArgumentError("nothing to call the model with: give input_shape, args or kwargs")
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **(kwargs or {}))
        flops, macs = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
        params = profiler.get_total_params(as_string)
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
    return flops, macs, params
