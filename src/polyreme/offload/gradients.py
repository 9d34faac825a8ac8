"""The store of a bucket's reduced gradients that do not stay on the device, in host memory
(`gradients_in_host`) or in files (`gradients_in_files`). No communication between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Final = Callable[[Tensor, int], None]
"""A function of a part of the step's gradients, on the CPU, and the number of its first element."""


class GradientStore(Protocol):
    """A store that has the gradients from their last reduction in a step to the update; or, if it `adds`,
    from the first one on, with those of the others added in the order in which they are put."""

    adds: bool
    order: Sequence[int] | None
    """Extents of a file store that have them, one for each of the bucket's extents; None where `get` has
    all."""

    def put(self, gradient: Tensor, final: Final | None = None) -> bool:
        """Begin to move `gradient`, of the bucket's region, there; of the reduce dtype, where none are added.
        `final` comes with the last of a step, and has been given all parts when `complete` returns. Returns
        whether it has left its memory already."""

    def complete(self) -> None:
        """Return when all that was put is there."""

    def get(self) -> Tensor:
        """What was put last, or the sum since `clear`, on the CPU."""

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers [start, stop) of what `get` gives, on the CPU: there or copied."""

    def write(self, start: int, flat: Tensor) -> None:
        """Set the numbers from `start` on."""

    def clear(self) -> None:
        """Forget the step before; called before the first gradient of a step, and before memory of the device
        that gradients were in is written again."""
