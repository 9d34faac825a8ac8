"""The checkpoints of `polyreme train`: from which one its run begins, when they are written, and which are
deleted.

Invariant: all ranks begin from the same one, and rank 0 alone changes the folder, after every rank has read
what it needs.
Communication: rank 0 sends where to begin; loading and saving, as `Engine` does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from polyreme.checkpoint import ownership
from polyreme.checkpoint.collective_errors import reason
from polyreme.checkpoint.run_directory import RUN_CLAIM, RunDirectory, step_of
from polyreme.config import Config
from polyreme.data import load_tokenizer
from polyreme.distributed.mesh import Mesh
from polyreme.engine import Engine
from polyreme.errors import CheckpointError, ConfigError, DataError, Problem
from polyreme.files.folder_lock import Claim
from polyreme.job.resume import Beginning, find_beginning, nothing_to_go_on_from, origin

PATIENCE = 10.0
"""Seconds that an earlier run gets to leave the folder, as one with much memory takes that long to end."""


@dataclass
class History:
    """The history of a run beyond the engine's state, kept in its checkpoints for a resumed run."""

    origin: str | None = None
    """The path that the config named to begin from; see `resume.origin`."""
    seconds: float = 0.0
    """Seconds spent in training steps."""
    loss: float = math.nan
    """The loss of the last step."""
    first_validation: float | None = None
    last_validation: float | None = None
    bytes_per_token: float | None = None
    """The mean bytes of a token of the validation text, by which a loss is converted to bits per byte."""
    best: Sequence[float] | None = None
    """The step with the lowest validation loss, and that loss, where `checkpoint.keep_best` asks for it."""

    def measured(self, step: int, loss: float, keep_best: bool) -> None:
        """Record a validation loss."""
        self.first_validation = loss if self.first_validation is None else self.first_validation
        self.last_validation = loss
        if keep_best and step and loss < (math.inf if self.best is None else self.best[1]):
            self.best = [step, loss]

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> History:
        """Return the history in a checkpoint's `extra`."""
        return cls(**{each.name: extra[each.name] for each in fields(cls) if each.name in extra})


