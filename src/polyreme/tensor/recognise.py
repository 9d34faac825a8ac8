"""Recognises attentions and MLPs of an unknown model by one forward on the meta device: which layers each
calls, which outputs of a layer are used together, and that no other operation mixes outputs that would be
divided; and which parameters are used while no module that has them runs.

Invariant: a style that is not certain is left out. Nothing is computed, and the model stays as it was."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyreme.models.huggingface import sample_inputs, training_arguments
from polyreme.tensor.layers import has_own_forward, is_linear, linear_sizes

PLACEWISE = frozenset({
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand",
    "contiguous", "clone", "alias", "detach", "slice", "select", "split", "split_with_sizes", "chunk",
    "unbind", "_to_copy", "to", "copy_", "mm", "addmm", "bmm", "linear", "add", "add_", "sub", "rsub",
    "mul", "mul_", "div", "div_", "neg", "abs", "silu", "silu_", "gelu", "gelu_", "relu", "relu_",
    "sigmoid", "tanh", "erf", "pow", "square", "sqrt", "rsqrt", "exp", "sin", "cos", "clamp", "clamp_",
    "clamp_min", "minimum", "maximum", "hardtanh", "hardswish", "elu", "leaky_relu", "softplus",
    "threshold_", "native_dropout", "dropout", "bernoulli_", "empty_like",
})  # fmt: skip
"""Operations (of aten) that treat each place of the last dimension alike, or multiply by a matrix."""
BY_HEAD = PLACEWISE | {
    "cat", "stack", "softmax", "_softmax", "_safe_softmax", "masked_fill", "where", "matmul", "baddbmm",
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_efficient_attention", "scalar_tensor",
    "full", "zeros", "ones", "arange", "zeros_like", "full_like", "le", "lt", "ge", "gt", "eq",
    "logical_and", "logical_or", "bitwise_and", "tril", "triu",
}  # fmt: skip
"""Operations that an attention may apply, each head by itself."""
WITHIN_HEAD = {
    "mean", "native_layer_norm", "rms_norm", "_fused_rms_norm", "var_mean", "linalg_vector_norm",
}  # fmt: skip
"""Operations that join places of the last dimension; in an attention they may within a head."""


class _Trace(TorchDispatchMode):
    """A record of what happens inside of modules: operations with the last sizes of their inputs, the layers
    called, in order, and the places of a layer's output that one operation reads together.

    owners: the modules that have each parameter, by the parameter's id. elsewhere: modules with a parameter
    that is used while they do not run."""

    def __init__(self, owners: Mapping[int, set[str]]) -> None:
        super().__init__()
        self.owners, self.elsewhere = owners, set[str]()
        self.inside: list[str] = []
        self.given: dict[str, set[int]] = defaultdict(set)
        self.operations: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.calls: dict[str, list[str]] = defaultdict(list)
        self.outputs: dict[int, tuple[str, Tensor]] = {}
        self.reads: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # a number is asked for: of a mask that there is nothing to mask
            return {torch.bool: True}.get(args[0].dtype, 1)
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for module in self.inside:
            self.operations[module] |= {(name, each.shape[-1] if each.dim() else 1) for each in given}
        owners = [self.owners.get(id(each), set()) for each in given if name not in ("detach", "alias")]
        self.elsewhere |= {name for each in owners if each.isdisjoint(self.inside) for name in each}
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for each in given:
            layer, whole = self.outputs.get(each.untyped_storage()._cdata, ("", each))
            if layer and not any(each.untyped_storage()._cdata == m.untyped_storage()._cdata for m in made):
                self.reads[layer].add(_places(each, whole.shape[-1]))
        return out

    def enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module's forward begins; a hook."""
        self.inside.append(name)
        more = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim() > 2]
        self.given[name] |= {each.shape[-3] for each in more}

    def leave(self, name: str, module: nn.Module, _: Any, out: Any) -> None:
        """Note that a module's forward ends; a hook."""
        self.inside.pop()
        self.calls[name.rpartition(".")[0]].append(name)
        if is_linear(module) and isinstance(out, Tensor):
            self.outputs[out.untyped_storage()._cdata] = name, out


def _places(view: Tensor, width: int) -> tuple[int, ...]:
    """The places along the last dimension, `width` wide, of a contiguous tensor that its `view` includes."""
    return _at(view.untyped_storage().nbytes() // view.element_size(), tuple(view.shape), view.stride(),
               view.storage_offset(), width)  # fmt: skip


@functools.lru_cache(maxsize=256)
def _at(
    numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, width: int
) -> tuple[int, ...]:
    at = torch.arange(numel, device="cpu").as_strided(shape, stride, offset)
    return tuple((at % width).unique().tolist())


def recognise(
    model: nn.Module, names: Iterable[str], counts: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, str], set[str]]:
    """Find those of the modules `names` that are attentions or MLPs. Returns styles for their layers, by
    name; and the modules with a parameter that is used while they do not run.

    counts: number and size of the query heads of attentions, by name."""
    modules = dict(model.named_modules())
    wanted = [name for name in names if _is_plain(modules[name])]
    trace = _traced(model, modules, wanted)
    found: dict[str, str] = {}
    if trace is None:
        return {}, set()
    for name in wanted:
        found |= _styles(name, modules, trace, counts.get(name))
    return found, trace.elsewhere


def _is_plain(module: nn.Module) -> bool:
    """Whether the module has several linear layers, and no parameters or buffers of its own."""
    layers = [child for child in module.children() if any(True for _ in child.parameters())]
    own = [*module.parameters(recurse=False), *module.buffers()]
    return not own and sum(map(is_linear, layers)) > 1 and not any(map(has_own_forward, layers))


