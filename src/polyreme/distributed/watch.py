"""Deadlines and deadlocks. Ranks that wait long tell each other where they are, and a wait that can never end
is broken off.

Invariants: an operation that ranks do in the same order costs a note in this process' memory. Only a wait of
more than `patience` seconds communicates, through the store by which the ranks met, in a thread of its own. A
wait is broken off only where it is known never to end: the other rank began another operation in its place,
or ranks wait in a circle, each for an operation that the next one has not begun."""

from __future__ import annotations

import functools
import json
import socket
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from polyreme.distributed.failure import LAST
from polyreme.distributed.world import CLOSED, Resource, current
from polyreme.errors import TransportError, ranks_named

REMEMBERED = 64
"""Most recent operations of a group that a rank reports to others."""
BREAK = (1 << 30) + 1
"""A message tag that nobody sends with."""
ANSWER = 3.0
"""Seconds that the store may take to answer. A host that was cut off never answers, and the store itself has
no deadline."""
TELLING = 0.5
"""Seconds that the store may take to record why this rank breaks off all operations, before it does."""
GONE = (RuntimeError, ValueError, AttributeError)
"""What asking the store raises once the rank that has it ended, the process group was destroyed, or another
thread closed this watch."""
LOOP_METHODS = {"train_step", "backward", "step"}
"""The engine's methods that a script calls in a loop, and seldom on one rank alone."""
NO_ENGINE = "has no engine any more"
"""The reason given of a rank whose shared memory has gone. It may be about to report that it ends."""
BACKGROUND = "polyreme-save"
"""The beginning of the names of threads that exchange in the background, as a save does: while one waits, its
rank goes on."""

P = ParamSpec("P")
T = TypeVar("T")


class WatchedGroup:
    """The ranks of one axis, and a numbered log of the operations that this rank began with them. Operations
    have the same numbers on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.process_group, self.ranks = group, tuple(dist.get_process_group_ranks(group))
        self.watch = current().of(Watch)
        self.watch.made[self.ranks] += 1
        self.key = f"{self.ranks}#{self.watch.made[self.ranks]}"
        self.begun: deque[tuple[int, str, str]] = deque(maxlen=REMEMBERED)
        """The number of each operation, its description, and the engine's method in which it was begun."""
        self.broken = ""
        """The reason why every further operation with these ranks fails; empty while they may go on."""
        self.watch.groups.add(self)

    def others(self) -> list[int]:
        mine = dist.get_rank()
        return [rank for rank in self.ranks if rank != mine]

    def abort(self, why: str) -> None:
        """Break off all operations with these ranks, now and later."""
        self.broken = self.broken or why
        break_off(self.process_group)


def break_off(group: dist.ProcessGroup) -> None:
    """Make every wait for this group's messages fail at once: on this rank and, except over MPI, on the
    others, as gloo closes its connections after a timeout."""
    if group not in dist.distributed_c10d._world.pg_map:  # destroyed by the user
        return
    if dist.get_backend(group) != "gloo":
        with suppress(RuntimeError):
            group.abort()
        return
    for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
        # Over a connection that is closed already nothing times out, and the others would stay open.
        with suppress(RuntimeError):
            dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=BREAK).wait(  # type: ignore[union-attr]
                timedelta(milliseconds=1)
            )


class MessageError(TransportError):
    """A message to or from the rank `peer` of its group failed."""

    def __init__(self, peer: int, error: object) -> None:
        super().__init__(str(error))
        self.peer = peer


class Waiter(NamedTuple):
    """Another rank's wait: for which operation, in which call, since when by its own clock, and which of its
    reports says so."""

    what: str
    call: str
    since: float
    report: int


@dataclass(eq=False)
class Wait:
    """An operation that one thread waits for, the `number`th of its group."""

    group: WatchedGroup
    what: str
    number: int | None
    since: float = field(default_factory=time.monotonic)
    lines: int = 0
    in_background: bool = field(
        default_factory=lambda: threading.current_thread().name.startswith(BACKGROUND)
    )
    circle: dict[int, Waiter] = field(default_factory=dict)
    """Ranks that were seen to wait in a circle with this one."""


