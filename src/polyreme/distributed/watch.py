"""Deadlines and deadlocks: what this rank waits for, and whether it can ever come: ranks that wait long tell
each other where they are, and a wait without end is broken off.

Invariants: an operation that ranks do in the same order costs a note in this process' memory; only a wait of
more than `patience` seconds communicates, through the store by which the ranks met, in a thread of its own. A
wait is broken off only where it is known to be without end: the other rank began another operation in its
place, or ranks wait in a circle, each for what the next one has not begun."""

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
from polyreme.distributed.world import CLOSED, Part, current
from polyreme.errors import TransportError, ranks_named

REMEMBERED = 64
"""Operations of a meeting that others are told of."""
BREAK = (1 << 30) + 1
"""The tag of a message that nobody sends."""
ANSWER = 3.0
"""Seconds that the store may take to answer: on a host that was cut off it never does, and has no
deadline."""
TELLING = 0.5
"""Seconds that the store may take to hear why this rank breaks off all, before it does."""
LOOP = {"train_step", "backward", "step"}
"""The engine's methods that a script calls again and again, and seldom on one rank alone."""
NO_ENGINE = "has no engine any more"
"""What is said of a rank whose memory has gone; it may be about to tell that it ends."""
ASIDE = "polyreme-save"
"""How the names of threads begin that exchange beside training: while one waits, its rank goes on."""

P = ParamSpec("P")
T = TypeVar("T")


class Meeting:
    """The ranks of one axis, and the operations that this rank began with them, numbered alike on all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, tuple(dist.get_process_group_ranks(group))
        self.watch = current().of(Watch)
        self.watch.made[self.ranks] += 1
        self.key = f"{self.ranks}#{self.watch.made[self.ranks]}"
        self.begun: deque[tuple[int, str, str]] = deque(maxlen=REMEMBERED)
        """Of each its number, what it is, and the engine's method in which it was begun."""
        self.broken = ""
        """Why nothing more is done with these ranks."""
        self.watch.meetings.add(self)

    def others(self) -> list[int]:
        mine = dist.get_rank()
        return [rank for rank in self.ranks if rank != mine]

    def abort(self, why: str) -> None:
        """Break off all operations with these ranks, now and later."""
        self.broken = self.broken or why
        break_off(self.group)


def break_off(group: dist.ProcessGroup) -> None:
    """Have every wait for this group's messages fail at once, here and, but for MPI's, on the others: gloo
    closes connections after a timeout."""
    if group not in dist.distributed_c10d._world.pg_map:  # the user has destroyed it
        return
    with suppress(RuntimeError):
        if dist.get_backend(group) != "gloo":
            group.abort()
        else:
            peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=BREAK).wait(  # type: ignore[union-attr]
                timedelta(milliseconds=1)
            )


class MessageError(TransportError):
    """A message failed, to or from the rank `peer` of its group."""

    def __init__(self, peer: int, error: object) -> None:
        super().__init__(str(error))
        self.peer = peer


class Waiter(NamedTuple):
    """What another rank waits for, in which call, since when by its clock, and how often it has told of
    itself."""

    what: str
    call: str
    since: float
    told: int


@dataclass(eq=False)
class Wait:
    """What one thread waits for: an operation, the `number`th of its meeting."""

    meeting: Meeting
    what: str
    number: int | None
    since: float = field(default_factory=time.monotonic)
    told: int = 0
    aside: bool = field(default_factory=lambda: threading.current_thread().name.startswith(ASIDE))
    circle: dict[int, Waiter] = field(default_factory=dict)
    """Ranks that were seen to wait in a circle with this one."""


