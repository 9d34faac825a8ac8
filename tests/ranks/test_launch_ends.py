"""How a launch ends: at once when the ranks have ended, and before they run, at a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import RANK_VARIABLES, SOURCE
from examples import whole
from hosts import lacking

LOADED = """
import gc, sys
print(gc.get_freeze_count() if "torch" in sys.modules else 0)
import torch
print(gc.get_freeze_count())
"""
SITE = """
import atexit, os, sys
class Last:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")
if "POLYREME_LAUNCHED" not in os.environ:
    sys.last = Last()
    atexit.register(print, "at exit")
"""


def launch(folder: Path, *before: str, script: str = "print('runs')") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    own = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return subprocess.run(
        [*before, sys.executable, "-m", "polyreme", "launch", "-n", "1", "script.py"], cwd=folder, text=True,
        env={**own, "PYTHONPATH": f"{folder}:{SOURCE}"}, capture_output=True, timeout=120,
    )  # fmt: skip


@whole
def test_neither_launcher_nor_ranks_look_through_all_of_torch_at_their_end(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    run = launch(tmp_path, script=LOADED)
    before, after, *launcher = run.stdout.splitlines()
    assert int(before) == 0 and int(after) > 100_000 and launcher == ["at exit"], run


@pytest.mark.skipif(bool(lacking("unshare")), reason=lacking("unshare"))
def test_a_loopback_that_is_down_is_named_with_what_puts_it_up(tmp_path: Path) -> None:
    down = launch(tmp_path, "unshare", "--net")
    assert down.returncode == 1 and down.stdout == "", down
    assert down.stderr.count("\n") == 1 and "(Network is unreachable): the loopback" in down.stderr, down
    fix = down.stderr.rpartition("put it up (`")[2].partition("`")[0]
    up = launch(tmp_path, "unshare", "--net", "sh", "-c", f'{fix} && exec "$@"', "sh")
    assert (up.returncode, up.stdout) == (0, "runs\n"), up
