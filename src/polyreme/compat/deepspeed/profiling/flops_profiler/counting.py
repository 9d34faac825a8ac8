"""What is counted of the functions that a model calls.

Products (matrix products, convolutions, attention) are counted where torch carries them out, by its own
formulas, whoever called them; a multiply and an add are two operations, and one MAC. Elementwise functions
are counted where a model calls them by the names that DeepSpeed knows, one operation or a few for each
element. As there, `+` and `*` count nothing, nor does the bias of a linear layer, and recurrent layers count
by their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop


class Count(NamedTuple):
    """Operations of products, and of elementwise functions."""

    products: int = 0
    elementwise: int = 0

    @property
    def flops(self) -> int:
        """All of them."""
        return self.products + self.elementwise

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations."""
        return self.products // 2

    def plus(self, other: Count, times: int = 1) -> Count:
        """The sum with `times` times the other."""
        return Count(self.products + times * other.products, self.elementwise + times * other.elementwise)


class Counter:
    """Adds up what runs in `counting`."""

    def __init__(self) -> None:
        self.count = Count()
        """What was counted so far."""

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count, on this thread."""
        with _Products(self), _Elementwise(self):
            yield


def _vector_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Operations of a vector's product with a vector, or a matrix's."""
    return 2 * a.numel()


_PRODUCTS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten.dot: _vector_product,
    torch.ops.aten.mv: _vector_product,
}
"""Those that torch has no formula for."""


class _Products(TorchDispatchMode):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket) or _PRODUCTS.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.counter.count = self.counter.count.plus(Count(formula(*args, **kwargs, out_val=out)))
        return out


class _Elementwise(TorchFunctionMode):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (operations := _ELEMENTWISE.get(func)) is not None:
            inputs = {name: value for name, value in kwargs.items() if name != "out"}
            self.counter.count = self.counter.count.plus(Count(0, operations(out, *args, **inputs)))
        return out


Operations = Callable[..., int]


def _each_input(out: Any, input: Tensor, *_: Any, **__: Any) -> int:
    return input.numel()


def _each_output(out: Tensor, *_: Any, **__: Any) -> int:
    return out.numel()


def _bias(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> int:
    return 0 if bias is None else out.numel()


def _norm(out: Tensor, input: Tensor, groups: Any, weight: Tensor | None = None, *_: Any, **__: Any) -> int:
    return input.numel() * (4 if weight is None else 5)


def _batch_norm(
    out: Tensor, input: Tensor, mean: Any, var: Any, weight: Tensor | None = None, bias: Any = None,
    training: bool = False, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return input.numel() * ((4 if training else 1) + (weight is not None))


def _instance_norm(
    out: Tensor, input: Tensor, mean: Any = None, var: Any = None, weight: Tensor | None = None,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _norm(out, input, None, weight)


def _weights(out: Any, q: Any, k: Any, v: Any, width: Any, heads: int, *_: Any, **options: Any) -> int:
    """The softmax of attention whose weights are returned."""
    if out[1] is None:
        return 0
    averaged: bool = options.get("average_attn_weights", True)
    return int(out[1].numel()) * (heads if averaged else 1)


_POOLS = [
    getattr(F, f"{kind}_pool{dimensions}d")
    for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
    for dimensions in (1, 2, 3)
]
_CONVOLUTIONS = [
    getattr(F, f"{kind}{dimensions}d") for kind in ("conv", "conv_transpose") for dimensions in (1, 2, 3)
]
_ACTIVATIONS = [F.relu, F.prelu, F.elu, F.leaky_relu, F.relu6, F.silu, F.gelu, F.softmax]
_ADDED = [torch.add, torch.mul, torch.addmm, torch.Tensor.addmm, torch.baddbmm, F.interpolate, F.upsample]
_ELEMENTWISE: dict[Any, Operations] = {
    **dict.fromkeys([*_ACTIVATIONS, *_POOLS], _each_input),
    **dict.fromkeys(_ADDED, _each_output),
    **dict.fromkeys(_CONVOLUTIONS, _bias),
    **dict.fromkeys([F.layer_norm, F.group_norm], _norm),
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.multi_head_attention_forward: _weights,
}
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def recurrent(layer: nn.RNNBase | nn.RNNCellBase, input: Tensor) -> Count:
    """Of a recurrent layer, or cell, on an input of any number of steps and samples."""
    steps = input.numel() // layer.input_size
    weights = {name: weight.shape for name, weight in layer.named_parameters() if weight.dim() == 2}
    inner = {name: shape for name, shape in weights.items() if "weight_hr" not in name}
    gates = sum(shape[0] for shape in inner.values())
    own = layer.hidden_size * _OWN.get(gates // max(1, len(inner)) // layer.hidden_size, 1) * len(inner) // 2
    products = 2 * sum(shape.numel() for shape in weights.values())
    return Count(steps * products, steps * (own + (0 if layer.bias else -gates)))


_OWN = {3: 7, 4: 10}
"""Elementwise operations of a hidden number, by gates: of a GRU and an LSTM."""
