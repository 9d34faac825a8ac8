"""Find out whether a run has ended already, and how its config differs from a checkpoint's.

Invariant: reads only, and imports no torch: the command answers at once where nothing is left to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.checkpoint import manifest
from polyreme.checkpoint.files import locate
from polyreme.config import Config, Progress
from polyreme.config.describe import toml
from polyreme.config.schema import LEAVES
from polyreme.errors import CheckpointError, printable

ORDER = (
    *("seed", "data.path", "data.pattern", "data.field", "data.sequence"),
    *("data.tokenizer", "data.vocab_size", "data.validation", "data.shuffle"),
)
"""Keys that decide the order of the samples."""
NOT_REPORTED = (
    *("checkpoint", "monitor", "launch", "plan", "data.cache", "data.workers"),
    *("train.sample", "train.sample_tokens", "model.trust_remote_code", "batch.size"),
)
"""Sections and keys whose change is not reported: they do not affect what is computed, or the engine itself
reports them."""
EFFECTS = {
    **dict.fromkeys(ORDER, "the training data begins anew"),
    "lr_schedule": "the learning rate follows the new schedule from here on",
}


def ended(config: Config) -> str | None:
    """Return the message about the run of the resolved `config` if its newest checkpoint is complete, of the
    same model, and its end. None where there is something to do, or only `polyreme.job.resume` can tell."""
    steps = {
        int(path.name[5:]): path
        for path in Path(config.checkpoint.folder).glob("step-*")
        if re.fullmatch(r"step-[0-9]+", path.name)
    }
    if config.checkpoint.resume != "auto" or not steps:
        return None
    newest = steps[max(steps)]
    try:
        found = manifest.read(newest)
        if found is None or any(locate(newest, name)[1] != file.size for name, file in found.files.items()):
            return None
    except CheckpointError:
        return None
    if (progress := _progress(found)) is None:
        return None
    changes = changed_keys(found.config, config)
    if not config.train.length.reached(progress) or any(key.startswith("model.") for key in changes):
        return None
    lines = [change_line(key, *values) for key, values in changes.items()]
    return nothing_to_do(config, str(newest), progress.steps, progress.tokens, lines)


def is_end(checkpoint: Path, config: Config) -> bool:
    """Return whether a complete checkpoint is the end of a run as long as `config` says."""
    try:
        found = manifest.read(checkpoint)
    except CheckpointError:
        return False
    progress = _progress(found) if found is not None else None
    return progress is not None and config.train.length.reached(progress)


def _progress(found: manifest.Resume) -> Progress | None:
    try:
        return Progress(*(int(found.state[name]) for name in ("step", "samples", "tokens")))
    except (KeyError, TypeError, ValueError):
        return None


def nothing_to_do(config: Config, checkpoint: str, steps: int, tokens: int, changes: Sequence[str]) -> str:
    """Return the message that the run has ended, with the changes of the config since, and how to go on."""
    said = f"nothing to do: {checkpoint} is the end of this run, with {steps:,} steps and {tokens:,} tokens"
    fix = (
        f"raise train.length (now {config.train.length}) to go on from there, or begin anew with --no-resume"
    )
    return printable("\n".join([said, *(f"changed since then: {change}" for change in changes), fix]))


def changed_keys(before: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys that have another value in `config` than in `before`, with both values; of tables, the
    keys in them."""
    now = config.model_dump(mode="json")
    found: dict[str, tuple[Any, Any]] = {}
    for key in LEAVES:
        section, _, name = key.rpartition(".")
        there, here = (tree.get(section, {}) if section else tree for tree in (before, now))
        if not isinstance(there, dict) or name not in there or there[name] == here[name]:
            continue
        if section in NOT_REPORTED or key in NOT_REPORTED:
            continue
        old, new = there[name], here[name]
        if config.searched and (new == "auto" or key in config.searched):  # it is not known yet
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {
                f"{key}.{n}": (old.get(n), new.get(n))
                for n in sorted({*old, *new})
                if old.get(n) != new.get(n)
            }
        else:
            found[key] = old, new
    return found


def change_line(key: str, before: Any, now: Any) -> str:
    """Describe the change of a key, and its effect, in a line."""
    effect = EFFECTS.get(key) or EFFECTS.get(key.partition(".")[0])
    return f"{key} = {toml(now)}, and was {toml(before)}{f': {effect}' if effect else ''}"


def checkpoint_entries(folder: str | Path) -> frozenset[tuple[Path, int]]:
    """Return the entries of a run's folder that are named as checkpoints, each with the time when it was
    written, as a name may be written again."""
    return frozenset((each, each.lstat().st_mtime_ns) for each in Path(folder).glob("step-*"))
