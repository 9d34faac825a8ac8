"""A backward in two halves: first the gradients of inputs, then, whenever it suits, those of weights.

Invariant: when both halves are done, every parameter has got the gradient that one backward would have given
it, in one piece, and its hooks ran once (none where only those who sum gradients listen, to whose sum it was
added); before the second half none has any.

The first half keeps, of each layer that asks `now_or_later`, what its product is made of (the layer's input
and the gradient of its output); the second adds the product to where the parameter's gradients are summed, if
some are already. All else (norms, embeddings, layers that do not ask) has its gradients computed in the first
half and held until the second. Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241)."""

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


Product = Callable[[Tensor | None], Tensor]
"""A gradient, of a product of its own; or added to the tensor that is given, which is returned."""


class Sums(Protocol):
    """Where gradients are summed: `zero.reduce.Reducer`."""

    def gradient_buffer(self, parameter: Tensor) -> Tensor | None:
        """The sum so far, to which a gradient may be added without any hook; None where that cannot be."""

    def added(self, parameter: Tensor) -> None:
        """A whole gradient was added there."""


class WeightGradients:
    """The gradients of weights in one backward."""

    def __init__(self) -> None:
        self._products: dict[Tensor, list[Product]] = {}
        self._deferred: dict[Tensor, tuple[Tensor, Callable[[Tensor], None]]] = {}

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """The first half runs inside."""
        global _current
        _current = self
        try:
            yield
        finally:
            _current = None

    def defer(self, parameter: Tensor, arrived: Callable[[Tensor], None]) -> None:
        """Take `parameter.grad` away until the second half, which calls `arrived(parameter)` where no product
        adds to it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._deferred[parameter] = (
                gradient if parameter not in self._deferred else self._deferred[parameter][0] + gradient,
                arrived,
            )

    def later(self, parameter: Tensor, product: Product) -> None:
        """`product` is (a part of) the gradient of `parameter`."""
        self._products.setdefault(parameter, []).append(product)

    def accumulate(self, sums: Sums | None = None) -> None:
        """The second half, one parameter after the other: products are added to `sums`, or go the way of
        autograd, with all hooks."""
        deferred, self._deferred = self._deferred, {}
        for parameter, (gradient, arrived) in deferred.items():
            Tensor.grad.__set__(parameter, gradient)  # type: ignore[union-attr]  # past what `.grad` says to users
            if parameter not in self._products:
                arrived(parameter)
        while self._products:
            parameter = next(iter(self._products))
            products = self._products.pop(parameter)
            gradient_buffer = (
                None if sums is None or parameter in deferred else sums.gradient_buffer(parameter)
            )
            if sums is None or gradient_buffer is None:
                torch.autograd.backward([_Product.apply(parameter, product) for product in products])
                continue
            for product in products:
                product(gradient_buffer)
            sums.added(parameter)


class _Product(Function):
    """An empty output whose gradient is `product`. It is in a graph, so that products of one parameter are
    added up before it gets them."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, product: Product) -> Tensor:
        ctx.product = product
        return parameter.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        product, ctx.product = ctx.product, None  # and what it is made of
        return product(None), None


def expect(halves: bool) -> None:
    """Whether the forwards from now on have a backward in two halves: else layers do what they always do,
    which is faster."""
    global _expected
    _expected = halves


def expected() -> bool:
    """What `expect` was told last."""
    return _expected


def current() -> WeightGradients | None:
    """Where the backward under way puts gradients off to; None where it does not."""
    return _current


def now_or_later(parameter: Tensor | None, product: Product) -> Tensor | None:
    """The gradient `product` of `parameter`, in a backward; or None where it is put off. None for `parameter`
    stands for a weight that is computed itself, whose gradient is needed now. So is one for a hook of the
    user's, which would be called without it."""
    if _current is None or parameter is None or parameter._backward_hooks:
        return product(None)
    _current.later(parameter, product)
    return None
