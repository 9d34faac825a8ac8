"""Recomputation: a block's forward keeps everything for its backward, or its inputs alone, or some operators'
outputs. Inputs are kept on the device, or elsewhere (`offload`), and with them what its attention has from
other ranks (`sequence.kept`).

Invariant: losses, gradients and buffers are the same to the last bit, dropout and running means included: a
recomputation begins with the random state and the buffers of the forward, and restores the later ones
afterwards. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from polyreme.errors import ConfigError, Problem, warn
from polyreme.models.huggingface import tensors_in
from polyreme.models.patches import InPlace, Patches
from polyreme.offload.activations import ActivationOffload, BlockCall
from polyreme.sequence.kept import Result, giving, keeping, place

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the forward of a block and of its recomputation."""
OPERATORS = {
    "mm": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "attention": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}  # fmt: skip
"""Values of `memory.recompute_save`, each for a family of aten operators. The name of one aten operator is a
value, too."""
_count_result: ContextVar[Callable[[Tensor], object]] = ContextVar("_count_result", default=lambda _: None)


def wrap_blocks(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    recompute: bool,
    every: int,
    keep: Sequence[str],
    compiled: bool,
    offload: ActivationOffload | None,
    patches: Patches,
) -> list[nn.Module]:
    """Set each block's `forward`: compiled if asked; every `every`-th recomputed in backward, except for the
    outputs of the operators `keep`, from inputs that `offload` holds meanwhile. Module hooks stay outside
    both. Returns the recomputed blocks.

    In a `model` without blocks its largest submodules are recomputed, or all of it at once (see
    `_outermost`). Raises ConfigError where there are no blocks to compile, or for an unknown operator."""
    if not (recompute or compiled):
        return []
    if compiled and not blocks:
        raise ConfigError([Problem("compile", True, "the model has no repeated blocks (no "
                                                    "nn.ModuleList or nn.Sequential of them)",
                                   "leave compile out, or put the model's "
                                   "repeated part into an nn.ModuleList")])  # fmt: skip
    contexts: Callable[[], Contexts] = (
        functools.partial(create_selective_checkpoint_contexts, overloads(keep)) if keep else noop_context_fn
    )
    recomputed = []
    for index, block in enumerate(blocks.values() if blocks else _outermost(model)):
        forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if recompute and index % every == 0:
            forward = _recomputed(block, forward, contexts, offload)
            recomputed.append(block)
        patches.forward(block, InPlace(block.forward, forward))
    return recomputed


@dataclass
class Saved:
    """Bytes that a forward kept for its backward."""

    bytes: int = 0
    """Bytes on the device."""
    moved: int = 0
    """Bytes in host memory or in files."""


@contextmanager
def measure(
    recomputed: Iterable[nn.Module], parameters: Iterable[Tensor], offload: ActivationOffload | None = None
) -> Iterator[Saved]:
    """Count the bytes that forwards inside keep for backward, as they are at the end: each storage once,
    `parameters` not at all; of a recomputed block its inputs, which may be in `offload`."""
    saved = Saved()
    # by id, as addresses change when a block is gathered
    fixed = {p.untyped_storage()._cdata for p in parameters}
    saved_bytes: dict[int, int] = {}  # bytes by storage
    inputs: dict[int, int] = {}

    def count(tensor: Tensor, into: dict[int, int] = saved_bytes) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in fixed:
            into.setdefault(storage._cdata, storage.nbytes())
        return tensor

    def count_inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            count(tensor, inputs)

    handles = [block.register_forward_pre_hook(count_inputs, with_kwargs=True) for block in recomputed]
    token = _count_result.set(lambda tensor: count(tensor, inputs))
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield saved
    finally:
        _count_result.reset(token)
        for handle in handles:
            handle.remove()
        for storage, nbytes in inputs.items():
            here, out = offload.where(storage) if offload is not None else (True, False)
            saved.bytes += nbytes * (here and storage not in saved_bytes)
            saved.moved += nbytes * out
        saved.bytes += sum(saved_bytes.values())


def _outermost(model: nn.Module) -> list[nn.Module]:
    """Return the modules to recompute, one after the other, in a model without repeated blocks: its outermost
    modules with submodules and parameters, if there are several (the halves of an autoencoder); else the
    whole model, with a warning."""
    owner = model
    while len(composed := [child for child in _children(owner) if _composed(child)]) == 1:
        owner = composed[0]
    if not composed:
        warn(
            'memory.activations = "recompute": the model has no repeated '
            "blocks, so it is recomputed as a whole, which costs time and "
            "hardly lowers the peak of memory; put its repeated part into an nn.ModuleList"
        )
    return composed or [model]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Return the module's children that have a forward; for a list or a dictionary of modules, its items."""
    for child in module.children():
        yield from _children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else (child,)


