"""The command `polyreme` as its users run it: in a process of its own, whose descendants can be found
wherever they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from examples import ALL
from polyreme import errors
from warm import NAME, WarmPython

SOURCE = str(Path(errors.__file__).parents[1])
RANK_VARIABLES = (
    "POLYREME_LAUNCHED",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64
[data]
path = "text.txt"
sequence = 32
vocab_size = 300
[batch]
size = 4
[optimizer]
lr = 1e-2
[train]
length = 20
validate_every = 10
validate_batches = 2
[checkpoint]
every = "none"
[monitor]
plot = false
"""


def write_text(folder: Path, sentences: int = 400) -> Path:
    """A text with much to learn in a few steps: sentences of a few words, told apart by their numbers."""
    people = ("the people", "our states", "this congress")
    deeds = ("made peace", "kept the laws", "paid the debt", "built roads")
    lines = [
        f"In year {i} {people[i % 3]} {deeds[i * i % 4]}.{' ' if i % 20 else chr(10)}"
        for i in range(sentences)
    ]
    path = folder / "text.txt"
    path.write_text("".join(lines))
    return path


class Command:
    """One run of `polyreme WORDS` in `folder`, its temporary files in `folder/tmp`.

    `warm`: as forks (warm.py), but where all cases are run; `door`: which begin with DeepSpeed's door
    open."""

    process: subprocess.Popen[str] | WarmPython

    def __init__(
        self,
        folder: Path,
        *words: str,
        variables: Mapping[str, str] | None = None,
        warm: bool = True,
        door: bool = False,
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._mark = f"polyreme-test-{uuid.uuid4().hex}".encode()
        own = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        environment = {
            **own,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": SOURCE,
            "POLYREME_TEST": self._mark.decode(),
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        if warm and ALL not in os.environ:
            self.process = WarmPython(["-m", "polyreme", *words], folder, environment, ranks=True, door=door)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyreme", *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def descendants(self) -> dict[int, int | None]:
        """Every live process of the run but the first: its process id, and its rank if it has one."""
        found: dict[int, int | None] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                ours = b"POLYREME_TEST=" + self._mark in variables
                name = b""
                if not ours and isinstance(self.process, WarmPython):  # a fork's variables are not seen
                    ours = (folder / "fd" / "2").readlink() == self.process.errors
                    name = (folder / "comm").read_bytes().strip()
            except (OSError, ProcessLookupError):
                continue
            if ours and int(folder.name) != self.process.pid and state not in "ZX":
                told = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
                if name.startswith(NAME.encode()):
                    told = [name.removeprefix(NAME.encode())]
                found[int(folder.name)] = int(told[0]) if told else None
        return found

    def end(self, seconds: float = 240) -> tuple[int, str, str]:
        """Exit status, stdout, stderr, when it has ended by itself."""
        output, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode is not None
        return self.process.returncode, output, errors


def polyreme(
    folder: Path,
    *words: str,
    variables: Mapping[str, str] | None = None,
    warm: bool = True,
    door: bool = False,
) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of a run from its start to its end."""
    with running(folder, *words, variables=variables, warm=warm, door=door) as command:
        return command.end()


@contextmanager
def running(
    folder: Path,
    *words: str,
    variables: Mapping[str, str] | None = None,
    warm: bool = True,
    door: bool = False,
) -> Iterator[Command]:
    """A run that is over, with all its processes, when the block is left; one that left any is a failed
    test."""
    command = Command(folder, *words, variables=variables, warm=warm, door=door)
    try:
        yield command
        left = command.descendants()
        assert not left, f"processes outlived the run: {left}"
        # torch's, empty
        files = [path for path in command.temporary.rglob("*") if not path.name.startswith("torchinductor_")]
        assert not files, f"temporary files outlived the run: {files}"
    finally:
        for pid in (command.process.pid, *command.descendants()):
            if pid != command.process.pid or command.process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        command.process.communicate()


def until(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    """Wait for `condition`; the limit only matters when it never comes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