class Watch(Resource):
    """The waits of this process for the ranks of a world. In seconds: a wait lasts `patience` before other
    ranks are asked, `every` is between two lines about it on stderr, and `period` between two checks."""

    def __init__(self) -> None:
        self.patience, self.every, self.period = 5.0, 60.0, 1.0
        self.deadline = float("inf")
        """Seconds after which operations fail. Other ranks are asked well before."""
        self.call = ""
        """The engine's method that is running."""
        self.failure = ""
        """The reason why a wait was broken off; empty if none was."""
        self.groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()
        self.made = Counter[tuple[int, ...]]()
        """How many groups were made, by their ranks."""
        self.hosts: Sequence[str] = ()
        """The name of each rank's host, once the ranks have exchanged them."""
        self._waits: dict[int, Wait] = {}  # keys: threads
        self._world: object = None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._why = ""  # why an operation failed
        self._reported = self._calls = 0
        self._lasted = 0.0  # seconds of the last wait
        self._reports: dict[int, Any] = {}  # reports that one check has read, by rank
        self._wake, self._closed = threading.Event(), False

    def begin(self, timeout: timedelta) -> None:
        """Watch the ranks of the process group from now on. Their operations end after `timeout`."""
        self.deadline = min(self.deadline, timeout.total_seconds())
        if self._world is dist.group.WORLD:
            return
        self._world, mine = dist.group.WORLD, dist.get_rank()
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        # successive worlds of these ranks have a prefix each
        self._store = dist.PrefixStore(f"polyreme/{store.add(f'polyreme/worlds/{mine}', 1)}", store)
        self._store.set(f"host/{mine}", socket.gethostname())
        self._thread = threading.Thread(target=self._look_again, name="polyreme watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise TransportError where a wait was broken off: later ones would not end, either."""
        if self.failure:
            raise TransportError(self.failure)

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Mark a call that all ranks make. An error in it, which a script may catch, is reported to ranks
        that wait within the same call."""
        before, self.call = self.call, call
        self._calls += not before
        try:
            yield
        except Exception as error:
            if not before and self._store is not None and not isinstance(error, TransportError):
                report = json.dumps([self._calls, f"raised {type(error).__name__}: {error}"])
                telling = threading.Thread(target=self._say, args=("raised", report), daemon=True)
                telling.start()
                telling.join(ANSWER)
            raise
        finally:
            self.call = before

    def _say(self, key: str, text: str) -> None:
        with suppress(*GONE):
            self._store.set(f"{key}/{dist.get_rank()}", text)

    @contextmanager
    def waiting(self, group: WatchedGroup, what: str, number: int | None) -> Iterator[None]:
        self.check()
        if group.broken:
            raise TransportError(group.broken)
        thread = threading.get_ident()
        self._waits[thread] = Wait(group, what, number)
        try:
            yield
        finally:
            self._lasted = time.monotonic() - self._waits.pop(thread).since

    def why(self, group: WatchedGroup | None, number: int | None, error: Exception) -> str:
        """Return what is known of the cause of `error`, by which the `number`th operation with these ranks
        failed."""
        self._why = self._found(group, number, error)
        return self._why

    def _found(self, group: WatchedGroup | None, number: int | None, error: Exception) -> str:
        peer = group.ranks[error.peer] if group and isinstance(error, MessageError) else None
        who = "another rank" if peer is None else f"rank {peer}"
        if peer is not None and self.hosts:
            who += f" on {self.hosts[peer]}"
        # its text tells what became of the other rank
        ours = isinstance(error, TransportError) and peer is None
        alone = str(error) if ours else f"{who} ended or cannot be reached: {error}"
        broken = self.failure or (group.broken if group else "")
        if broken or group is None or self._store is None:
            return broken or alone
        found: list[str] = []

        def ask() -> None:
            with suppress(*GONE):
                for _ in range(10 if NO_ENGINE in str(error) else 1):  # it may report soon
                    self._reports.clear()
                    heard = self._heard(group)
                    self.failure = self.failure or heard  # another thread may have closed the world
                    if self.failure:
                        break
                    time.sleep(0.1)
                found.append(self.failure or f"{self._absent(group, number, peer)} ({error})")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER)
        if asking.is_alive():
            return f"the host of rank 0, which has the ranks' store, does not answer ({error})"
        return found[0] if found else self.failure or alone

    def _soon(self) -> float:
        """Return the seconds after which other ranks are asked."""
        return min(self.patience, self.deadline / 3)

    def _absent(self, group: WatchedGroup, number: int | None, peer: int | None) -> str:
        """Name the ranks, with their hosts, that are not known to have begun the operation nor to wait in
        another one. If the connection to `peer` broke before the deadline, name `peer` alone."""
        late = [
            rank
            for rank in group.others()
            if (there := self._at(rank)) is None or number not in _by_number(there, group)
        ]
        silent = [rank for rank in late if (there := self._at(rank)) is None or not there["waits"]] or late
        if peer in silent and self._lasted < self.deadline:
            silent = [peer]
        elif not silent or (len(silent) == len(group.others()) > 1 and self._lasted < 2 * self._soon()):
            # those that are there have not reported yet
            return "another rank ended or cannot be reached"
        hosts: dict[str, list[int]] = {}
        for rank in silent:
            hosts.setdefault(self._host(rank), []).append(rank)
        absent = [f"{ranks_named(ranks)} on {host}" for host, ranks in hosts.items()]
        return f"{' and '.join(absent)} did not come to it, ended or cannot be reached"

    def _host(self, rank: int) -> str:
        if self.hosts:
            return self.hosts[rank]
        known = self._store.check([f"host/{rank}"])
        return self._store.get(f"host/{rank}").decode() if known else "an unknown host"

    # ---- in the thread

    def _look_again(self) -> None:
        while True:
            self._wake.wait(min(self.period, self.deadline / 8))
            if self._closed:
                return self._end()
            for wait in list(self._waits.values()):
                # the wait and its group may end meanwhile; go on with others
                with suppress(Exception):
                    if time.monotonic() - wait.since > self._soon():
                        self._visit(wait)

    def _visit(self, wait: Wait) -> None:
        """Break off a long wait, or say that it goes on."""
        try:
            if self.failure:  # found while this wait began
                wait.group.abort(self.failure)
            else:
                self._look(wait)
        except RuntimeError as error:  # the rank with the store ended, and the wait for it will fail
            self._tell(wait, f"the store of rank 0 cannot be reached: {error}")

    def _look(self, wait: Wait) -> None:
        mine = dist.get_rank()
        waits = [(each.group.key, each.group.ranks, each.number, each.what, each.since)
                 for each in list(self._waits.values()) if not each.in_background]  # fmt: skip
        begun = {group.key: list(group.begun) for group in list(self.groups)}
        self._reported += 1
        self._reports.clear()
        self._store.set(
            f"at/{mine}",
            json.dumps({"call": self.call, "waits": waits, "begun": begun, "report": self._reported}),
        )
        failure = (
            self._heard(wait.group)
            or self._why_other_call(wait)
            or ("" if wait.in_background else self._in_circle(wait))
        )
        if failure:
            self.failure = failure
            self._store.set(f"left/{mine}", f"could not go on with {wait.what}{within(self.call)}: {failure}")
            wait.group.abort(failure)
        else:
            self._tell(wait)

    def _at(self, rank: int) -> Any:
        """Return the last report of where a rank was, which it writes while it waits; None if it wrote
        none."""
        if rank not in self._reports:
            known = self._store.check([f"at/{rank}"])
            self._reports[rank] = json.loads(self._store.get(f"at/{rank}")) if known else None
        return self._reports[rank]

    def _heard(self, group: WatchedGroup) -> str:
        """Return the reason why another rank of the group will not come, if it reported one."""
        for rank in group.others():
            if self.call and self._store.check([f"raised/{rank}"]):
                calls, why = json.loads(self._store.get(f"raised/{rank}"))
                if calls == self._calls:
                    return f"rank {rank} {why}"
            for key in (f"ended/{rank}", f"left/{rank}"):
                if self._store.check([key]):
                    why = self._store.get(key).decode()
                    if why == _ENDED and self.call and self.call not in LOOP_METHODS:
                        why = f"ended without it; {_every_rank(self.call)}"
                    return f"rank {rank} {why}"
        return ""

    def _why_other_call(self, wait: Wait) -> str:
        """Return why the wait never ends, where another rank of the group began another operation in its
        place."""
        for rank in wait.group.others():
            there = _by_number(self._at(rank), wait.group)
            other, call = there.get(wait.number, (wait.what, ""))
            if other == wait.what:
                continue
            number, before = self._first_apart(wait, rank, there)
            if not wait.in_background and (said := _unlike(self._calls_of(wait.group, number))):
                return said
            return f"rank {rank} began another operation in its place, {other}{within(call)}{before}; {_WAY}"
        return ""

    def _first_apart(
        self, wait: Wait, rank: int, there: Mapping[int | None, tuple[str, str]]
    ) -> tuple[int | None, str]:
        """Find the first logged operation that this rank and the other one began in different calls. Returns
        its number and a sentence about it; without one, the number of the awaited operation and an empty
        text."""
        for number, what, call in wait.group.begun:
            other = there.get(number, (what, call))
            if number != wait.number and other[1] != call:
                return number, (
                    f". Before, rank {rank} began {other[0]}{within(other[1]) or _OUTSIDE}, and this "
                    f"rank {what}{within(call) or _OUTSIDE}"
                )
        return wait.number, ""

    def _calls_of(self, group: WatchedGroup, number: int | None) -> dict[int, str]:
        """Return the call in which each rank began an operation of the group, where it is known."""
        begun = {rank: _by_number(self._at(rank), group) for rank in group.others()}
        begun[dist.get_rank()] = {each: (what, call) for each, what, call in group.begun}
        return {rank: its[number][1] for rank, its in sorted(begun.items()) if number in its}

    def _in_circle(self, wait: Wait) -> str:
        """Return why the wait never ends, where it is in a circle of waits that have all lasted since the
        circle was first seen."""
        before, wait.circle = wait.circle, self._circle(wait)
        if not wait.circle or any(
            rank not in before or before[rank].since != each.since for rank, each in wait.circle.items()
        ):
            return ""
        if any(before[rank].report == each.report for rank, each in wait.circle.items()):
            wait.circle = before  # not everyone has reported again
            return ""
        mine, ranks = dist.get_rank(), list(wait.circle)
        each = [
            f"rank {rank} waits for rank {after}, in {here.what}{within(here.call)}"
            for (rank, here), after in zip(wait.circle.items(), [*ranks[1:], mine], strict=True)
        ]
        calls = {mine: self.call, **{rank: here.call for rank, here in wait.circle.items()}}
        return _unlike(calls) or (
            f"{', '.join(each)}, and rank {mine} for rank "
            f"{ranks[0]}, in {wait.what}{within(self.call)}; {_WAY}"
        )

    def _circle(self, wait: Wait) -> dict[int, Waiter]:
        """Return the waits of a shortest circle by rank, from one that this wait is for to one that waits for
        this rank; empty if there is no circle."""
        mine = dist.get_rank()
        ways: dict[int, dict[int, Waiter]] = {mine: {}}  # to each rank that is waited for
        queue = deque([mine])
        while queue:
            rank = queue.popleft()
            there = self._at(rank)
            for key, members, number, what, since in there["waits"]:
                if number is None or (rank == mine and (key, number) != (wait.group.key, wait.number)):
                    continue
                way = (
                    ways[rank]
                    if rank == mine
                    else {**ways[rank], rank: Waiter(what, there["call"], since, there["report"])}
                )
                for other in members:
                    if (at := self._at(other)) is None or max(
                        (n for n, *_ in at["begun"].get(key, [])), default=-1
                    ) >= number:
                        continue  # it has not reported, or it has begun the operation
                    if other == mine:
                        return way
                    if other not in ways:
                        ways[other] = way
                        queue.append(other)
        return {}

    def _tell(self, wait: Wait, more: str = "") -> None:
        seconds = time.monotonic() - wait.since
        if seconds >= self.every * (wait.lines + 1):
            wait.lines = int(seconds / self.every)
            print(f"polyreme: rank {dist.get_rank()} has waited "
                  f"{seconds:.0f} s for {ranks_named(wait.group.others())}{within(self.call)}: "
                  f"{wait.what} {more}", file=sys.stderr, flush=True)  # fmt: skip

    # ---- the end

    def abort(self, why: str) -> None:
        self._why, self.failure = f"it {why}", self.failure or f"this process {why}"
        if self._store is not None:
            telling = threading.Thread(target=self._say, args=("left", why), daemon=True)
            telling.start()
            telling.join(TELLING)  # then others notice it, with the reason or without

    def close(self) -> None:
        """Report that this rank leaves, stop watching, and break off the waits of other threads."""
        self.failure = self.failure or CLOSED
        for wait in [*self._waits.values()]:
            wait.group.abort(CLOSED)
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ANSWER)
        self._store = None

    def _end(self) -> None:
        if self._world is dist.group.WORLD:
            ended = f"ended, because {self._why}" if self._why else _ENDED
            self._say("ended", f"raised {LAST.error}" if LAST.error else ended)


def within(call: str) -> str:
    """Return " in CALL", to put behind the name of an operation; empty outside of the engine's methods."""
    return f" in {call}" if call else ""


def _by_number(there: Any, group: WatchedGroup) -> dict[int | None, tuple[str, str]]:
    """Return the operations that a rank reported to have begun with a group, by number: what each is, and in
    which call."""
    begun = [] if there is None else there["begun"].get(group.key, [])
    return {number: (what, call) for number, what, call in begun}


def _every_rank(call: str) -> str:
    return f"every rank has to call engine.{call}, outside of any `if rank == 0:`"


def _unlike(calls: Mapping[int, str]) -> str:
    """Return a sentence about ranks that make different calls in each other's place; empty where all make the
    same call, or some rank is in none of the engine's methods."""
    ranks: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(rank)
    if len(ranks) < 2 or "" in ranks:
        return ""
    rare = [call for call in ranks if call not in LOOP_METHODS]
    if len(rare) != 1:
        said = " and ".join(f"{ranks_named(its)} called engine.{call}" for call, its in ranks.items())
        return f"{said} in its place; all ranks have to make the same calls in the same order"
    others = " and ".join(
        f"{ranks_named(its)} engine.{call}" for call, its in ranks.items() if call != rare[0]
    )
    alone = " alone" if len(calls) == dist.get_world_size() else ""
    return (
        f"{ranks_named(ranks[rare[0]])}{alone} called engine.{rare[0]}, and {others} in its place; "
        f"{_every_rank(rare[0])}"
    )


_OUTSIDE = " outside of the engine's methods, as where engine.module is called"
_WAY = (
    "a model that each rank calls as often as it likes (validation on one rank, generate) is called within "
    "engine.full_parameters(), which all ranks enter, or on all ranks by engine.eval_step; else all ranks "
    "have to make the same calls in the same order, and to run the same blocks (zero.keep names those that "
    "not all run)"
)
_ENDED = (
    "ended before this one: all ranks have to make the same number "
    "of steps, and engine.ask_to_stop() has them stop at the same one"
)


def collective(method: Callable[P, T], of: str = "") -> Callable[P, T]:
    """Mark a method that all ranks have to call. Messages name it as a method of the engine, or of the
    attribute `of` of it."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with current().of(Watch).calling(of + method.__name__):
            return method(*args, **kwargs)

    return run
