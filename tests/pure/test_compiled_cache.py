"""What is compiled for the CPU's update is kept on disk, in a folder of the user's alone."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import SOURCE
from examples import whole

pytest.importorskip("numba")

from polyreme.optim import compiled_cache, compiled_kernels

EACH = """
import sys
import numpy as np
from polyreme.optim import compiled_kernels as c
dtypes = [np.float32, np.uint16, np.int16]
for k in map(int, sys.argv[1:]):
    a = np.ones(64, np.float32)
    c.sgd(a, np.ones(64, dtypes[k]), None, None, *map(np.float32, (1, 1)), None, None, None, np.float32(-1))
print(sum(c.sgd.stats.cache_hits.values()), sum(c.sgd.stats.cache_misses.values()))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def update() -> tuple[np.ndarray, Any]:
    """Numbers after a step of Adam, by functions as a new process has them."""
    adam = runpy.run_path(compiled_kernels.__file__)["adam"]
    p, g, m, v = np.random.default_rng(0).random((4, 1000), np.float32)
    numbers = [
        None if each is None else np.float32(each) for each in (1, 0.9, None, 0.1, 0.9, 0.1, 0.5, 1e-8, 0.1)
    ]
    adam(p, g, m, v, None, *numbers)
    return p, adam.stats


def test_a_second_process_compiles_nothing_and_has_the_same_bits(home: Path) -> None:
    (first, compiled), (second, read) = update(), update()
    assert sum(compiled.cache_misses.values()) == 1 and not compiled.cache_hits
    assert sum(read.cache_hits.values()) == 1 and not read.cache_misses
    assert first.tobytes() == second.tobytes()
    assert (home / "polyreme").stat().st_mode & 0o777 == 0o700


@whole
@pytest.mark.parametrize("file", ["adam.nbi", "adam.1.nbc"])
def test_a_file_that_is_not_whole_is_compiled_anew(home: Path, file: str) -> None:
    first, _ = update()
    kept = home / "polyreme" / file
    kept.write_bytes(kept.read_bytes()[:-100])
    again, stats = update()
    assert again.tobytes() == first.tobytes() and sum(stats.cache_misses.values()) == 1
    update()
    assert sum(update()[1].cache_hits.values()) == 1  # it has been written anew


def test_nothing_is_read_where_others_could_have_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = home / "polyreme"
    assert compiled_cache.folder() == own
    for mode in (0o777, 0o750, 0o701):
        own.chmod(mode)
        assert compiled_cache.folder() is None
    own.chmod(0o700)
    home.chmod(0o777)  # another could put a folder in its place
    assert compiled_cache.folder() is None
    home.chmod(0o1777)
    assert compiled_cache.folder() == own
    home.chmod(0o700)
    if os.getuid() == 0:
        os.chown(own, 12345, -1)
        assert compiled_cache.folder() is None
        os.chown(own, 0, -1)
    own.rename(home / "other")
    own.symlink_to(home / "other")
    assert compiled_cache.folder() is None
    for nowhere in ("/proc/none", "relative", "/dev/null"):
        monkeypatch.setenv("XDG_CACHE_HOME", nowhere)
        monkeypatch.chdir(home)
        assert compiled_cache.folder() is None
        assert not update()[1].cache_hits


@whole
def test_processes_that_compile_at_once_do_not_disturb_each_other(home: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": SOURCE}
    parts = ("0", "1", "2", "2")

    def start(*kinds: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", EACH, *kinds]
        return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)

    for process in [start(each) for each in parts]:
        output, _ = process.communicate(timeout=120)
        assert output == "0 1\n" or output == "1 0\n"
    output, _ = start("0", "1", "2").communicate(timeout=120)
    hits, misses = map(int, output.split())
    assert hits >= 1 and hits + misses == 3
