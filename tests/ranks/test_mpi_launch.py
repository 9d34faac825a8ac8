"""`polyreme launch --mpi` on this host, by the mpirun of each library that is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from command import TINY, write_text
from examples import whole
from mpirun import LIBRARIES, OPTIONS, missing, variables

SCRIPT = """
import os, sys
import polyreme
class Told(polyreme.PolyremeError):
    exit_status = int(sys.argv[1])
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
print("rank", rank, sys.argv[1:], os.environ["WORD"])
print("an error", file=sys.stderr)
if rank and Told.exit_status:
    raise Told("as it was told")
"""


@pytest.mark.parametrize(
    "library", [each if each == "mpich" else pytest.param(each, marks=whole) for each in LIBRARIES]
)
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
            told = r"rank 1 of 2 on \S+ failed: as it was told\n(\S+ 1] )?  at \S*script.py:\d+: raise Told"
            own = re.search(rf"1] error: {told}", done.stderr)
            assert own or library == "openmpi", done.stderr  # it may drop what a rank says as it ends
            assert "Traceback" not in done.stderr, done.stderr
            last = r"\nerror: mpirun ended with status 3: "
            assert re.search(rf"{last}{told}\(\"as it was told\"\)\n$", done.stderr), done.stderr
            continue
        given = repr([str(status), "$HOME 'a", ""])
        lines = done.stdout.splitlines()
        assert f"rank 0 {given} x y" in lines, done.stdout
        assert any(each.endswith(f" 1] rank 1 {given} x y") for each in lines), done.stdout
        assert done.stderr.count("] an error\n") == 1 and "mpirun" in done.stderr.splitlines()[0]


@whole
@pytest.mark.parametrize(
    ("library", "number"), [*product(LIBRARIES, (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT))]
)
def test_training_by_mpirun_saves_when_it_is_asked_to(
    library: str, number: signal.Signals, tmp_path: Path
) -> None:
    if reason := missing(library):
        pytest.skip(reason)
    write_text(tmp_path)
    text = TINY.replace("[checkpoint]\n", '[checkpoint]\nfolder = "out"\n')
    (tmp_path / "run.toml").write_text(text.replace("length = 20", "length = 4000"))
    python = str(LIBRARIES[library] / "bin" / "python")
    options = [f"--mpirun={each}" for each in OPTIONS[library]]
    with subprocess.Popen(
        [python, "-m", "polyreme", "train", "run.toml", "--mpi", "-n", "2", *options], cwd=tmp_path,
        env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        log = tmp_path / "out" / "log.jsonl"
        try:
            while not log.exists() or log.read_text().count("\n") < 2:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            process.send_signal(number)
            printed, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    saved = [each.name for each in (tmp_path / "out").glob("step-*")]
    assert process.returncode == (130 if number == signal.SIGINT else 0), printed
    assert f"stopped by SIGUSR1 after step {saved[0].removeprefix('step-')}; the same command" in printed
    assert "\x1b" not in printed  # as into a file, though mpirun may give ranks a terminal of its own


@whole
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_script_under_mpirun_saves_when_it_is_asked_to(
    library: str, number: signal.Signals, tmp_path: Path
) -> None:
    if reason := missing(library):
        pytest.skip(reason)
    page = Path(__file__).parents[2] / "docs" / "cluster.md"
    text = page.read_text("utf-8").partition("# saves.py\n")[2].partition("```")[0]
    begun = "    Path(f'begun{engine.mesh.dp.rank}').touch()\n    done = "
    (tmp_path / "saves.py").write_text(text.replace("    done = ", begun))
    python = str(LIBRARIES[library] / "bin" / "python")
    options = [f"--mpirun={each}" for each in OPTIONS[library]]
    script = ("saves.py", "1000000", "out")
    with subprocess.Popen(
        [python, "-m", "polyreme", "launch", "--mpi", "-n", "2", *options, "--saves", *script],
        cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while not all((tmp_path / f"begun{rank}").exists() for rank in range(2)):
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            process.send_signal(number)
            asked = time.monotonic()
            printed, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    print(f"{library}, {number.name}: {time.monotonic() - asked:.1f} s to the end")
    assert process.returncode == os.EX_TEMPFAIL, printed
    assert "ranks have stopped, and are to go on" in printed
    assert (tmp_path / "out" / "resume.json").exists()
