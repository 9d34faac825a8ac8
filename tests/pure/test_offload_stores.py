"""A record is the same bytes in every tier, in whatever order it is used; what fails is told; a folder is one
run's at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from polyreme.errors import TierError
from polyreme.files import folder_lock
from polyreme.files.direct_io import ALIGNMENT, padded
from polyreme.offload import file as file_module
from polyreme.offload import host
from polyreme.offload.file import FileStore
from polyreme.offload.host import HostStore
from polyreme.offload.store import Store

SIZES = [3 * ALIGNMENT + 17, 0, 5, ALIGNMENT, 2 * ALIGNMENT + 1, 100, 7 * ALIGNMENT - 1, ALIGNMENT, 64]
KINDS = ("host", "file", "two folders")


@contextmanager
def tier_of(kind: str, folder: Path, sizes: list[int] = SIZES, **options: Any) -> Iterator[Store]:
    folders = [folder / "a", folder / "b"] if kind == "two folders" else [folder / "a"]
    store = HostStore() if kind == "host" else FileStore(folders, rank=1, run="run", **options)
    try:
        assert [store.reserve(size) for size in sizes] == list(range(len(sizes)))
        store.commit()
        yield store
    finally:
        store.close()


def change(memory: Tensor, seed: int) -> None:
    """A change that depends on what was there, at every byte."""
    memory.mul_(3).add_(torch.arange(len(memory)).mul_(seed + 1).to(torch.uint8)).add_(seed + 1)


def contents(store: Store) -> list[Tensor]:
    return [store.get(record, 0, size) for record, size in store.sizes.items()]


def assert_same(found: list[Tensor], records: list[Tensor]) -> None:
    assert len(found) == len(records) and all(
        torch.equal(one, other) for one, other in zip(found, records, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(st.data())
def test_streams_one_after_the_other_are_as_plain_memory(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """Records come again at any distance, streams end early, are read only, and begin anew after another use
    of the tier."""
    sizes = data.draw(st.lists(st.integers(0, 3 * ALIGNMENT), min_size=1, max_size=12))
    orders = st.lists(st.integers(0, len(sizes) - 1), max_size=40)
    records = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    options = {"buffers": data.draw(st.integers(1, 6)), "threads": data.draw(st.integers(1, 4))}
    with tier_of(kind, tmp_path_factory.getbasetemp(), sizes, **(options if kind != "host" else {})) as store:
        assert_same(contents(store), records)
        for order in data.draw(st.lists(orders, min_size=1, max_size=4)):
            write, stop = data.draw(st.booleans()), data.draw(st.integers(0, len(order)))
            stream = store.stream(order, write=write)
            if order and data.draw(st.booleans()):  # before anything is taken from it
                last = order[0]
                store.put(last, torch.full_like(records[last], 7))
                records[last].fill_(7)
            given = 0
            for seed, record in enumerate(order[: stop + 1]):
                memory = next(stream)
                assert torch.equal(memory, records[record]) and memory.data_ptr() % ALIGNMENT == 0
                given += 1
                if write:
                    change(memory, seed)
                    change(records[record], seed)
            if data.draw(st.booleans()):
                stream.close()
            elif given == len(order):
                assert next(stream, None) is None
            del stream
        assert_same(contents(store), records)


@pytest.mark.parametrize("distance", range(1, 8))
def test_a_change_that_is_slow_to_be_written_comes_before_the_next_use_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distance: int
) -> None:
    write, calls = os.pwritev, []

    def slowly(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if not at:
            calls.append(at)
            time.sleep(0.02 if len(calls) == 1 else 0)
        return write(descriptor, buffers, at)

    monkeypatch.setattr(os, "pwritev", slowly)
    with tier_of("file", tmp_path, [ALIGNMENT] * distance, buffers=3, threads=4) as store:
        seen = []
        for number, memory in enumerate(store.stream([*range(distance), 0])):
            seen.append(int(memory[0]))
            memory.fill_(number + 1)
        assert seen == [0] * distance + [1]
        assert store.get(0, 0, 1) == distance + 1


@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SIZES) - 1), st.integers(0, 7 * ALIGNMENT), st.integers(0, 7 * ALIGNMENT)
        ),
        max_size=15,
    )
)
def test_any_range_is_read_and_written(
    tmp_path_factory: pytest.TempPathFactory, kind: str, ranges: list[tuple[int, int, int]]
) -> None:
    records = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    with tier_of(kind, tmp_path_factory.getbasetemp()) as store:
        for number, (record, one, other) in enumerate(ranges):
            start, stop = sorted((min(one, SIZES[record]), min(other, SIZES[record])))
            data = torch.full((stop - start,), number + 1, dtype=torch.uint8)
            store.put(record, data, start)
            records[record][start:stop] = data
            assert torch.equal(store.get(record, start, stop), data)
        assert_same(contents(store), records)
        for start, stop in ((-1, 1), (2, 1), (0, SIZES[0] + 1)):
            with pytest.raises(ValueError, match="extent 0, which has"):
                store.get(0, start, stop)
        with pytest.raises(ValueError, match="extent 0, which has"):
            store.put(0, torch.ones(1), SIZES[0])


@pytest.mark.parametrize("kind", [*KINDS, "as much as is open"])
@examples(20)
@given(st.data())
def test_extents_come_and_go_are_opened_and_added_to(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """As plain memory, in whatever order; what is released makes room, and no other extent notices."""
    options = {"as much as is open": {"buffers": 0}, "host": {}}.get(kind, {"buffers": 3})
    # the largest is there from the beginning, as buffers have its size
    with tier_of(kind, tmp_path_factory.getbasetemp(), [4 * ALIGNMENT], **options) as store:
        plain: dict[int, Tensor] = {}
        for seed in range(data.draw(st.integers(0, 25))):
            what = data.draw(st.sampled_from(["reserve", "release", "change", "set", "put", "add", "look"]))
            if what == "reserve" or not plain:
                extent = store.reserve(4 * data.draw(st.integers(4, ALIGNMENT)))
                plain[extent] = torch.full((store.sizes[extent] // 4,), float(seed))
                assert store.put(extent, plain[extent])
                continue
            extent = data.draw(st.sampled_from(sorted(plain)))
            if what == "release":
                store.release(extent)
                del plain[extent]
            elif what == "add":
                first, given_to = data.draw(st.booleans()), []
                summand = torch.full_like(plain[extent], 0.5 + seed, dtype=torch.bfloat16)
                store.add(extent, summand, torch.float32, first, lambda total: given_to.append(total.clone()))
                plain[extent] = summand.float() + (0 if first else plain[extent])
                store.settle()
                assert torch.equal(given_to[0], plain[extent])
            elif what == "put":
                store.put(extent, torch.ones(3), 4)
                plain[extent][1:4] = 1
            else:
                opened = store.open(extent, read=what != "set", write=what != "look")
                found = opened.wait().view(torch.float32)
                assert what == "set" or torch.equal(found, plain[extent])
                if what != "look":
                    found.copy_(found.mul(2) if what == "change" else torch.full_like(found, seed))
                    plain[extent] = found.clone()
                opened.close(None)
        for extent, numbers in plain.items():
            assert torch.equal(store.get(extent, 0, store.sizes[extent]).view(torch.float32), numbers)


def test_what_is_still_to_be_added_is_seen_by_who_opens_it(tmp_path: Path) -> None:
    with tier_of("file", tmp_path, [40]) as store:
        assert isinstance(store, FileStore)
        busy = threading.Event()
        for _ in range(file_module.THREADS):
            store._pool.submit(busy.wait, 60)
        store.add(0, torch.ones(10), torch.float32)
        timer = threading.Timer(0.05, busy.set)
        timer.start()
        opened = store.open(0)
        assert opened.wait().view(torch.float32).tolist() == [1.0] * 10
        opened.close(None)
        timer.join()


def test_room_that_is_given_back_is_used_again(tmp_path: Path) -> None:
    for kind, options in (("host", {}), ("file", {"buffers": 0})):
        with tier_of(kind, tmp_path, [], **options) as store:
            for _ in range(20):
                extents = [store.reserve(ALIGNMENT) for _ in range(3)]
                for extent in extents:
                    store.put(extent, torch.full((ALIGNMENT,), extent % 251, dtype=torch.uint8))
                for extent in extents:
                    assert (store.get(extent, 0, ALIGNMENT) == extent % 251).all()
                    store.release(extent)
            assert store.taken == 3 * ALIGNMENT and store.buffers <= 4 * ALIGNMENT


def test_a_failure_ends_with_its_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_of("file", tmp_path, [], buffers=0) as store:
        lost = store.reserve(ALIGNMENT)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing(os.pwritev, 0))
            store.put(lost, torch.ones(ALIGNMENT // 4))
            with pytest.raises(TierError, match=r"not whole any more: .*Input/output error"):
                store.settle()
        with pytest.raises(TierError, match="not whole any more"):
            store.open(lost)
        store.release(lost)
        extent = store.reserve(ALIGNMENT)
        store.put(extent, torch.ones(ALIGNMENT // 4))
        assert (store.get(extent, 0, ALIGNMENT).view(torch.float32) == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_dtype_are_written(tmp_path: Path, kind: str) -> None:
    with tier_of(kind, tmp_path) as store:
        numbers = torch.randn(100)
        store.put(0, numbers, 12)
        assert torch.equal(store.get(0, 12, 412).view(torch.float32), numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_what_moves_is_counted(tmp_path: Path, kind: str) -> None:
    with tier_of(kind, tmp_path) as store:
        moved = sum(SIZES) if kind == "host" else sum(map(padded, SIZES))
        assert store.nbytes == sum(SIZES)
        assert store.buffers == (
            sum(map(padded, SIZES)) if kind == "host" else file_module.BUFFERS * 7 * ALIGNMENT
        )
        for _ in store.stream(range(len(SIZES))):
            pass
        assert (store.traffic.read, store.traffic.written) == (moved, moved)
        for _ in store.stream(range(len(SIZES)), write=False):
            pass
        assert (store.traffic.read, store.traffic.written) == (2 * moved, moved)
        assert store.traffic.waited >= 0


def test_reading_ahead_begins_at_once_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: seen.append(at) or read(file, buffers, at))  # type: ignore[func-returns-value]
    with tier_of("file", tmp_path, [ALIGNMENT] * 20, buffers=4, threads=1) as store:
        seen.clear()
        stream = store.stream(range(20))
        await_true(lambda: len(seen) == 4)
        next(stream)
        time.sleep(0.02)
        assert seen == [i * ALIGNMENT for i in range(4)]  # the buffer in use is still the caller's
        next(stream)
        await_true(lambda: len(seen) == 5)
        stream.close()
        assert len(seen) == 5


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_what_a_stream_gives_stays_until_the_next(tmp_path: Path) -> None:
    with tier_of("file", tmp_path, [ALIGNMENT] * 12) as store:
        for number, memory in enumerate(store.stream(range(12))):
            memory.fill_(number)
        stream = store.stream([*range(12)])
        for number, memory in enumerate(stream):
            time.sleep(2e-3)
            assert (memory == number).all()


def test_nothing_is_read_ahead_into_memory_that_is_still_copied(tmp_path: Path) -> None:
    class Copy:
        def __init__(self) -> None:
            self.under_way, self.may_end = threading.Event(), threading.Event()

        def synchronize(self) -> None:
            self.under_way.set()
            assert self.may_end.wait(20)

    copy = Copy()
    with tier_of("file", tmp_path, [ALIGNMENT] * 3, buffers=1) as store:
        for number, memory in enumerate(store.stream(range(3))):
            memory.fill_(number)
        opened = store.open(1)
        opened.wait()
        opened.close(copy)
        stream = store.stream([2])
        assert copy.under_way.wait(20)
        assert (opened.memory == 1).all()
        copy.may_end.set()
        assert (next(stream) == 2).all()


def test_asking_for_something_else_ends_a_stream(tmp_path: Path) -> None:
    with tier_of("file", tmp_path) as store:
        first = store.stream(range(len(SIZES)))
        next(first).fill_(7)
        second = store.stream([0])
        assert (next(second) == 7).all()
        with pytest.raises(TierError, match="ended early"):
            next(first)
        first.close()
        assert (store.get(0, 0, 9) == 7).all()
        with pytest.raises(TierError, match="ended early"):
            next(second)


def test_a_loop_that_is_left_keeps_its_changes(tmp_path: Path) -> None:
    with tier_of("file", tmp_path) as store:
        with pytest.raises(RuntimeError, match="left"):
            for memory in store.stream(range(len(SIZES))):
                memory.fill_(9)
                raise RuntimeError("left")
        assert (store.get(0, 0, SIZES[0]) == 9).all()
        assert not store.get(3, 0, ALIGNMENT).any()


def test_a_tier_that_has_no_space_yet_or_any_more(tmp_path: Path) -> None:
    store = FileStore([tmp_path], rank=0, run="run")
    record = store.reserve(10)
    for use in (
        lambda: store.stream([record]),
        lambda: store.get(record, 0, 1),
        lambda: store.put(record, torch.ones(1)),
    ):
        with pytest.raises(TierError, match="closed, or its space"):
            use()
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())


# Faults


def failing(call: Callable[..., int], after: int) -> Callable[..., int]:
    """The system's `call`, which fails from the given time on."""
    count = 0

    def fail(*args: object) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args)

    return fail


