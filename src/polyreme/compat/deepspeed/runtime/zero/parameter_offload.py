"""What DeepSpeed's optimizer of stage 3 shows of how parameters come and go, for libraries that take its
hooks away while they generate. Here parameters that are whole in `GatheredParameters` need none taken."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle


class DeepSpeedZeRoOffload:
    """The module, and no hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Do nothing: the engine's hooks are there."""


def external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Those that a module uses without having them: none are noted, as each is gathered where it is used."""
    return iter(())
