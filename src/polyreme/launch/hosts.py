"""The launchers of a run, one on each host: which of them this is, and where they meet before they start
ranks, in a store that the first of them keeps. A launcher that is the only one meets itself.

Invariants: nothing listens but at loopback, or at the address that all hosts were given. A launcher that is
started again never joins a rendezvous that is over: it waits for the next one."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore

from polyreme.distributed.apart import apart
from polyreme.distributed.environment import (
    LEAST_PODS,
    LOOPBACK,
    NONE,
    PODS,
    RANKS_PER_POD,
    TORCHRUN,
    Environment,
    detect,
)
from polyreme.distributed.rendezvous import greet, listen, serve
from polyreme.errors import LaunchError, TransportError
from polyreme.launch.peers import Peers

PATIENCE = 10 * 60.0  # seconds for all hosts to come: some still fetch an image
LAST_CALL = 10.0  # seconds after the last arrival, where fewer hosts are enough
ANSWER = 60.0  # seconds for the first host to answer
POLL = 0.1
OVER, WAITING = "over", "waiting"


@dataclass(frozen=True)
class Hosts:
    """The place of this launcher among those of one run.

    They meet at `address` (host, port), which is of host 0: at least `least` of them, at most `most`."""

    index: int
    least: int
    most: int
    address: tuple[str, int]


def hosts(variables: Mapping[str, str] = os.environ) -> Hosts | None:
    """Return the place of a launcher that is the only task of a Slurm step on each of several nodes, or the
    program of each pod of a Job; None where there are no other launchers.

    Raises LaunchError where it is one of several on this host, or of a launcher that does not say where they
    meet, and what `detect` raises."""
    environment = _of_launcher(variables)
    if environment.world_size == 1 or environment.name == TORCHRUN:
        return None
    if environment.local_world_size > 1 or environment.address is None:
        raise LaunchError(
            f"{environment.name} started {environment.world_size} processes, of which this is number "
            f"{environment.rank}, and each would start ranks: have it start one on each host (srun "
            "--ntasks-per-node=1, a pod of a Job; over MPI with MASTER_ADDR), or have it run the script "
            "itself, `python SCRIPT`, whose engine finds the other ranks"
        )
    least = variables.get(LEAST_PODS, str(environment.world_size))
    if not least.isdecimal() or not 1 <= int(least) <= environment.world_size:
        raise LaunchError(
            f"{LEAST_PODS} is {least!r}, but must be a number from 1 to {environment.world_size} ({PODS})"
        )
    return Hosts(environment.rank, int(least), environment.world_size, environment.address)


def started_by() -> str | None:
    """Return the name of the launcher that started this one (srun, Indexed Job, mpirun); None if a shell did.
    Raises what `detect` raises."""
    name = _of_launcher(os.environ).name
    return None if name in (NONE, TORCHRUN) else name.partition(" (")[0]


def _of_launcher(variables: Mapping[str, str]) -> Environment:
    """Return the environment of a process that starts the ranks of its pod itself."""
    return detect({name: value for name, value in variables.items() if name != RANKS_PER_POD})


@dataclass(frozen=True)
class Place:
    """The place of a launcher among those that have met: its number and their count; the number of its first
    rank, and the world size; their store, which ranks use, too, and its address; a name that no other run
    has."""

    index: int
    count: int
    first: int
    world_size: int
    store: TCPStore
    address: tuple[str, int]
    run_id: str
    peers: Peers | None = None
    """The other hosts' launchers, where they watch each other."""

    def somebody_waits(self) -> bool:
        """Return whether another host would join, if the run were to meet again."""
        return self.index == 0 and self.store.check([WAITING])


