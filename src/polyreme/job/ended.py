"""Whether a run has ended already, and what a config says otherwise than a checkpoint's.

Invariant: only looks, and imports no torch: the command answers at once where nothing is to do."""

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
    "seed",
    "data.path",
    "data.pattern",
    "data.field",
    "data.sequence",
    "data.tokenizer",
    "data.vocab_size",
    "data.validation",
    "data.shuffle",
)
"""The keys that decide which sample comes when."""
NOT_TOLD = (
    "checkpoint",
    "monitor",
    "launch",
    "data.cache",
    "data.workers",
    "train.sample",
    "train.sample_tokens",
    "model.trust_remote_code",
    "batch.size",
)
"""Sections and keys that change nothing of what is computed; and that of which the engine speaks itself."""
EFFECTS = {
    **dict.fromkeys(ORDER, "the training data begins anew"),
    "lr_schedule": "the learning rate follows the new schedule from here on",
}


def ended(config: Config) -> str | None:
    """What to say of the run of the resolved `config` where its newest checkpoint is whole, of the same
    model, and its end. None where there is something to do, or telling takes a closer look
    (`polyreme.job.resume`)."""
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
    lines = [told(key, *values) for key, values in changes.items()]
    return nothing_to_do(config, str(newest), progress.steps, progress.tokens, lines)


def is_end(checkpoint: Path, config: Config) -> bool:
    """Whether a whole checkpoint is the end of a run of such a length."""
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
    """That the run has ended, with what the config says otherwise since, and how to go on."""
    said = f"nothing to do: {checkpoint} is the end of this run, with {steps:,} steps and {tokens:,} tokens"
    fix = (
        f"raise train.length (now {config.train.length}) to go on from there, or begin anew with --no-resume"
    )
    return printable("\n".join([said, *(f"changed since then: {change}" for change in changes), fix]))


def changed_keys(before: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """The keys that have another value in `config`, with the value they had and the one they have; of tables,
    the keys in them."""
    now = config.model_dump(mode="json")
    found: dict[str, tuple[Any, Any]] = {}
    for key in LEAVES:
        section, _, name = key.rpartition(".")
        there, here = (tree.get(section, {}) if section else tree for tree in (before, now))
        if not isinstance(there, dict) or name not in there or there[name] == here[name]:
            continue
        if section in NOT_TOLD or key in NOT_TOLD:
            continue
        old, new = there[name], here[name]
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {
                f"{key}.{n}": (old.get(n), new.get(n))
                for n in sorted({*old, *new})
                if old.get(n) != new.get(n)
            }
        else:
            found[key] = old, new
    return found


def told(key: str, before: Any, now: Any) -> str:
    """A change of a key in a line, with what it does."""
    effect = EFFECTS.get(key) or EFFECTS.get(key.partition(".")[0])
    return f"{key} = {toml(now)}, and was {toml(before)}{f': {effect}' if effect else ''}"


def standing(folder: str | Path) -> frozenset[tuple[Path, int]]:
    """What in a run's folder bears the name of a checkpoint, each with when it was written: the same name may
    be written anew."""
    return frozenset((each, each.lstat().st_mtime_ns) for each in Path(folder).glob("step-*"))