@pytest.mark.parametrize("call", ("preadv", "pwritev"))
@pytest.mark.parametrize("after", (0, 1, 4, 8))
def test_an_error_of_the_disk_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    with tier_of("file", tmp_path, [ALIGNMENT] * 9) as store:
        monkeypatch.setattr(os, call, failing(getattr(os, call), after))
        stream = store.stream(range(9))
        with pytest.raises(
            TierError, match=rf"{tmp_path}/a: {call[1:-1]} of 4,096 bytes failed .*Input/output error.* free"
        ):
            for memory in stream:
                memory.fill_(1)
        assert next(stream, None) is None
        monkeypatch.undo()
        for again in (lambda: store.stream([0]), lambda: store.get(0, 0, 1)):
            with pytest.raises(TierError, match=r"not whole any more: .*Input/output error"):
                again()
    assert not list((tmp_path / "a").iterdir())


def test_an_error_of_ranges_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call, use in (
        ("preadv", lambda store: store.get(0, 3, 5)),
        ("pwritev", lambda store: store.put(0, torch.ones(1))),
    ):
        with tier_of("file", tmp_path) as store, monkeypatch.context() as patch:
            patch.setattr(os, call, failing(getattr(os, call), 0))
            with pytest.raises(TierError, match="Input/output error"):
                use(store)


