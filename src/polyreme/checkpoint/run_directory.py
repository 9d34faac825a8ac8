"""The directory of a run: its checkpoints `step-N`, which of them is the newest, and which may be deleted.

Invariants: a directory named `step-N` is complete, because it got that name when all of it was written; the
newest one, the newest whose files are all there and the best are never deleted, and nothing that is not ours
(see `ownership`); whatever instant a process is killed at, `tidy` leaves only complete ones.
Pure: one process (rank 0) changes the folder, any may read it. No communication.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from polyreme.checkpoint import manifest, ownership
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.config import Duration, Progress
from polyreme.errors import CheckpointError
from polyreme.files.direct_io import no_links
from polyreme.files.folder_lock import holder

LATEST = "latest"
"""The file with the name of the newest checkpoint, for people and other programs. We go by the folders
themselves, so it may be old or missing."""
LINK = "latest-checkpoint"
"""The link to the newest checkpoint, which other programs can open like the folder itself. None on a file
system without symbolic links."""
BEST = "best-checkpoint"
"""The link to the checkpoint with the lowest validation loss, where a run keeps that; like LINK."""
EARLIER = ".earlier"
"""The ending of the names of checkpoints that a new run in the same folder will replace; they are kept until
it has one of its own."""
RUN_CLAIM = "polyreme.run"
"""The file by which a live run has the folder to itself (see `Claim`)."""
DAMAGED = ".damaged"
"""The ending of the names of checkpoints that could not be read, and were passed over."""

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""The errors of file systems without symbolic links."""
HERE, EXCHANGE = -100, 2
"""Linux's constants: paths begin at the working directory; `renameat2` exchanges them."""


class RunDirectory:
    """The checkpoints in `path`, a folder that need not exist yet."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def saved(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(self._named(""), key=step_of)

    def newest(self) -> Path | None:
        return next(reversed(self.saved()), None)

    def candidates(self) -> list[Path]:
        """The checkpoints that a run may resume from, newest first; those set aside only if there are no
        others."""
        return list(reversed(self.saved() or sorted(self._named(EARLIER), key=step_of)))

    def point(self, checkpoint: Path) -> None:
        """Make the file `latest` name this checkpoint, and LINK lead to it. A reader at any instant finds a
        whole name."""
        draft = self.path / f"{LATEST}.tmp"
        with open(draft, "w", encoding="utf-8", opener=no_links) as file:
            file.write(f"{checkpoint.name}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / LATEST)
        self._link(LINK, checkpoint)
        sync(self.path)

    def point_to_best(self, step: int | None) -> None:
        """Make the link BEST lead to the checkpoint of this step; remove it where there is no such
        checkpoint."""
        best, link = self.path / f"step-{step}", self.path / BEST
        if best.is_dir():
            self._link(BEST, best)
        elif _leads_to_checkpoint(link):
            link.unlink()

    def _link(self, name: str, checkpoint: Path) -> None:
        """Make the link `name` lead to this checkpoint. It leads to a whole one at any instant. Raises
        CheckpointError where something else has that name."""
        link, draft = self.path / name, self.path / f"{name}.tmp"
        if os.path.lexists(link) and not _leads_to_checkpoint(link):
            raise CheckpointError(f"{link} is there, and is no link to a checkpoint: move it away")
        draft.unlink(missing_ok=True)
        try:
            draft.symlink_to(checkpoint.name, target_is_directory=True)
        except OSError as error:
            if error.errno in NO_LINKS:
                return
            raise
        draft.replace(link)

    def foreign(self, after: int = -1) -> list[Path]:
        """List what is not ours and has a name that a run needs to save a step beyond `after`: step-N,
        step-N.tmp or step-N.old."""
        named = [
            path for path in self.path.glob("step-*") if re.fullmatch(r"step-[0-9]+(\.tmp|\.old)?", path.name)
        ]
        return sorted(
            path
            for path in named
            if step_of(path) > after and not ownership.carries_manifest(path) and ownership.why_not(path)
        )

    def prune(self, keep: int | None, keep_every: Duration | None = None, best: int | None = None) -> None:
        """Delete all checkpoints but the last `keep` (None: delete none), the one of step `best`, and the
        first of each `keep_every`: with "1000 steps" that of step 1000, 2000, ..., or else the next after it.
        Raises CheckpointError for those that are kept because there are other files in them, or they are not
        ours."""
        saved = self.saved()
        old = [] if keep is None else saved[:-keep]
        if not old:
            return
        spared = {
            next((path for path in reversed(saved) if is_whole(path)), None),
            *_first_of_each(saved, keep_every),
            *(path for path in saved if step_of(path) == best),
        }
        _delete(path for path in old if path not in spared)

    def set_aside(self, after: int = -1) -> list[Path]:
        """Rename the checkpoints beyond step `after`, which a new run will replace, to names that end with
        EARLIER, so that none counts as the newest. Returns their old paths."""
        replaced = [
            path for path in self.saved() if step_of(path) > after and ownership.carries_manifest(path)
        ]
        for path in replaced:
            _rename(path, EARLIER)
        return replaced

    def drop_earlier(self) -> None:
        """Delete the checkpoints that were set aside, if the new run has one of its own. Raises
        CheckpointError as `prune` does."""
        if self.saved():
            _delete(self._named(EARLIER))

    def pass_over(self, checkpoint: Path) -> Path:
        """Rename a checkpoint that cannot be read, so that it does not count as the newest again. Returns its
        new path."""
        return _rename(checkpoint, DAMAGED)

    def tidy(self) -> None:
        """Remove the unfinished folders of a dead run; and undo `set_aside` where the run that called it
        saved no checkpoint."""
        for old in self._named(".old"):  # beside a step-N.tmp it was about to be replaced, else to be deleted
            if (
                ownership.carries_manifest(old)
                and old.with_suffix(".tmp").is_dir()
                and not old.with_suffix("").exists()
            ):
                old.rename(old.with_suffix(""))
        for ending in (".tmp", ".old", f"{EARLIER}.old"):
            for leftover in self._named(ending):
                if ownership.why_not(leftover) is None and holder(leftover, ownership.UNFINISHED) is None:
                    ownership.remove(leftover)
        for name in (LATEST, LINK, BEST):
            (self.path / f"{name}.tmp").unlink(missing_ok=True)
        if not self.saved():
            for path in filter(ownership.carries_manifest, self._named(EARLIER)):
                path.rename(path.with_suffix(""))

    def _named(self, ending: str) -> list[Path]:
        pattern = re.compile(rf"step-[0-9]+{re.escape(ending)}")
        return [
            path
            for path in self.path.glob(f"step-*{ending}")
            if pattern.fullmatch(path.name) and path.is_dir()
        ]


def _leads_to_checkpoint(link: Path) -> bool:
    return link.is_symlink() and ownership.STEP.fullmatch(str(link.readlink())) is not None


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-").partition(".")[0])


def progress_of(checkpoint: Path) -> Progress | None:
    """The steps, samples and tokens in the checkpoint's resume.json; None where that cannot be read."""
    try:
        found = manifest.read(checkpoint)
    except CheckpointError:
        return None
    steps, samples, tokens = (
        found.state.get(name) if found else None for name in ("step", "samples", "tokens")
    )
    if not (isinstance(steps, int) and isinstance(samples, int) and isinstance(tokens, int)):
        return None
    return Progress(steps, samples, tokens)


