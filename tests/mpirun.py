"""Ranks that mpirun started, of each MPI library that is installed: one launch runs many jobs.

Those of the system (Debian's openmpi-bin and mpich) get an environment as those of pip have one: a Python,
beside which mpi4py finds the library, and the mpirun.
Ranks that wait keep the processors busy: one launch at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VENV = Path(sys.prefix)
SYSTEM = VENV / "system-mpi"
LIBRARIES = {
    "mpich": VENV,
    "openmpi": VENV / "openmpi",
    "system-mpich": SYSTEM / "mpich",
    "system-openmpi": SYSTEM / "openmpi",
}
"""Where each is, and a Python whose mpi4py finds it (`make setup`, `system`)."""
SHARED = {"system-mpich": ("libmpich.so.12", "libmpi.so.12"), "system-openmpi": ("libmpi.so.40",) * 2}
"""What Debian calls the library, and what mpi4py calls it."""
AS_ROOT = ("--allow-run-as-root", "--oversubscribe")
OPTIONS: Mapping[str, Sequence[str]] = {
    "mpich": (), "openmpi": AS_ROOT, "system-mpich": (), "system-openmpi": AS_ROOT,
}  # fmt: skip
Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Failed(str):
    """A job's traceback."""


MISSING = Failed("the rank did not come to this")


def missing(library: str) -> str:
    """Why ranks of a library cannot be started; "" if they can."""
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed"
    found = system(library) if library in SHARED else (LIBRARIES[library] / "bin" / "mpirun").exists()
    how = "apt-get install openmpi-bin mpich" if library in SHARED else "make setup"
    return "" if found else f"{library} is not installed: {how}"


def system(library: str) -> bool:
    """Make the environment of a library of the system, unless it is there; whether there is that library."""
    mpirun = shutil.which(f"mpirun.{library.removeprefix('system-')}", path="/usr/bin")
    name, called = SHARED[library]
    file = Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")) / name
    if mpirun is None or not file.exists():
        return False
    if not (folder := LIBRARIES[library]).exists():
        SYSTEM.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=SYSTEM))
        venv.create(made, symlinks=True)
        packages = next((made / "lib").glob("python*")) / "site-packages"
        (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
        (made / "lib" / called).symlink_to(file)
        # by its own path: Open MPI looks for the rest of itself beside it
        (made / "bin" / "mpirun").write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{folder}/lib" exec {mpirun} "$@"\n'
        )
        (made / "bin" / "mpirun").chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return True


def command(library: str, world: int, *words: str, under: Sequence[str] = ()) -> list[str]:
    """That starts `python WORDS` on `world` ranks, each by the command `under`."""
    at = LIBRARIES[library] / "bin"
    start = [at / "mpirun", *OPTIONS[library], "-n", world, *under, at / "python", *words]
    return [str(each) for each in start]


def variables() -> dict[str, str]:
    """The environment of ranks."""
    paths = [str(HERE), str(HERE.parent / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(
    library: str, world: int, jobs: Mapping[str, Job], folder: Path, timeout: float = 150
) -> dict[str, list[Any]]:
    """What each job gave on each rank: its result, or the text of what it raised. A job is a function at the
    top of a test module, called as `function(rank, world, *args)`, and what follows its rank and world."""
    (folder / "jobs").write_bytes(
        pickle.dumps((sys.path, {name: pickle.dumps(job) for name, job in jobs.items()}))
    )
    words = command(library, world, "-c", "import mpirun; mpirun.serve()", str(folder))
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen(
            words, stdout=printed, stderr=printed, env=variables(), start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    files = [folder / f"rank-{rank}" for rank in range(world)]
    answers = [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files]
    return {
        "status": [process.returncode],
        "printed": [(folder / "printed").read_text(errors="replace")],
        **{name: [answer.get(name, MISSING) for answer in answers] for name in jobs},
    }


def serve() -> None:
    """Be one of the ranks; the folder that has the jobs, and gets the answers, is the program's argument."""
    import torch
    import torch.distributed as dist

    from polyreme.distributed.process_group import close, join

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    paths, jobs = pickle.loads((folder / "jobs").read_bytes())
    sys.path[:] = paths
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    answers = {}
    for name, pickled in jobs.items():
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(pickled)
            answers[name] = function(rank, world, *args)
        except BaseException:
            answers[name] = Failed(traceback.format_exc())
        file = folder / f"rank-{rank}"
        file.with_suffix(".new").write_bytes(pickle.dumps(answers))
        file.with_suffix(".new").rename(file)
    close()