def test_a_file_that_became_short_ends_the_stream(tmp_path: Path) -> None:
    with tier_of("file", tmp_path, [ALIGNMENT] * 20) as store:
        os.ftruncate(store._spaces[0].segments[0].backing._descriptor, 10 * ALIGNMENT)  # type: ignore[attr-defined]
        given = 0
        with pytest.raises(TierError, match="it ended early"):
            for _ in store.stream(range(20), write=False):
                given += 1
        assert given <= 10


def test_a_folder_that_is_removed_does_no_harm(tmp_path: Path) -> None:
    with tier_of("file", tmp_path) as store:
        (tmp_path / "a" / folder_lock.NAME).unlink()
        (tmp_path / "a").rmdir()
        for memory in store.stream(range(len(SIZES))):
            memory.fill_(3)
        assert all((record == 3).all() for record in contents(store))


def test_too_little_space_is_known_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = 1 << 60
    for kind, pattern in (
        ("file", rf"{tmp_path}/a: {enough:,} bytes needed, [\d,]+ free"),
        ("host", rf"memory: {enough:,} bytes needed"),
    ):
        with pytest.raises(TierError, match=pattern), tier_of(kind, tmp_path, [enough // 2] * 2):
            pass
    with (
        pytest.raises(TierError, match=rf"{tmp_path}/a, {tmp_path}/b: {enough:,} bytes needed"),
        tier_of("two folders", tmp_path, [enough // 2] * 2),
    ):
        pass
    monkeypatch.setattr(host, "available", lambda: None)
    with pytest.raises(TierError, match="host memory were refused"), tier_of("host", tmp_path, [enough]):
        pass
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


@pytest.mark.parametrize(
    ("version", "line", "files"),
    [
        (2, "0::/job/step", ("memory.max", "memory.current", "inactive_file")),
        (
            1,
            "4:cpu,memory:/job/step",
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_control_group_that_leaves_less_is_the_limit(
    tmp_path: Path, version: int, line: str, files: tuple[str, str, str]
) -> None:
    """Whichever of the groups around the process has a limit, and where only the top one can be seen."""
    (tmp_path / "membership").write_text(f"9:pids:/job\n{line}\n")

    def left(groups: dict[str, tuple[str, int, int]]) -> list[int]:
        root = tmp_path / "-".join(["root", *groups]).replace("/", "_")
        for group, (limit, used, inactive) in groups.items():
            for file, value in zip(
                (*files[:2], files[0].rpartition("/")[0] + "/memory.stat"),
                (limit, used, f"anon 1\n{files[2]} {inactive}\n"),
                strict=True,
            ):
                folder, _, name = ("./" + file).rpartition("/")
                path = root / folder.strip("/") / group / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(value))
        return list(host._left_by_groups(tmp_path / "membership", root).values())

    assert left({"job/step": ("1000", 700, 50), "job": ("800", 790, 0)}) == [350, 10]
    assert left({".": ("500", 700, 0)}) == [0]
    if version == 2:
        assert left({"job/step": ("max", 700, 50)}) == []
    assert left({}) == [] and host._left_by_groups(tmp_path / "nothing", tmp_path) == {}


def test_what_is_available_is_the_least_that_anything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {Path("/job"): 1 << 20, Path("/job/step"): 1 << 10}
    monkeypatch.setattr(host, "_left_by_groups", lambda membership, root: groups)
    assert host.available() == 1 << 10
    assert [each for each in host.pools().values() if each <= 1 << 20] == [1 << 20, 1 << 10]


@pytest.mark.parametrize(
    ("pools", "refused"),
    [
        ([{"machine": 100}, {"machine": 100}], "120 bytes needed by 2 ranks that share 100 free"),
        ([{"machine": 120}, {"machine": 130}], None),
        ([{"machine": 500, "a": 70}, {"machine": 500, "b": 70}], None),
        (
            [{"machine": 500, "a": 119}, {"machine": 500, "a": 119}],
            "120 bytes needed by 2 ranks that share 119",
        ),
        ([{"one": 70}, {"another": 70}], None),
        ([{}, {}], None),
    ],
)
def test_ranks_share_what_grants_memory(pools: list[dict[str, int]], refused: str | None) -> None:
    reports = [{"needed": 60, "pools": each} for each in pools]
    with pytest.raises(TierError, match=refused) if refused else nullcontext():
        host.refuse_more(reports)


def test_host_memory_is_taken_at_once(tmp_path: Path) -> None:
    if host.available() is None:
        pytest.skip("this system does not tell")
    resident = Path("/proc/self/statm")
    before = int(resident.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    with tier_of("host", tmp_path, [1 << 24] * 4):
        assert int(resident.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") - before > 3 << 24


def test_memory_for_a_gpu_is_pinned_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        pinned: dict[int, int]
        status = 0

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            self.pinned[address] = nbytes
            return self.status

        def cudaHostUnregister(self, address: int) -> int:
            del self.pinned[address]
            return 0

    runtime = Runtime()
    runtime.pinned = {}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for store in (HostStore("cuda"), FileStore([tmp_path], 0, "run", pin=True)):
        store.reserve(10 * ALIGNMENT)
        store.commit()
        assert list(runtime.pinned.values()) == [store.buffers]
        stream = store.stream([0])
        next(stream)
        stream.close()
        store.close()
        del stream, store
        assert not runtime.pinned
    runtime.status = 2
    store = HostStore("cuda")
    store.reserve(1)
    with pytest.raises(TierError, match=r"could not be pinned \(CUDA error 2\)"):
        store.commit()


def test_where_the_page_cache_is_used_it_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polyreme.files.direct_io._go_direct", lambda _: False)
    with caplog.at_level(logging.WARNING), tier_of("file", tmp_path) as store:
        assert "no direct transfers" in caplog.text and str(tmp_path) in caplog.text
        for memory in store.stream(range(len(SIZES))):
            memory.fill_(3)
        assert all((record == 3).all() for record in contents(store))


# Claims


@contextmanager
def holder(folder: Path, run: str) -> Iterator[int]:
    """The id of another process, which claims the folder until it is killed."""
    ready, tell = os.pipe()
    if not (pid := os.fork()):
        held = folder_lock.Claim(folder, run)
        os.write(tell, b"1")
        signal.pause()
        held.close()
    os.close(tell)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_folder_of_another_run_that_lives(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with holder(folder, "one") as pid:
        with pytest.raises(
            TierError,
            match=rf"{folder} is in use by another run, which process {pid} on host {os.uname().nodename}",
        ):
            FileStore([folder], 0, "two")
        same = folder_lock.Claim(folder, "one")
    # one of its ranks died, and another one lives
    with pytest.raises(TierError, match="in use by another run"):
        folder_lock.Claim(folder, "two")
    same.close()
    assert not list(folder.iterdir())


def test_a_folder_of_another_run_that_died(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(tmp_path, "one") as pid:
        pass
    assert [path.name for path in tmp_path.iterdir()] == [folder_lock.NAME]
    with caplog.at_level(logging.WARNING):
        mine = folder_lock.Claim(tmp_path, "two")
    assert f"{tmp_path}: taken over from a run that died (process {pid}" in caplog.text
    assert json.loads((tmp_path / folder_lock.NAME).read_text())["pid"] == os.getpid()
    mine.close()
    mine.close()
    assert not list(tmp_path.iterdir())


def test_a_process_that_got_the_number_of_a_dead_one_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock tells, not the number: here that of this test's parent, which lives."""
    with holder(tmp_path, "one"):
        pass
    place = tmp_path / folder_lock.NAME
    place.write_text(json.dumps(json.loads(place.read_text()) | {"pid": os.getppid()}))
    assert folder_lock.holder(tmp_path) is None
    folder_lock.Claim(tmp_path, "two").close()
    assert f"process {os.getppid()}" in caplog.text and not list(tmp_path.iterdir())


def test_a_run_that_ends_gets_time_to_leave(tmp_path: Path) -> None:
    held = folder_lock.Claim(tmp_path, "one")
    threading.Timer(0.1, held.close).start()
    mine = folder_lock.Claim(tmp_path, "two")
    assert json.loads((tmp_path / folder_lock.NAME).read_text())["run"] == "two"
    mine.close()


@pytest.mark.parametrize("text", ("", "{", "[]", "\udcff"))
def test_a_claim_that_says_nothing_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / folder_lock.NAME).write_text(text, errors="surrogateescape")
    folder_lock.Claim(tmp_path, "run").close()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_does_not_let_go(tmp_path: Path) -> None:
    held = folder_lock.Claim(tmp_path, "one")
    child = os.fork()
    if not child:
        held.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / folder_lock.NAME).exists()
    with pytest.raises(TierError, match="in use"):
        folder_lock.Claim(tmp_path, "two")
    held.close()


def test_many_that_come_and_go(tmp_path: Path) -> None:
    """At no time do two runs hold the folder; nothing is left."""
    holders: dict[str, int] = {"one": 0, "two": 0}
    lock, wrong = threading.Lock(), []

    def work(run: str, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(30):
            try:
                held = folder_lock.Claim(tmp_path, run)
            except TierError:
                continue
            with lock:
                holders[run] += 1
                if all(holders.values()):
                    wrong.append(dict(holders))
            time.sleep(chance.random() * 2e-3)
            with lock:
                holders[run] -= 1
            held.close()

    threads = [threading.Thread(target=work, args=(run, seed)) for run in holders for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=rf"{tmp_path}/file/folder cannot be used: Not a directory"):
        FileStore([tmp_path / "file" / "folder"], 0, "run")


def test_extents_that_come_after_a_commit_of_none_are_streamed(tmp_path: Path) -> None:
    with tier_of("file", tmp_path, []) as store:
        extents = [store.reserve(size) for size in (ALIGNMENT, 5)]
        for extent in extents:
            store.put(extent, torch.full((store.sizes[extent],), extent + 1, dtype=torch.uint8))
        assert [memory.unique().tolist() for memory in store.stream(extents)] == [[1], [2]]
