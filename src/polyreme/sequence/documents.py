"""The documents of a batch, whose tokens see no other document's: by `document_ids`, by
`cu_seq_lens_q`, or by `position_ids` that begin anew.

Communication: none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from polyreme.errors import BatchError

IDS = ("document_ids", "seq_idx")
"""Keys of a batch that number the document of each token."""
ENDS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens")
"""Keys of a batch that say where its documents begin and end."""
DROPPED = (*IDS, *ENDS, "cu_seq_lens_k", "cu_seqlens_k", "max_length_q", "max_length_k", "attention_mask")
"""Keys that no model gets: what they say is in `Documents`."""


@dataclass(frozen=True)
class Documents:
    """The document of each token, counted in each row from 0; whether others may see it (which is not so of
    padding); its position in the model; and whether the batch says that there are several documents. Tensors
    of (samples, tokens), on the CPU. plain: a position is one number, not several as in images."""

    of: Tensor
    seen: Tensor
    positions: Tensor
    several: bool
    plain: bool = True

    @property
    def last(self) -> Tensor:
        """Whether each token is the last of its document, so that the token after it is none that it
        predicts."""
        ends = torch.ones_like(self.seen)
        ends[:, :-1] = self.of[:, 1:] != self.of[:, :-1]
        return ends


def find(batch: Mapping[str, Any], samples: int, length: int, first: int = 0) -> Documents:
    """Return the documents of a batch of so many samples and tokens. first: the position of a document's
    first token in the model; positions that begin at 0 are counted on from there. Raises BatchError where
    what the batch says of them cannot be."""
    seen, given = _seen(batch, samples, length), batch.get("position_ids")
    plain = not isinstance(given, Tensor) or given.dim() < 3
    positions = _rows(batch, "position_ids", samples, length) if plain else None
    if positions is not None and not positions[:, 0].any():
        positions = positions + first
    begins, said = _begins(batch, positions, seen, first)
    if not plain:  # of images, whose tokens have several: (3 or 4, samples, tokens)
        begins, said = _begins_of_images(cast("Tensor", given), begins, seen), True
    begins[:, 0] = False
    of = begins.cumsum(1)
    if positions is None:
        positions = torch.arange(length).expand(samples, length) + first
        if said:
            positions = places(of) + first
    elif not said:
        _refuse_jumps(positions, begins, seen)
        if (below := (positions < first) & seen).any():
            row, place = below.nonzero()[0].tolist()
            raise BatchError(
                f"position_ids have {int(positions[row, place])} at token {place} of sample {row}, before "
                f"the first position of a document, {first}: count from there on, or say by document_ids "
                "where documents begin"
            )
    return Documents(of, seen, positions, bool(begins.any()), plain)


def _begins_of_images(given: Tensor, begins: Tensor, seen: Tensor) -> Tensor:
    """Return where documents begin, by positions of several numbers for each token, all of which are 0
    there."""
    if given.dim() != 3 or given.shape[1:] != seen.shape:
        raise BatchError(
            f"position_ids of {list(given.shape)} cannot be cut over mesh.cp: give a tensor of "
            f"{[len(given), *seen.shape]}, numbers for each token, or set mesh.cp = 1"
        )
    return begins | ((given.detach().cpu() == 0).all(0) & seen)


def shape_of(value: object) -> list[int] | str:
    """Return the shape of a tensor, or the type of anything else."""
    return [*value.shape] if isinstance(value, Tensor) else type(value).__name__


def places(of: Tensor) -> Tensor:
    """Return the place of each token in its document."""
    index = torch.arange(of.shape[1]).expand(of.shape)
    first = torch.ones_like(of, dtype=torch.bool)
    first[:, 1:] = of[:, 1:] != of[:, :-1]
    return index - torch.where(first, index, 0).cummax(1).values


def _begins(
    batch: Mapping[str, Any], positions: Tensor | None, seen: Tensor, first: int
) -> tuple[Tensor, bool]:
    """Return where documents begin, and whether that is said by another key than `position_ids`."""
    begins = torch.zeros_like(seen)
    ids = next((name for name in IDS if batch.get(name) is not None), None)
    ends = next((name for name in ENDS if batch.get(name) is not None), None)
    if ids is not None and ends is not None:
        raise BatchError(
            f"the batch says by {ids} and by {ends} which documents it has: leave one of them out"
        )
    if ids is not None:
        numbers = cast("Tensor", _rows(batch, ids, *seen.shape))
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        return begins, True
    if ends is not None:
        begins[0, _ends(batch[ends], ends, *seen.shape)[:-1]] = True
        return begins, True
    if positions is not None:
        begins = (positions == first) & seen
    return begins, False


def _ends(given: Any, name: str, samples: int, length: int) -> Tensor:
    """Return the ends of documents of a batch of one row, from 0 on."""
    ends = torch.as_tensor(given).detach().cpu().long()
    if samples != 1:
        raise BatchError(
            f"{name} tells the documents of one row, but the batch has {samples}: flatten it to one, or give "
            "document_ids, or position_ids that begin anew"
        )
    if ends.dim() != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != length or (ends.diff() <= 0).any():
        shown = ends.flatten()[:8].tolist()
        raise BatchError(
            f"{name} = {shown}{'...' if ends.numel() > 8 else ''} must rise from 0 to the {length} tokens of "
            "the row: give the beginning of each document, and the length"
        )
    return ends


def _seen(batch: Mapping[str, Any], samples: int, length: int) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(samples, length, dtype=torch.bool)
    if (shape := shape_of(mask)) != [samples, length]:
        raise BatchError(
            f"attention_mask of {shape} cannot be cut over mesh.cp, which takes one of {[samples, length]} "
            "that marks padding: say by document_ids which tokens see each other, or set mesh.cp = 1"
        )
    return cast("Tensor", mask).detach().cpu().bool()


def _rows(batch: Mapping[str, Any], name: str, samples: int, length: int) -> Tensor | None:
    """Return a number for each token, from a tensor of as many, or of one row for all samples."""
    if (given := batch.get(name)) is None:
        return None
    if (shape := shape_of(given)) not in ([samples, length], [1, length]):
        raise BatchError(
            f"{name} of {shape} cannot be cut over mesh.cp: give a tensor of {[samples, length]}, a number "
            "for each token, or set mesh.cp = 1"
        )
    return cast("Tensor", given).detach().cpu().long().expand(samples, length)


def _refuse_jumps(positions: Tensor, begins: Tensor, seen: Tensor) -> None:
    """Refuse positions that neither go on by one nor begin anew, but for padding."""
    jumps = torch.zeros_like(begins)
    jumps[:, 1:] = (positions.diff(dim=1) != 1) & ~begins[:, 1:] & seen[:, 1:] & seen[:, :-1]
    if jumps.any():
        row, place = jumps.nonzero()[0].tolist()
        before, here = positions[row, place - 1 : place + 1].tolist()
        raise BatchError(
            f"position_ids jump from {before} to {here} at token {place} of sample {row}: a document's go on "
            "by one, and the next document's begin anew at 0; say by document_ids where other ones begin"
        )
