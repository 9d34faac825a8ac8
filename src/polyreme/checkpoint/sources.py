"""The `Source` protocol: an open checkpoint of any format, with named tensors of several kinds, of which any
range can be read.

Invariant: a source reads only the ranges asked for, never runs a pickle's code, and never opens a file
outside of its folder. No communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polyreme.layout.region import MASTER, MODEL

__all__ = ["MASTER", "MODEL", "Source", "TensorInfo", "Tensors"]


class TensorInfo(NamedTuple):
    """The shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Tensors = Mapping[str, Mapping[str, TensorInfo]]
"""The shape and dtype of each tensor, by kind and name."""


class Source(Protocol):
    """An open checkpoint. Names are those of the model's own parameters and buffers, the same for every kind.

    A state that is one number for a parameter, such as `step`, has the shape ()."""

    path: Path
    tensors: Tensors

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of the flattened whole tensor: 1-D, on the CPU, in the
        checkpoint's dtype. Raises CheckpointError, with the file and the tensor, where they cannot be
        read."""
        ...

    def contributions(self, share: int, shares: int) -> list[int]:
        """Read share number `share`, from 0 on, of `shares` equal ones of all bytes. Returns its contribution
        to the checksum of each file; nothing for a format without checksums. Raises CheckpointError where a
        file cannot be read."""
        ...

    def compare(self, contributions: Sequence[int]) -> None:
        """Raise CheckpointError, with the files and what they hold, where a file differs from what was
        written.
        contributions: those of all shares, combined by XOR file by file."""
        ...