def _composed(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _recomputed(
    block: nn.Module,
    forward: Callable[..., Any],
    contexts: Callable[[], Contexts],
    offload: ActivationOffload | None,
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if offload is None:
            inputs_again: Callable[[], Any] = lambda: (args, kwargs)  # noqa: E731
        else:
            inputs_again = offload.keep((args, kwargs)).back
        tensors = tensors_in((args, kwargs)) if offload is None else [offload.marker]
        # each run empties it, so that it does not keep the inputs alive
        buffers, times, given = (_Buffers(block), itertools.count(), [(args, kwargs)])
        exchanged, where = _Exchanged(offload), place.get()

        def run(*_: Tensor) -> Any:
            positional, named = given.pop()
            if next(times) == 0:
                with buffers.watched(), keeping(exchanged.results):
                    return forward(*positional, **named)
            with buffers.put_back(), giving(exchanged.results, where):
                return forward(*positional, **named)

        def before_again() -> None:
            given.append(inputs_again())
            exchanged.come_back()

        def contexts_of_runs() -> Contexts:
            first, again = contexts()
            return _Around(first, after=exchanged.hold), _Around(again, before_again, exchanged.let_go)

        # the tensors are passed for their devices, of which checkpoint saves the random state, and to find
        # changes of them in place
        return checkpoint(run, *tensors, use_reentrant=False, context_fn=contexts_of_runs)

    return wrapped


class _Around(AbstractContextManager[Any]):
    """A context, `before` which and `after` which something runs outside of it."""

    def __init__(
        self,
        inner: AbstractContextManager[Any],
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._before, self._inner, self._after = before, inner, after

    def __enter__(self) -> Any:
        self._before()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        handled = self._inner.__exit__(*error)
        self._after()
        return handled


class _Exchanged:
    """What the attention of a block had from other ranks, between its forward and its recomputation: on the
    device, or in `offload`."""

    def __init__(self, offload: ActivationOffload | None) -> None:
        self.results: list[Result] = []
        self._offload = offload
        self._call: BlockCall | None = None

    def hold(self) -> None:
        """Count the results of a forward, and hold them where inputs of blocks are held."""
        for tensor in tensors_in(self.results):
            _count_result.get()(tensor)
        if self._offload is not None and self.results:
            self._call = self._offload.keep([*self.results])
            self.let_go()

    def come_back(self) -> None:
        """Bring the results back to the device."""
        if self._call is not None:
            self.results[:] = self._call.back()

    def let_go(self) -> None:
        """Free the device of results that are held elsewhere."""
        if self._call is not None:
            self.results.clear()


class _Buffers:
    """A block's buffers, such as running means, as its forward found them: copied only where the forward
    changes them."""

    def __init__(self, block: nn.Module) -> None:
        self._found = [
            (module._buffers, name, held)
            for module in block.modules()
            for name, held in module._buffers.items()
            if held is not None
        ]
        self._changed: dict[int, Tensor] = {}  # by position in `_found`

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep copies of the buffers that the forward inside changes."""
        before = [(buffer._version, buffer.clone()) for _, _, buffer in self._found]
        yield
        for at, ((owner, name, buffer), (version, found)) in enumerate(zip(self._found, before, strict=True)):
            if owner[name] is not buffer or buffer._version != version:
                self._changed[at] = found

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Run the forward inside again on copies of the buffers, with changed ones as they were."""
        now = [owner[name] for owner, name, _ in self._found]
        copies: dict[int, Tensor] = {}  # by buffer, so that one that modules share stays one
        for at, (owner, name, buffer) in enumerate(self._found):
            owner[name] = copies.setdefault(id(buffer), self._changed.get(at, buffer).clone())
        try:
            yield
        finally:
            for (owner, name, _), held in zip(self._found, now, strict=True):
                owner[name] = held


def overloads(names: Sequence[str]) -> list[Any]:
    """Return every overload of the operators that `names` stand for."""
    found = []
    for name in names:
        packets = [
            getattr(torch.ops.aten, op, None) for op in OPERATORS.get(name, (name.removeprefix("aten."),))
        ]
        if not any(packets):
            raise ConfigError([Problem("memory.recompute_save", name, "is not an aten operator",
                                       f"one of {', '.join(OPERATORS)}, or "
                                       "an operator's name such as \"mm\"")])  # fmt: skip
        found += [
            getattr(packet, overload)
            for packet in packets
            if packet is not None
            for overload in packet.overloads()
        ]
    return found
