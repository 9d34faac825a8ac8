"""A nameless file gives back what was written, byte by byte, or a TierError that says where and how much;
nothing of it is ever left."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from polyreme.errors import TierError
from polyreme.files import direct_io
from polyreme.files.direct_io import ALIGNMENT, File, aligned, check_space, padded

DIRECT = pytest.mark.parametrize("direct", (True, False))


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    return aligned(nbytes).random_(generator=torch.Generator().manual_seed(seed))


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of that size, where this process may mount one."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user who may do nothing special, if this one may."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(54321)
    try:
        yield
    finally:
        if privileged:
            os.seteuid(0)


@pytest.mark.parametrize("nbytes", (ALIGNMENT, 3 * ALIGNMENT, direct_io.HUGE_PAGE + ALIGNMENT))
def test_memory_begins_at_a_page_and_is_zero(nbytes: int) -> None:
    memory = aligned(nbytes)
    assert (
        memory.dtype == torch.uint8
        and memory.nbytes == nbytes
        and memory.data_ptr() % ALIGNMENT == 0
        and not memory.any()
    )
    view = memory[5:].fill_(1)
    del memory
    assert view.sum() == nbytes - 5
    assert aligned(0).nbytes == 0
    with pytest.raises(ValueError, match="multiple"):
        aligned(nbytes + 1)


def test_memory_that_the_system_refuses_is_told() -> None:
    with pytest.raises(TierError, match=rf"{1 << 60:,} bytes of host memory were refused"):
        aligned(1 << 60)


@DIRECT
@examples(25)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=12))
def test_what_is_read_is_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, direct: bool, writes: list[tuple[int, int]]
) -> None:
    file = File(tmp_path_factory.getbasetemp(), 8 * ALIGNMENT - 100, direct)
    whole = aligned(8 * ALIGNMENT)
    assert file.nbytes == whole.nbytes
    for number, (start, count) in enumerate(writes):
        start, stop = start * ALIGNMENT, min(start + count, 8) * ALIGNMENT
        whole[start:stop] = random_bytes(stop - start, number)
        file.write(whole[start:stop], start)
    found = random_bytes(whole.nbytes)
    file.read(found, 0)
    assert torch.equal(found, whole)
    file.close()


def test_any_dtype_is_transferred(tmp_path: Path) -> None:
    file = File(tmp_path, ALIGNMENT)
    numbers = aligned(ALIGNMENT).view(torch.bfloat16).normal_()
    file.write(numbers, 0)
    found = aligned(ALIGNMENT).view(torch.bfloat16)
    file.read(found, 0)
    assert torch.equal(found, numbers)


def test_what_is_not_aligned_or_not_in_the_file_is_refused(tmp_path: Path) -> None:
    file, memory = File(tmp_path, 2 * ALIGNMENT), aligned(2 * ALIGNMENT)
    for wrong, at in (
        (memory[512:-ALIGNMENT], 0),
        (memory[:512], 0),
        (memory, 512),
        (memory, ALIGNMENT),
        (memory, -ALIGNMENT),
    ):
        with pytest.raises(ValueError, match="within the file"):
            file.read(wrong, at)


def test_a_file_takes_its_space_has_no_name_and_gives_all_back(tmp_path: Path) -> None:
    file = File(tmp_path, 1 << 20)
    descriptor = file._descriptor
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20
    assert os.fstat(descriptor).st_nlink == 0 and not list(tmp_path.iterdir())
    file.close()
    file.close()
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_where_nameless_files_or_direct_transfers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file gets a name, which is gone at once; the page cache is used."""
    open_file, control = os.open, direct_io.fcntl.fcntl

    def refuse_nameless(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & direct_io._O_TMPFILE == direct_io._O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return open_file(path, flags, mode)

    def refuse_direct(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & direct_io._O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return control(descriptor, command, flags)

    monkeypatch.setattr(os, "open", refuse_nameless)
    monkeypatch.setattr(direct_io.fcntl, "fcntl", refuse_direct)
    file, numbers = File(tmp_path, ALIGNMENT), random_bytes(ALIGNMENT)
    assert not file.direct and not list(tmp_path.iterdir())
    file.write(numbers, 0)
    found = aligned(ALIGNMENT)
    file.read(found, 0)
    assert torch.equal(found, numbers)


def test_direct_transfers_that_fail_at_the_first_read_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems that accept the flag and want larger blocks."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, errno.EINVAL))
        file = File(tmp_path, ALIGNMENT)
    assert (
        not file.direct
        and not direct_io.fcntl.fcntl(file._descriptor, direct_io.fcntl.F_GETFL) & direct_io._O_DIRECT
    )
    file.read(aligned(ALIGNMENT), 0)


def failing(call: Callable[..., int], number: int) -> Callable[..., int]:
    """Instead of the system's `call`: the error."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("what", ("read", "write"))
def test_an_error_of_the_disk_names_folder_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    file, memory, call = File(tmp_path, 4 * ALIGNMENT), aligned(4 * ALIGNMENT), f"p{what}v"
    monkeypatch.setattr(os, call, failing(getattr(os, call), errno.EIO))
    with pytest.raises(
        TierError,
        match=rf"{tmp_path}: {what} of 16,384 bytes failed with "
        r"16,384 to go \(Input/output error\).* are free",
    ):
        getattr(file, what)(memory, 0)


@pytest.mark.parametrize("what", ("read", "write"))
def test_a_transfer_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Parts that end at any byte, as when a signal comes."""
    file, numbers, found = File(tmp_path, 8 * ALIGNMENT), random_bytes(8 * ALIGNMENT), aligned(8 * ALIGNMENT)
    call = getattr(os, f"p{what}v")

    def partly(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return min(call(descriptor, buffers, at), ALIGNMENT + 1234)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", partly if what == "write" else os.pwritev)
        file.write(numbers, 0)
        patch.setattr(os, "preadv", partly if what == "read" else os.preadv)
        file.read(found, 0)
    assert torch.equal(found, numbers)


@DIRECT
@pytest.mark.parametrize("left", (0, ALIGNMENT, ALIGNMENT + 100))
def test_a_file_that_became_short_is_told(tmp_path: Path, direct: bool, left: int) -> None:
    file = File(tmp_path, 4 * ALIGNMENT, direct)
    os.ftruncate(file._descriptor, left)
    to_go = 4 * ALIGNMENT - left // ALIGNMENT * ALIGNMENT
    with pytest.raises(
        TierError, match=rf"{tmp_path}: read of 16,384 bytes failed with {to_go:,} to go \(it ended early\)"
    ):
        file.read(aligned(4 * ALIGNMENT), 0)


def test_a_full_disk_is_known_when_the_file_is_made(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        with pytest.raises(TierError, match=rf"{folder}: 2,097,152 bytes needed, 1,048,576 free"):
            File(folder, 2 << 20)
        file = File(folder, 768 << 10)
        with pytest.raises(TierError, match=r"524,288 bytes needed, 262,144 free"):
            File(folder, 512 << 10)
        file.close()
        file = File(folder, 1 << 20)
        file.write(random_bytes(1 << 20), 0)  # to the last byte
        file.close()
    missing = tmp_path / "missing"
    for call in (lambda: File(missing, ALIGNMENT), lambda: check_space({missing: ALIGNMENT})):
        with pytest.raises(
            TierError, match=rf"{missing} cannot be used: No such file or directory. 4,096 bytes"
        ):
            call()


def test_two_folders_of_one_disk_are_added_up(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        folders = [folder / name for name in "ab"]
        for each in folders:
            each.mkdir()
        check_space(dict.fromkeys(folders, 512 << 10))
        with pytest.raises(
            TierError, match=rf"{folders[0]}, {folders[1]}: 1,228,800 bytes needed, 1,048,576 free"
        ):
            check_space(dict.fromkeys(folders, 600 << 10))
        check_space({folders[0]: 600 << 10, tmp_path: 600 << 10})


def test_a_limit_that_is_met_when_space_is_taken(tmp_path: Path) -> None:
    """As where another process was faster, or a quota counts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(
            TierError,
            match=rf"{tmp_path}: no file of 1,048,576 bytes can be made \([\d,]+ free\): File too large",
        ):
            File(tmp_path, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path may be in a folder that is closed to others
        closed = Path(name)
        closed.chmod(0o555)
        with (
            unprivileged(),
            pytest.raises(
                TierError, match=rf"{closed}: no file of 4,096 bytes can be made .*Permission denied"
            ),
        ):
            File(closed, ALIGNMENT)
        closed.chmod(0o700)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TierError, match=rf"{file}: no file of 4,096 bytes can be made .*Not a directory"):
        File(file, ALIGNMENT)


def test_a_folder_that_is_removed_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, numbers, found = File(folder, ALIGNMENT), random_bytes(ALIGNMENT), aligned(ALIGNMENT)
    folder.rmdir()
    file.write(numbers, 0)
    file.read(found, 0)
    assert torch.equal(found, numbers)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from polyreme.files.direct_io import File; "
        "f = File(sys.argv[1], 1 << 20); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with small_disk(tmp_path / "disk", 1 << 20) as folder:
        ended = subprocess.run([sys.executable, "-c", script, str(folder)], check=False)
        assert ended.returncode == -9 and not list(folder.iterdir())
        assert os.statvfs(folder).f_bfree == (1 << 20) // os.statvfs(folder).f_frsize


def test_padding() -> None:
    assert [padded(nbytes) for nbytes in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [
        0,
        ALIGNMENT,
        ALIGNMENT,
        2 * ALIGNMENT,
    ]
