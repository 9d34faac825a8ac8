"""How ranks are started, and how they failed, in terms that launchers of other hosts and clusters share.
Imports no torch, which would take such a launcher a second."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from polyreme.errors import LaunchError
from polyreme.launch.signals import SAVE_SIGNALS
from polyreme.launch.streams import Take

PATIENCE = 8  # seconds that ranks get to end by themselves before SIGKILL
SAVING = 15 * 60  # and ranks that were asked to save before


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are started, where it differs from `polyreme launch SCRIPT`.

    `variables` override the user's. `ports`: where ranks meet is the first of them that is free; 0 is any.
    `local_rank`: the script's first argument is --local_rank=N. `program`: the command is a program, not a
    Python script. `log`: rank N writes its output to the file LOG + N + ".log", whose folder is made.
    `interrupt_saves`: Ctrl-C, too, asks ranks that save to save, and each request is acknowledged on stderr.
    `take` gets the output of ranks, in another thread. `begun` is called with the number of the first rank
    here, and how many start."""

    variables: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[int] = (0,)
    local_rank: bool = False
    program: bool = False
    log: str | None = None
    interrupt_saves: bool = False
    take: Take | None = None
    begun: Callable[[int, int], None] | None = None

    @property
    def save_signals(self) -> tuple[signal.Signals, ...]:
        """The signals by which ranks that save are asked to save and stop."""
        return (*SAVE_SIGNALS, *([signal.SIGINT] if self.interrupt_saves else []))


PLAIN = LaunchOptions()


class RanksFailedError(LaunchError):
    """Ranks failed, or a signal ended them.

    `rank` is the one that failed first (None after a signal), `traceback` its traceback if it left one,
    `out_of_memory` whether the kernel killed it for lack of memory, `ended_well` whether all ended with
    status 0 after a signal.
    """

    out_of_memory = False
    ended_well = False

    def __init__(
        self, message: str, exit_status: int, rank: int | None = None, traceback: str | None = None
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.rank = rank
        self.traceback = traceback
