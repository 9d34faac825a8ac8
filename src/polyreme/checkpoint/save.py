"""Writes a checkpoint: a Hugging Face directory with the optimizer's states beside the weights.

Invariants: the directory at the path is complete, old or new, at any instant; a failure on one rank is an
error on every rank; each number is written by one rank that holds it. Communication (over an axis of its own,
as all of it may go on while training does): the names and shapes of tensors; whether rank 0 made the files;
the contribution of each rank to their checksums; whether rank 0 gave the directory its name."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor, nn

from polyreme.checkpoint import checksum, manifest, ownership
from polyreme.checkpoint.collective_errors import collectively, reason
from polyreme.checkpoint.copy_on_write import BLOCK, BackgroundAccess
from polyreme.checkpoint.manifest import File, Resume
from polyreme.checkpoint.run_directory import RUN_CLAIM, exchange, sync
from polyreme.checkpoint.safetensors import CODES, DTYPES
from polyreme.checkpoint.sources import MODEL, TensorInfo, Tensors
from polyreme.checkpoint.writer import BUFFERS, PACKERS, FileLayout, Name, Writer, combine
from polyreme.distributed.mesh import Axis
from polyreme.distributed.watch import BACKGROUND
from polyreme.distributed.world import Resource, current
from polyreme.errors import CheckpointError
from polyreme.files.folder_lock import Claim, holder
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import Region, Stored
from polyreme.models.huggingface import save_config
from polyreme.offload.host import report_memory, share


@dataclass(frozen=True)
class Payload:
    """The contents of a checkpoint that come from this rank.

    regions: its shards of parameters and states. buffers: each with all its names; the first rank that has
    one writes it. saved_name: chooses, of all names of a tensor, the one in the file. small: writes the files
    without tensors (rank 0). resume: the content of resume.json without `files` and `rng`; rng: the states of
    this rank's random numbers. limit: bytes of tensors in one file, at most. shared_files: several ranks may
    write to one file. weights: begins the names of the files with the weights. storages: addresses of the
    memory that scripts see as parameters."""

    regions: Sequence[Region]
    buffers: Sequence[tuple[Sequence[str], Tensor]]
    saved_name: Callable[[Sequence[str]], str]
    small: Callable[[Path], None]
    resume: Resume
    rng: Mapping[str, Any]
    limit: int
    shared_files: bool
    weights: str
    storages: Collection[int] = ()


class _UnderWay(Resource):
    """The threads of saves under way, of all engines of a world, which share the connections between
    ranks."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def close(self) -> None:
        """Wait for its end, as its exchanges between ranks are broken off."""
        while self.threads:
            self.threads.pop().join()


class Saver:
    """Writes the checkpoints of one engine, one at a time; in the background, if asked to."""

    def __init__(self, open_axis: Callable[[], Axis]) -> None:
        """open_axis: opens an axis over all ranks that is used only here, so that a save can communicate
        while training does; all ranks must call it."""
        self.axis = cache(open_axis)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._access = BackgroundAccess()

    def save(self, path: Path, make: Callable[[], Payload], background: bool = False) -> None:
        """Write what `make` returns as the checkpoint `path`. All ranks must call. In the background, an
        error is raised by the next `wait` or `save`, and `wait_until_copied` must be called before anything
        but buffers changes. Where a rank's regions are not all in memory, or copies have no room, it is
        written before this returns. Raises CheckpointError."""
        self.wait()
        self.idle()
        made: list[Payload] = []
        _collectively(path, self.axis(), partial(self._begin, path, make, made), ())
        if not background or not self._fits(made[0]):
            write(path, made[0], self.axis(), BackgroundAccess())
            return
        _collectively(path, self.axis(), lambda: made.append(apart(made.pop())), ())
        self._access = BackgroundAccess()
        arguments = (path, made[0], self._access, side_stream())
        atexit.register(self._tell)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"{BACKGROUND}-{path.name}")
        self._thread.start()
        current().of(_UnderWay).threads.append(self._thread)

    def _begin(self, path: Path, make: Callable[[], Payload], made: list[Payload]) -> None:
        if self.axis().rank == 0:
            ownership.check(path)
            if user := holder(path.parent, RUN_CLAIM):
                raise CheckpointError(
                    f"{path.parent} is the folder of a run, {user}: let it end, or save to another folder"
                )
        made.append(make())

    def _fits(self, payload: Payload) -> bool:
        """Whether it can be written in the background: on every rank all regions are in memory, and there is
        room for the copies made before writing. All ranks must call."""
        reports: list[Any] = self.axis().gather_objects(
            {
                "there": not any(isinstance(region.data, Stored) for region in payload.regions),
                "copied": sum(tensor.nbytes for tensor in _copied(payload)),
                **report_memory(),
            }
        )
        room = share(reports)
        fits = all(each["there"] for each in reports) and reports[self.axis().rank]["copied"] <= room
        return all(self.axis().gather_objects(fits))

    def wait(self) -> None:
        """Wait until the save under way is complete. Raises the error that it met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._tell)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait_until_copied(self) -> None:
        """Wait until the background has written or copied all weights and states, so that they may change."""
        if self._thread is not None:
            self._access.take_back()

    @property
    def failed(self) -> bool:
        """Whether a save in the background met an error that was not raised yet."""
        return self._error is not None

    @staticmethod
    def idle() -> None:
        """Wait until no engine of this world is writing."""
        threads = current().of(_UnderWay).threads
        while threads:
            threads.pop().join()

    def _tell(self) -> None:
        """Print at exit an error that neither `wait` nor `save` raised; but not that another rank ended."""
        if isinstance(self._error, CheckpointError):
            print(f"polyreme: {self._error}", file=sys.stderr)

    def _run(
        self, path: Path, payload: Payload, access: BackgroundAccess, stream: torch.cuda.Stream | None
    ) -> None:
        try:
            if not payload.shared_files:  # ranks wait for each other then, and nobody knows how long
                copies: list[Payload] = []
                with torch.cuda.stream(stream):
                    _collectively(path, self.axis(), lambda: copies.append(with_regions(payload)), ())
                payload = copies[0]
                access.give_back()
            write(path, payload, self.axis(), access, stream)
        except Exception as error:
            self._error = error
        finally:
            access.give_back()


class CheckpointBytes(NamedTuple):
    """What checkpoints take of a rank at most, in bytes, beside what is there between steps. save: of host
    memory, for a save that training waits for. background: for one that it does not wait for, the most of
    which is taken where the next update comes before anything is written. load, load_device: to load one, of
    host memory and of the device's. files: all files of tensors together."""

    save: int
    background: int
    files: int
    load: int = 0
    load_device: int = 0


