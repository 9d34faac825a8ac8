"""All bytes of a checkpoint are read once, compared, and kept where they are needed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_checkpoint_huggingface import make, seal

from polyreme.checkpoint import reader
from polyreme.checkpoint.direct_reader import DirectFile
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.reader import Need, Range, divide, joined, preload
from polyreme.distributed.mesh import Axis
from polyreme.errors import CheckpointError
from polyreme.files.direct_io import ALIGNMENT, aligned
from polyreme.offload import host

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[Range]]]:
    """Files, and what each rank needs of them."""
    sizes = draw(SIZES)
    place = st.integers(0, len(sizes) - 1).flatmap(
        lambda file: st.tuples(st.just(file), st.integers(0, sizes[file]), st.integers(0, sizes[file]))
    )
    needed = draw(st.lists(st.lists(place, max_size=5), min_size=1, max_size=4))
    return sizes, [joined((file, min(a, b), max(a, b)) for file, a, b in ranges) for ranges in needed]


@given(cases(), st.integers(1, 70))
def test_every_byte_is_read_by_one_rank_and_by_one_that_needs_it(
    case: tuple[list[int], list[list[Range]]], share: int
) -> None:
    sizes, needed = case
    with patch.object(reader, "SHARE", share):
        parts = divide(sizes, needed)
    for file, size in enumerate(sizes):
        ranges = sorted((part.begin, part.end) for each in parts for part in each if part.file == file)
        assert [at for part in ranges for at in range(*part)] == list(range(size))
    for rank, each in enumerate(parts):
        for part in each:
            for at in range(part.begin, part.end):
                by = [
                    r
                    for r, ranges in enumerate(needed)
                    if any(file == part.file and a <= at < b for file, a, b in ranges)
                ]
                assert part.wanted == (rank in by) == bool(by) and part.others == (len(by) > 1)
        assert [(part.file, part.begin) for part in each] == sorted((part.file, part.begin) for part in each)


def test_shares_are_alike_where_there_is_a_choice() -> None:
    with patch.object(reader, "SHARE", 10):
        for needed in ([[], [], []], [[(0, 0, 1000)]] * 3):
            read = [sum(part.end - part.begin for part in parts) for parts in divide([1000], needed)]
            assert max(read) - min(read) <= 10


def everything(source: Directory) -> list[Need]:
    return [
        Need(kind, name, 0, math.prod(info.shape))
        for kind, tensors in source.tensors.items()
        for name, info in tensors.items()
    ]


@pytest.mark.parametrize("room", [0, 200, 1 << 30])
def test_what_is_kept_is_what_is_there(tmp_path: Path, room: int) -> None:
    make(tmp_path, limit=100)
    source = Directory(tmp_path)
    wanted = everything(source)
    dtypes = {need: source.tensors[need.kind][need.name].dtype for need in wanted}
    wanted = [
        need._replace(into=torch.empty(need.stop, dtype=dtypes[need])) if need.kind == "exp_avg" else need
        for need in wanted
    ]
    with patch.object(host, "available", lambda: 2 * room):
        found = preload(source, wanted, Axis("dp"))
    assert found.complete == {need[:2] for need in wanted if need.into is not None and room == 1 << 30}
    assert sum(each.memory.nbytes for each in found.ranges) <= room
    with patch.object(source, "read", wraps=source.read) as again:
        for kind, name, start, stop, *_ in wanted:
            assert torch.equal(
                found.read(kind, name, start, stop), Directory(tmp_path).read(kind, name, start, stop)
            )
    assert again.called == (room < 1 << 30)
    with pytest.raises(CheckpointError, match="has no exp_avg of 'other'"):
        found.read("exp_avg", "other", 0, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is only read."""
    path = tmp_path_factory.mktemp("saved")
    make(path)
    return path


