"""`polyreme launch --mpi` on this host, by the mpirun of each library that is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mpirun import LIBRARIES, OPTIONS, missing, variables

SCRIPT = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
print("rank", rank, sys.argv[1:], os.environ["WORD"])
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[1]) if rank else 0)
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_mpirun_starts_the_ranks_of_a_script(library: str, tmp_path: Path) -> None:
    if reason := missing(library):
        pytest.skip(reason)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        "launch",
        "--mpi",
        "-n",
        "2",
        "--env",
        "WORD=x y",
        *(f"--mpirun={each}" for each in OPTIONS[library]),
    ]
    python = str(LIBRARIES[library] / "bin" / "python")
    for status in 0, 3:
        done = subprocess.run(
            [python, "-m", "polyreme", *words, "script.py", str(status), "$HOME 'a", ""],
            cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert ("error: mpirun ended with status 3" in done.stderr) == bool(status)
        if status:  # mpirun may have ended the other rank before it printed
            continue
        given = repr([str(status), "$HOME 'a", ""])
        lines = done.stdout.splitlines()
        assert f"rank 0 {given} x y" in lines, done.stdout
        assert any(each.endswith(f" 1] rank 1 {given} x y") for each in lines), done.stdout
        assert done.stderr.count("] an error\n") == 1 and "mpirun" in done.stderr.splitlines()[0]
