"""How ranks meet, in processes of their own: all of them, some of them, two of the same rank."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import whole
from polyreme.distributed import rendezvous
from polyreme.distributed.environment import Environment
from polyreme.distributed.process_group import _share_cores, close, open_group
from polyreme.errors import PolyremeError
from polyreme.launch import hosts
from pool import forkserver


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _run(place: Environment, within: float, variables: dict[str, str], answers: Any) -> None:
    for name in rendezvous.INTERFACES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        open_group("gloo", place, timedelta(seconds=60), timedelta(seconds=within))
        close()
        open_group("gloo", place, timedelta(seconds=60), timedelta(seconds=within))  # as a second engine may
        gathered: list[Any] = [None] * place.world_size
        dist.all_gather_object(gathered, place.rank)
        answers.put((place.rank, (gathered, os.environ["GLOO_SOCKET_IFNAME"], os.environ["RANK"])))
    except PolyremeError as error:
        answers.put((place.rank, str(error)))


def meet(
    ranks: Sequence[int], world_size: int, within: float, port: int | None = None, **variables: str
) -> list[tuple[int, Any]]:
    """What each of `ranks` says, by rank."""
    context, address = forkserver(), ("127.0.0.1", port or free_port())
    answers = context.Queue()
    places = [Environment("a test", rank, world_size, rank, world_size, address) for rank in ranks]
    processes = [context.Process(target=_run, args=(each, within, variables, answers)) for each in places]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    return sorted(found, key=lambda each: (each[0], str(each[1])))


def test_all_meet_over_the_interface_that_leads_there() -> None:
    assert meet([0, 1, 2], 3, 60) == [(rank, ([0, 1, 2], "lo", str(rank))) for rank in range(3)]


def test_an_interface_that_the_user_chose_stays() -> None:
    found = meet([0, 1], 2, 60, GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="eth7")
    assert [each[1][1] for each in found] == ["lo", "lo"]


def test_every_rank_that_came_names_those_that_did_not() -> None:
    found = meet([0, 2], 4, 1.0)
    for _, said in found:
        assert "ranks 1, 3 of 4 did not come to the meeting at 127.0.0.1" in said
        assert "within 1 s (launch.meet_timeout)" in said and f"on {socket.gethostname()} ranks 0, 2" in said


def test_without_rank_0_the_others_say_that_it_holds_the_meeting() -> None:
    ((_, said),) = meet([1], 2, 1.0)
    assert "rank 1" in said and "rank 0, which holds it, has not come" in said


@contextmanager
def listening(speak: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that is no store: what it does with each who connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    there.append(listener.accept()[0])
                    speak(there[-1])

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _echo(connection: socket.socket) -> None:
    connection.sendall(connection.recv(10, socket.MSG_WAITALL)[-4:])


OTHERS = {
    "mute": (lambda connection: None, "what listens there takes connections and says nothing"),
    "ssh": (
        lambda connection: connection.sendall(b"SSH-2.0-x\r\n"),
        "another program, which answered b'SSH-'",
    ),
    "http": (
        lambda connection: connection.sendall(connection.recv(9)[:0] + b"HTTP/1.1 400"),
        "answered b'HTTP'",
    ),
    "closes": (socket.socket.close, "(what listens there closes|Connection reset)"),
    "hangs": (_echo, "has not answered rank 1"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each in ("mute", "http") else [whole]) for each in OTHERS]
)
def test_what_is_no_store_is_told_within_the_time(kind: str) -> None:
    speak, said = OTHERS[kind]
    began = time.monotonic()
    with listening(speak) as port:
        ((_, told),) = meet([1], 2, 1.0, port)
    assert re.search(said, told) and "\n" not in told, told
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("kind", ["mute", *(pytest.param(each, marks=whole) for each in ("ssh", "hangs"))])
def test_a_launcher_says_so_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ANSWER", 1.0)
    speak, said = OTHERS[kind]
    with listening(speak) as port:
        place = hosts.Hosts(1, 2, 2, ("127.0.0.1", port))
        with pytest.raises(PolyremeError, match="no answer within 1 s" if kind == "hangs" else said):
            hosts.Rendezvous(place, patience=1.0).meet(1)


def test_two_runs_at_one_place_do_not_mix() -> None:
    found = meet([0, 1, 1], 3, 60)
    assert all("two processes are rank 1" in said and "MASTER_PORT" in said for _, said in found)


def test_ranks_that_torchrun_starts_again_meet_in_the_same_store() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        found = meet([0, 1], 2, 60, agent.port, TORCHELASTIC_USE_AGENT_STORE="True")
        assert [each[1][0] for each in found] == [[0, 1], [0, 1]]
    for came, absent in (([1], "rank 0 of 3"), ([0, 1], "rank 2 of 3")):
        for _, said in meet(came, 3, 1.0, agent.port, TORCHELASTIC_USE_AGENT_STORE="True"):
            assert f"{absent} did not come" in said


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Environment("a test", 0, 2, 0, 2, taken.getsockname())
        with pytest.raises(PolyremeError, match=f"port {taken.getsockname()[1]}(.|\n)*set MASTER_PORT"):
            rendezvous.listen(place)


def test_a_meeting_point_of_one_host_listens_on_it_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one = Environment("a test", 0, 2, 0, 2, ("localhost", port))
    with rendezvous.listen(one) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


class World:
    """MPI's communicator, as two ranks on two hosts have it."""

    def __init__(self, others: bytes) -> None:
        self._others = others

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Allgather(self, mine: bytes, everyone: bytearray) -> None:
        everyone[:] = mine + self._others.ljust(len(mine))

    def Bcast(self, told: bytearray, root: int) -> None:
        assert root == 0


def test_over_mpi_rank_0_tells_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Environment("mpirun (Open MPI)", 0, 2, 0, 1)
    own = [each for each in rendezvous.addresses() if not rendezvous.is_loopback(each) and ":" not in each]
    monkeypatch.setattr(rendezvous, "_mpi_world", lambda *_: World(str(own).replace("'", '"').encode()))
    (host, port), listener = rendezvous._over_mpi(place, timedelta(seconds=1))
    assert listener is not None and (host, port) == ("127.0.0.1", listener.getsockname()[1])
    listener.close()


def test_mpi4py_of_another_library_is_no_way_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1),
        Get_library_version=lambda: "Some MPI 1.2\0\nof today",
    )
    monkeypatch.setattr(rendezvous, "library", lambda within: other)
    place = Environment("mpirun (Open MPI)", 1, 2, 0, 1)
    with pytest.raises(PolyremeError, match=r"another MPI library \(Some MPI 1.2\)"):
        rendezvous.meet(place, timedelta(seconds=1))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(PolyremeError, match="pip install mpi4py, or set MASTER_ADDR"):
        rendezvous.meet(place, timedelta(seconds=1))


def test_ranks_that_share_all_cores_compute_with_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    _share_cores(Environment("srun (Slurm)", 0, 6, 0, 3))
    _share_cores(Environment("torchrun", 0, 6, 0, 3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    _share_cores(Environment("srun (Slurm)", 0, 6, 0, 3))
    assert chosen == [2]
