"""What of a block's forward is kept for its backward: everything, or its inputs alone (recomputed), or some operators' outputs.

Invariant: losses and gradients are the same to the last bit, dropout included: the random state is restored for recomputation.
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from polyreme.errors import ConfigError, Problem
from polyreme.model_map import tensors_in

OPERATORS = {
    "mm": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "attention": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}  # fmt: skip
"""Names for `memory.recompute_save`, each for a family of aten operators. A single aten operator's name does as well."""


def wrap_blocks(blocks: Mapping[str, nn.Module], recompute: bool, every: int, keep: Sequence[str], compiled: bool) -> list[nn.Module]:
    """Set each block's `forward`: compiled, where asked; recomputed in backward, every `every`-th block, but for the outputs of the
    operators `keep`. Module hooks stay outside both. Returns the blocks that are recomputed.

    Raises ConfigError where the model has no blocks to treat, or for an unknown operator.
    """
    if not (recompute or compiled):
        return []
    if not blocks:
        key, value = ("memory.activations", "recompute") if recompute else ("compile", True)
        raise ConfigError([Problem(key, value, "the model has no repeated blocks (no nn.ModuleList or nn.Sequential of them)",
                                   f"leave {key} out, or put the model's repeated part into an nn.ModuleList")])  # fmt: skip
    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _overloads(keep))
    recomputed = []
    for index, block in enumerate(blocks.values()):
        forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if recompute and index % every == 0:
            forward = _recomputed(forward, options)
            recomputed.append(block)
        block.forward = forward
    return recomputed


@dataclass
class Saved:
    """Bytes that a forward kept for its backward."""

    bytes: int = 0


@contextmanager
def measure(recomputed: Iterable[nn.Module], parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what the forwards inside keep for backward: each storage once, `parameters`' not; of a recomputed block its inputs."""
    saved = Saved()
    seen = {p.untyped_storage()._cdata for p in parameters}  # not their addresses, which change when a block is gathered

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            saved.bytes += storage.nbytes()
        return tensor

    def count_inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            count(tensor)

    handles = [block.register_forward_pre_hook(count_inputs, with_kwargs=True) for block in recomputed]
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield saved
    finally:
        for handle in handles:
            handle.remove()


def _recomputed(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # the tensors are passed for their devices: checkpoint saves the random state of those
        return checkpoint(lambda *_: forward(*args, **kwargs), *tensors_in((args, kwargs)), **options)

    return wrapped


def _overloads(names: Sequence[str]) -> list[Any]:
    """Every overload of the operators that `names` stand for."""
    found = []
    for name in names:
        packets = [getattr(torch.ops.aten, op, None) for op in OPERATORS.get(name, (name.removeprefix("aten."),))]
        if not any(packets):
            raise ConfigError([Problem("memory.recompute_save", name, "is not an aten operator",
                                       f"one of {', '.join(OPERATORS)}, or an operator's name such as \"mm\"")])  # fmt: skip
        found += [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
    return found