def tensors_like(
    regions: Sequence[Region], shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Collection[str]]
) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of a checkpoint, by kind and name, of which this rank has some `regions`. shapes: of
    the weights, by their names in it. kinds: what a weight has, where that is not all that any has."""
    forms = {r.kind: (r.data.dtype, bool(r.whole)) for r in sorted(regions, key=lambda r: len(r.whole))}
    found: dict[str, dict[str, TensorInfo]] = {MODEL: {}}
    for kind, (dtype, is_whole) in forms.items():
        names = (name for name in shapes if kind in kinds.get(name, forms))
        found[kind] = {name: TensorInfo(shapes[name] if is_whole else (), dtype) for name in names}
    return found


def needed(payload: Payload, tensors: Tensors, ranks: int) -> CheckpointBytes:
    """Return what it takes to save the payload of one of so many ranks, where its host has room. tensors:
    those of the whole checkpoint, by their names in it."""
    layout = FileLayout.of(tensors, payload.limit, payload.weights)
    jobs = len(Writer(layout, Path()).jobs((*_regions(payload), *_buffers(payload))))
    files = sum(layout.sizes) + sum(map(len, layout.indices.values()))
    stored = any(isinstance(each.data, Stored) for each in payload.regions)
    alone = payload.shared_files or ranks == 1
    # who collects has the block that is written, and the next one
    host = BLOCK * (min(jobs, BUFFERS) + PACKERS * stored if alone else 2)
    copied = sum(tensor.nbytes for tensor in _copied(payload)) + (BLOCK * jobs if alone else host)
    return CheckpointBytes(host, host if stored else copied, files)


def _copied(payload: Payload) -> Iterator[Tensor]:
    """The tensors to copy before a save in the background: those that may change without notice (buffers in a
    forward, parameters by a script); and all of them where ranks wait for each other in writing."""
    yield from (buffer for _, buffer in payload.buffers)
    for region in payload.regions:
        if isinstance(region.data, Tensor):
            yield from [region.data] * (_is_shown(region.data, payload) + (not payload.shared_files))


def _is_shown(data: Tensor, payload: Payload) -> bool:
    """Whether the tensor shares its memory with a parameter that scripts see."""
    return address(data) in payload.storages


def address(tensor: Tensor) -> int:
    """Return a number that only tensors of one memory share, on the meta device, too."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def apart(payload: Payload) -> Payload:
    """Return the payload with copies, in host memory, of the tensors that may change without notice."""
    buffers = [(names, buffer.detach().to("cpu", copy=True)) for names, buffer in payload.buffers]
    regions = [
        _copy(each) if isinstance(each.data, Tensor) and _is_shown(each.data, payload) else each
        for each in payload.regions
    ]
    return replace(payload, buffers=buffers, regions=regions)


