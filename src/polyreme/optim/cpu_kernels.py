"""The optimizer's step of one contiguous piece on the CPU, in one pass over memory: gradient times factor,
update of parameter and states, rounded copy.

For torch's Adam, AdamW, SGD and Adagrad with `fused`, and for Lion, a piece is walked either by a loop that
numba compiled (`compiled`), where numba is installed, or in parts small enough that every pass of torch's own
kernels but the first finds them in the cache. Any other optimizer makes its own `step()` on the whole piece.

Invariant: the numbers are, to the last bit, those of `optimizer.step()` on the widened and scaled gradient,
whichever way they are made. A compiled loop is tried on a few numbers with the options at hand, and taken
only if its bits are torch's."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polyreme.layout.bucket_layout import ALIGN
from polyreme.optim.groups import Lion

CHUNK = 1 << 17
"""Elements of a part, a multiple of ALIGN: scratch, parameter and states of it are in the second-level cache
together."""

WORTH = 1 << 16
"""Fewest elements of a piece for which a loop is compiled, which takes some tenths of a second."""

State = dict[str, Any]
"""What torch keeps for a parameter: tensors of its shape, and scalars (`step`)."""


def kernel(optimizer: Optimizer) -> Kernel:
    """The kernel for an optimizer of one group, whose options (lr, ...) in `param_groups[0]` it follows from
    step to step."""
    found = _KERNELS.get(type(optimizer), Kernel)
    fused = optimizer.param_groups[0].get("fused") or found is _Lion
    return found(optimizer) if fused else Kernel(optimizer)


class Kernel:
    """Steps of any optimizer, by its own `step()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @torch.no_grad()
    def step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        factor: float = 1.0,
        out: Tensor | None = None,
        first: bool = False,
        at: int = 0,
        later: bool = False,
    ) -> Callable[[], None] | None:
        """One step of `parameter` (contiguous, on the CPU) along `gradient` times `factor` (same shape, any
        float format, only read).

        `state` is its torch state, which is updated in place: tensors stay where they are, missing ones are
        made as torch makes them.
        `first`: those that are given hold nothing yet, and begin as torch would begin them. `out`, of the
        same shape, gets the new parameter rounded to its format. `at` is the place of the piece's first
        number in all that the optimizer updates, which only `compact` looks at. With `later`, all that is
        left to do may be returned, which takes one thread, any."""
        given = dict(state)
        if first:
            state.clear()
        widened = gradient.to(parameter.dtype)
        parameter.grad = widened if factor == 1.0 else widened * factor
        self.optimizer.param_groups[0]["params"] = [parameter]
        self.optimizer.state[parameter] = state
        self.optimizer.step()
        parameter.grad = None
        state.update(self.optimizer.state.pop(parameter))
        for name, memory in given.items():
            if isinstance(memory, Tensor) and memory is not state[name]:
                state[name] = memory.copy_(state[name])
        if out is not None:
            out.copy_(parameter)
        return None


class Crew:
    """Steps of several pieces at a time, on as many threads as torch has."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Future[None], Callable[[], None]]] = deque()

    @property
    def most(self) -> int:
        """Jobs that may have been begun: a few more than threads, so that none waits for the caller."""
        return torch.get_num_threads() + 2

    def do(self, job: Callable[[], None] | None, then: Callable[[], None] = lambda: None) -> None:
        """Have a thread do `job`, unless there is nothing to do; `then` is called by the caller's thread, now
        or later, in `finish` at the latest."""
        if job is None or torch.get_num_threads() < 2 or (compiled_kernels := compiler()) is None:
            if job is not None:
                job()
            then()
            return
        while len(self._under_way) >= self.most:
            self._end_oldest()
        self._under_way.append((compiled_kernels.pool(torch.get_num_threads()).submit(job), then))

    def finish(self) -> None:
        """Return when all is done."""
        while self._under_way:
            self._end_oldest()

    def _end_oldest(self) -> None:
        future, then = self._under_way.popleft()
        future.result()
        then()


class Walk(Kernel):
    """An elementwise optimizer, walked part by part. `options` are its group's."""

    name: ClassVar[str]
    """Of the function in `compiled`."""
    most: ClassVar[int]
    """Most states of the parameter's size that the function takes."""
    counts: ClassVar[bool] = True
    """Whether there is a step count."""

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        """The states of the parameter's size, in the kernel's order, and what they begin with."""
        raise NotImplementedError

    def update(self, parts: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool) -> None:
        """Torch's update of a part (parameter, gradient, states); `step` is the count of steps, this one
        too."""
        raise NotImplementedError

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        """What the compiled function takes after the factor."""
        raise NotImplementedError

    def step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        factor: float = 1.0,
        out: Tensor | None = None,
        first: bool = False,
        at: int = 0,
        later: bool = False,
    ) -> Callable[[], None] | None:
        options = self.optimizer.param_groups[0]
        initial = self.moments(options)
        first = first or not initial.keys() <= state.keys()
        if first:
            self._begin(parameter, state, initial)
        if self.counts:
            state["step"] += 1
        count = state["step"] if self.counts else _UNCOUNTED
        tensors = [parameter, gradient, *(state[name] for name in initial)]
        if parameter.dim() != 1:
            tensors, out = [t.view(-1) for t in tensors], None if out is None else out.view(-1)
        if not self._compiles(tensors, out, options, first):
            self._walked(tensors, out, factor, options, count, first)
        elif later:
            return partial(self._compiled, tensors, out, factor, options, count, threads=1)
        else:
            self._compiled(tensors, out, factor, options, count)
        return None

    def _begin(self, parameter: Tensor, state: State, initial: Mapping[str, float]) -> None:
        for name, value in initial.items():
            if state.get(name) is None:
                state[name] = torch.full_like(parameter, value)
            else:
                state[name].fill_(value)
        if self.counts:
            state["step"] = torch.zeros((), dtype=torch.float32)

    def _walked(
        self,
        tensors: Sequence[Tensor],
        out: Tensor | None,
        factor: float,
        options: Mapping[str, Any],
        count: Tensor,
        first: bool = False,
    ) -> None:
        walk = list(zip(*(t.split(CHUNK) for t in tensors), strict=True))
        outs = [None] * len(walk) if out is None else out.split(CHUNK)
        for (parameter, gradient, *moments), rounded in zip(walk, outs, strict=True):
            self.update(
                [parameter, _scaled(gradient, parameter.dtype, factor), *moments], options, count, first
            )
            if rounded is not None:
                rounded.copy_(parameter)

    def _compiled(
        self,
        tensors: Sequence[Tensor],
        out: Tensor | None,
        factor: float,
        options: Mapping[str, Any],
        count: Tensor,
        threads: int | None = None,
    ) -> None:
        compiled_kernels = compiler()
        assert compiled_kernels is not None
        absent = [None] * (2 + self.most - len(tensors))
        numbers = [factor, *self.numbers(options, float(count))]
        compiled_kernels.run(
            getattr(compiled_kernels, self.name), [*tensors, *absent, out], numbers, threads=threads
        )

    def _compiles(
        self, tensors: Sequence[Tensor], out: Tensor | None, options: Mapping[str, Any], first: bool
    ) -> bool:
        """Whether the compiled loop takes these tensors and options and gives torch's bits on a few
        numbers."""
        if options.get("maximize") or (compiled_kernels := compiler()) is None:
            return False
        # the first momentum is the gradient
        if len(tensors) > 2 + self.most or (first and len(tensors) == 3 and self.name == "sgd"):
            return False
        # what of the options changes the arithmetic
        formats = (*(t.dtype for t in tensors), None if out is None else out.dtype)
        key = (
            self.name,
            formats,
            *(bool(options.get(name)) for name in ("weight_decay", "nesterov", "decoupled_weight_decay")),
            *(beta < 0.5 for beta in options.get("betas", ())),
        )
        if key not in _TRIED:
            if tensors[0].numel() < WORTH:
                return False
            known = {*compiled_kernels.VIEWS, None}
            taken = (
                all(d == torch.float32 for d in (formats[0], *formats[2:-1]))
                and {formats[1], formats[-1]} <= known
            )
            _TRIED[key] = taken and self._agrees(tensors, out, {**options, "lr": float(options["lr"]) or 0.1})
        return _TRIED[key]

    def _agrees(self, like: Sequence[Tensor], out: Tensor | None, options: Mapping[str, Any]) -> bool:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(len(like), 16 * ALIGN, generator=generator)
        numbers[2:] = 0.1 * numbers[2:].square()
        ends = []
        for way in (self._compiled, self._walked):
            tensors = [row.to(t.dtype, copy=True) for row, t in zip(numbers, like, strict=True)]
            rounded = None if out is None else torch.empty_like(tensors[0], dtype=out.dtype)
            for step in (1.0, 2.0):
                way(tensors, rounded, 1 / 3, options, torch.tensor(step))
            ends.append(torch.stack([*tensors, *([] if rounded is None else [rounded.float()])]))
        return torch.equal(ends[0].view(torch.int32), ends[1].view(torch.int32))


_UNCOUNTED = torch.zeros(())
_TRIED: dict[tuple[Any, ...], bool] = {}


@cache
def compiler() -> ModuleType | None:
    """The module of compiled loops, if numba is installed."""
    try:
        from polyreme.optim import compiled_kernels
    except ImportError:
        return None
    return compiled_kernels


_memory = threading.local()


def scratch(like: torch.dtype, size: int, use: str) -> Tensor:
    """Memory of this thread's for `use`, that is in the cache from the part before."""
    if (held := getattr(_memory, use, None)) is None or held.dtype != like or held.numel() < size:
        held = torch.empty(size, dtype=like)
        setattr(_memory, use, held)
    return held[:size]


def _scaled(gradient: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """`gradient` widened to `dtype`, then times `factor`."""
    if gradient.dtype == dtype and factor == 1.0:
        return gradient
    memory = scratch(dtype, gradient.numel(), "gradient")
    if gradient.dtype == dtype:
        return torch.mul(gradient, factor, out=memory)
    memory.copy_(gradient)
    return memory if factor == 1.0 else memory.mul_(factor)


class _Adam(Walk):
    name, most = "adam", 2

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return dict.fromkeys(names[: 3 if options["amsgrad"] else 2], 0.0)

    def update(self, parts: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool) -> None:
        parameter, gradient, mean, square, *largest = parts
        beta1, beta2 = options["betas"]
        apply = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
        apply(
            [parameter],
            [gradient],
            [mean],
            [square],
            largest,
            [step],
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=options["amsgrad"],
            maximize=options["maximize"],
        )

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        lr = float(options["lr"])
        decay = options["weight_decay"]
        (beta1, beta2) = map(float, options["betas"])
        decoupled = options["decoupled_weight_decay"]
        keep = 1 - lr * decay if decay and decoupled else None
        l2 = decay if decay and not decoupled else None
        return (
            keep,
            l2,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            options["eps"],
            lr / (1 - beta1**step),
        )


class _SGD(Walk):
    name, most, counts = "sgd", 1, False

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if options["momentum"] else {}

    def update(self, parts: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool) -> None:
        parameter, gradient, *buffer = parts
        torch._fused_sgd_(
            [parameter],
            [gradient],
            buffer,
            weight_decay=float(options["weight_decay"]),
            momentum=options["momentum"],
            lr=float(options["lr"]),
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            maximize=options["maximize"],
            is_first_step=first and bool(buffer),
        )

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        momentum = options["momentum"] or None
        ahead = momentum if options["nesterov"] else None
        return (
            float(options["weight_decay"]) or None,
            momentum,
            1 - options["dampening"],
            ahead,
            -float(options["lr"]),
        )


class _Adagrad(Walk):
    name, most = "adagrad", 1

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"sum": self.optimizer.defaults["initial_accumulator_value"]}

    def update(self, parts: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool) -> None:
        parameter, gradient, total = parts
        torch._fused_adagrad_(
            [parameter],
            [gradient],
            [total],
            [step],
            lr=float(options["lr"]),
            lr_decay=options["lr_decay"],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
        )

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        size = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
        return options["weight_decay"] or None, options["eps"], size


class _Lion(Walk):
    name, most, counts = "lion", 1, False

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"exp_avg": 0.0}

    def update(self, parts: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool) -> None:
        parameter, gradient, mean = parts
        beta1, beta2 = options["betas"]
        direction = torch.lerp(
            gradient, mean, beta1, out=scratch(gradient.dtype, gradient.numel(), "direction")
        ).sign_()
        parameter.mul_(1 - options["lr"] * options["weight_decay"]).sub_(direction, alpha=options["lr"])
        mean.lerp_(gradient, 1 - beta2)

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        lr, (beta1, beta2) = float(options["lr"]), options["betas"]
        return 1 - lr * options["weight_decay"], beta1, 1 - beta2, lr


_KERNELS: Mapping[type[Optimizer], Callable[[Optimizer], Kernel]] = {
    Adam: _Adam, AdamW: _Adam, SGD: _SGD, Adagrad: _Adagrad, Lion: _Lion}  # fmt: skip
