"""What this process has together with one set of ranks: groups, the watch over them, memory that they share.
It ends with them, and other ranks may follow in the same process.

Invariant: nothing that lives as long as these ranks is kept anywhere else. What is known of parameters goes
to the next world, as they outlive this one. Two more things live longer, as others may need them: MPI, which
begins and ends once in a process, and the store where ranks met last (`meeting`).
Communication: none of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

CLOSED = "this process has closed the world of these ranks, with their groups: open another engine"


class Part:
    """Something that a world has one of."""

    def abort(self, why: str) -> None:
        """Break off what this process does with other ranks, who hear that it `why`."""

    def close(self) -> None:
        """Let go of all."""


P = TypeVar("P", bound=Part)


class World:
    """The parts are made as they are asked for, the first time."""

    def __init__(self) -> None:
        self._parts: dict[type[Any], Any] = {}
        self.rank = 0
        """This process' number among the ranks, which it keeps when the world is closed."""
        self.address: tuple[str, int] | None = None
        """Where they met (host, port), where Polyreme had them meet."""

    def of(self, kind: type[P]) -> P:
        """The world's own `kind`."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        found: P = self._parts[kind]
        return found

    def abort(self, why: str = "") -> None:
        """Break off every exchange that is under way or waits in this process, in whichever thread: it raises
        TransportError within a second, and names what was under way, and `why`. So does what is begun
        afterwards; the world can only be closed. May be called in any thread.

        Communication: others hear of it, where they wait for this rank."""
        for part in [*self._parts.values()]:
            part.abort(f"broke off what it did with other ranks{why and f', because {why}'}")

    def close(self) -> None:
        """End groups that were made for meshes (and the process group, if Polyreme opened it), the thread
        that watches them, and the memory shared with other ranks, but for tensors that somebody still has.
        What still waits in other threads is broken off. The axes of this world move nothing any more. The
        next mesh opens another world.

        Parts end in the order in which they were made, the watch before the groups that it watches.
        Communication: others hear, where they wait for this rank, that it has left."""
        global _current
        if _current is self:
            _current = World()
        with ExitStack() as ending:
            for part in reversed(self._parts.values()):
                ending.callback(part.close)
        self._parts.clear()


def current() -> World:
    """The world that meshes are opened in."""
    return _current


_current = World()
