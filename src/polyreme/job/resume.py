"""Decide where a run of `polyreme train` begins, newly or from which checkpoint, and how its config differs
from that checkpoint's.

Invariant: reads only, so it can be asked before any rank starts. In a run rank 0 asks for all.
Communication: none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyreme.checkpoint import ownership
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.load import Wanted, match
from polyreme.checkpoint.run_directory import RunDirectory, progress_of, step_of
from polyreme.config import Config
from polyreme.data import load_tokenizer
from polyreme.distributed.mesh import Axis
from polyreme.errors import CheckpointError, ConfigError, DataError, Problem, named
from polyreme.job.ended import ORDER, change_line, changed_keys
from polyreme.models.huggingface import base_prefix, file_names
from polyreme.planner.meta_model import meta_model


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: plain values, which can be sent to other ranks."""

    checkpoints: list[str] = field(default_factory=list)
    """Checkpoints to go on from, the first that can be read; empty where the run begins newly."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that cannot be opened, and why."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The extra state in the first checkpoint."""
    steps: int = 0
    tokens: int = 0
    changes: list[str] = field(default_factory=list)
    """Changes of the config since the first checkpoint, a line each."""
    same_data: bool = True
    """Whether the samples come in the same order as in the first checkpoint's run."""
    finished: bool = False
    """Whether the first checkpoint is the end of the run that the config asks for."""


def find_beginning(config: Config) -> Beginning:
    """Decide where the run that the resolved `config` describes begins.

    Raises ConfigError where there are checkpoints but none can be gone on from, or they are of another
    model."""
    section, key = config.checkpoint, "checkpoint.folder"
    folder = RunDirectory(section.folder)
    if section.resume == "never":
        _check_names(config, folder, -1)
        return Beginning()
    paths, source, damaged = _open(folder.candidates())
    wanted = origin(config)
    if wanted is not None and (
        source is None or source.resume is None or source.resume.extra.get("origin") != wanted
    ):
        key = "checkpoint.resume"
        given = Path(section.resume).expanduser()
        paths, source, damaged = _open(RunDirectory(given).candidates() or [given])
    if source is None or source.resume is None:
        if damaged and key == "checkpoint.resume":
            raise ConfigError([nothing_to_go_on_from(config, key, damaged.values())])
        _check_names(config, folder, -1)
        if damaged:
            raise ConfigError([nothing_to_go_on_from(config, key, damaged.values())])
        return Beginning()
    _check_names(config, folder, step_of(source.path) if source.path.parent == folder.path else -1)
    _check_model(config, source)
    changed = changed_keys(source.resume.config, config)
    progress = progress_of(source.path)
    return Beginning(
        checkpoints=[str(path) for path in paths],
        damaged={str(path): reason for path, reason in damaged.items()},
        extra=dict(source.resume.extra),
        steps=progress.steps if progress else 0,
        tokens=progress.tokens if progress else 0,
        changes=[change_line(name, *values) for name, values in changed.items()],
        same_data=changed.keys().isdisjoint(ORDER),
        finished=progress is not None and config.train.length.reached(progress),
    )


def _check_names(config: Config, folder: RunDirectory, after: int) -> None:
    """Raise ConfigError where something else has the name of a checkpoint that the run will write, of a step
    beyond `after`."""
    if taken := folder.foreign(after):
        names = named([path.name for path in taken])
        reason = (
            f"{names} in it would be replaced by checkpoints of "
            f"this run, and is none: {ownership.why_not(taken[0])}"
        )
        fix = "move that away, or give another folder"
        raise ConfigError([Problem("checkpoint.folder", config.checkpoint.folder, reason, fix)])


def origin(config: Config) -> str | None:
    """Return the absolute path that the config names to begin from; None if it names none. The run's own
    checkpoints, which record it, take precedence."""
    named = config.checkpoint.resume
    return None if named in ("auto", "never") else str(Path(named).expanduser().resolve())


def _open(paths: Sequence[Path]) -> tuple[Sequence[Path], Directory | None, dict[Path, str]]:
    """Find the first of `paths` that can be gone on from. Returns it and those after it, its open directory,
    and the reasons against those before it."""
    damaged: dict[Path, str] = {}
    for at, path in enumerate(paths):
        try:
            source = Directory(path)
            if source.resume is not None:
                return paths[at:], source, damaged
            damaged[path] = f"{path} has weights, but no resume.json"
        except CheckpointError as error:
            damaged[path] = str(error)
    return [], None, damaged


def nothing_to_go_on_from(config: Config, key: str, damages: Iterable[str]) -> Problem:
    """Return the problem that none of the checkpoints that `key` names can be read, with the reasons."""
    reasons = "; ".join(damages)
    if key == "checkpoint.resume":
        fix = (
            "name a checkpoint of Polyreme, or a folder of them; to begin "
            "anew with the weights of any other directory, set model.path"
        )
        return Problem(key, config.checkpoint.resume, f"no run can go on from it ({reasons})", fix)
    fix = "give another folder, or --no-resume to begin anew in this one"
    return Problem(
        key, config.checkpoint.folder, f"no run can go on from the checkpoints in it ({reasons})", fix
    )


def _check_model(config: Config, source: Directory) -> None:
    """Raise ConfigError where the checkpoint is of another model than the config's."""
    tokenizer = config.data.tokenizer or source.path
    try:
        vocabulary = len(load_tokenizer(tokenizer))
    except DataError:
        vocabulary = None
    model = meta_model(config.model, vocabulary)
    names: dict[int, list[str]] = {}  # all names of a shared tensor
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    wanted = [Wanted(each, tuple(tensors[each[0]].shape)) for each in names.values()]
    renamed = file_names(model, {name: tensor.shape for name, tensor in tensors.items()})
    found = match(source, wanted, renamed, base_prefix(model), Axis("alone"))
    if not found.is_exact:
        key = "model.path" if config.model.path is not None else "model.config"
        fix = "give this model another checkpoint.folder, or --no-resume to begin anew in this one"
        raise ConfigError(
            [Problem(key, config.value(key), f"{source.path} is of another model: {found}", fix)]
        )
