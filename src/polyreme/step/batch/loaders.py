"""An engine's loaders: whose place in the data its checkpoints keep.

Communication: none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.data import Loader
from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError, DataError


class Loaders:
    """The loaders without an end that an engine has made, in their order, and where those begin that are
    still to be made."""

    def __init__(self, mesh: Mesh, size: int, seed: int, shuffle: bool) -> None:
        """size: of a global batch, in samples. seed, shuffle: of those that are given none."""
        self._mesh, self._size, self._seed, self._shuffle = mesh, size, seed, shuffle
        self._made: list[Loader] = []
        self._coming: list[Mapping[str, Any]] = []

    def make(self, dataset: Any, options: Mapping[str, Any]) -> Loader:
        """See `Engine.loader`."""
        data = self._mesh.data
        defaults = {
            "batch_size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "pin": self._mesh.device.type == "cuda",
        }
        known = inspect.signature(Loader).parameters.keys() - {"dataset", "rank", "world"}
        if unknown := sorted(options.keys() - known):
            raise BatchError(
                f"engine.loader has no option {unknown[0]}, but {', '.join(sorted(known))} (workers are "
                "threads). For torch's own, as processes, iterate over torch.utils.data.DataLoader(dataset, "
                f"{self._size // data.size}, sampler=DistributedSampler(dataset, "
                "engine.mesh.dp.size, engine.mesh.dp.rank), drop_last=True, num_workers=...)"
            )
        made = Loader(dataset, rank=data.rank, world=data.size, **{**defaults, **options})
        if made.epochs is None:
            if self._coming:
                made.load_state_dict(self._coming.pop(0))
            self._made.append(made)
        return made

    def state_dict(self) -> list[Mapping[str, Any]]:
        """The place of each in the data."""
        return [loader.state_dict() for loader in self._made] or list(self._coming)

    def load_state_dict(self, places: Sequence[Mapping[str, Any]]) -> list[str]:
        """Go on from what `state_dict` gave. Returns what there is to say of it."""
        notes = []
        for loader, place in zip(self._made, places, strict=False):
            try:
                loader.load_state_dict(place)
            except DataError as error:
                notes.append(f"the data begins anew: {error}")
        self._coming = list(places[len(self._made) :])
        return notes
