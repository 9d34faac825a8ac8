"""The exchange between the launchers of one run, one on each host, while their ranks run and no command
watches them all: that they live, whose ranks failed, and that their ranks have ended.

Invariants: the first failure that is written stands on all hosts; launchers leave together, or LINGER seconds
after a failure; the main thread never waits for the store, which may be on a host that hangs.
Communication: each writes a key in the store where they met every HEARTBEAT seconds; the first host reads
all."""

from __future__ import annotations

import json
import math
import threading
import time
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore

HEARTBEAT = 1.0
SOON = 0.05  # seconds between looks when something is about to come
ANSWER = 3.0  # seconds to reach the store
SILENCE = 60.0
LINGER = 15.0  # seconds for the others to end their ranks, too
RUNS, ENDED, LEFT = "runs", "ended", "left"
FAILED, ALL = "peers/failed", "peers/all"


class Ending(NamedTuple):
    """The end of a run: the place that caused it, a text, and an exit status."""

    place: int
    text: str
    status: int = 1


class Peers:
    """The launchers of a run, of which this is number `place`, on the host `name`. Number 0 holds the
    store."""

    def __init__(self, store: TCPStore, place: int, count: int, name: str, silence: float = SILENCE) -> None:
        self._store: TCPStore = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=silence))
        self.place, self._count, self._name, self._silence = place, count, name, silence
        self._state, self._beats = RUNS, 0
        self._seen: dict[int, tuple[str, float]] = {}  # each one's last word, and its time
        self._silent: set[int] = set()  # not waited for
        self._mine: Ending | None = None
        self._ending: Ending | None = None
        self._reported, self._left, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._asking = math.inf  # since when the store has not answered
        self._all_ended = math.inf
        for other in range(1, count) if place == 0 else ():
            self._store.compare_set(f"peers/{other}", "", RUNS)
        threading.Thread(target=self._keep, name="polyreme peers", daemon=True).start()

    def failure(self, within: float = 0.0) -> Ending | None:
        """Return the failure that ended the run, as this host or another reported it, waiting for one
        `within` so many seconds."""
        deadline = time.monotonic() + within
        while self._ending is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(SOON)
        if self._ending is None and time.monotonic() > self._asking + self._silence:
            self._lose(f"has not answered for {self._silence:g} s")
        return self._ending

    def fail(self, text: str, status: int = 1) -> None:
        """Report why the run ends here, unless another host has reported a failure before. A second call
        replaces this host's own report."""
        self._reported.clear()
        self._mine = Ending(self.place, f"{self._name}: {text}", status)
        self._wake.set()
        if not self._left.is_set():
            self._reported.wait(ANSWER)

    def leave(self, within: float) -> Ending | None:
        """Report that no rank runs here, and wait until none does elsewhere, for so many seconds. Returns the
        failure that ended the run, if one did."""
        self._state = ENDED
        self._wake.set()
        deadline = time.monotonic() + within
        while not self._left.wait(SOON) and time.monotonic() < deadline:
            self.failure()
        return self.failure()

    def close(self) -> None:
        """Report nothing more."""
        self._left.set()
        self._wake.set()

    def elsewhere(self) -> Ending | None:
        """Return the end of the run, unless this host itself caused and reported it."""
        ending = self.failure()
        return None if ending is not None and ending == self._mine and ending.place == self.place else ending

    @property
    def left(self) -> bool:
        """Whether no other launcher waits for this host any more."""
        return self._left.is_set()

    # ---- in the thread

    def _keep(self) -> None:
        while not self._left.is_set():
            self._asking = time.monotonic()
            try:
                self._exchange()
            except (RuntimeError, ValueError) as error:  # raised by torch's store
                self._lose(f"cannot be reached ({str(error).splitlines()[0]})")
                break
            self._asking = math.inf
            self._wake.wait(HEARTBEAT if self._state == RUNS and self._ending is None else SOON)
            self._wake.clear()
        self._asking = math.inf
        self._reported.set()
        self._left.set()

    def _lose(self, how: str) -> None:
        text = f"the first host's launcher {how}: it has ended, or it hangs, or its network is down"
        self._ending = self._ending or Ending(0, text)
        self._left.set()

    def _exchange(self) -> None:
        self._beats += 1
        self._store.set(f"peers/{self.place}", f"{self._state} {self._beats} {self._name}")
        mine = self._mine
        if mine is not None:
            first = self._store.compare_set(FAILED, "", json.dumps(mine))
            if Ending(*json.loads(first)).place == self.place:
                self._store.set(FAILED, json.dumps(mine))
        if self._store.check([FAILED]):
            self._ending = Ending(*json.loads(self._store.get(FAILED)))
        if mine is not None:
            self._reported.set()
        if self.place == 0:
            self._look_around()
        elif self._state == ENDED and self._store.check([ALL]):
            self._store.set(f"peers/{self.place}", LEFT)
            self._left.set()

    def _look_around(self) -> None:
        """Find on the first host which launchers have ended and which are silent."""
        others = range(1, self._count)
        now = time.monotonic()
        said: list[bytes] = self._store.multi_get([f"peers/{place}" for place in others])
        for place, text in zip(others, map(bytes.decode, said), strict=True):
            before, at = self._seen.get(place, ("", 0.0))
            if before != text:
                self._seen[place] = (text, now)
            elif now > at + self._silence and self._all_ended == math.inf and self._ending is None:
                name = text.split(" ", 2)[-1]
                self._silent.add(place)
                self._mine = Ending(
                    place,
                    f"host {place} of {self._count}, {name}, has said nothing for {self._silence:g} s: its "
                    "launcher hangs or was killed, or its network is down",
                )
        heard = [text for place, (text, _) in self._seen.items() if place not in self._silent]
        states = {text.partition(" ")[0] for text in heard}
        if RUNS not in {self._state, *states} and self._all_ended == math.inf:
            self._store.set(ALL, "1")
            self._all_ended = now
        if (self._state == ENDED and states <= {LEFT}) or now > self._all_ended + ANSWER:
            self._left.set()
