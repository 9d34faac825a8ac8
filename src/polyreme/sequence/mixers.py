"""Modules that mix the tokens of a sequence without attention (Mamba, gated delta nets, short convolutions):
each gets whole documents, and gives back this rank's tokens.

Invariant: a document is run by itself, padding too, so that its state begins anew; a rank runs those of which
it has tokens, all of each. So a document on n ranks is computed n times.
Communication: with b the elements of a rank's input, (n-1) b forward and (n-1) b backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.sequence.parts import Parts


@dataclass(frozen=True)
class Pieces:
    """The documents of which a rank has tokens. places: of those of one length, the places of their tokens in
    all samples, (documents, tokens). mine: where a rank's tokens are among all of these, (samples,
    tokens)."""

    places: list[Tensor]
    mine: Tensor

    @classmethod
    def of(cls, documents: Tensor, order: Tensor) -> Pieces:
        """Return them, by the document of each token and the places of the rank's, (samples, tokens)."""
        samples, length = documents.shape
        rows = torch.arange(samples)[:, None]
        apart = documents + rows * (int(documents.max()) + 1)
        _, run, counts = torch.unique_consecutive(apart.flatten(), return_inverse=True, return_counts=True)
        begins, flat = counts.cumsum(0) - counts, order + rows * length
        wanted = run[flat].unique()
        places = [
            begins[wanted[counts[wanted] == each], None] + torch.arange(each)
            for each in counts[wanted].unique().tolist()
        ]
        found = torch.zeros(samples * length, dtype=torch.long)
        taken = torch.cat([each.flatten() for each in places])
        found[taken] = torch.arange(len(taken))
        return cls(places, found[flat])


@dataclass(frozen=True)
class Whole:
    """What a mixer needs to get whole documents: the ranks, their parts, and this rank's pieces."""

    axis: Axis
    parts: Parts
    pieces: Pieces

    def run(
        self, what: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the output of a mixer's forward for this rank's tokens, where its arguments of (samples,
        tokens, ...) are given whole. Raises ModelError where it gets none. what: names the mixer in
        errors."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        shape = self.pieces.mine.shape
        tokens = {
            at for at, each in enumerate(leaves) if isinstance(each, Tensor) and each.shape[:2] == shape
        }
        if not tokens:
            raise ModelError(
                f"{what} gets nothing of the {shape[1]} tokens of this rank's part of the sequence, which it "
                "would mix: set mesh.cp = 1"
            )
        whole = [_Gather.apply(each, self) if at in tokens else each for at, each in enumerate(leaves)]
        outputs = []
        for places in self.pieces.places:
            given = [each.flatten(0, 1)[places] if at in tokens else each for at, each in enumerate(whole)]
            of_piece, kwargs_of_piece = pytree.tree_unflatten(given, spec)
            outputs.append(forward(*of_piece, **kwargs_of_piece))
        several = zip(*map(pytree.tree_leaves, outputs), strict=True)
        return pytree.tree_unflatten([self._mine(e) for e in several], pytree.tree_structure(outputs[0]))

    def _mine(self, values: tuple[Any, ...]) -> Any:
        """Return this rank's tokens of the outputs for each length; what has no values of tokens is that of
        the first."""
        shapes = [places.shape for places in self.pieces.places]
        if [each.shape[:2] if isinstance(each, Tensor) else None for each in values] != shapes:
            return values[0]
        return torch.cat([each.flatten(0, 1) for each in values])[self.pieces.mine]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Whole) -> Tensor:
        ctx.whole, axis = whole, whole.axis
        parts = axis.gathered(part.contiguous().view(-1)).view(axis.size, *part.shape)
        return whole.parts.joined(parts.movedim(0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        whole: Whole = ctx.whole
        ranks, wide = range(whole.axis.size), torch.promote_types(grad.dtype, torch.float32)
        full = torch.stack([whole.parts.mine(grad, rank) for rank in ranks]).to(wide)
        part = torch.empty_like(full[0])
        whole.axis.reduce_scatter(
            part.view(-1), full.view(-1), of=" of gradients of whole documents"
        ).settle()
        return part.to(grad.dtype), None
