"""Sequences divided between ranks, refused: names that scripts import."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from polyreme.compat.deepspeed.refusal import UnsupportedError, refused


def _not_there(name: str) -> UnsupportedError:
    return refused(
        f"deepspeed.runtime.sequence_parallel.ulysses_sp.{name}",
        "Polyreme does not divide sequences between ranks yet",
        "set sequence_parallel_size (sp_size) to 1; ZeRO 3 and recomputation make room for long sequences",
    )


class UlyssesSPAttentionHF(torch.nn.Module):
    """Raises UnsupportedError when it is made or registered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _not_there("UlyssesSPAttentionHF")

    @classmethod
    def register_with_transformers(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_there("UlyssesSPAttentionHF.register_with_transformers")


class UlyssesSPDataLoaderAdapter:
    """Raises UnsupportedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _not_there("UlyssesSPDataLoaderAdapter")


def sequence_tiled_compute(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise UnsupportedError."""
    raise _not_there("sequence_tiled_compute")


class _NotThere:
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise _not_there(cls.__name__)


class SequenceTiledCompute(_NotThere):
    """Raises UnsupportedError when it is applied."""


class TiledMLP(_NotThere):
    """Raises UnsupportedError when it is applied."""


class TiledFusedLogitsLoss(_NotThere):
    """Raises UnsupportedError when it is applied."""
