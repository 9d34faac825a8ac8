"""Buffers that forwards change, such as BatchNorm's running means, a codebook, the vectors of a spectral
norm: within a step each rank's own, after it rank 0's on all of them, as with DDP's `broadcast_buffers`.

Invariant: after a step the persistent buffers are the same on every rank. Those that no forward changes are
not sent (but running statistics, which torch changes unnoticed), nor those that are not persistent, which are
caches, nor those that ranks compute alike.
Communication: one broadcast for each dtype after a step, of what has ever changed; whether there is something
new goes with the step's totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError


class Buffers:
    """The persistent buffers of `model`, but `alike`, which need no sharing; with `apart`, or on one rank,
    none of them."""

    def __init__(
        self, model: nn.Module, axis: Axis, alike: Collection[Tensor] = (), apart: bool = False
    ) -> None:
        self._axis = axis
        self._owners = (
            []
            if apart or axis.size == 1
            else [
                (f"{prefix}.{name}".lstrip("."), module, name)
                for prefix, module in model.named_modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
                and name not in module._non_persistent_buffers_set
                and not any(buffer is each for each in alike)
            ]
        )
        self._known = {  # shapes of those that have changed, by place
            at: tuple(getattr(module, name).shape)
            for at, (_, module, name) in enumerate(self._owners)
            if isinstance(module, _NormBase)
        }
        self.take_note()

    def take_note(self) -> None:
        """The buffers are the same on all ranks now."""
        self._seen = [(self._at(at), self._at(at)._version) for at in range(len(self._owners))]

    def has_news(self) -> bool:
        """Whether one has changed since, on this rank, that is not known to, or to this shape."""
        return any(self._known.get(at) != tuple(self._at(at).shape) for at in self._changed())

    def share(self, news: bool) -> None:
        """Give all ranks what rank 0 has. news: `has_news` on any rank. All must call."""
        if news:
            self._ask()
        if not self._known:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for at in sorted(self._known):
            by_dtype[self._at(at).dtype].append(self._at(at))
        with torch.no_grad():
            for tensors in by_dtype.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                self._axis.broadcast(flat)
                for tensor, numbers in zip(
                    tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
                ):
                    tensor.copy_(numbers.view(tensor.shape))
        self.take_note()

    def _at(self, index: int) -> Tensor:
        full, module, name = self._owners[index]
        buffer = module._buffers.get(name)
        if buffer is None:
            raise ModelError(
                f"the buffer {full} was taken away after initialize: "
                "call engine.refresh() on every rank, which takes that in"
            )
        return buffer

    def _changed(self) -> list[int]:
        return [
            at
            for at, (before, version) in enumerate(self._seen)
            if self._at(at) is not before or before._version != version
        ]

    def _ask(self) -> None:
        """Have the same known on all ranks. Raises ModelError where a buffer has not the same shape on
        all."""
        told: list[Any] = self._axis.gather_objects(sorted({*self._known, *self._changed()}))
        indices = sorted({at for each in told for at in each})
        shapes: list[Any] = self._axis.gather_objects([list(self._at(at).shape) for at in indices])
        for at, each in zip(indices, zip(*shapes, strict=True), strict=True):
            if any(shape != each[0] for shape in each):
                raise ModelError(f"the buffer {self._owners[at][0]} has another shape "
                                 f"on each rank ({', '.join(map(str, each))}), so "
                                 'all cannot have rank 0\'s: register it with '
                                 'persistent=False, or write batch_norm = "rank"')  # fmt: skip
            self._known[at] = tuple(each[0])
