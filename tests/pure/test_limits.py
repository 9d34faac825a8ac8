"""Limits of the system: said before the libraries that would fail by them, and named where they do."""

from __future__ import annotations

import errno
import resource

import pytest

from polyreme.errors import LaunchError
from polyreme.launch import limits


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """What each limit is, soft and hard, in place of the system's."""
    found = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_AS: (-1, -1)}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    return found


def test_as_many_files_as_may_be(allowed: dict[int, tuple[int, int]]) -> None:
    limits.check()
    assert allowed[resource.RLIMIT_NOFILE] == (4096, 4096)
    allowed[resource.RLIMIT_NOFILE] = (1024, -1)
    limits.check()
    assert allowed[resource.RLIMIT_NOFILE] == (limits.MOST_FILES, -1)


def test_too_little_to_begin(allowed: dict[int, tuple[int, int]]) -> None:
    allowed[resource.RLIMIT_NOFILE] = (24, 24)
    with pytest.raises(LaunchError, match=r"24 open files here \(ulimit -n\).*set ulimit -n 4096"):
        limits.check()
    allowed[resource.RLIMIT_NOFILE] = (24, 1024)
    allowed[resource.RLIMIT_AS] = (10**8, -1)
    with pytest.raises(LaunchError, match=r"100,000,000 bytes .* \(ulimit -v\).*set ulimit -v unlimited"):
        limits.check()


def test_what_comes_of_a_limit_names_it(allowed: dict[int, tuple[int, int]]) -> None:
    outer = RuntimeError("it failed")
    outer.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert "1024 (ulimit -n)" in str(limits.named(outer))
    segment = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert limits.named(segment) is None and limits.named(MemoryError()) is None, "there is no limit"
    assert limits.named(OSError(errno.ENOENT, "no such file")) is None
    allowed[resource.RLIMIT_AS] = (2**31, -1)
    for error in (segment, MemoryError(), RuntimeError("can't start new thread")):
        assert "2,147,483,648 bytes of addresses (ulimit -v)" in str(limits.named(error))
    assert limits.named(ValueError("a value")) is None
