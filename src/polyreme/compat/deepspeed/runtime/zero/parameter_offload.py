"""The object by which libraries remove the hooks of DeepSpeed's stage 3 while a model generates. Here it has
no hooks to remove: inside of `GatheredParameters` parameters stay whole all the same."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle


class DeepSpeedZeRoOffload:
    """A module with empty lists of hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Do nothing: the engine's hooks were never removed."""


def external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Return an empty iterator, in place of the parameters that a module uses and another one has: they need
    not be known here, as each is gathered where it is used."""
    return iter(())
