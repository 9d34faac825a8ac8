"""What ranks print: it reaches the launcher over pipes, and whoever is to see it by lines that name their
rank.

Invariant: all that ranks wrote before they ended is handed on. Communication: none."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from polyreme.launch.frames import ERRORS, OUTPUT, Frame

PATIENCE = (
    5.0  # seconds for what ranks left in the pipes; what processes that they left behind print has no end
)
Take = Callable[[Frame], None]


@contextlib.contextmanager
def relayed(ranks: int, take: Take, folder: str) -> Iterator[str]:
    """How the names of pipes in `folder` begin to which ranks write what they print; `take` gets it, in a
    thread, with the rank's number on this host, and nothing at its end."""
    with selectors.DefaultSelector() as pipes:
        for rank in range(ranks):
            for kind, name in (OUTPUT, "out"), (ERRORS, "err"):
                path = Path(folder, f"rank{rank}.{name}")
                os.mkfifo(path, 0o600)
                # to write, too: a pipe that nobody writes to would be at its end
                pipes.register(os.open(path, os.O_RDWR | os.O_NONBLOCK), selectors.EVENT_READ, (kind, rank))
        over = threading.Event()

        def hand_on() -> None:
            while (ready := pipes.select(0.1)) or not over.is_set():
                for key, _ in ready:
                    kind, rank = key.data
                    take(Frame(kind, rank, os.read(key.fd, 65536)))
            for kind, rank in (key.data for key in pipes.get_map().values()):
                take(Frame(kind, rank, b""))

        relay = threading.Thread(target=hand_on, daemon=True)
        relay.start()
        try:
            yield str(Path(folder, "rank"))
        finally:
            over.set()
            relay.join(PATIENCE)
            for key in pipes.get_map().values():
                os.close(key.fd)


class Printer:
    """Prints what ranks print: rank 0's bytes as they are, others' lines after their host and rank."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        self._begun: dict[tuple[int, int], bytes] = {}

    def begin(self, host: str, way: str, first: int, ranks: int) -> None:
        """Say that `ranks` ranks start on a host, of which `first` is the first."""
        last = first + ranks - 1
        named = f"rank {first}" if ranks == 1 else f"ranks {first} to {last}"
        print(f"{host}: {named} ({way})", file=sys.stderr, flush=True)
        self._hosts.update(dict.fromkeys(range(first, last + 1), host))

    def take(self, frame: Frame) -> None:
        """Print what a rank wrote, as far as its lines are whole, or at its end."""
        if frame.rank == 0:
            self._write(frame.kind, frame.data)
            return
        key = (frame.kind, frame.rank)
        if not frame.data:
            self._flush(*key)
            return
        text = self._begun.get(key, b"") + frame.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, self._begun[key] = text.rpartition(b"\n")
        if newline:
            self._write(frame.kind, b"".join(self._line(frame.rank, line) for line in whole.split(b"\n")))

    def flush(self) -> None:
        """Print the lines that were begun."""
        for kind, rank in [*self._begun]:
            self._flush(kind, rank)

    def _flush(self, kind: int, rank: int) -> None:
        if begun := self._begun.pop((kind, rank), b""):
            self._write(kind, self._line(rank, begun))

    def _line(self, rank: int, line: bytes) -> bytes:
        return f"[{self._hosts[rank]} {rank}] ".encode() + line + b"\n"

    def _write(self, kind: int, data: bytes) -> None:
        stream = sys.stdout if kind == OUTPUT else sys.stderr
        if buffer := getattr(stream, "buffer", None):
            buffer.write(data)
            buffer.flush()
        else:  # a notebook's
            stream.write(data.decode(errors="replace"))
            stream.flush()
