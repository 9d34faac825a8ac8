"""What a killed launcher left is deleted by the next one; nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme.launch import torchrun


def test_what_killed_launchers_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ["polyreme-launch-dead", "polyreme-launch-lives", "polyreme-launch-notes", "another", "target"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").touch()
        if not name.endswith("notes"):
            (tmp_path / name / torchrun.MARK).touch()
    (tmp_path / "polyreme-launch-link").symlink_to(tmp_path / "target")
    with torchrun._locked(tmp_path / "polyreme-launch-lives"), torchrun._folder() as mine:
        assert Path(mine).is_dir() and not (tmp_path / "polyreme-launch-dead").exists()
        with pytest.raises(OSError), torchrun._locked(Path(mine)):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], "polyreme-launch-link"])
    assert (tmp_path / "target" / "error.json").exists()
