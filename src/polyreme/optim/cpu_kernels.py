"""The optimizer's step of one contiguous piece on the CPU: scale the gradient, update parameter and states,
write a rounded copy.

For torch's Adam, AdamW, SGD and Adagrad with `fused`, and for Lion, a piece is updated in chunks that fit in
the cache, so that only the first of torch's operators reads memory. Adam, AdamW and SGD use a loop compiled
by numba (`compiled_kernels`), which passes over memory once, where numba is installed. Any other optimizer
makes its own `step()` on the whole piece.

Invariant: in each of these ways the results are, to the last bit, those of `optimizer.step()` on the widened
and scaled gradient."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polyreme.observer import OBSERVER
from polyreme.optim.groups import FUSES, Lion

CHUNK = 1 << 17
"""Elements of a chunk, a multiple of ALIGN: its scratch, parameter and states fit together in the
second-level cache."""

WORTH = 1 << 16
"""Fewest elements of a piece for which a loop is compiled, which takes some tenths of a second."""

State = dict[str, Any]
"""Torch's state of a parameter: tensors of its shape, and scalars (`step`)."""


def kernel(optimizer: Optimizer) -> Kernel:
    """Return the kernel for an optimizer with one group. Each step reads its options (lr, ...) from
    `param_groups[0]`."""
    found = _KERNELS.get(type(optimizer), Kernel)
    options = optimizer.param_groups[0]
    fused = options.get(FUSES, options.get("fused")) or found is _Lion
    return found(optimizer) if fused else Kernel(optimizer)


class Kernel:
    """Updates pieces by the `step()` of any optimizer."""

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
        """Make one step of `parameter` (contiguous, on the CPU) along `gradient` times `factor` (same shape,
        any float format, not changed).

        state: torch's state of the parameter, updated in place: tensors keep their memory, missing ones are
        made as torch makes them. first: its tensors are uninitialised, and begin as torch would begin them.
        out: of the same shape; gets the new parameter, rounded to its format. at: the place of the piece's
        first number among all that the optimizer updates; only `QuantizedKernel` uses it. later: the step may
        return a function that does the rest, to be called on any one thread."""
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


def told(parameter: Tensor, gradient: Tensor, states: Iterable[Tensor], out: Tensor | None) -> None:
    """Tell an observer of the update of a parameter without numbers, which reads and writes it and its
    states, reads the gradient and writes `out`."""
    if (observer := OBSERVER.get()) is not None:
        changed = parameter.nbytes + sum(state.nbytes for state in states)
        observer.update(parameter.numel(), 2 * changed + gradient.nbytes + (0 if out is None else out.nbytes))


class Workers:
    """Updates several pieces at a time, on as many threads as torch has."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Future[None], Callable[[], None]]] = deque()

    @property
    def most(self) -> int:
        """Most jobs under way: a few more than threads, so that no thread waits for the caller."""
        return torch.get_num_threads() + 2

    def do(self, job: Callable[[], None] | None, then: Callable[[], None] = lambda: None) -> None:
        """Run `job`, if there is one, on a thread; `then` is called afterwards by the caller's thread, in
        `finish` at the latest."""
        if job is None or torch.get_num_threads() < 2 or (compiled_kernels := compiler()) is None:
            if job is not None:
                job()
            then()
            return
        while len(self._under_way) >= self.most:
            self._end_oldest()
        self._under_way.append((compiled_kernels.pool(torch.get_num_threads()).submit(job), then))

    def finish(self) -> None:
        """Wait for all jobs."""
        while self._under_way:
            self._end_oldest()

    def _end_oldest(self) -> None:
        future, then = self._under_way.popleft()
        future.result()
        then()


class ChunkedKernel(Kernel):
    """The kernel of an elementwise optimizer, which updates chunk by chunk. options: those of its group."""

    counts: ClassVar[bool] = True
    """Whether the optimizer counts steps."""
    on_gpus: ClassVar[bool] = True
    """Whether torch has a fused kernel for GPUs, too."""

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the initial value of each state of the parameter's size, by name, in the kernel's order."""
        raise NotImplementedError

    def update(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool
    ) -> None:
        """Update a chunk (parameter, gradient, states) by torch's operators. step: the count of steps, with
        this one."""
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
        if parameter.is_meta:  # there is nothing more to do without numbers
            told(parameter, gradient, [state[name] for name in initial], out)
            return None
        tensors = [parameter, gradient, *(state[name] for name in initial)]
        if parameter.dim() != 1:
            tensors, out = [t.view(-1) for t in tensors], None if out is None else out.view(-1)
        count = state["step"] if self.counts else _UNCOUNTED
        numbers = self.compiled_numbers(tensors, out, first, count)
        if numbers is None:
            self._in_chunks(tensors, out, factor, count, first)
            return None
        job = partial(self.compiled, tensors, out, [factor, *numbers])
        if later:
            return partial(job, threads=1)
        job()
        return None

    def compiled_numbers(
        self, tensors: Sequence[Tensor], out: Tensor | None, first: bool, step: Tensor
    ) -> Sequence[float | None] | None:
        """Return the arguments of `compiled` after the factor, for the step number `step`; None where there
        is no compiled loop for these tensors and options."""
        return None

    def compiled(
        self,
        tensors: Sequence[Tensor],
        out: Tensor | None,
        numbers: Sequence[float | None],
        threads: int | None = None,
    ) -> None:
        """Update flat (parameter, gradient, states) by the compiled loop, in one pass over memory."""
        raise NotImplementedError

    def _begin(self, parameter: Tensor, state: State, initial: Mapping[str, float]) -> None:
        for name, value in initial.items():
            if state.get(name) is None:
                state[name] = torch.full_like(parameter, value)
            else:
                state[name].fill_(value)
        if self.counts:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)

    def _in_chunks(
        self, tensors: Sequence[Tensor], out: Tensor | None, factor: float, count: Tensor, first: bool
    ) -> None:
        options = self.optimizer.param_groups[0]
        chunks = list(zip(*(t.split(CHUNK) for t in tensors), strict=True))
        outs = [None] * len(chunks) if out is None else out.split(CHUNK)
        for (parameter, gradient, *moments), rounded in zip(chunks, outs, strict=True):
            scaled = _scaled(gradient, parameter.dtype, factor)
            self.update([parameter, scaled, *moments], options, count, first)
            if rounded is not None:
                rounded.copy_(parameter)


