"""A backward in two halves: first the gradients of inputs, later those of weights.

Invariant: after both halves every parameter has the gradient that one backward would have given it, in one
piece, and its hooks ran once (no hooks, where the gradient was added straight to the reducer's sum); before
the second half no parameter has any.

For each layer that calls `now_or_later` the first half keeps the layer's input and the gradient of its
output; the second multiplies them, and adds the product to the reducer's sum where there is one. Gradients of
all other parameters (norms, embeddings, layers that do not call it) are computed in the first half and held
until the second. Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_current: WeightGradients | None = None  # shared by all threads: a device's nodes run in one of its own
_expected = False


ComputeGradient = Callable[[Tensor | None], Tensor]
"""Computes a weight's gradient: returns it in new memory (given None), or adds it to the given tensor, and
returns that."""


class Sums(Protocol):
    """The sums of gradients over micro-batches: `zero.reduce.Reducer`."""

    def gradient_buffer(self, parameter: Tensor) -> Tensor | None:
        """Return the sum so far, to which a gradient may be added without any hook; None where it must go
        through autograd."""

    def added(self, parameter: Tensor) -> None:
        """Note that a whole gradient was added to the buffer."""


class WeightGradients:
    """The gradients of weights that one backward puts off."""

    def __init__(self) -> None:
        self._pending: dict[Tensor, list[ComputeGradient]] = {}
        self._deferred: dict[Tensor, tuple[Tensor, Callable[[Tensor], None]]] = {}

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Make this the `current` one; the first half of the backward runs inside."""
        global _current
        _current = self
        try:
            yield
        finally:
            _current = None

    def defer(self, parameter: Tensor, arrived: Callable[[Tensor], None]) -> None:
        """Take `parameter.grad` away until the second half, which restores it, and calls `arrived(parameter)`
        where no other gradient is added to it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._deferred[parameter] = (
                gradient if parameter not in self._deferred else self._deferred[parameter][0] + gradient,
                arrived,
            )

    def put_off_gradient(self, parameter: Tensor, compute: ComputeGradient) -> None:
        """Keep `compute` for the second half: a summand of the gradient of `parameter`."""
        self._pending.setdefault(parameter, []).append(compute)

    def accumulate(self, sums: Sums | None = None) -> None:
        """Perform the second half, one parameter after the other: add its gradients to `sums`, or accumulate
        them by autograd, with all hooks."""
        deferred, self._deferred = self._deferred, {}
        for parameter, (gradient, arrived) in deferred.items():
            Tensor.grad.__set__(parameter, gradient)  # type: ignore[union-attr]  # past what `.grad` says to users
            if parameter not in self._pending:
                arrived(parameter)
        while self._pending:
            parameter = next(iter(self._pending))
            pending = self._pending.pop(parameter)
            gradient_buffer = (
                None if sums is None or parameter in deferred else sums.gradient_buffer(parameter)
            )
            if sums is None or gradient_buffer is None:
                torch.autograd.backward([_DeferredGradient.apply(parameter, compute) for compute in pending])
                continue
            for compute in pending:
                compute(gradient_buffer)
            sums.added(parameter)


class _DeferredGradient(Function):
    """An output without numbers whose backward returns the result of `compute`. Autograd adds up the
    gradients of one parameter before its hooks run."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, compute: ComputeGradient) -> Tensor:
        ctx.compute = compute
        return parameter.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        compute, ctx.compute = ctx.compute, None  # frees the tensors that it holds
        return compute(None), None


def expect(halves: bool) -> None:
    """Say whether the forwards from now on have a backward in two halves; without, layers use torch's own
    forward, which is faster."""
    global _expected
    _expected = halves


def expected() -> bool:
    """Whether the last call of `expect` announced backwards in two halves."""
    return _expected


def current() -> WeightGradients | None:
    """The WeightGradients that collects what the backward under way puts off; None where it puts nothing
    off."""
    return _current


def now_or_later(parameter: Tensor | None, compute: ComputeGradient) -> Tensor | None:
    """Return the gradient of `parameter` in a backward; or None, and put it off. It is computed now for a
    weight that is itself computed (None for `parameter`), and for a parameter with a hook of the user's,
    which autograd would call without the gradient."""
    if _current is None or parameter is None or parameter._backward_hooks:
        return compute(None)
    _current.put_off_gradient(parameter, compute)
    return None