@given(st.data())
def test_a_need_is_read_into_the_memory_that_it_gives(saved: Path, data: st.DataObject) -> None:
    source, wanted = Directory(saved), []
    for kind, name, start, stop, *_ in everything(source):
        low = data.draw(st.integers(start, stop))
        high = data.draw(st.integers(low, stop))
        dtype = source.tensors[kind][name].dtype
        at, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        into = torch.zeros(at + high - low + behind, dtype=dtype)
        wanted.append(Need(kind, name, low, high, data.draw(st.sampled_from([None, into])), at))
    with (
        patch.object(reader, "SHARE", data.draw(st.sampled_from([8, 64, reader.SHARE]))),
        patch.object(reader, "BLOCK", 4 * reader.ALIGNMENT),
    ):
        found = preload(source, wanted, Axis("dp"))
    for kind, name, low, high, into, at in wanted:
        there = source.read(kind, name, low, high)
        assert torch.equal(found.read(kind, name, low, high), there)
        assert into is None or torch.equal(into[at:][: high - low], there)
        assert into is None or not (into[:at].any() or into[at + high - low :].any())
    assert found.complete == {need[:2] for need in wanted if need.into is not None}


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_is_not_needed_is_compared_too(tmp_path: Path) -> None:
    make(tmp_path)
    spoil(tmp_path / "optimizer/exp_avg.safetensors")
    with pytest.raises(
        CheckpointError, match=r"other bytes than were written .* optimizer/exp_avg\.safetensors"
    ):
        preload(Directory(tmp_path), [], Axis("dp"))


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_what_the_cache_has_goes_straight_to_its_place(tmp_path: Path, cached: bool, damaged: bool) -> None:
    numbers, home = torch.arange(100_001.0), torch.full((100_001,), 3.0)
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    seal(tmp_path)
    if damaged:
        spoil(tmp_path / "model.safetensors")
    need = Need("model", "a", 0, 100_001, home)
    expected = (
        pytest.raises(CheckpointError, match=r"model\.safetensors") if damaged else contextlib.nullcontext()
    )
    straight = patch.object(reader, "fill", side_effect=reader.fill)
    small = patch.object(reader, "BLOCK", 4 * reader.ALIGNMENT)
    told = patch.object(DirectFile, "is_cached", return_value=cached)
    with small, told, straight as reads, expected:
        preload(Directory(tmp_path), [need], Axis("dp"))
        assert torch.equal(home, numbers)
    assert reads.call_count > 20 if cached else not reads.called


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("left", [0, 1, 5000, 100_000, 4096 * 20, 400_000])
def test_a_file_that_is_cut_short_while_it_is_open_is_said_to_end(
    tmp_path: Path, left: int, cached: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(400_003))
    with contextlib.closing(DirectFile(path)) as opened:
        os.truncate(path, left)
        with pytest.raises(CheckpointError, match=f"it ends {400_003 - left} bytes early"):
            opened.read(aligned(101 * ALIGNMENT).numpy().data, 0, 400_003, cached)


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_where_nothing_can_go_past_the_cache(tmp_path: Path, refused: str) -> None:
    make(tmp_path)
    (tmp_path / "big.txt").write_bytes(os.urandom(300_001))
    seal(tmp_path)
    original, direct = getattr(os, refused), set[int]()

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (refused == "open" and args[1] & os.O_DIRECT) or (
            refused == "preadv" and fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_DIRECT
        ):
            direct.add(args[0])
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*args, **kwargs)

    with patch.object(os, refused, refusing), patch.object(DirectFile, "is_cached", return_value=False):
        preload(Directory(tmp_path), [], Axis("dp"))
    assert direct


def uncache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_what_is_in_the_cache_is_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64 * 20)  # 80 pages
    opened = DirectFile(path)
    with contextlib.closing(opened):
        os.fsync(opened.descriptor)
        assert opened.is_cached(0, 1) and opened.is_cached(4096, 80 * 4096)
        assert not opened.is_cached(0, 80 * 4096 + 1)  # which the file has not
        data, memory = path.read_bytes(), aligned(80 * 4096).numpy().data
        assert opened.read(memory, 3, 79 * 4096 + 5, True) == data[3 : 79 * 4096 + 5]
        uncache(path)
        if opened.is_cached(0, 4096):
            pytest.skip("this file system is its cache")
        assert opened.read(memory, 3, 79 * 4096 + 5, False) == data[3 : 79 * 4096 + 5]
        assert not opened.is_cached(0, 4096)