class CompiledKernel(ChunkedKernel):
    """A kernel with a compiled loop for float32 parameters and states."""

    name: ClassVar[str]
    """The name of the function in `compiled_kernels`."""
    most: ClassVar[int]
    """The most states of the parameter's size that the function takes."""
    begins: ClassVar[bool] = True
    """Whether the function can make the first step."""

    def numbers(self, options: Mapping[str, Any], step: float) -> tuple[float | None, ...]:
        """Return the arguments of the compiled function after the factor."""
        raise NotImplementedError

    def compiled_numbers(
        self, tensors: Sequence[Tensor], out: Tensor | None, first: bool, step: Tensor
    ) -> Sequence[float | None] | None:
        loops, options = compiler(), self.optimizer.param_groups[0]
        if loops is None or options["maximize"] or len(tensors) > 2 + self.most:
            return None
        parameter, gradient, *moments = tensors
        narrow = {gradient.dtype} if out is None else {gradient.dtype, out.dtype}
        if any(t.dtype != torch.float32 for t in (parameter, *moments)) or not narrow <= {*loops.VIEWS}:
            return None
        if first and not self.begins:
            return None
        numbers = self.numbers(options, float(step))
        key = (
            self.name,
            gradient.dtype,
            None if out is None else out.dtype,
            *(number is None for number in numbers),
        )
        if parameter.numel() < WORTH and key not in _COMPILED:
            return None
        _COMPILED.add(key)
        return numbers

    def compiled(
        self,
        tensors: Sequence[Tensor],
        out: Tensor | None,
        numbers: Sequence[float | None],
        threads: int | None = None,
    ) -> None:
        loops = compiler()
        assert loops is not None
        absent = [None] * (2 + self.most - len(tensors))
        loops.run(getattr(loops, self.name), [*tensors, *absent, out], numbers, threads=threads)


_UNCOUNTED = torch.zeros(())
_COMPILED: set[tuple[Any, ...]] = set()
"""The combinations of kernel, formats and options whose loop is compiled already."""


@cache
def compiler() -> ModuleType | None:
    """Return the module of compiled loops, if numba is installed and torch uses its kernels for AVX2 or
    AVX-512, which fuse products and sums in the same way, so that the bits are equal; else None."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        from polyreme.optim import compiled_kernels
    except ImportError:
        return None
    return compiled_kernels


_memory = threading.local()


def scratch(like: torch.dtype, size: int, use: str) -> Tensor:
    """Return memory of this thread for `use`, which is still in the cache from its last use."""
    if (held := getattr(_memory, use, None)) is None or held.dtype != like or held.numel() < size:
        held = torch.empty(size, dtype=like)
        setattr(_memory, use, held)
    return held[:size]


def _scaled(gradient: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """Return `gradient` widened to `dtype`, then times `factor`."""
    if gradient.dtype == dtype and factor == 1.0:
        return gradient
    memory = scratch(dtype, gradient.numel(), "gradient")
    if gradient.dtype == dtype:
        return torch.mul(gradient, factor, out=memory)
    memory.copy_(gradient)
    return memory if factor == 1.0 else memory.mul_(factor)


class _Adam(CompiledKernel):
    name, most = "adam", 2

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return dict.fromkeys(names[: 3 if options["amsgrad"] else 2], 0.0)

    def update(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool
    ) -> None:
        parameter, gradient, mean, square, *largest = tensors
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


class _SGD(CompiledKernel):
    name, most, counts, begins = "sgd", 1, False, False  # the first momentum is the gradient

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if options["momentum"] else {}

    def update(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool
    ) -> None:
        parameter, gradient, *buffer = tensors
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


class _Adagrad(ChunkedKernel):
    on_gpus = False

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"sum": self.optimizer.defaults["initial_accumulator_value"]}

    def update(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool
    ) -> None:
        parameter, gradient, total = tensors
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


class _Lion(ChunkedKernel):
    counts = False

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        return {"exp_avg": 0.0}

    def update(
        self, tensors: Sequence[Tensor], options: Mapping[str, Any], step: Tensor, first: bool
    ) -> None:
        parameter, gradient, mean = tensors
        beta1, beta2 = options["betas"]
        direction = torch.lerp(
            gradient, mean, beta1, out=scratch(gradient.dtype, gradient.numel(), "direction")
        ).sign_()
        parameter.mul_(1 - options["lr"] * options["weight_decay"]).sub_(direction, alpha=options["lr"])
        mean.lerp_(gradient, 1 - beta2)


_KERNELS: Mapping[type[Optimizer], Callable[[Optimizer], Kernel]] = {
    Adam: _Adam, AdamW: _Adam, SGD: _SGD, Adagrad: _Adagrad, Lion: _Lion}  # fmt: skip