def with_regions(payload: Payload) -> Payload:
    """Return the payload with copies, in host memory, of weights and states, which an update changes."""
    return replace(payload, regions=[_copy(each) for each in payload.regions])


def _copy(region: Region) -> Region:
    assert isinstance(region.data, Tensor), "what is not in memory is not written in the background"
    return replace(region, data=region.data.detach().to("cpu", copy=True))


def side_stream() -> torch.cuda.Stream | None:
    """Return a second CUDA stream, which begins after the work that the current one has now; None without a
    GPU."""
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def write(
    path: Path,
    payload: Payload,
    axis: Axis,
    access: BackgroundAccess,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Write the checkpoint `path`, with all ranks of the axis. access, stream: see `Writer.write`. Raises
    CheckpointError on every rank if any failed."""
    save = _Save(path, payload, axis)
    try:
        _collectively(path, axis, save.prepare, save.layout)
        _collectively(path, axis, save.check_visible, save.layout)  # before `fill`, in which ranks exchange
        contributions = _collectively(path, axis, lambda: save.fill(access, stream), save.layout)
        _collectively(path, axis, lambda: save.finish(contributions), save.layout)
    except CheckpointError:
        save.remove()
        raise
    finally:
        save.close()


class _Save:
    """One checkpoint while it is written, in the folder `path.tmp`, by all ranks of the axis."""

    def __init__(self, path: Path, payload: Payload, axis: Axis) -> None:
        """All ranks must call."""
        self._path, self._payload, self._axis = path, payload, axis
        self._unfinished = path.with_name(path.name + ".tmp")
        self._regions, buffers = _regions(payload), _buffers(payload)
        mine = [
            [*name, list(region.whole), CODES.get(region.data.dtype, str(region.data.dtype))]
            for name, region in (*self._regions, *buffers)
        ]
        report = {"path": str(path), "tensors": mine, "rng": payload.rng, **report_memory()}
        self._reports: list[Any] = axis.gather_objects(report)
        writer_of: dict[Name, int] = {}
        for rank, each in enumerate(self._reports):
            for kind, name, *_ in each["tensors"]:
                writer_of.setdefault((kind, name), rank)
        self._regions += [(key, region) for key, region in buffers if writer_of[key] == axis.rank]
        self.layout: list[FileLayout] = []
        """Empty, and from `prepare` on the only one."""
        self._claim: Claim | None = None

    def prepare(self) -> None:
        """Lay out the files, and create them on rank 0."""
        if self._path != Path(self._reports[0]["path"]):
            raise CheckpointError(
                f"it was to be {self._path}, and of rank 0 {self._reports[0]['path']}: "
                "give all ranks the same path"
            )
        tensors: dict[str, dict[str, TensorInfo]] = {}
        for report in self._reports:
            for kind, name, shape, code in report["tensors"]:
                if code not in DTYPES:
                    raise CheckpointError(
                        f"tensor {name!r} of {code} cannot be saved: safetensors has no such dtype"
                    )
                tensors.setdefault(kind, {})[name] = TensorInfo(tuple(shape), DTYPES[code])
        self.layout.append(FileLayout.of(tensors, self._payload.limit, self._payload.weights))
        if self._axis.rank == 0:
            ownership.check(self._path)
            token, own = uuid4().hex, ownership.UNFINISHED
            self._claim = Claim(self._unfinished, token, own, keep=True, error=CheckpointError)
            ownership.clear(self._unfinished)
            (self._unfinished / manifest.NAME).unlink(missing_ok=True)
            self.layout[0].create(self._unfinished)

    def check_visible(self) -> None:
        """Raise CheckpointError where this rank does not see the folder that rank 0 made."""
        if not self._unfinished.is_dir():
            raise CheckpointError(
                f"it does not see {self._unfinished}, which rank 0 made: give a folder that all hosts share"
            )

    def fill(self, access: BackgroundAccess, stream: torch.cuda.Stream | None) -> dict[int, int]:
        """Write this rank's regions. Returns its contribution to each file's checksum."""
        writer = Writer(self.layout[0], self._unfinished)
        beside = partial(self._payload.small, self._unfinished) if self._axis.rank == 0 else None
        if self._payload.shared_files or self._axis.size == 1:
            return writer.write(self._regions, access, stream, beside, room=share(self._reports))
        return writer.collect(self._regions, self._axis, beside)

    def finish(self, contributions: Sequence[Mapping[str, int]]) -> None:
        """Write resume.json, and give the directory its name, on rank 0."""
        if self._axis.rank == 0:
            rng = {str(rank): report["rng"] for rank, report in enumerate(self._reports)}
            by_file = [{int(file): value for file, value in each.items()} for each in contributions]
            resume = replace(self._payload.resume, rng=rng)
            _finish(self._path, self._unfinished, self.layout[0], by_file, resume)

    def remove(self) -> None:
        """Delete the unfinished folder, on the rank that made it."""
        if self._claim is not None:
            with contextlib.suppress(OSError, CheckpointError):
                ownership.remove(self._unfinished)

    def close(self) -> None:
        """Release the claim on the unfinished folder."""
        if self._claim is not None:
            self._claim.close()


def _regions(payload: Payload) -> list[tuple[Name, Region]]:
    return [((region.kind, payload.saved_name(region.names)), region) for region in payload.regions]


def _buffers(payload: Payload) -> list[tuple[Name, Region]]:
    return [((MODEL, payload.saved_name(names)), _whole(names, buffer)) for names, buffer in payload.buffers]


def _whole(names: Sequence[str], buffer: Tensor) -> Region:
    return Region(
        MODEL, names, Cut.whole(tuple(buffer.shape), 1), 0, 0, buffer.detach().contiguous().view(-1)
    )


def _collectively(path: Path, axis: Axis, work: Callable[[], Any], layout: Sequence[FileLayout]) -> list[Any]:
    """Return what `work` returned on each rank. Raises CheckpointError on all ranks if it failed on one.
    layout: empty or one, whose sizes the message about a full disk names."""

    def why(rank: int, error: Exception) -> str:
        return (
            f"the checkpoint {path} was not written, rank {rank}: "
            f"{_reason(error, path, sum(layout[0].sizes) if layout else 0)}"
        )

    return collectively(axis, work, why)


def _reason(error: Exception, path: Path, needed: int) -> str:
    """Say why the checkpoint was not written; `needed`: bytes of its tensors."""
    in_rust = f"(os error {errno.ENOSPC})" in str(error)  # tokenizers is written in Rust
    number = errno.ENOSPC if in_rust else getattr(error, "errno", None)
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return reason(error)
    written = 0
    for each in path.with_name(path.name + ".tmp").rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # of one that gets its last name meanwhile
            written += each.stat().st_blocks * 512
    folder = next(each for each in path.parents if each.is_dir())
    free = shutil.disk_usage(folder).free + written
    return f"{os.strerror(number)}: its tensors need {needed:,} bytes, and {free:,} are free in {folder}"


def _finish(
    path: Path, unfinished: Path, layout: FileLayout, contributions: Sequence[Mapping[int, int]], done: Resume
) -> None:
    """Write resume.json, and give the directory its name. contributions: those of each rank, by file."""
    files = {}
    for i, (file, size, header) in enumerate(zip(layout.files, layout.sizes, layout.headers, strict=True)):
        own = checksum.contribution(header, size - len(header))
        files[file] = File(
            size, checksum.total(size, [own, combine(each.get(i, 0) for each in contributions)])
        )
    for small in sorted(each for each in unfinished.rglob("*") if each.is_file()):
        name = small.relative_to(unfinished).as_posix()
        if name not in (*files, ownership.UNFINISHED):
            text = small.read_bytes()
            files[name] = File(len(text), checksum.total(len(text), [checksum.contribution(text, 0)]))
            _sync_file(small)
    manifest.write(unfinished, replace(done, files=files))
    _sync_file(unfinished / manifest.NAME)
    (unfinished / ownership.UNFINISHED).unlink()
    for folder in (*(each for each in unfinished.rglob("*") if each.is_dir()), unfinished):
        sync(folder)
    _put(unfinished, path)
    sync(path.parent)


def _put(unfinished: Path, path: Path) -> None:
    """Rename the directory to `path`, and delete the checkpoint that had this name, if it is ours. Where the
    file system cannot exchange two names, that one is called `path.old` for an instant."""
    ownership.check(path)
    old = path.with_name(path.name + ".old")
    ownership.remove(old)
    if not path.is_dir() or not any(path.iterdir()):
        unfinished.rename(path)
    elif exchange(unfinished, path):
        unfinished.rename(old)
    else:
        path.rename(old)
        try:
            unfinished.rename(path)
        except OSError:
            old.rename(path)
            raise
    ownership.remove(old)


def _sync_file(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def small_files(
    module: nn.Module, tokenizer: Any, adapters: Mapping[str, Tensor] | None, folder: Path
) -> None:
    """Write to `folder` the files of a Hugging Face model but its weights, PEFT's files with `adapters`, and
    the tokenizer's. adapters: empty without PEFT; None: only the tokenizer's files."""
    if hasattr(module, "save_pretrained") and adapters is not None:
        temporary = folder / "config"
        save_config(module, temporary, adapters)
        for file in temporary.iterdir():
            if not file.name.startswith("model.safetensors"):
                file.rename(folder / file.name)
        shutil.rmtree(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
