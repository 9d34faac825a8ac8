"""The output of ranks: it reaches the launcher over pipes, and is printed by lines that name their rank.

Invariant: all that ranks wrote before they ended is passed on. Communication: none."""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections.abc import Callable

from polyreme.launch.frames import OUTPUT, Frame

PATIENCE = 5.0  # seconds for what ranks left in the pipes
Take = Callable[[Frame], None]


class Pipes:
    """Passes the output of ranks to `take`, in a thread, as frames with the rank's number; an empty one at
    its end."""

    def __init__(self, take: Take) -> None:
        self._take, self._pipes, self._over = take, selectors.DefaultSelector(), threading.Event()
        self._thread = threading.Thread(target=self._hand_on, daemon=True)

    def open(self, rank: int, kind: int) -> int:
        """Return the write end of a new pipe for a rank's output, `OUTPUT` or `ERRORS`."""
        out, into = os.pipe()
        self._pipes.register(out, selectors.EVENT_READ, Frame(kind, rank, b""))
        return into

    def start(self) -> None:
        """Start the thread, once all pipes are open."""
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left in the pipes, for at most PATIENCE seconds: processes that ranks left behind
        may print for ever."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)
        for key in [*self._pipes.get_map().values()]:
            os.close(key.fd)
        self._pipes.close()

    def _hand_on(self) -> None:
        pipes = self._pipes
        while pipes.get_map() and ((ready := pipes.select(0.1)) or not self._over.is_set()):
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                self._take(key.data._replace(data=data))
                if not data:
                    pipes.unregister(key.fd)
                    os.close(key.fd)
        for key in pipes.get_map().values():
            self._take(key.data)


class Printer:
    """Prints the output of ranks: that of rank 0 unchanged, other ranks' lines after their host and rank."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        self._begun: dict[tuple[int, int], bytes] = {}

    def begin(self, host: str, way: str, first: int, ranks: int) -> None:
        """Print that `ranks` ranks start on a host, beginning with rank `first`."""
        last = first + ranks - 1
        named = f"rank {first}" if ranks == 1 else f"ranks {first} to {last}"
        print(f"{host}: {named} ({way})", file=sys.stderr, flush=True)
        self._hosts.update(dict.fromkeys(range(first, last + 1), host))

    def take(self, frame: Frame) -> None:
        """Print output of a rank as far as its lines are complete, and the rest at its end."""
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
        """Print the incomplete lines."""
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
        else:  # as in a notebook
            stream.write(data.decode(errors="replace"))
            stream.flush()
