"""Operations of the functions that a model calls.

Products (matrix products, convolutions, attention) are counted where torch carries them out, by its own
formulas, whoever called them; a multiply and an add are two operations, and one MAC. Elementwise functions
are counted where a model calls them by the names that DeepSpeed knows, one operation or a few for each
element. As there, `+` and `*` count nothing, nor does the bias of a linear layer, and recurrent layers count
by their weights."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from polyreme.planner.flops import FORMULAS

Count = Counter[str]
"""Operations of "products", and of "elementwise" functions."""


@contextlib.contextmanager
def counting(count: Count) -> Iterator[None]:
    """Add to `count` what runs on this thread."""
    with _Products(count), _Elementwise(count):
        yield


def _vector_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of a vector's product with a vector, or a matrix's."""
    return 2 * a.numel()


_PRODUCTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **FORMULAS,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten.dot: _vector_product,
    torch.ops.aten.mv: _vector_product,
}
"""The formulas of torch, of the planner, and of products that neither knows."""


class _Products(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _PRODUCTS.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.count["products"] += formula(*args, **kwargs, out_val=out)
        return out


class _Elementwise(TorchFunctionMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if (operations := _ELEMENTWISE.get(func)) is not None:

            def given(place: int, name: str) -> Any:
                return args[place] if place < len(args) else named.get(name)

            self.count["elementwise"] += operations(out, given)
        return out


Operations = Callable[[Any, Callable[[int, str], Any]], int]
"""Takes a function's output, and the function that gives an argument by its place and name."""


def _norm(place: int) -> Operations:
    """Return four for each number, and one more where there is a weight, which is at this place."""
    return lambda out, given: given(0, "input").numel() * (4 + (given(place, "weight") is not None))


def _batch_norm(out: Any, given: Any) -> int:
    weight, training = given(3, "weight") is not None, given(5, "training")
    return given(0, "input").numel() * ((4 if training else 1) + weight)


def _attention(out: Any, given: Any) -> int:
    """Count the softmax of attention whose weights are returned, as their mean over heads or of each head."""
    if out[1] is None:
        return 0
    return out[1].numel() * (1 if given(99, "average_attn_weights") is False else given(4, "num_heads"))


def _in_dimensions(*names: str) -> list[Any]:
    """Return torch's functions of these names for one, two and three dimensions."""
    return [getattr(F, f"{name}{dimensions}d") for name in names for dimensions in (1, 2, 3)]


_POOLS = _in_dimensions("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool")
_CONVOLUTIONS = _in_dimensions("conv", "conv_transpose")
_ACTIVATIONS = [F.relu, F.prelu, F.elu, F.leaky_relu, F.relu6, F.silu, F.gelu, F.softmax]
_ADDED = [torch.add, torch.mul, torch.addmm, torch.Tensor.addmm, torch.baddbmm, F.interpolate, F.upsample]
_ELEMENTWISE: dict[Any, Operations] = {
    **dict.fromkeys([*_ACTIVATIONS, *_POOLS], lambda out, given: given(0, "input").numel()),
    **dict.fromkeys(_ADDED, lambda out, given: out.numel()),
    **dict.fromkeys(_CONVOLUTIONS, lambda out, given: 0 if given(2, "bias") is None else out.numel()),
    **dict.fromkeys([F.layer_norm, F.group_norm], _norm(2)),
    F.batch_norm: _batch_norm,
    F.instance_norm: _norm(3),
    F.multi_head_attention_forward: _attention,
}
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def recurrent(layer: nn.RNNBase | nn.RNNCellBase, input: Tensor) -> Count:
    """Count a recurrent layer, or cell, on an input of any number of steps and samples."""
    steps = input.numel() // layer.input_size
    weights = {name: weight.shape for name, weight in layer.named_parameters() if weight.dim() == 2}
    inner = {name: shape for name, shape in weights.items() if "weight_hr" not in name}
    gates = sum(shape[0] for shape in inner.values())
    own = layer.hidden_size * _OWN.get(gates // max(1, len(inner)) // layer.hidden_size, 1) * len(inner) // 2
    products = 2 * sum(shape.numel() for shape in weights.values())
    return Counter(products=steps * products, elementwise=steps * (own + (0 if layer.bias else -gates)))


_OWN = {3: 7, 4: 10}
"""Elementwise operations of a hidden number, by gates: of a GRU and an LSTM."""