def _traced(model: nn.Module, modules: Mapping[str, nn.Module], names: Iterable[str]) -> _Trace | None:
    """Record a forward of the model on the meta device; None where it cannot run there."""
    inputs = sample_inputs(model)
    if inputs is None:
        return None
    given = {name: each.to("meta") for name, each in inputs.items()} | training_arguments(model)
    numbers = {name: each.to("meta") for name, each in (*model.named_parameters(), *model.named_buffers())}
    owners: dict[int, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(name)
    trace = _Trace({id(numbers[name]): owners[id(each)] for name, each in model.named_parameters()})
    watched = [f"{name}.{child}" for name in names for child, _ in modules[name].named_children()]
    hooks = []
    for each in dict.fromkeys([*names, *watched, *(name for owner in owners.values() for name in owner)]):
        entered = functools.partial(trace.enter, each)
        hooks.append(modules[each].register_forward_pre_hook(entered, with_kwargs=True))
        hooks.append(modules[each].register_forward_hook(functools.partial(trace.leave, each)))
    # experts are passed over: their routing depends on numbers
    experts = [
        each
        for path, each in modules.items()
        if any(
            p.dim() > 2 and not isinstance(each, nn.modules.conv._ConvNd)
            for p in each.parameters(recurse=False)
        )
        and not any(f"{name}.".startswith(f"{path}.") for name in names)
    ]
    try:
        with torch.no_grad(), torch.device("meta"), trace, _passing_on(experts):
            functional_call(model, numbers, (), given)
    except Exception:  # whatever a forward does that needs numbers
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return trace


@contextmanager
def _passing_on(modules: list[nn.Module]) -> Iterator[None]:
    """Make `modules` return their first tensor argument, inside of the context."""
    own = [(module, vars(module).get("forward")) for module in modules]
    for module in modules:
        module.forward = _first
    try:
        yield
    finally:
        for module, forward in own:
            del module.forward
            if forward is not None:
                module.forward = forward


def _first(*given: Any, **named: Any) -> Any:
    return next(each for each in (*given, *named.values()) if isinstance(each, Tensor))


def _styles(
    name: str, modules: Mapping[str, nn.Module], trace: _Trace, heads: tuple[int, int] | None
) -> dict[str, str]:
    """The styles of the layers of one module; none where it is neither attention nor MLP."""
    children = {f"{name}.{child}": each for child, each in modules[name].named_children()}
    layers = [each for each in children if any(True for _ in children[each].parameters())]
    called = [each for each in trace.calls[name] if each in layers]
    linear = [each for each in called if is_linear(modules[each])]
    if sorted(called) != sorted(layers) or len(linear) < 2:
        return {}
    *first, last = linear
    inside, hidden = linear_sizes(modules[last])
    norms = [each for each in layers if each not in linear]
    widths = {each: linear_sizes(modules[each])[1] for each in first}
    if {linear_sizes(modules[each])[0] for each in first} != {hidden}:
        return {}
    operations = trace.operations[name]
    if heads is None:
        if norms or any(operation not in PLACEWISE for operation, _ in operations):
            return {}
        styles = {each: _packed(trace.reads[each], width, inside) for each, width in widths.items()}
    else:
        count, size = heads
        whole = {tuple(p.shape) for each in norms for p in modules[each].parameters()} <= {(size,)}
        if (
            inside != count * size
            or not whole
            or count in trace.given[name]  # something for each head, as ALiBi's slopes
            or not all(
                operation in BY_HEAD or (operation in WITHIN_HEAD and last in (size, 1))
                for operation, last in operations
            )
        ):
            return {}
        styles = {
            each: _heads(trace.reads[each], width, inside, size, len(first)) for each, width in widths.items()
        }
        styles |= dict.fromkeys(norms, "replicated_with_grad_allreduce")
    return {**styles, last: "rowwise"} if all(styles.values()) else {}


def _packed(reads: set[tuple[int, ...]], width: int, inside: int) -> str:
    """The style of a layer with `width` outputs before an MLP's last one, which has `inside` inputs; "" if it
    is not clear."""
    if width == inside:
        return "colwise"
    if width == 2 * inside and reads == {tuple(range(inside)), tuple(range(inside, width))}:
        return "packed_colwise"
    interleaved = {tuple(range(0, width, 2)), tuple(range(1, width, 2))}
    return "interleaved_colwise" if width == 2 * inside and reads == interleaved else ""


def _heads(reads: set[tuple[int, ...]], width: int, queries: int, size: int, layers: int) -> str:
    """The style of one of `layers` layers before an attention's last one, by its `width`; "" if it is not
    clear.
    queries: the width of all query heads; size: of one head."""
    if layers > 1:
        return "colwise" if width <= queries and width % size == 0 else ""
    shared, rest = divmod(width - queries, 2)
    if rest or shared <= 0 or shared % size:
        return ""
    kinds = [
        range(0, queries, size),
        range(queries, queries + shared, size),
        range(queries + shared, width, size),
    ]
    by_head = [range(kind * size, width, 3 * size) for kind in range(3)]
    for style, starts in (
        ("fused_qkv", kinds),
        ("interleaved_colwise", by_head if shared == queries else []),
    ):
        if {_kind(places, starts, size) for places in reads} == set(range(3)):
            return style
    return ""


def _kind(places: tuple[int, ...], starts: list[range], size: int) -> int | None:
    """The number of the kind of heads (query, key, value) that `places` belong to; None unless they are the
    same places of every head of one kind. starts: the first place of each head, for each kind."""
    for kind, heads in enumerate(starts):
        within = {place - heads.start for place in places if 0 <= place - heads.start < size}
        if within and set(places) == {head + place for head in heads for place in within}:
            return kind
    return None
