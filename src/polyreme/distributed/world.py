"""The state that this process shares with one set of ranks: groups, the watch over them, shared memory. It
ends with these ranks, and other ranks may follow in the same process.

Invariant: nothing that lives as long as these ranks is kept anywhere else. What is known of parameters goes
to the next world, as they outlive this one. Two more things live longer: MPI, which begins and ends once in a
process, and the store where ranks met last (`rendezvous`).
Communication: none of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

CLOSED = "this process has closed the world of these ranks, with their groups: open another engine"


class Resource:
    """A resource that each world makes once, when it is first asked for."""

    def abort(self, why: str) -> None:
        """Break off this process' exchanges with other ranks, which are told the reason `why`."""

    def close(self) -> None:
        """Release everything."""


R = TypeVar("R", bound=Resource)


class World:
    """The resources shared with one set of ranks, each made when it is first asked for."""

    def __init__(self) -> None:
        self._resources: dict[type[Any], Any] = {}
        self.rank = 0
        """This process' number among the ranks. It stays when the world is closed."""
        self.address: tuple[str, int] | None = None
        """The (host, port) where the ranks met, if Polyreme made them meet."""

    def of(self, kind: type[R]) -> R:
        """Return this world's resource of class `kind`."""
        if kind not in self._resources:
            self._resources[kind] = kind()
        found: R = self._resources[kind]
        return found

    def abort(self, why: str = "") -> None:
        """Break off every exchange that is under way or waits in this process, in whichever thread: each
        raises TransportError within a second, which names the exchange, and `why`. So does every later
        exchange; the world can then only be closed. May be called in any thread.

        Communication: ranks that wait for this one are told."""
        for resource in [*self._resources.values()]:
            resource.abort(f"broke off what it did with other ranks{why and f', because {why}'}")

    def close(self) -> None:
        """Close the groups that were made for meshes (and the process group, if Polyreme opened it), the
        thread that watches them, and the memory shared with other ranks, except for tensors still in use.
        Waits of other threads are broken off, and the axes of this world move nothing any more. The next mesh
        opens another world.

        Resources close in the order in which they were made: the watch before the groups that it watches.
        Communication: ranks that wait for this one are told that it left."""
        global _current
        if _current is self:
            _current = World()
        with ExitStack() as ending:
            for resource in reversed(self._resources.values()):
                ending.callback(resource.close)
        self._resources.clear()


def current() -> World:
    """Return the world in which meshes are opened."""
    return _current


_current = World()
