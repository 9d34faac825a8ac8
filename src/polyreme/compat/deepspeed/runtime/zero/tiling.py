"""A linear layer in tiles, each of them a layer of its own, which ZeRO 3 gathers by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.compat.deepspeed.refusal import CallError, OrderError
from polyreme.compat.deepspeed.runtime.utils import partition_uniform
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import GatheredParameters


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: list[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Parts of these sizes of the last dimension."""
    parts = torch.split(tensor, partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class TiledLinear(nn.Module):
    """A linear layer of `out_splits` times `in_splits` tiles, as even as they go: `linears[out][in]`, each a
    `linear_cls` with the arguments `kwargs`; the last of a row has the bias.

    With `input_is_already_split` the input is a list of `in_splits` tensors; without `combine_out_splits` the
    output is a list of `out_splits`. Raises CallError, a RuntimeError, for more tiles than features."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise CallError(f"{name}_splits is {splits}: choose one of 1 to {name}_features, {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList()
        for start, stop in pairwise(self.out_parts):
            self.linears.append(
                nn.ModuleList(
                    linear_cls(right - left, stop - start, bias=bias and right == in_features, **kwargs)
                    for left, right in pairwise(self.in_parts)
                )
            )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        if self.in_splits == 1:
            parts = [input_]
        elif self.input_is_already_split:
            parts = input_
            if len(parts) != self.in_splits:
                raise OrderError(
                    f"the input has {len(parts)} parts, and the layer in_splits={self.in_splits}"
                )
        else:
            sizes = [right - left for left, right in pairwise(self.in_parts)]
            parts = self._split_global_input(input_, sizes)
        outputs = []
        for row, tiles in enumerate(self.linears):
            out = None
            for column, (tile, part) in enumerate(zip(tiles, parts, strict=True)):  # type: ignore[call-overload]
                out = self._reduce_local_output(column, row, out, tile(part))
            outputs.append(out)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Any:
        return split_tensor_along_last_dim(input, split_sizes)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """What the tiles of a row have given so far."""
        return new_out.clone() if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Set the tiles from a whole layer. Raises OrderError for one of another size."""
        shape = (self.out_features, self.in_features)
        if other.weight.shape != shape or (other.bias is not None) != self.use_bias:
            raise OrderError(f"init_linear is {other}: give one of {shape} with bias={self.use_bias}")
        for (start, stop), tiles in zip(pairwise(self.out_parts), self.linears, strict=True):
            for (left, right), tile in zip(pairwise(self.in_parts), tiles, strict=True):  # type: ignore[call-overload]
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    tile.weight.copy_(other.weight[start:stop, left:right])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[start:stop])


class TiledLinearReturnBias(TiledLinear):
    """Tiles of a `linear_cls` that returns its output and its bias apart, as Megatron-LM's do; so does
    this."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias_before = (None, None) if current_out is None else current_out
        output, bias = new_out
        total = super()._reduce_local_output(in_id, out_id, before, output)
        return total, bias_before if bias is None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        combine = super()._combine_output_splits
        return combine([output for output, _ in outputs]), combine(biases) if biases else None
