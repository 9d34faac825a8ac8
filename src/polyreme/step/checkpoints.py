"""The checkpoints of an engine: when they may be written and read.

Communication: that of `checkpoint.save` and `checkpoint.load`, beside training, over an axis of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme.checkpoint.save import Saver
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.step.engine_state import Loaded, adapters, adapters_alone, content, restore
from polyreme.step.training import Training


class Checkpoints:
    """Saves and loads a `Training`. What a script wrote to weights has been taken in before."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._all: Axis | None = None
        self._saver: Saver | None = None

    def save(
        self, training: Training, path: Path, tokenizer: Any, extra: Mapping[str, Any], **how: bool
    ) -> None:
        """See `Engine.save`; how: `wait` and `adapters_only`."""
        training.sleep.refuse()
        only = adapters_alone(training.contents) if how["adapters_only"] else None
        if self._saver is None:
            self._saver = Saver(self._aside())
        whole = adapters(training.contents)
        self._saver.save(
            path,
            lambda: content(training.contents, tokenizer, extra, whole, only),
            background=not how["wait"],
        )

    def load(self, training: Training, path: Path, strict: bool, weights_only: bool) -> Loaded:
        """See `Engine.load`."""
        training.sleep.refuse()
        self.wait()
        found = restore(training.contents, path, strict, weights_only, self._aside())
        training.note()
        return found

    def wait(self) -> None:
        """Return when the checkpoint that is being written in the background is there. Raises CheckpointError
        where it failed."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait for what is being written, and forget it. Raises CheckpointError where it failed."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def taken(self) -> None:
        """Return when weights and states may change."""
        if self._saver is not None:
            self._saver.taken()

    def tell_failed(self, training: Training) -> None:
        """Raise CheckpointError on every rank, before one and the same step, if a checkpoint being written in
        the background failed."""
        if self._saver is not None:
            if training.step.heard_unsaved:
                training.step.heard_unsaved = False
                self._saver.wait()
            training.step.flags.unsaved = self._saver.failed

    def _aside(self) -> Axis:
        """All ranks, for what may go on beside training, where nothing does now. All must call."""
        Saver.idle()
        if self._all is None:
            self._all = self._mesh.aside()
        return self._all
