"""Activations between forward and backward: kept, recomputed, or off the device; and how much memory they
take.

Communication: none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from polyreme.config.schema import MemorySection
from polyreme.models.patches import Patches
from polyreme.offload.activations import ActivationOffload
from polyreme.optim.sparse_rows import look_up_by_rows
from polyreme.step.memory.recomputation import Saved, measure, wrap_blocks


class Activations:
    """Sets the forwards of a model's blocks so that their activations are kept, recomputed or moved off the
    device, as the config's `memory` says, and measures those kept. `compiles`: whether blocks are
    compiled. on_cpu: whether CPUs compute, in the run itself."""

    def __init__(
        self, memory: MemorySection, compiles: bool, device: torch.device, patches: Patches, on_cpu: bool
    ) -> None:
        self.offload: ActivationOffload | None = None
        """The store for inputs of recomputed blocks, if they leave the device."""
        if memory.activations not in ("keep", "recompute"):
            where = str(memory.activations)
            self.offload = ActivationOffload(device, None if where == "host" else Path(where))
        self._memory, self._compiles, self._patches = memory, compiles, patches
        self._by_rows = on_cpu and not compiles
        self._module = nn.Module()
        self._blocks: dict[str, nn.Module] | None = None
        self._recomputed: list[nn.Module] = []
        self._so_far = Saved()
        self._first: Saved | None = Saved() if compiles else None  # None until they are measured

    def wrap(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """Set the forwards of new ones among `blocks`, which are all repeated blocks of `module` now."""
        self._module = module
        if self._by_rows:
            look_up_by_rows(module, self._patches)
        memory, known = self._memory, {id(block) for block in (self._blocks or {}).values()}
        new = {name: block for name, block in blocks.items() if id(block) not in known}
        if new or self._blocks is None:
            self._recomputed += wrap_blocks(
                module,
                new,
                memory.activations != "keep",
                memory.recompute_every,
                memory.recompute_save,
                self._compiles,
                self.offload,
                self._patches,
            )
        self._blocks = dict(blocks)
        if self.offload is not None:
            self.offload.leave([*module.parameters(), *module.buffers()])

    def close(self) -> None:
        """End the threads that move activations."""
        if self.offload is not None:
            self.offload.close()

    @property
    def saved(self) -> Saved:
        """Bytes that the first micro-batch kept for its backward; 0 before it, and for compiled blocks."""
        return self._first or Saved()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the bytes that forwards inside keep for backward, during the first micro-batch."""
        if self._first is not None:
            yield
            return
        with measure(self._recomputed, self._module.parameters(), self.offload) as saved:
            yield
        self._so_far = Saved(self._so_far.bytes + saved.bytes, self._so_far.moved + saved.moved)

    def end_microbatch(self) -> None:
        """Note that all forwards of a micro-batch are done."""
        if self._first is None:
            self._first = self._so_far
