"""The parts of a batch: labels are shifted on the whole sequence, then all that has a value for each token is
padded, and cut.

Communication: none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyreme.errors import BatchError
from polyreme.models.huggingface import IGNORED_LABEL
from polyreme.sequence.documents import Documents, shape_of
from polyreme.sequence.layout import Layout

LABELS = ("labels", "shift_labels")


def tokens_of(batch: Any) -> Tensor:
    """Return what a batch has of each token, (samples, tokens, ...). Raises BatchError without that."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a batch that is a {type(batch).__name__} cannot be cut over mesh.cp: give a mapping with "
            "input_ids and labels, or set mesh.cp = 1"
        )
    found = next(
        (batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None
    )
    if not isinstance(found, Tensor) or found.dim() < 2 or not found.shape[1]:
        raise BatchError(
            "the batch has neither input_ids nor inputs_embeds of (samples, tokens), which mesh.cp cuts, "
            "with a token or more: add them, or set mesh.cp = 1"
        )
    return found


def shifted(batch: Mapping[str, Any], found: Documents, shifts: bool) -> dict[str, Any]:
    """Return a batch whose labels are shifted, where the model's loss would do that (`shifts`); the token
    that begins a document is predicted from none."""
    labels, given = batch.get("labels"), batch.get("shift_labels")
    if labels is None and given is None:
        return {**batch}
    for name in LABELS:
        if batch.get(name) is not None and (shape := shape_of(batch[name])) != [*found.of.shape]:
            raise BatchError(
                f"{name} of {shape} are not one for each of the {list(found.of.shape)} "
                "tokens, as mesh.cp needs to cut them: set mesh.cp = 1"
            )
    if not shifts:
        return {**batch}
    if labels is not None and given is not None:
        raise BatchError(
            "the batch has labels and shift_labels: give labels, which are shifted by one before "
            "sequences are cut, or shift_labels alone, which are taken as they are"
        )
    if labels is not None:
        given = pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        given = given.masked_fill(found.last.to(given.device), IGNORED_LABEL)
    return {**batch, "labels": given, "shift_labels": given}


def part_of(name: str, value: Any, found: Documents, layout: Layout) -> Any:
    """Return this rank's part of one value of a batch. Raises BatchError for a tensor that has none."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if not _has_tokens(name, value, found):
        raise BatchError(
            f"{name} of {list(value.shape)} cannot be cut over mesh.cp, which takes tensors of "
            f"{list(found.of.shape)}, a value for each token: leave it out, or set mesh.cp = 1"
        )
    return layout.part(padded(name, value, found, layout))


def whole_of(name: str, value: Any, found: Documents, layout: Layout, filler: int) -> Any:
    """Return a value of a batch for a model that sees images or sounds: of labels this rank's part, of others
    that have a value for each token the whole, padded by tokens `filler`."""
    if name in LABELS:
        return part_of(name, value, found, layout)
    if not isinstance(value, Tensor) or not _has_tokens(name, value, found):
        return value
    return padded(name, value, found, layout, filler)


def _has_tokens(name: str, value: Tensor, found: Documents) -> bool:
    """Return whether a tensor has a value for each token; positions in images have several."""
    return (value.shape[-2:] if name == "position_ids" else value.shape[:2]) == found.of.shape


def padded(name: str, value: Tensor, found: Documents, layout: Layout, filler: int | None = None) -> Tensor:
    """Return a tensor with the tokens of padding: labels that are ignored, positions from 0 on, and else the
    last token again; or where there is a `filler`, that token, and 0 for what tells of tokens."""
    extra = layout.parts.padded - found.of.shape[1]
    if not extra:
        return value
    if name == "position_ids":
        more = torch.arange(extra, device=value.device).expand(*value.shape[:-1], extra)
        return torch.cat([value, more], -1)
    more = value[:, -1:].expand(-1, extra, *value.shape[2:])
    if name in LABELS:
        more = torch.full_like(more, IGNORED_LABEL)
    elif filler is not None and not value.is_floating_point():
        more = torch.full_like(more, filler if name == "input_ids" else 0)
    return torch.cat([value, more], 1)
