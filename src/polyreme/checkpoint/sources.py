"""The `Source` protocol, a checkpoint of any format to whoever reads one: named tensors of several kinds, of
which any range can be read.

Invariant: a source reads only what is asked for, never a pickle's code, and never a file outside of its
folder. No communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polyreme.layout.region import MASTER, MODEL

__all__ = ["MASTER", "MODEL", "Source", "TensorInfo"]


class TensorInfo(NamedTuple):
    """The shape and dtype of one tensor, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """An open checkpoint. Names are those of the model's own parameters and buffers, the same for every kind.

    A state that is one number for a parameter, such as `step`, has the shape ()."""

    path: Path
    tensors: Mapping[str, Mapping[str, TensorInfo]]
    """What is known of each tensor, by kind and name."""

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened whole tensor: flat, on the CPU, in the dtype of the
        checkpoint.

        Raises CheckpointError, with the file and the tensor, where they cannot be read."""
        ...

    def contributions(self, part: int, parts: int) -> list[int]:
        """Reads the `part`-th of `parts` equal shares of all bytes: what it adds to the checksum of each
        file. Empty for a format without checksums. Raises CheckpointError where a file cannot be read."""
        ...

    def compare(self, contributions: Sequence[int]) -> None:
        """Raises CheckpointError, with the files and what they hold, where a file is not as it was written:
        `contributions` are those of all parts, combined by XOR file by file."""
        ...
