"""Ranks find each other through a store that rank 0 (or torchrun's agent) holds, within a time limit, and
choose the network interface that leads there.

Invariant: where not all ranks come, each one that did raises the same error, which names those that did not.
Communication: each rank writes one record of itself to the store, and reads one outcome. Where MPI started
the ranks, two small collectives of mpi4py first tell them where the store is."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from polyreme.distributed import restart
from polyreme.distributed.apart import apart, look_up
from polyreme.distributed.environment import AGAIN, BY_MPI, LOOPBACK, Environment, announce
from polyreme.distributed.interfaces import addresses, is_loopback, source
from polyreme.distributed.mpi import library, named
from polyreme.errors import LaunchError, TransportError, ranks_named

INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""The variables that name network interfaces, and the prefix of a name in each (NCCL's "=" asks for exactly
this one)."""
HEARD = 2.0
"""Seconds for which rank 0 keeps the store after a failed meeting, so that others can read the reason."""
MET = "met"
EVERYWHERE = ("0.0.0.0", "::")
_ANSWER = 5.0
"""Seconds that this process gets to reach itself, and that others get beyond a deadline to report it."""
_GREETING, _NONCE = bytes((0, 0xCE, 0xF7, 0x85, 0x3C, 13)), b"\x9e\x37\x79\xb9"
"""The first bytes that a client of torch's store sends, and four bytes that the store sends back."""
_RECORD = 4096
"""Bytes of the record that each rank sends to the others over MPI."""

_stores: dict[tuple[str, int], Any] = {}
"""The store that this process opened last, by its address. It outlives worlds, as a rank may come to the next
meeting there before rank 0 has left this one."""
_times = Counter[tuple[str, int] | None]()
"""How many meetings there were at each address."""


def meet(environment: Environment, within: timedelta) -> tuple[Environment, Any]:
    """Wait until all ranks are here. Returns the environment with its address, and a store that all of them
    share; sets the variables of torchrun, and those of interfaces that are not set.

    Raises TransportError on every rank after `within`, naming those that have not come, and LaunchError where
    it cannot be found out where ranks meet."""
    listener = None
    if environment.address is None:
        address, listener = _over_mpi(environment, within)
        environment = replace(environment, address=address)
    _times[environment.address] += 1
    announce(environment)
    deadline = time.monotonic() + within.total_seconds()
    try:
        mine = apart(partial(_record, environment), within.total_seconds())
        come = partial(_come, environment, listener, mine, within, deadline)
        store, outcome = apart(come, deadline - time.monotonic() + HEARD + _ANSWER)
    except TimeoutError as late:
        raise TransportError(
            f"the meeting at {_at(environment)} has not answered rank {environment.rank} (on "
            f"{socket.gethostname()}) within {within.total_seconds():g} s (launch.meet_timeout): rank 0, "
            "which holds it, or its host hangs, the way there is cut, or no name server answers; look at "
            "what rank 0 prints"
        ) from late
    except RuntimeError as lost:
        raise TransportError(
            f"rank 0 left the meeting at {_at(environment)} before all were there: look at what it says "
            f"({str(lost).splitlines()[0]})"
        ) from lost
    if outcome != MET:
        raise TransportError(outcome)
    _choose_interface(store, environment, mine)
    if environment.name == AGAIN:
        environment = _by_host(store, environment)
        announce(environment)
    return environment, store


def forget(address: tuple[str, int]) -> None:
    """Forget the store at `address`, so that ranks who meet there next find a new one."""
    _stores.pop(address, None)
    del _times[address]


