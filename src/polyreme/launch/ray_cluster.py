"""Start ranks on a Ray cluster that runs already: a process of `polyreme.launch.on_host` on each of its nodes
that a placement group reserves, reached through an actor instead of ssh.

Ray is optional. Invariant: the actors, and with them the ranks, end with the command.
Communication: calls of the actors, with the data of their processes' pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from polyreme.errors import LaunchError
from polyreme.launch import several
from polyreme.launch.several import RankCommand

PATIENCE = 10 * 60.0  # seconds for the cluster to have room
WAIT = 0.5  # seconds that an actor waits for output
SILENCE = 15.0  # seconds without an answer after which an actor is lost


@dataclass(frozen=True)
class Request:
    """The nodes of a run: how many, and of each the ranks, the cores (the number of ranks where None) and
    GPUs."""

    ranks: int
    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a node, as Ray counts them."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": float(self.ranks if self.cpus is None else self.cpus), **gpus}


def run(request: Request, what: RankCommand) -> signal.Signals | None:
    """Run ranks on the cluster of RAY_ADDRESS, or the one that this machine belongs to; as `several.run`.

    Raises LaunchError where there is no Ray, no cluster, or no room in it for PATIENCE seconds."""
    ray = _ray()
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises several classes
        raise LaunchError(
            f"--ray finds no cluster at {address!r}: {str(error).splitlines()[0]}; start one with `ray start "
            "--head` (other hosts: --address), or set RAY_ADDRESS"
        ) from None
    try:
        with _places(ray, request) as processes:
            active = {name: list(range(request.ranks)) for name in processes}
            return several.run(active, what, processes=processes)
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise LaunchError(f"--ray needs Ray, which cannot be imported ({error}): pip install ray") from None
    return ray


@contextlib.contextmanager
def _places(ray: Any, request: Request) -> Iterator[Mapping[str, Remote]]:
    """Start a process on each of the nodes, and yield them by the nodes' addresses."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([request.bundle] * request.nodes, "STRICT_SPREAD")
    try:
        _await(ray, group, request)
        path = several.python_path()
        environment = {"env_vars": {"PYTHONPATH": path}} if path else {}
        actor = ray.remote(max_concurrency=3, max_restarts=0, runtime_env=environment)(Relay)
        found = {}
        for index in range(request.nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            its = {"num_cpus": request.bundle["CPU"], "num_gpus": request.gpus or 0}
            relay = actor.options(scheduling_strategy=place, **its).remote()
            try:
                address = ray.get(relay.address.remote(), timeout=several.ANSWER)
            except ray.exceptions.RayError as error:
                first = str(error).strip().splitlines()[0]
                raise LaunchError(
                    f"Ray starts no worker on node {index} of {request.nodes}: {first}; see `ray logs` and "
                    "`ray status`"
                ) from None
            found[address] = Remote(ray, relay)
        yield dict(sorted(found.items()))  # Ray's order differs from run to run
    finally:
        remove_placement_group(group)


def _await(ray: Any, group: Any, request: Request) -> None:
    """Wait until the cluster has room, a second at a time, as Ctrl-C is not handled while Ray waits."""
    deadline, said = time.monotonic() + PATIENCE, False
    while not group.wait(1):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the Ray cluster has had no {request.nodes} nodes with {request.bundle} free for "
                f"{PATIENCE:g} s: it has {ray.cluster_resources()}; give fewer --nodes, -n, --cpus or --gpus"
            )
        if not said:
            print(f"waiting for {request.nodes} nodes with {request.bundle}", file=sys.stderr, flush=True)
        said = True


class Relay:
    """The actor on a node: the process there, and its pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "polyreme.launch.on_host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self._said: queue.Queue[tuple[int, bytes]] = queue.Queue(1000)
        for number, stream in enumerate((self._process.stdout, self._process.stderr)):
            threading.Thread(target=self._read, args=(number, stream), daemon=True).start()

    def _read(self, number: int, stream: BinaryIO) -> None:
        while data := os.read(stream.fileno(), 65536):
            self._said.put((number, data))
        self._said.put((number, b""))

    def address(self) -> str:
        """Return this node's address."""
        import ray

        return str(ray.util.get_node_ip_address())

    def write(self, data: bytes) -> None:
        """Write to the process; empty data closes the pipe."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            if not data:
                self._process.stdin.close()
                return
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def read(self) -> Sequence[tuple[int, bytes]]:
        """Return the process' new output: the number of the stream, and data, which is empty at a stream's
        end."""
        with contextlib.suppress(queue.Empty):
            said = [self._said.get(timeout=WAIT)]
            with contextlib.suppress(queue.Empty):
                while len(said) < 100:
                    said.append(self._said.get_nowait())
            return said
        return []


class Remote:
    """The process behind an actor, with the interface of subprocess.Popen that `several` uses."""

    def __init__(self, ray: Any, relay: Any) -> None:
        self._ray, self._relay = ray, relay
        self._status: int | None = None
        self.stdin = self
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(out, "rb") for out, _ in ends)
        self._thread = threading.Thread(target=self._bring, args=([into for _, into in ends],), daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        self._relay.write.remote(data)

    def flush(self) -> None:
        """Do nothing, as calls are sent in order."""

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster is gone
            self._relay.write.remote(b"")

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        self._thread.join()
        return self._status or 0

    def kill(self) -> None:
        self._status = -9
        with contextlib.suppress(Exception):
            self._ray.kill(self._relay)

    def _bring(self, into: list[int]) -> None:
        """Write the process' output to the pipes, until it has closed both."""
        open_ones = dict(enumerate(into))
        try:
            while open_ones:
                for number, data in self._ray.get(self._relay.read.remote(), timeout=SILENCE):
                    _write(open_ones[number] if data else open_ones.pop(number), data)
        except self._ray.exceptions.GetTimeoutError:
            self._say(into, f"the node has been silent for {SILENCE:g} s")
        except Exception as error:  # the actor has died, or the cluster
            self._say(into, str(error).splitlines()[0])
        for each in open_ones.values():
            os.close(each)
        self._status = self._status or 0

    def _say(self, into: list[int], text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(into[1], f"Ray: {text}\n".encode())
        self._status = self._status or 1


def _write(pipe: int, data: bytes) -> None:
    """Write all data to a pipe, which stays open unless the data is empty."""
    with open(pipe, "wb", closefd=not data) as stream:
        stream.write(data)
