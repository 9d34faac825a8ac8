"""A tier of which only the sizes are known. No memory, no files, no communication."""

from __future__ import annotations

from typing import Any

from polyreme.errors import TierError
from polyreme.files.direct_io import padded
from polyreme.offload.space import Space
from polyreme.offload.store import Store


class PlannedStore(Store):
    """What a tier in host memory, or in `folders` files with `buffers` in memory, would take. What asks for
    its bytes raises TierError."""

    def __init__(self, folders: int = 0, buffers: int = 0) -> None:
        super().__init__([Space(_nothing, _nothing) for _ in range(folders or 1)])
        self.in_memory, self._count = not folders, buffers

    @property
    def buffers(self) -> int:
        if self.in_memory:
            return sum(self._needed())
        return self._count * padded(max(self.sizes.values(), default=0))

    def commit(self) -> None:
        """Take nothing."""

    def settle(self, extents: Any = None) -> None:
        """Wait for nothing."""

    def _unknown(self, *_: Any, **__: Any) -> Any:
        raise TierError("a planned tier holds nothing")

    put = get = add = open = stream = numbers = _unknown

    def _is_busy(self, extent: int) -> bool:
        return False


def _nothing(_: Any) -> None:
    """Open or close nothing."""
