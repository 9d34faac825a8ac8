"""A sparse gradient as its rows, as DeepSpeed passes them between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from polyreme.compat.deepspeed.refusal import OrderError


class SparseTensor:
    """The rows of a tensor of torch's sparse layout: `indices` [rows], `values` [rows, columns] and the
    `dense_size` of the whole. Rows of one index count by their sum."""

    indices: Tensor
    values: Tensor
    dense_size: list[int]

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        """Without a tensor, `indices`, `values` and `dense_size` are for the caller to set. Raises OrderError
        for a dense one."""
        self.orig_dense_tensor, self.is_sparse = dense_tensor, True
        if dense_tensor is None:
            return
        if not dense_tensor.is_sparse:
            raise OrderError("SparseTensor of a dense tensor: give it a gradient of torch's sparse layout")
        rows = dense_tensor.coalesce()
        self.dtype = rows.dtype
        self.indices, self.values = rows.indices().flatten(), rows.values()
        self.dense_size = list(rows.size())

    def to_coo_tensor(self) -> Tensor:
        """As torch has it."""
        return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size)

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """The numbers of the rows and their indices, and those of the whole."""
        return self.indices.numel() + self.values.numel(), self.dense_size[0] * self.dense_size[1]

    def add(self, b: SparseTensor) -> None:
        """Add the rows of another in place. Raises OrderError for one of another size."""
        if self.dense_size != b.dense_size:
            raise OrderError(
                f"add of a SparseTensor {b.dense_size} to one {self.dense_size}: give like sizes"
            )
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __repr__(self) -> str:
        there, whole = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={self.indices.size()}, values_size={self.values.size()}, "
            f"dense_size={self.dense_size}, device={self.indices.device}, reduction_factor={whole / there})"
        )