class Watch(Part):
    """The waits of this process for the ranks of a world. `patience`, `every` and `period` are seconds:
    before others are asked, between two lines of a wait on stderr, and between looks."""

    def __init__(self) -> None:
        self.patience, self.every, self.period = 5.0, 60.0, 1.0
        self.deadline = float("inf")
        """Seconds after which operations fail: others are asked well before."""
        self.call = ""
        """The engine's method that is running."""
        self.failure = ""
        """Why a wait was broken off."""
        self.meetings: weakref.WeakSet[Meeting] = weakref.WeakSet()
        self.made = Counter[tuple[int, ...]]()
        """Meetings, by their ranks."""
        self.hosts: Sequence[str] = ()
        """The name of each rank's host, where they have told each other."""
        self._waits: dict[int, Wait] = {}  # keys: threads
        self._world: object = None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._why = ""  # why an operation failed
        self._told = self._calls = 0
        self._lasted = 0.0  # seconds of the last wait
        self._reports: dict[int, Any] = {}  # what one look saw, by rank
        self._wake, self._closed = threading.Event(), False

    def begin(self, timeout: timedelta) -> None:
        """Watch the ranks of the process group, whose operations have so long, from now on."""
        self.deadline = min(self.deadline, timeout.total_seconds())
        if self._world is dist.group.WORLD:
            return
        self._world, mine = dist.group.WORLD, dist.get_rank()
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        # the worlds of these ranks, one after the other, have a place each
        self._store = dist.PrefixStore(f"polyreme/{store.add(f'polyreme/worlds/{mine}', 1)}", store)
        self._store.set(f"host/{mine}", socket.gethostname())
        self._thread = threading.Thread(target=self._look_again, name="polyreme watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise TransportError where waits were broken off: what comes after has no end, either."""
        if self.failure:
            raise TransportError(self.failure)

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Mark a call that all ranks make. Others that wait within the same one hear of an error in it, which
        a script may catch."""
        before, self.call = self.call, call
        self._calls += not before
        try:
            yield
        except Exception as error:
            if not before and self._store is not None and not isinstance(error, TransportError):
                told = json.dumps([self._calls, f"raised {type(error).__name__}: {error}"])
                telling = threading.Thread(target=self._say, args=("raised", told), daemon=True)
                telling.start()
                telling.join(ANSWER)
            raise
        finally:
            self.call = before

    def _say(self, key: str, told: str) -> None:
        with suppress(RuntimeError, ValueError):  # the rank that had the store ended, or the groups did
            self._store.set(f"{key}/{dist.get_rank()}", told)

    @contextmanager
    def waiting(self, meeting: Meeting, what: str, number: int | None) -> Iterator[None]:
        self.check()
        if meeting.broken:
            raise TransportError(meeting.broken)
        thread = threading.get_ident()
        self._waits[thread] = Wait(meeting, what, number)
        try:
            yield
        finally:
            self._lasted = time.monotonic() - self._waits.pop(thread).since

    def why(self, meeting: Meeting | None, number: int | None, error: Exception) -> str:
        """What is known of a failure, which raised `error`, of the `number`th operation with these ranks."""
        self._why = self._found(meeting, number, error)
        return self._why

    def _found(self, meeting: Meeting | None, number: int | None, error: Exception) -> str:
        peer = meeting.ranks[error.peer] if meeting and isinstance(error, MessageError) else None
        who = "another rank" if peer is None else f"rank {peer}"
        if peer is not None and self.hosts:
            who += f" on {self.hosts[peer]}"
        ours = isinstance(error, TransportError) and peer is None  # it says itself what became of the others
        alone = str(error) if ours else f"{who} ended or cannot be reached: {error}"
        broken = self.failure or (meeting.broken if meeting else "")
        if broken or meeting is None or self._store is None:
            return broken or alone
        found: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the rank that had the store ended
                for _ in range(10 if NO_ENGINE in str(error) else 1):  # it may tell soon
                    self._reports.clear()
                    self.failure = self._heard(meeting)
                    if self.failure:
                        break
                    time.sleep(0.1)
                found.append(self.failure or f"{self._absent(meeting, number, peer)} ({error})")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER)
        if asking.is_alive():
            return f"the host of rank 0, which has the ranks' store, does not answer ({error})"
        return found[0] if found else alone

    def _soon(self) -> float:
        """Seconds before others are asked."""
        return min(self.patience, self.deadline / 3)

    def _absent(self, meeting: Meeting, number: int | None, peer: int | None) -> str:
        """The ranks of which is not known that they began the operation, or wait in another one, with their
        hosts; of these only `peer`, where the connection to it broke, and was not closed at the deadline."""
        late = [
            rank
            for rank in meeting.others()
            if (there := self._at(rank)) is None or number not in _by_number(there, meeting)
        ]
        silent = [rank for rank in late if (there := self._at(rank)) is None or not there["waits"]] or late
        if peer in silent and self._lasted < self.deadline:
            silent = [peer]
        elif not silent or (len(silent) == len(meeting.others()) > 1 and self._lasted < 2 * self._soon()):
            # those that are there have not told yet
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
                # the wait ended meanwhile, and with it its group: look on for others
                with suppress(Exception):
                    if time.monotonic() - wait.since > self._soon():
                        self._visit(wait)

    def _visit(self, wait: Wait) -> None:
        """Break off a long wait, or say that it goes on."""
        try:
            if self.failure:  # found while this wait began
                wait.meeting.abort(self.failure)
            else:
                self._look(wait)
        except RuntimeError as error:  # the rank that had the store ended; what waits for it hears of that
            self._tell(wait, f"the store of rank 0 cannot be reached: {error}")

    def _look(self, wait: Wait) -> None:
        mine = dist.get_rank()
        waits = [(each.meeting.key, each.meeting.ranks, each.number, each.what, each.since)
                 for each in list(self._waits.values()) if not each.aside]  # fmt: skip
        begun = {meeting.key: list(meeting.begun) for meeting in list(self.meetings)}
        self._told += 1
        self._reports.clear()
        self._store.set(
            f"at/{mine}", json.dumps({"call": self.call, "waits": waits, "begun": begun, "told": self._told})
        )
        failure = (
            self._heard(wait.meeting)
            or self._why_other_call(wait)
            or ("" if wait.aside else self._in_circle(wait))
        )
        if failure:
            self.failure = failure
            self._store.set(f"left/{mine}", f"could not go on with {wait.what}{within(self.call)}: {failure}")
            wait.meeting.abort(failure)
        else:
            self._tell(wait)

    def _at(self, rank: int) -> Any:
        """Where a rank was when it told, which it does while it waits; None if it never did."""
        if rank not in self._reports:
            known = self._store.check([f"at/{rank}"])
            self._reports[rank] = json.loads(self._store.get(f"at/{rank}")) if known else None
        return self._reports[rank]

    def _heard(self, meeting: Meeting) -> str:
        """Why another rank of the meeting will not come, if it said so."""
        for rank in meeting.others():
            if self.call and self._store.check([f"raised/{rank}"]):
                calls, why = json.loads(self._store.get(f"raised/{rank}"))
                if calls == self._calls:
                    return f"rank {rank} {why}"
            for key in (f"ended/{rank}", f"left/{rank}"):
                if self._store.check([key]):
                    why = self._store.get(key).decode()
                    if why == _ENDED and self.call and self.call not in LOOP:
                        why = f"ended without it; {_every_rank(self.call)}"
                    return f"rank {rank} {why}"
        return ""

    def _why_other_call(self, wait: Wait) -> str:
        """Why the wait has no end, where another rank of its meeting began another operation in its place."""
        for rank in wait.meeting.others():
            there = _by_number(self._at(rank), wait.meeting)
            other, call = there.get(wait.number, (wait.what, ""))
            if other == wait.what:
                continue
            number, before = self._first_apart(wait, rank, there)
            if not wait.aside and (said := _unlike(self._calls_of(wait.meeting, number))):
                return said
            return f"rank {rank} began another operation in its place, {other}{within(call)}{before}; {_WAY}"
        return ""

    def _first_apart(
        self, wait: Wait, rank: int, there: Mapping[int | None, tuple[str, str]]
    ) -> tuple[int | None, str]:
        """The first of the remembered operations that this rank and the other one began in unlike calls, and
        what to say of it; the awaited one, and nothing, where none was before."""
        for number, what, call in wait.meeting.begun:
            other = there.get(number, (what, call))
            if number != wait.number and other[1] != call:
                return number, (
                    f". Before, rank {rank} began {other[0]}{within(other[1]) or _OUTSIDE}, and this "
                    f"rank {what}{within(call) or _OUTSIDE}"
                )
        return wait.number, ""

    def _calls_of(self, meeting: Meeting, number: int | None) -> dict[int, str]:
        """In which call each rank began an operation of the meeting, as far as is known."""
        begun = {rank: _by_number(self._at(rank), meeting) for rank in meeting.others()}
        begun[dist.get_rank()] = {each: (what, call) for each, what, call in meeting.begun}
        return {rank: its[number][1] for rank, its in sorted(begun.items()) if number in its}

    def _in_circle(self, wait: Wait) -> str:
        """Why the wait has no end, where it is in a circle of waits that have all gone on since the circle
        was first seen."""
        before, wait.circle = wait.circle, self._circle(wait)
        if not wait.circle or any(
            rank not in before or before[rank].since != each.since for rank, each in wait.circle.items()
        ):
            return ""
        if any(before[rank].told == each.told for rank, each in wait.circle.items()):
            wait.circle = before  # not everyone has told again
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
        """The ranks of a shortest circle, from one that this wait is for to one that waits for this rank;
        empty where there is none."""
        mine = dist.get_rank()
        ways: dict[int, dict[int, Waiter]] = {mine: {}}  # to each rank that is waited for
        queue = deque([mine])
        while queue:
            rank = queue.popleft()
            there = self._at(rank)
            for key, members, number, what, since in there["waits"]:
                if number is None or (rank == mine and (key, number) != (wait.meeting.key, wait.number)):
                    continue
                way = (
                    ways[rank]
                    if rank == mine
                    else {**ways[rank], rank: Waiter(what, there["call"], since, there["told"])}
                )
                for other in members:
                    if (at := self._at(other)) is None or max(
                        (n for n, *_ in at["begun"].get(key, [])), default=-1
                    ) >= number:
                        continue  # nothing is known of it, or it came
                    if other == mine:
                        return way
                    if other not in ways:
                        ways[other] = way
                        queue.append(other)
        return {}

    def _tell(self, wait: Wait, more: str = "") -> None:
        seconds = time.monotonic() - wait.since
        if seconds >= self.every * (wait.told + 1):
            wait.told = int(seconds / self.every)
            print(f"polyreme: rank {dist.get_rank()} has waited "
                  f"{seconds:.0f} s for {ranks_named(wait.meeting.others())}{within(self.call)}: "
                  f"{wait.what} {more}", file=sys.stderr, flush=True)  # fmt: skip

    # ---- the end

    def abort(self, why: str) -> None:
        self._why, self.failure = f"it {why}", self.failure or f"this process {why}"
        if self._store is not None:
            telling = threading.Thread(target=self._say, args=("left", why), daemon=True)
            telling.start()
            telling.join(TELLING)  # and then others hear of it, whether they know why or not

    def close(self) -> None:
        """Tell others that this rank leaves, look no more, and break off what other threads wait for."""
        self.failure = self.failure or CLOSED
        for wait in [*self._waits.values()]:
            wait.meeting.abort(CLOSED)
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ANSWER)
        self._store = None

    def _end(self) -> None:
        if self._world is dist.group.WORLD:
            self._say("ended", self._ended())

    def _ended(self) -> str:
        if LAST.error:
            return f"raised {LAST.error}"
        return f"ended, because {self._why}" if self._why else _ENDED


def within(call: str) -> str:
    """The engine's method in which an operation is, to put behind its name."""
    return f" in {call}" if call else ""


def _by_number(there: Any, meeting: Meeting) -> dict[int | None, tuple[str, str]]:
    """What a rank that told where it is began with a meeting's ranks, and in which call."""
    begun = [] if there is None else there["begun"].get(meeting.key, [])
    return {number: (what, call) for number, what, call in begun}


def _every_rank(call: str) -> str:
    return f"every rank has to call engine.{call}, outside of any `if rank == 0:`"


def _unlike(calls: Mapping[int, str]) -> str:
    """What to say of ranks that are in these calls in each other's place; nothing where they are in the same
    one, or some in none of the engine's."""
    ranks: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(rank)
    if len(ranks) < 2 or "" in ranks:
        return ""
    rare = [call for call in ranks if call not in LOOP]
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
    """Marks a method that all ranks have to call: messages name it, of an engine or of what `of` is of
    one."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with current().of(Watch).calling(of + method.__name__):
            return method(*args, **kwargs)

    return run
