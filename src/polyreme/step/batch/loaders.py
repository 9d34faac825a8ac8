"""The loaders of an engine, whose place in the data its checkpoints keep.

Communication: none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.data import Loader
from polyreme.distributed.mesh import Mesh
from polyreme.errors import BatchError, DataError


class Loaders:
    """The endless loaders that an engine has made, in order, and the places where those to come begin."""

    def __init__(self, mesh: Mesh, size: int, seed: int, shuffle: bool) -> None:
        """size: samples of a global batch. seed, shuffle: defaults of loaders."""
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

    def place(self) -> str:
        """Return where the batches that were handed out last begin, as the end of a sentence."""
        began = [each.began for each in self._made if each.began is not None]
        return "".join(f"; its data begin at sample {sample} of epoch {epoch}" for epoch, sample in began)

    def state_dict(self) -> list[Mapping[str, Any]]:
        """Return the place of each loader in the data."""
        return [loader.state_dict() for loader in self._made] or list(self._coming)

    def load_state_dict(self, places: Sequence[Mapping[str, Any]]) -> list[str]:
        """Restore the result of `state_dict`. Returns notes for the user."""
        notes = []
        for loader, place in zip(self._made, places, strict=False):
            try:
                loader.load_state_dict(place)
            except DataError as error:
                notes.append(f"the data begins anew: {error}")
        self._coming = list(places[len(self._made) :])
        return notes