def alone(ports: Sequence[int], ranks: int) -> Place:
    """Return the place of a single launcher, whose store listens on loopback at the first of `ports` that is
    free. torch's own store would listen on all interfaces."""
    for port in ports:
        try:
            listener = socket.create_server((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            problem = error
        else:
            address = LOOPBACK, listener.getsockname()[1]
            return Place(0, 1, 0, ranks, serve(listener), address, uuid.uuid4().hex)
    raise LaunchError(
        f"ranks cannot meet at port {ports[-1]} of {LOOPBACK}: {problem}; "
        "give another port, or none for any that is free"
    )


class Rendezvous:
    """The rendezvous of the launchers of several hosts, in the order of their indices.

    Where fewer than `hosts.most` are enough, it ends LAST_CALL seconds after the last one came. If `watched`,
    the launchers watch each other from then on."""

    def __init__(self, hosts: Hosts, patience: float = PATIENCE, watched: bool = False) -> None:
        self._hosts, self._patience, self._watched = hosts, patience, watched
        self._where = "{}:{}".format(*hosts.address)
        self._run_id, self._word = uuid.uuid4().hex, ""
        self._store: TCPStore | None = None

    def meet(self, ranks: int) -> Place:
        """Wait for the others; `ranks` are to start here. Raises LaunchError, naming the missing hosts, where
        fewer than `hosts.least` are there within `patience` seconds."""
        self._word = f"{self._run_id} {ranks}"
        members = self._receive() if self._hosts.index == 0 else self._join()
        assert self._store is not None
        index = [index for index, _ in members].index(self._hosts.index)
        counts = [int(word.split()[1]) for _, word in members]
        count, first, address = len(members), sum(counts[:index]), self._hosts.address
        watching = partial(Peers, self._store, index, count, socket.gethostname())
        peers = apart(watching, ANSWER) if self._watched and count > 1 else None
        return Place(index, count, first, sum(counts), self._store, address, self._run_id, peers)

    def _receive(self) -> list[tuple[int, str]]:
        """Wait on the first host for the others, and publish who takes part."""
        self._store = store = self._open()
        here: dict[int, str] = {0: self._word}
        began = came = time.monotonic()
        while len(here) < self._hosts.most:
            for index in set(range(self._hosts.most)) - here.keys():
                if store.check([f"here/{index}"]):
                    here[index], came = "", time.monotonic()
            now = time.monotonic()
            enough = len(here) >= self._hosts.least
            if enough and self._hosts.least < self._hosts.most and now > came + LAST_CALL:
                break
            if not enough and now > began + self._patience:
                missing = sorted(set(range(self._hosts.most)) - here.keys())
                raise LaunchError(
                    f"{len(here)} of {self._hosts.most} hosts came to {self._where} within "
                    f"{self._patience:g} s, and not {', '.join(map(str, missing))} (counted from 0): "
                    "look at what they print, and whether they reach that address"
                )
            time.sleep(POLL)
        # a host that was started again meanwhile has a new word
        members = [(i, store.get(f"here/{i}").decode() if i else self._word) for i in sorted(here)]
        store.set(OVER, json.dumps(members))
        return members

    def _open(self) -> TCPStore:
        """Open the store at the address of the first host, with retries: a pod's name resolves only some
        seconds after it was started."""
        environment = Environment("launcher", 0, self._hosts.most, 0, 1, self._hosts.address)
        for problem in self._attempts():
            try:
                listener = listen(environment)
            except TransportError as error:
                problem.append(error)
            else:
                return serve(listener)
        raise LaunchError(f"this is the first of {self._hosts.most} hosts: {problem[-1]}")

    def _join(self) -> list[tuple[int, str]]:
        """Wait on another host until the first one publishes who takes part."""
        address, port = self._hosts.address
        for problem in self._attempts():
            try:
                apart(partial(greet, (address, port), POLL * 20))
                client = partial(TCPStore, is_master=False, wait_for_workers=False)
                store = apart(partial(client, address, port, timeout=timedelta(seconds=ANSWER)), ANSWER)
                if not self._is_over(store):
                    apart(partial(store.set, f"here/{self._hosts.index}", self._word), ANSWER)
                    problem.append("not all hosts came")
                    while not self._is_over(store):  # the first host has its own time limit
                        time.sleep(POLL)
                published = apart(partial(store.get, OVER), ANSWER)
                members = [(index, name) for index, name in json.loads(published)]
                if (self._hosts.index, self._word) in members:
                    self._store = store
                    return members
                apart(partial(store.set, WAITING, "1"), ANSWER)
                problem.append("hosts are at work there that met before this one came")
            except (OSError, RuntimeError) as error:  # torch's are RuntimeErrors
                problem.append(error)
        raise LaunchError(
            f"host {self._hosts.index} of {self._hosts.most} did not meet the first one at {self._where} "
            f"within {self._patience:g} s: {problem[-1]}; is the first one running, and is MASTER_ADDR its "
            "address, at which this host reaches it?"
        )

    def _is_over(self, store: TCPStore) -> bool:
        return apart(partial(store.check, [OVER]), ANSWER)

    def _attempts(self) -> Iterator[list[object]]:
        """Yield for each attempt the list of problems so far, until `patience` seconds are over. A host
        beyond `hosts.least` tries for ever."""
        problem: list[object] = []
        deadline = time.monotonic() + self._patience
        spare = self._hosts.index >= self._hosts.least
        while spare or time.monotonic() < deadline:
            yield problem
            time.sleep(POLL * 5)