def by_agent() -> bool:
    """Return whether torchrun's agent holds the store, which then outlives ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _by_host(store: Any, environment: Environment) -> Environment:
    """Return the environment with this rank's local rank and local world size, counted from the host names of
    all ranks."""
    records = store.multi_get([f"here/{rank}" for rank in range(environment.world_size)])
    hosts = [json.loads(each)["host"] for each in records]
    own, host = environment.rank, hosts[environment.rank]
    return replace(environment, local_rank=hosts[:own].count(host), local_world_size=hosts.count(host))


def _come(
    environment: Environment,
    listener: socket.socket | None,
    mine: Mapping[str, str],
    within: timedelta,
    deadline: float,
) -> tuple[Any, str]:
    """Open the store, and wait there for all ranks. Returns the store, and MET or the error that every rank
    raises."""
    meeting = str(_times[environment.address])
    if by_agent():
        rank, world_size = environment.rank, environment.world_size
        opened = next(iter(dist.rendezvous("env://", rank, world_size, timeout=within)))[0]
        meeting = restart.agree(
            dist.PrefixStore("polyreme/meeting", opened), rank, world_size, json.dumps(mine), deadline
        )
        if not meeting:
            raise TransportError(_absent(environment, within, [0], {mine["host"]: [rank]}))
    else:
        opened = _open(environment, listener, within, deadline)
    store = dist.PrefixStore(f"polyreme/meeting/{meeting}", opened)
    return store, _outcome(store, environment, mine, within, deadline)


def _at(environment: Environment) -> str:
    assert environment.address is not None
    return "{} port {}".format(*environment.address)


def _record(environment: Environment) -> dict[str, str]:
    """Return this rank's record: its host, the meeting point's address as it sees it, and its own address on
    the way there."""
    assert environment.address is not None
    host = environment.address[0]
    try:
        seen = str(look_up(host, None)[0][4][0])
    except OSError:  # torchrun's agent may know better
        seen = ""
    return {"host": socket.gethostname(), "seen": seen, "from": source(host) or ""}


# ---- the store


def _open(
    environment: Environment, listener: socket.socket | None, within: timedelta, deadline: float
) -> Any:
    assert environment.address is not None
    host, port = environment.address
    if environment.address in _stores and listener is None:
        return _stores[environment.address]
    if environment.rank == 0:
        store = serve(listener or listen(environment), within)
    else:
        _reach(environment, within, deadline)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=within)
    _stores.clear()
    _stores[environment.address] = store
    return store


def serve(listener: socket.socket, within: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Return the store that others reach by `listener`. Raises TransportError where this process cannot reach
    it."""
    host, port = listener.getsockname()[:2]
    host = LOOPBACK if host in EVERYWHERE else host
    try:
        socket.create_connection((host, port), timeout=_ANSWER).close()
    except OSError as error:
        raise TransportError(
            f"this host ({socket.gethostname()}) cannot reach itself at {host} port {port}, where ranks "
            f"would meet ({error.strerror or error}): the loopback interface is down, or a firewall is in "
            "the way; look at `ip link show lo`, and put it up (`ip link set lo up`)"
        ) from error
    return apart(
        partial(
            dist.TCPStore, host, port, is_master=True, wait_for_workers=False, timeout=within,
            master_listen_fd=listener.detach(),
        )
    )  # fmt: skip


