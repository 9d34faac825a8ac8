"""What has a bucket's reduced gradients where they do not stay on the device: in host memory (`transfer`) or
in files (`gradient_files`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Final = Callable[[Tensor, int], None]
"""Given a part of what a hold has in the end, on the CPU, and its first element."""


class GradientStore(Protocol):
    """Where they are from their last reduction in a step to the update; or from the first one on, and those
    of the others are added to them (`adds`), in the order in which they are taken."""

    adds: bool
    order: Sequence[int] | None
    """Records of a file store that have them, one for each of the bucket's records; None where `numbers` has
    all."""

    def take(self, gradient: Tensor, final: Final | None = None) -> bool:
        """Begin to move `gradient`, of the bucket's region, there; of the reduce dtype, where none are added.
        `final` comes with the last of a step, and has been given all parts when `complete` returns. Returns
        whether it has left its memory already."""

    def complete(self) -> None:
        """Return when all that was taken is there."""

    def numbers(self) -> Tensor:
        """What was taken last, or the sum since `clear`, on the CPU."""

    def clear(self) -> None:
        """Before the first gradient of a step, and before memory of the device that gradients were in is
        written again."""
