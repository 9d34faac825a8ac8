"""MLPs over tiles of tokens: each tile's forward is computed again in its backward, so that a block never has
the wide middle of its MLP for all of a rank's tokens.

Invariant: each token's numbers are those without tiles; gradients of weights are up to the order of sums.
Communication: that of the MLP, once more in backward: as many bytes for all tiles as for the whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyreme.errors import ConfigError, ModelError, Problem, named
from polyreme.models.patches import InPlace, Patches
from polyreme.models.tensor_access import sees_gradients

KEY = "context.mlp_tile"
OFF = f'write {KEY} = "none"'
KINDS = re.compile("MLP|Mlp|FeedForward|FFN")
"""Parts of the names of classes that work on each token by itself."""


@dataclass(frozen=True, eq=False)
class Tiled:
    """The forward of an MLP over tiles of `tokens`; its own is `forward`."""

    module: nn.Module
    forward: Callable[..., Any]
    tokens: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, others = args[0] if args else None, (*args[1:], *kwargs.values())
        if not isinstance(hidden, Tensor) or any(isinstance(each, Tensor) for each in others):
            raise self._refusal("takes other tensors than its hidden states")
        count = max(1, self.tokens // math.prod(hidden.shape[:-2]))
        if not torch.is_grad_enabled():
            made = [self.forward(each, *args[1:], **kwargs) for each in hidden.split(count, -2)]
        else:
            made = [
                checkpoint(self.forward, each, *args[1:], use_reentrant=False, **kwargs)
                for each in hidden.split(count, -2)
            ]
        if not all(isinstance(each, Tensor) for each in made):
            raise self._refusal("returns more than hidden states")
        whole = torch.cat(made, -2)
        if whole.shape[:-1] != hidden.shape[:-1]:
            raise self._refusal(f"makes {list(whole.shape)} of {list(hidden.shape)}")
        return whole

    def _refusal(self, reason: str) -> ModelError:
        name = type(self.module).__name__
        return ModelError(f"{name} {reason}, and cannot be cut into tiles of {self.tokens} tokens: {OFF}")


def tile_mlps(blocks: Mapping[str, nn.Module], tokens: int, patches: Patches) -> None:
    """Compute the MLPs of a model's blocks over tiles of so many `tokens`. Raises ConfigError for blocks
    without one that works on each token by itself."""
    found = {name: mlps_of(block) for name, block in blocks.items()}
    if without := [name for name, mlps in found.items() if not mlps]:
        reason = (
            f"{named(without, 3)} has no MLP of its own, a module of one of the kinds "
            f"{', '.join(KINDS.pattern.split('|'))} without experts and convolutions"
        )
        raise ConfigError([Problem(KEY, tokens, reason, OFF)])
    for mlp in {mlp for mlps in found.values() for mlp in mlps}:
        if sees_gradients(mlp.modules()):
            raise ModelError(f"{type(mlp).__name__} has a backward hook, which would see tiles: {OFF}")
        patches.forward(mlp, InPlace(mlp.forward, Tiled(mlp, mlp.forward, tokens)))


def mlps_of(block: nn.Module) -> list[nn.Module]:
    """Return the outermost MLPs of a block, none of one with experts."""
    inside: set[nn.Module] = set()
    found = []
    for module in block.modules():
        if "experts" in module._modules:
            return []
        if module in inside or not KINDS.search(type(module).__name__):
            continue
        if not any(isinstance(each, nn.Conv1d) for each in module.modules()):
            found.append(module)
        inside.update(module.modules())
    return found
