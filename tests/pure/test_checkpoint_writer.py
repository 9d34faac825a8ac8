"""What a rank writes into files that it shares with others: all of its own bytes, and only these."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.checkpoint import checksum, writer
from polyreme.checkpoint.copy_on_write import BackgroundAccess
from polyreme.checkpoint.direct_reader import DirectFile
from polyreme.checkpoint.sources import TensorInfo
from polyreme.checkpoint.writer import BLOCK, FileLayout, Writer
from polyreme.files.direct_io import ALIGNMENT, aligned
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import MODEL, Region

SHAPES = {"a": (300_000,), "b": (3,), "c": (2048, 700), "d": (1,), "e": (70_000,), "none": (0,)}


def regions_of(
    tensors: dict[str, torch.Tensor], cuts: list[int], rank: int, ranks: int
) -> list[tuple[tuple[str, str], Region]]:
    """Of ranks that have every so many elements in turn: `cuts` say where a tensor is divided."""
    found = []
    for name, tensor in tensors.items():
        edges = sorted({0, tensor.numel(), *(cut % max(tensor.numel(), 1) for cut in cuts)})
        for i, (start, stop) in enumerate(pairwise(edges)):
            if i % ranks == rank:
                cut = Cut.whole(tuple(tensor.shape), 1)
                found.append(
                    ((MODEL, name), Region(MODEL, [name], cut, 0, start, tensor.view(-1)[start:stop]))
                )
    return found


def written(folder: Path, cuts: list[int], ranks: int, limit: int) -> None:
    """Ranks one after the other, in one process: all files are as they should be, and so are their
    checksums."""
    make = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
    tensors["c"] = tensors["c"].bfloat16()
    plan = FileLayout.of(
        {MODEL: {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}}, limit
    )
    folder.mkdir()
    plan.create(folder)
    parts = [
        Writer(plan, folder).write(regions_of(tensors, cuts, rank, ranks), BackgroundAccess())
        for rank in range(ranks)
    ]
    for i, (name, size, beginning) in enumerate(zip(plan.files, plan.sizes, plan.headers, strict=True)):
        content = (folder / name).read_bytes()
        assert len(content) == size and content.startswith(beginning)
        own = checksum.contribution(beginning, size - len(beginning))
        assert checksum.total(size, [own, *(part.get(i, 0) for part in parts)]) == crc32(content)
        for (_, tensor), place in plan.positions.items():
            if place.file == i:
                expected = tensors[tensor].view(-1).view(torch.uint8).numpy().tobytes()
                assert content[place.begin : place.begin + len(expected)] == expected


@examples(15)
@given(st.lists(st.integers(0, 2_000_000), max_size=8), st.integers(1, 3), st.sampled_from([10**9, 10**6]))
def test_whatever_each_has(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], ranks: int, limit: int
) -> None:
    written(tmp_path_factory.mktemp("written") / "step", cuts, ranks, limit)


@pytest.mark.parametrize("refused", ["open", "pwritev"])
def test_where_nothing_can_go_past_the_cache(tmp_path: Path, refused: str) -> None:
    original, direct = getattr(os, refused), []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (
            args[1] & os.O_DIRECT
            if refused == "open"
            else len(args[1][0]) % ALIGNMENT == args[2] % ALIGNMENT == len(direct) == 0
        ):
            direct.append(args[0])
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*args, **kwargs)

    with patch.object(os, refused, refusing):
        written(tmp_path / "step", [1000, 500_000], 2, 10**9)
    assert direct


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    with (
        patch.object(os, "pwritev", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space"),
    ):
        written(tmp_path / "step", [], 1, 10**9)


def test_whole_pages_go_past_the_cache() -> None:
    """And whatever is less through it."""
    tensor = torch.zeros(3 * BLOCK // 4 + 50_011)
    place = writer.FilePosition(0, ALIGNMENT + 8, 4)
    region = Region(MODEL, ["x"], Cut.whole((tensor.numel(),), 1), 0, 0, tensor)
    found = writer._segments([(place, *region.strided_ranges(), region)])
    end = ALIGNMENT + 8 + tensor.nbytes
    edges = [ALIGNMENT + 8, 2 * ALIGNMENT, BLOCK, 2 * BLOCK, 3 * BLOCK, end // ALIGNMENT * ALIGNMENT, end]
    assert sorted((each.begin, each.end) for each in found) == [
        pair for pair in pairwise(edges) if pair[0] < pair[1]
    ]
    assert all(each.is_direct == (each.begin % ALIGNMENT == each.end % ALIGNMENT == 0) for each in found)


@pytest.mark.parametrize("counts", [[100, 5000], [0]])
def test_a_short_write_past_the_cache_goes_on_through_it(tmp_path: Path, counts: list[int]) -> None:
    """Whatever the system took: nothing is written twice at another place, and a write that takes nothing is
    an error, not a loop."""
    path, data, original = tmp_path / "file", os.urandom(16 * ALIGNMENT), os.pwritev
    path.write_bytes(b"")
    left = list(counts)

    def short(descriptor: int, buffers: list[memoryview], at: int) -> int:
        [memory] = buffers
        count = (left.pop(0) if left else len(memory)) if any(counts) else 0
        past = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        original(descriptor, [memory[: count // ALIGNMENT * ALIGNMENT if past else count]], at)
        return count

    expected = (
        contextlib.nullcontext() if any(counts) else pytest.raises(OSError, match="could not be written")
    )
    with (
        contextlib.closing(DirectFile(path, write=True)) as opened,
        patch.object(os, "pwritev", short),
        expected,
    ):
        opened.write(
            memoryview(
                aligned(len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy()
            ),
            0,
        )
        assert path.read_bytes() == data