def is_whole(checkpoint: Path) -> bool:
    """Whether a run could resume from the checkpoint: every file is there, in its size. Contents are not
    compared."""
    try:
        return Directory(checkpoint).resume is not None
    except CheckpointError:
        return False


def sync(folder: Path) -> None:
    """Flush the folder's list of files to the disk, so that a rename survives the loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths, at one instant. Returns False, with nothing done, where the system or
    the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(HERE, bytes(one), HERE, bytes(other), EXCHANGE) == 0


def _first_of_each(saved: Iterable[Path], every: Duration | None) -> list[Path]:
    """The first checkpoint at or after each multiple of `every`, in order. Deleting others never changes
    which one that is."""
    if every is None:
        return []
    first: dict[int, Path] = {}
    for path in saved:
        # they may be many, so only names are looked at
        progress = Progress(step_of(path)) if every.unit == "steps" else progress_of(path)
        if progress is not None and every.reached(progress):
            first.setdefault(int(every.count(progress) // every.amount), path)
    return list(first.values())


def _rename(path: Path, ending: str) -> Path:
    target = path.with_name(path.name + ending)
    ownership.remove(target)
    return path.rename(target)


def _delete(paths: Iterable[Path]) -> None:
    """Delete checkpoints, each renamed first, so that no half-deleted one has the name of a checkpoint.
    Raises CheckpointError, at the end, for those that are not ours."""
    left = []
    for path in paths:
        if reason := ownership.why_not(path):
            left.append(f"{path}: {reason}")
        else:
            ownership.remove(_rename(path, ".old"))
    if left:
        raise CheckpointError(
            f"only checkpoints are deleted, and nothing else with them, so these stay: {'; '.join(left)}"
        )