class Retention:
    """The checkpoints in the run's folder. `say` shows messages to people."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Any, say: Callable[[str], None]) -> None:
        self._config, self._engine, self._tokenizer, self._say = config, engine, tokenizer, say
        self._folder = RunDirectory(config.checkpoint.folder)
        self._writing: Path | None = None
        self._claim: Claim | None = None
        self._history = History()
        self._best = self._best_before = self._history.best  # the best as last saved, and as saved before
        self._step = 0  # saved last
        self._said: set[str] = set()

    def begin(self) -> Beginning:
        """Claim the folder for this run and decide where the run begins, the same on every rank. Loads
        nothing yet.

        Raises CheckpointError where another run has the folder, ConfigError where it cannot begin, and
        DataError where the text has another tokenizer now."""
        from_rank_0(self._engine.mesh, self._take_folder)
        beginning = Beginning(**from_rank_0(self._engine.mesh, self._find_beginning))
        if beginning.checkpoints:
            self._check_tokenizer(Path(beginning.checkpoints[0]))
        return beginning

    def load(self, beginning: Beginning) -> tuple[History, list[str]]:
        """Load the state where the run begins. Returns its history, and messages about it.

        Raises ConfigError where no checkpoint can be read."""
        unreadable = dict(beginning.damaged)
        for name in beginning.checkpoints:
            try:
                loaded = self._engine.load(name)
            except CheckpointError as error:
                unreadable[name] = str(error)
                continue
            history = self._history = History.of(loaded.extra)
            history.origin = origin(self._config) or history.origin
            if not (self._config.checkpoint.keep_best and beginning.same_data and self._is_ours(Path(name))):
                history.best = None  # not asked for, of another text, or in another folder
            self._best = history.best
            return history, [
                *self._pass_over(unreadable),
                *self._resumed(Path(name), beginning),
                *loaded.notes,
            ]
        if unreadable:
            key = (
                "checkpoint.folder"
                if all(self._is_ours(Path(name)) for name in unreadable)
                else "checkpoint.resume"
            )
            raise ConfigError([nothing_to_go_on_from(self._config, key, unreadable.values())])
        aside = self._set_aside()
        later = (
            f"{', '.join(aside)} in {self._folder.path}, of an "
            "earlier run, will go when the first checkpoint is there"
        )
        self._history.origin = origin(self._config)
        return self._history, [later] if aside else []

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint of this step; without `wait`, in the background. Every rank must call. Raises
        CheckpointError."""
        path = self._folder.path / f"step-{self._engine.state.step}"
        self.finish()
        if self._best != self._history.best:
            self._best, self._best_before = self._history.best, self._best
        self._say(f"saving {path}")
        self._step = step_of(path)
        self._engine.save(path, self._tokenizer, extra=asdict(self._history), wait=wait)
        self._writing = path
        self.settle()
        return path

    def finish(self) -> None:
        """Wait for the save in the background. If it failed, say so and let training go on."""
        try:
            self._engine.wait()
        except CheckpointError as error:
            self.failed(error)
        self.settle()

    def failed(self, error: CheckpointError) -> None:
        """Report that a checkpoint could not be written; earlier ones are still there."""
        self._writing = None
        self._say(f"{error}; training goes on")
        if self._best is not None and self._best[0] == self._step:
            if self._history.best == self._best:
                self._history.best = self._best_before
            self._best = self._best_before

    def settle(self) -> None:
        """Once the checkpoint that is being written is complete, point to it, and delete those that are no
        longer kept."""
        path = self._writing
        if path is None or self._engine.mesh.rank != 0 or not path.is_dir():
            return
        self._writing = None
        section = self._config.checkpoint
        best = None if self._best is None else int(self._best[0])
        folder = self._folder
        point, point_to_best = partial(folder.point, path), partial(folder.point_to_best, best)
        prune = partial(folder.prune, section.keep, section.keep_every, best)
        for change in (point, point_to_best, folder.drop_earlier, prune):
            try:
                change()
            # on a full disk there may be room when older ones have gone
            except (OSError, CheckpointError) as error:
                said = f"{self._folder.path} could not be brought up to date: {error}"
                if said not in self._said:
                    self._said.add(said)
                    self._say(said)

    def close(self) -> None:
        """Release the folder to other runs."""
        if self._claim is not None:
            self._claim.close()

    def _take_folder(self) -> None:
        self._claim = Claim(
            self._folder.path, uuid4().hex, RUN_CLAIM, patience=PATIENCE, error=CheckpointError
        )

    def _find_beginning(self) -> dict[str, Any]:
        self._folder.tidy()
        return asdict(find_beginning(self._config))

    def _check_tokenizer(self, checkpoint: Path) -> None:
        try:
            tokenizer = load_tokenizer(checkpoint)
        except DataError:  # it was saved without one
            return
        if tokenizer.get_vocab() != self._tokenizer.get_vocab():
            raise DataError(
                "the tokens of the text are not those that the model of "
                f"{checkpoint} knows: its tokenizer is another now, as the text or "
                f'the config has changed. Set data.tokenizer = "{checkpoint}" '
                "(or a copy of it), or --no-resume to begin anew"
            )

    def _pass_over(self, unreadable: Mapping[str, str]) -> list[str]:
        def rename() -> list[str]:
            notes = []
            for name, why in unreadable.items():
                renamed = self._is_ours(Path(name)) and ownership.carries_manifest(Path(name))
                now = f" (it is now {self._folder.pass_over(Path(name)).name})" if renamed else ""
                notes.append(f"{name} cannot be used{now}: {why}")
            return notes

        return from_rank_0(self._engine.mesh, rename)

    def _set_aside(self, after: int = -1) -> list[str]:
        return from_rank_0(self._engine.mesh, lambda: [path.name for path in self._folder.set_aside(after)])

    def _resumed(self, checkpoint: Path, beginning: Beginning) -> list[str]:
        state = self._engine.state
        after = state.step if self._is_ours(checkpoint) else -1
        aside = self._set_aside(after)
        notes = [f"resumed from {checkpoint}: {state.step:,} steps, {state.tokens:,} tokens"]
        notes += [f"changed since then: {change}" for change in beginning.changes]
        if aside:
            notes.append(
                f"{', '.join(aside)} in {self._folder.path} will go when the first new checkpoint is there"
            )
        return notes

    def _is_ours(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self._folder.path.resolve()


def from_rank_0(mesh: Mesh, question: Callable[[], Any]) -> Any:
    """Return rank 0's answer (what JSON can hold) on every rank. Where it raises, every rank raises."""
    answer, failure = None, None
    try:
        answer = question() if mesh.rank == 0 else None
    except Exception as error:  # whatever it is, the others must not wait for it
        failure = error
    problems = (
        [list(vars(each).values()) for each in failure.problems] if isinstance(failure, ConfigError) else None
    )
    reply = mesh.gather_objects(
        {"answer": answer, "said": failure and f"rank 0: {reason(failure)}", "problems": problems}
    )[0]
    if failure is not None:
        raise failure
    if reply["problems"]:
        raise ConfigError([Problem(*each) for each in reply["problems"]])
    if reply["said"]:
        raise CheckpointError(reply["said"])
    return reply["answer"]
