"""What a rank says that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command import SOURCE
from polyreme.distributed import failure
from polyreme.errors import LaunchError


def test_a_traceback_never_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {failure.keep(f"of rank {number}", 1) for number in range(3)}
    assert len(said) == 3 and len(list(tmp_path.glob("traceback-*-rank-1-*.txt"))) == 3
    for each in said:
        assert Path(each.partition(" on ")[0]).read_text().startswith("of rank ")


def test_a_traceback_goes_elsewhere_where_its_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone.rmdir()
    assert failure.keep("x", 3).startswith(f"{tmp_path}/traceback-")
    monkeypatch.setattr("tempfile.tempdir", str(gone))
    assert failure.keep("x", 3).startswith("nowhere: ")


def test_what_explains_itself_is_told_with_the_last_line_of_the_script() -> None:
    def deep() -> None:
        raise LaunchError("so it is")

    with pytest.raises(LaunchError) as caught:
        deep()
    caught.value.add_note("a note")
    said, note, line = failure.explained(caught.value).splitlines()
    assert (said, note) == ("so it is", "a note")
    assert line.startswith(f"  at {__file__}:") and line.endswith(': raise LaunchError("so it is")')


SCRIPT = """
import os, signal, sys
from polyreme.distributed.failure import speak_for
if "own" in sys.argv:
    sys.excepthook = lambda *_: print("the script's own", file=sys.stderr)
for _ in range(2):
    speak_for(1, 2, by_mpi=True)
if "ended" in sys.argv:
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
raise ValueError("no good")
"""


@pytest.mark.parametrize("how", ["plain", "own", "interrupt", "ended"])
def test_an_error_that_nobody_catches(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "script.py", how], cwd=tmp_path, env={"PYTHONPATH": SOURCE}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    lines, files = ran.stderr.splitlines(), list(tmp_path.glob("traceback-*"))
    if how == "interrupt":
        assert ran.returncode == -2 and lines[0].startswith("Traceback") and not files
        return
    assert "Traceback" not in ran.stderr and len(files) == (how != "ended")
    if how == "ended":
        assert ran.returncode == -15 and len(lines) == 2, ran.stderr
        assert (
            lines[0].startswith("error: rank 1 of 2 on ") and " was ended by SIGTERM, as MPI does" in lines[0]
        )
        assert lines[1].endswith("script.py:12: os.kill(os.getpid(), signal.SIGTERM)")
        return
    if how == "own":
        assert lines.pop(0) == "the script's own"
    assert lines[0].startswith("error: rank 1 of 2 on ") and lines[0].endswith(" failed: ValueError: no good")
    assert lines[1].endswith('script.py:15: raise ValueError("no good")')
    assert lines[2].startswith(f"traceback: {files[0]} on ") and len(lines) == 3