def listen(environment: Environment) -> socket.socket:
    """Listen at the meeting point, which is on this host: at its address alone, where this host has it and
    others can reach it. Raises TransportError."""
    assert environment.address is not None
    host, port = environment.address
    try:
        known = look_up(host, port, socket.SOCK_STREAM)
        family, _, _, _, own = min(known, key=lambda each: each[0] != socket.AF_INET)
        if is_loopback(str(own[0])) and not environment.one_host:  # 127.0.1.1 of a hosts file
            return _listen_everywhere(port)
        return socket.create_server((str(own[0]), port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # it is forwarded to this host, as that of a Service
            return _listen_everywhere(port)
        raise TransportError(
            f"rank 0 cannot hold the meeting at {_at(environment)} ({socket.gethostname()}): "
            f"{error.strerror}; set MASTER_PORT to a free port, and MASTER_ADDR to an address of this "
            "host, the same for all ranks"
        ) from error


def _listen_everywhere(port: int) -> socket.socket:
    """Listen at all of this host's addresses, also by IPv6 where others may know it by that alone."""
    v4, v6 = EVERYWHERE
    if any(":" in address and not is_loopback(address) for address in addresses()):
        return socket.create_server((v6, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((v4, port))


def greet(address: tuple[str, int], seconds: float) -> None:
    """Check that a store listens at `address`. Raises OSError where none answers within `seconds`, and
    TransportError where another program does."""
    answer = _answer(address, seconds)
    if answer == _NONCE:
        return
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        own = serve(listener)
        if _answer((LOOPBACK, port), seconds) != _NONCE:  # another version of torch has another greeting
            return
        del own
    if not answer:
        raise ConnectionError("what listens there closes connections without a word")
    raise TransportError(
        f"what listens at {address[0]} port {address[1]} is no store in which ranks meet, but another "
        f"program, which answered {answer!r}: set MASTER_PORT to a free port of rank 0's host, the same for "
        "all ranks"
    )


def _answer(address: tuple[str, int], seconds: float) -> bytes:
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(_GREETING + _NONCE)
            return connection.recv(len(_NONCE), socket.MSG_WAITALL)
        except TimeoutError:
            raise TimeoutError(
                "what listens there takes connections and says nothing: it hangs, or is another program"
            ) from None


def _reach(environment: Environment, within: timedelta, deadline: float) -> None:
    """Wait until rank 0 listens. Its host name may also appear only then, as that of a pod."""
    assert environment.address is not None
    while True:
        left = deadline - time.monotonic()
        try:
            greet(environment.address, max(left, 0.1))
            return
        except OSError as error:
            if left < 0:
                raise TransportError(
                    f"rank {environment.rank} (on {socket.gethostname()}) could not reach the meeting at "
                    f"{_at(environment)} within {within.total_seconds():g} s (launch.meet_timeout): rank 0, "
                    "which holds it, has not come, or this host has no way there. Look whether rank 0 runs "
                    "and what it prints, whether both have the same MASTER_ADDR and MASTER_PORT, and "
                    f"whether a firewall is between them ({error})"
                ) from error
        time.sleep(0.1)


# ---- who comes


def _outcome(
    store: Any, environment: Environment, mine: Mapping[str, str], within: timedelta, deadline: float
) -> str:
    """Wait for the meeting's outcome: MET, or the error that every rank raises."""
    if store.add(f"claimed/{environment.rank}", 1) > 1:
        twice = (
            f"two processes are rank {environment.rank} of the meeting at {_at(environment)}, one of them on "
            f"{mine['host']}: either ranks have the same number, or another run meets there; set "
            "MASTER_PORT to another port for one of the runs"
        )
        store.compare_set("outcome", "", twice)
        return twice
    store.set(f"here/{environment.rank}", json.dumps(mine))
    if store.add("count", 1) == environment.world_size:
        store.compare_set("outcome", "", MET)
    pause = 0.005
    while not store.check(["outcome"]) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    if not store.check(["outcome"]):
        store.compare_set("outcome", "", _missing(store, environment, within))
    outcome = str(store.get("outcome").decode())
    if outcome != MET:
        _leave(store, environment)
    return outcome


def _missing(store: Any, environment: Environment, within: timedelta) -> str:
    missing, hosts = [], dict[str, list[int]]()
    for rank in range(environment.world_size):
        if store.check([f"here/{rank}"]):
            hosts.setdefault(json.loads(store.get(f"here/{rank}"))["host"], []).append(rank)
        else:
            missing.append(rank)
    return _absent(environment, within, missing, hosts)


def _absent(
    environment: Environment, within: timedelta, missing: Sequence[int], hosts: Mapping[str, Sequence[int]]
) -> str:
    there = "; ".join(f"on {host} {ranks_named(ranks)}" for host, ranks in hosts.items())
    return (
        f"{ranks_named(missing)} of {environment.world_size} did not come to the meeting at "
        f"{_at(environment)} within {within.total_seconds():g} s (launch.meet_timeout). "
        f"Here were {there}. Look whether the missing ones were started and what they print, and whether "
        "their host reaches that address and port (name, route, firewall)"
    )


def _leave(store: Any, environment: Environment) -> None:
    """Leave a failed meeting, rank 0 after the others, as the store ends with it."""
    heard, until = store.add("heard", 1), time.monotonic() + HEARD
    while environment.rank == 0 and heard < store.add("count", 0) and time.monotonic() < until:
        time.sleep(0.02)
        heard = store.add("heard", 0)


# ---- the way


def _choose_interface(store: Any, environment: Environment, mine: Mapping[str, str]) -> None:
    """Set the interface variables that are not set to the interface on the way to the meeting point.

    On its own host the name of that point may stand for loopback (127.0.1.1 of a hosts file). Then the
    interface counts whose address the other hosts see."""
    address = mine["from"]
    if not address:
        return
    if is_loopback(address):
        records = map(json.loads, store.multi_get([f"here/{rank}" for rank in range(environment.world_size)]))
        elsewhere = next((each for each in records if each["from"] and not is_loopback(each["from"])), None)
        if elsewhere is not None:
            seen = elsewhere["seen"]
            address = seen if seen in addresses() else source(elsewhere["from"]) or address
    known = addresses()
    name = known.get(address)
    if name is None:
        return
    _refuse_other_way(environment, known, address)
    for variable, exactly in INTERFACES.items():
        os.environ.setdefault(variable, exactly + name)


def _refuse_other_way(environment: Environment, known: Mapping[str, str], address: str) -> None:
    """Raise TransportError where GLOO_SOCKET_IFNAME names an interface that reaches no other host."""
    for name in os.environ.get("GLOO_SOCKET_IFNAME", known[address]).split(","):
        its = [each for each, interface in known.items() if interface == name]
        if not its or (all(map(is_loopback, its)) and not is_loopback(address)):
            raise TransportError(
                f"GLOO_SOCKET_IFNAME is {os.environ['GLOO_SOCKET_IFNAME']} on {socket.gethostname()}, "
                f"{'which leads to no other host' if its else 'and there is no such interface'}: "
                f"{known[address]} leads to the meeting at {_at(environment)}; unset it, or set it to that"
            )


# ---- over MPI


def _over_mpi(environment: Environment, within: timedelta) -> tuple[tuple[str, int], socket.socket | None]:
    """Agree over MPI on where rank 0 listens. Returns the address, and on rank 0 the listening socket."""
    world = _mpi_world(environment, within)
    known = [each for each in addresses() if not is_loopback(each) and not each.startswith("fe80:")]
    own = sorted(known, key=lambda address: ":" in address)
    everyone = bytearray(_RECORD * environment.world_size)
    world.Allgather(json.dumps(own[:64]).encode().ljust(_RECORD), everyone)
    answer, listener = bytearray(_RECORD), None
    if environment.rank == 0:
        records = [everyone[at : at + _RECORD] for at in range(0, len(everyone), _RECORD)]
        address = _reachable(own, [json.loads(each) for each in records])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        answer[:] = json.dumps(listener.getsockname()[:2]).encode().ljust(_RECORD)
    world.Bcast(answer, root=0)
    host, port = json.loads(answer)
    return (host, port), listener


def _reachable(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return this host's address on the way to the others; loopback's where there are none."""
    for address in (address for each in others for address in each if address not in own):
        way = source(address)
        if way is not None and not is_loopback(way):
            return way
    return LOOPBACK


def _mpi_world(environment: Environment, within: timedelta) -> Any:
    """Return mpi4py's communicator of all processes. Raises LaunchError where it has other ranks than
    `environment`."""
    if environment.name not in BY_MPI:
        raise LaunchError(
            f"{environment.name} does not say where ranks meet; set MASTER_ADDR and MASTER_PORT"
        )
    way = "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of it, the same for all ranks"
    try:
        MPI = library(within)
    except TransportError as error:
        raise LaunchError(
            f"{environment.name} started {environment.world_size} processes, but does not say where they "
            f"meet, and mpi4py, over which rank 0 would tell, cannot be imported ({error}): pip install "
            f"mpi4py, or {way}"
        ) from error
    if environment.world_size != MPI.COMM_WORLD.Get_size() or environment.rank != MPI.COMM_WORLD.Get_rank():
        raise LaunchError(
            f"{environment.name} says that this is rank {environment.rank} of {environment.world_size}, "
            f"but mpi4py that it is rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}: it "
            f"uses another MPI library ({named(MPI)}); start ranks by that "
            f"one's mpirun, or {way}"
        )
    return MPI.COMM_WORLD
