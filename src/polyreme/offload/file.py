"""Extents in files, read ahead and written behind by threads, through reused memory.

Invariants: transfers of one extent run in the order in which they were begun, and none reads an extent that
is still in memory. Only threads that use a tier begin transfers. No communication."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyreme.errors import TierError
from polyreme.files.direct_io import ALIGNMENT, File, aligned, check_space, padded
from polyreme.files.folder_lock import Claim
from polyreme.files.memory_pool import MemoryPool
from polyreme.layout.intervals import round_down
from polyreme.layout.region import Stored
from polyreme.offload.copy_stream import CopyStream
from polyreme.offload.space import Space
from polyreme.offload.store import Opened, Store, Then, add_when

log = logging.getLogger(__name__)

BUFFERS = 5
"""One in use, and, as reads and writes balance, two that are read ahead and two that are written behind."""
THREADS = 2
WRITING = 1
"""Extents that may wait in memory to be written while another is changed, where memory is not of fixed
size."""


class FileStore(Store):
    """Extents in nameless files of `folders`, which are made if need be and are claimed for `run`, if given,
    until `close` (see Claim).

    Extent i is in folder (i + rank) % len(folders), so that ranks which go through their extents together use
    all disks. Takes `buffers` (2 at least to add) times the memory of the largest extent; with 0 buffers,
    which allow no stream, as much as is open at once. `pin` locks it for a device. Raises TierError where a
    folder cannot be used or is another run's."""

    in_memory = False

    def __init__(
        self,
        folders: Sequence[Path | str],
        rank: int,
        run: str | None,
        *,
        buffers: int = BUFFERS,
        threads: int = THREADS,
        copy_stream: CopyStream | None = None,
        pin: bool = False,
    ) -> None:
        self.folders = [Path(folder) for folder in folders]
        spaces = [Space(partial(File, folder), lambda file: file.close()) for folder in self.folders]
        super().__init__(spaces, rank, copy_stream)
        self._claims = [Claim(folder, run) for folder in self.folders if run is not None]
        for folder in self.folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TierError(f"{folder} cannot be used: {error.strerror}") from error
        self.count, self._pin = buffers, pin
        self._memory, self._fixed, self._made = MemoryPool(), 0, 0
        self._pool = ThreadPoolExecutor(threads, "tier")
        self._lock = threading.Lock()  # guards state that threads of the pool change
        self._alone = threading.RLock()  # held by the calling thread
        self._stream: FileStream | None = None
        self._staged: dict[int, _Staged] = {}  # extents in memory
        self._jobs: dict[int, Future[None]] = {}  # the last transfer of each extent
        self._writing: deque[Future[None]] = deque()
        self._failures: dict[int, Exception] = {}  # by extent, whose bytes are not complete

    @property
    def buffers(self) -> int:
        return self.count * padded(max(self.sizes.values(), default=0)) or self._made

    def commit(self) -> None:
        needed = dict.fromkeys(self.folders, 0)
        for folder, nbytes in zip(self.folders, self._needed(), strict=True):
            needed[folder] += nbytes
        check_space(needed)
        super().commit()
        for folder, space in zip(self.folders, self._spaces, strict=True):
            if not space.segments[0].backing.direct:
                log.warning("%s: no direct transfers there, so they go through the page cache", folder)
        if self.count and self.buffers:
            self._fixed = self.buffers // self.count
            self._memory.add(aligned(self.buffers, self._pin), self._fixed)

    def stream(self, order: Sequence[int], write: bool = True) -> FileStream:
        stream = FileStream(self, order, write)
        self.begin(stream)
        return stream

    def begin(self, stream: FileStream) -> None:
        """Make `stream` the open one, and read ahead."""
        self._end_stream()
        self.settle()
        self._stream = stream
        stream.begin()

    def open(self, extent: int, read: bool = True, write: bool = False) -> Opened:
        staged = self._open(extent, read, write)
        memory, arriving = staged.memory[: self.sizes[extent]], partial(self.arrive, staged)
        close = partial(self.write_behind if write else self.let_go, extent, staged)
        return Opened(memory, staged.is_near, arriving, close)

    def _open(self, extent: int, read: bool, write: bool) -> _Staged:
        with self._alone:
            self._end_stream()
            most = self.count or WRITING
            while write and self._writing and (self._writing[0].done() or len(self._writing) > most):
                with self.traffic.waiting():
                    self._writing.popleft().result()
            staged = self.stage(extent, read)
            # it is being written, or changed before the write
            if staged.uses > 1 and (write or staged.changing):
                self.settle([extent])
            return staged

    def stage(self, extent: int, read: bool, ahead: bool = False) -> _Staged:
        """Begin to bring an extent to memory, unless it is still there to be written. `ahead`: to a buffer,
        as soon as one is free."""
        with self._lock:
            if (staged := self._staged.get(extent)) is not None:
                staged.uses += 1
                return staged
        staged = self._staged[extent] = _Staged()
        if ahead and self._fixed:
            done: Future[None] = Future()
            staged.reading = self._jobs[extent] = done

            def fill(memory: Tensor, free: Any) -> None:
                staged.memory, staged.free = memory, free
                self._pool.submit(self._read, extent, staged).add_done_callback(
                    lambda _: done.set_result(None)
                )

            self._memory.when_free(fill, self._fixed)
            return staged
        staged.memory, staged.free = self._take(self.sizes[extent])
        if read:
            staged.reading = self._begin(extent, lambda: self._read(extent, staged))
        return staged

    def put(self, extent: int, data: Tensor, start: int = 0) -> bool:
        stop = start + data.nbytes
        self._check_range(extent, start, stop)
        if data.nbytes == self.sizes[extent]:
            with self._alone:
                opened = self.open(extent, read=False, write=True)
                if data.device.type == "cpu":  # copies from a device are ordered by the copy stream
                    opened.wait()
                arrived = self.copy_stream.out(data.view(torch.uint8), opened.memory[: data.nbytes])
                opened.close(arrived)
                return arrived is None
        with self._window(extent, start, stop) as (window, first):
            if start > first or (stop % ALIGNMENT and stop < self.sizes[extent]):  # keep the bytes around it
                self.move("read", extent, window, first)
            window[start - first : stop - first] = data.view(torch.uint8)
            self.move("write", extent, window, first)
            self.check()
        return True

    def get(self, extent: int, start: int, stop: int) -> Tensor:
        self._check_range(extent, start, stop)
        with self._window(extent, start, stop) as (window, first):
            self.move("read", extent, window, first)
            self.check()
            return window[start - first : stop - first].clone()

    def add(
        self, extent: int, data: Tensor, dtype: torch.dtype, first: bool = False, then: Then | None = None
    ) -> bool:
        if self.count == 1:
            raise ValueError("a sum takes two buffers, and this tier has one")
        with self._alone:
            self._end_stream()
            memory, _ = self._take(data.nbytes)
            numbers = memory[: data.nbytes].view(data.dtype)
            arrived = self.copy_stream.out(data.view(torch.uint8), numbers.view(torch.uint8))
            staged = self._open(extent, read=not first, write=True)

            def change() -> None:
                try:
                    add_when(arrived, numbers, staged.memory, dtype, first, then)
                finally:
                    self._memory.give(memory)

            self.write_behind(extent, staged, change=change)
            return arrived is None

    def numbers(self, extent: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Stored:
        size = dtype.itemsize

        def fetch(begin: int, end: int) -> Tensor:
            return self.get(extent, start + begin * size, start + end * size).view(dtype)

        return Stored(dtype, tuple(shape), fetch)

    def settle(self, extents: Iterable[int] | None = None) -> None:
        jobs = [*self._jobs.values()] if extents is None else map(self._jobs.get, extents)
        wait([job for job in jobs if job is not None])
        self.check()

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(TierError):  # its extents are dropped
                self._stream.close()
        self._pool.shutdown()
        super().close()
        for claim in self._claims:
            claim.close()
        self._memory, self._made = MemoryPool(), 0
        self._staged.clear()

    def move(self, what: Literal["read", "write"], extent: int, memory: Tensor, at: int = 0) -> None:
        """Read the extent's bytes from `at` on into all of `memory`, or write them from it. Runs in any
        thread; `check` raises its errors."""
        allocation = self._allocation(extent)
        try:
            getattr(allocation.segment.backing, what)(memory, allocation.start + at)
        except Exception as error:
            self._failures.setdefault(extent, error)
            return
        with self._lock:
            self.traffic.read += memory.nbytes if what == "read" else 0
            self.traffic.written += memory.nbytes if what == "write" else 0

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    def check(self) -> None:
        """Raise TierError if a transfer of an extent has failed."""
        for failure in [*self._failures.values()][:1]:
            raise TierError(
                f"a transfer failed, and what the tier holds is not whole any more: {failure}"
            ) from failure

    def arrive(self, staged: _Staged) -> Any:
        """Wait until an extent is read. Returns the event after which its memory may be changed, or None."""
        if staged.reading is not None:
            with self.traffic.waiting():
                staged.reading.result()
            self.check()
        return staged.free

    def write_behind(
        self, extent: int, staged: _Staged, after: Any = None, change: Callable[[], None] | None = None
    ) -> None:
        """Begin, in a thread, to wait for the event, make the change, write the extent and release its
        memory."""

        def job() -> None:
            try:
                if after is not None:
                    after.synchronize()
                if change is not None:
                    change()
                self.move("write", extent, staged.memory[: padded(self.sizes[extent])])
            finally:
                self.let_go(extent, staged)

        staged.changing = after is not None or change is not None
        self._writing.append(self._begin(extent, job))

    def let_go(self, extent: int, staged: _Staged, free: Any = None) -> None:
        """Count one user fewer of an extent's memory, which may be changed after the event `free`."""
        if staged.reading is not None:
            wait([staged.reading])
        with self._lock:
            staged.uses -= 1
            staged.free = free or staged.free
            if staged.uses:
                return
            del self._staged[extent]
        self._memory.give(staged.memory, staged.free)

    def _begin(self, extent: int, work: Callable[[], None]) -> Future[None]:
        """Run `work` in a thread, after the transfers of the extent that were begun before."""
        before = self._jobs.get(extent)

        def job() -> None:
            try:
                wait([before] if before is not None else [])
                work()
            except Exception as error:
                self._failures.setdefault(extent, error)

        self._jobs[extent] = self._pool.submit(job)
        return self._jobs[extent]

    def _read(self, extent: int, staged: _Staged) -> None:
        if staged.free is not None:
            staged.free.synchronize()
            staged.free = None
        self.move("read", extent, staged.memory[: padded(self.sizes[extent])])

    @contextlib.contextmanager
    def _window(self, extent: int, start: int, stop: int) -> Iterator[tuple[Tensor, int]]:
        """Yield memory for the pages with these bytes of an extent, and the number of its first byte."""
        with self._alone:
            self._end_stream()
            self.settle([extent])
            memory, free = self._take(self.sizes[extent])
            try:
                if free is not None:
                    free.synchronize()
                first = round_down(start, ALIGNMENT)
                yield memory[: padded(stop) - first], first
            finally:
                self._memory.give(memory)

    def _take(self, nbytes: int) -> tuple[Tensor, Any]:
        """Return memory for so many bytes, and the event after which it is free."""
        if (nbytes := padded(nbytes)) > self._fixed > 0:
            raise ValueError(f"{nbytes} bytes of an extent that came later than `commit`")
        with self.traffic.waiting():
            return self._memory.lend(self._fixed or nbytes, new=None if self._fixed else self._new)

    def _new(self, nbytes: int, _: torch.dtype) -> Tensor:
        """Allocate memory, in place of memory whose size no extent has any more."""
        for memory, event in self._memory.drop(but={*map(padded, self.sizes.values())}):
            self._made -= memory.nbytes
            if event is not None:
                event.synchronize()
        self._made += nbytes
        return aligned(nbytes, self._pin)

    def _end_stream(self) -> None:
        """End the open stream, if there is one."""
        if self._allocations is None:
            raise TierError("this tier is closed, or its space was never taken")
        if self._stream is not None:
            self._stream.give_way()
            self._stream = None
        self.check()

    def _is_busy(self, extent: int) -> bool:
        return (job := self._jobs.get(extent)) is not None and not job.done()

    def _forget(self, extent: int) -> None:
        self._jobs.pop(extent, None)
        if (staged := self._staged.pop(extent, None)) is not None:  # read ahead for a use that did not come
            self._memory.give(staged.memory, staged.free)
        super()._forget(extent)
        self._failures.pop(extent, None)


@dataclass
class _Staged:
    """An extent in memory. free: the event after which the memory may be changed. uses: its users, among them
    the thread that writes it. changing: that thread changes it first, or waits for a copy to it."""

    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    free: Any = None
    reading: Future[None] | None = None
    uses: int = 1
    changing: bool = False

    def is_near(self) -> bool:
        """Return whether the extent has been read."""
        return self.reading is None or self.reading.done()


class FileStream:
    """A Stream of a FileStore, for one thread. A dropped one stays open until the tier is used again."""

    def __init__(self, store: FileStore, order: Sequence[int], write: bool) -> None:
        self._store, self._order, self._write = store, list(order), write
        self._ahead: deque[tuple[int, _Staged]] = deque()
        self._using: tuple[int, _Staged] | None = None
        self._position = 0  # in `order`, of the extent to read ahead next
        self._taken = self._superseded = self._waits = False
        self.closed = False

    def begin(self) -> None:
        """Begin to read the first extents."""
        self._waits, self._position = False, 0
        self._fetch(self._store.count)

    def give_way(self) -> None:
        """Free the tier for another use. If nothing was taken from the stream yet, it begins anew at the
        first use."""
        if self.closed:
            return
        if self._taken:
            self.close()
            self._superseded = True
            return
        self._waits = True
        self._drop()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        if self._waits and not self.closed:
            self._store.begin(self)
        self._taken = True
        if self._superseded:
            raise TierError(
                "this stream ended early, because the tier was asked for something else meanwhile"
            )
        self._pass_on()
        self._fetch(self._store.count)
        if not self._ahead or self._store.failed:
            self.close()
        if self.closed:
            raise StopIteration
        self._using = extent, staged = self._ahead.popleft()
        try:
            self._store.arrive(staged)
        except TierError:
            self._write = False
            self.close()
            raise
        return staged.memory[: self._store.sizes[extent]]

    def close(self) -> None:
        """Wait until everything is written, the extent in use too. Raises the errors of transfers."""
        if self.closed:
            return
        self.closed = True
        with self._store.traffic.waiting():
            self._pass_on()
            self._drop()
            self._store.settle()

    def _fetch(self, most: int) -> None:
        """Read ahead until so many extents are in memory or under way."""
        while not self.closed and len(self._ahead) < most and self._position < len(self._order):
            extent = self._order[self._position]
            self._ahead.append((extent, self._store.stage(extent, read=True, ahead=True)))
            self._position += 1

    def _pass_on(self) -> None:
        """Write the extent in use, or release it."""
        if (used := self._using) is not None:
            # set first, so that an interrupt here does not write it twice
            self._using = None
            (self._store.write_behind if self._write else self._store.let_go)(*used)

    def _drop(self) -> None:
        """Release the extents that were read ahead."""
        while self._ahead:
            self._store.let_go(*self._ahead.popleft())
