"""The process that `polyreme.launch.several` starts on each host, over ssh or as its child: it checks the
host, starts the host's ranks through `polyreme.launch.torchrun`, and passes their output on.

It reads requests from stdin, and answers on stdout (frames). Invariants: when stdin ends or stays silent for
SILENCE seconds, the starter is gone, and the ranks are ended; nothing listens but at an address that was
asked for."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme.distributed.interfaces import addresses, is_loopback, source
from polyreme.distributed.versions import versions
from polyreme.errors import LaunchError, PolyremeError
from polyreme.files.machine import identity
from polyreme.launch import frames
from polyreme.launch.frames import Frame
from polyreme.launch.processes import leave
from polyreme.launch.signals import ENDINGS, SAVE_SIGNALS

SILENCE = 60.0  # seconds; the starter writes at least every ALIVE
ALIVE = 10.0
GIVING_UP = 11.0  # seconds for ranks to end, after which the kernel kills them
Tell = Callable[[Frame], None]


def main() -> None:
    """Answer requests on stdin, until one begins the run and that has ended."""
    asked = os.fdopen(os.dup(0), "rb", buffering=0)  # unbuffered, as `select` does not see a buffer
    out = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # only frames go to the real stdout
    for number in (signal.SIGHUP, signal.SIGPIPE):  # stdin tells when the starter is gone
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if started in the background
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDINGS, *SAVE_SIGNALS})  # Ray's workers block them
    lock = threading.Lock()

    def tell(frame: Frame) -> None:
        with lock, contextlib.suppress(OSError):  # the starter is gone, as stdin will tell
            out.write(frames.pack(frame))
            out.flush()

    out.write(frames.MARK)
    for each in asked:
        request = json.loads(each)
        if request["do"] == "begin":
            gone = threading.Event()
            threading.Thread(target=_listen, args=(asked, gone), daemon=True).start()
            _begin(request, tell)
            gone.wait()  # other hosts may need this one until the starter leaves
            leave(0)
        if request["do"] != "nothing":
            tell(frames.message(**_ANSWERS[request["do"]](request)))


def _look(request: Mapping[str, Any]) -> dict[str, Any]:
    """Check this host's folder, files and versions for a run."""
    problems = []
    try:
        os.chdir(request["folder"])
    except OSError as error:
        problems.append(
            f"the folder {request['folder']} cannot be used ({error.strerror}): a run has the same one on "
            "each host, so copy or mount it there"
        )
    else:
        missing = [each for each in request["files"] if not Path(each).is_file()]
        problems += [f"{each} is not a file in {request['folder']}: copy it there" for each in missing]
    # "client port server port", where ssh has set it
    reached = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return {
        "machine": identity(),
        "versions": versions(),
        "reached": [address for address in reached if not is_loopback(address)],
        "problems": problems,
    }


def _ways(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return addresses of this host, the first one, that others may reach: those that they are reached over,
    and the one that its name stands for here."""
    found = [*request["addresses"], *(source(each) for each in request["others"])]
    with contextlib.suppress(OSError, UnicodeError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(request["name"], None)]
    own = addresses()
    usable = dict.fromkeys(each for each in found if each and each in own and not is_loopback(each))
    listening = {}
    for address in usable:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):
            _probes.append(socket.create_server((address, request["port"]), family=family))
            listening[address] = _probes[-1].getsockname()[1]
    return {"listening": listening}


def _reach(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return which of the first host's addresses can be connected to from here."""
    reached = []
    for address, port in request["listening"].items():
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=3).close()
            reached.append(address)
    return {"reached": reached}


_probes: list[socket.socket] = []
_ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "look": _look,
    "ways": _ways,
    "reach": _reach,
}


# ---- the run


def _listen(asked: Any, gone: threading.Event) -> None:
    """Pass signals on, and end the run when the starter is gone."""
    try:
        while select.select([asked], [], [], SILENCE)[0] and (line := asked.readline()):
            request = json.loads(line)
            if request["do"] == "signal":
                os.kill(os.getpid(), request["number"])
            elif request["do"] == "end":
                threading.Thread(target=_end, args=(request["number"],), daemon=True).start()
    finally:  # also where a line was cut
        gone.set()
        _end(signal.SIGINT)


def _end(number: int) -> None:
    """End the run, and finally this process, whereupon the kernel ends its ranks."""
    os.kill(os.getpid(), number)
    time.sleep(GIVING_UP)
    os._exit(1)


def _begin(request: Mapping[str, Any], tell: Tell) -> None:
    for each in _probes:
        each.close()
    os.environ.update(request["variables"])
    try:
        _run(request, tell)
        _be_deaf()
        end: dict[str, Any] = {"end": "well"}
    except KeyboardInterrupt:  # while torch was imported
        end = {"end": "failed", "message": "", "exit_status": 128 + signal.SIGINT, "rank": None}
    except PolyremeError as error:
        end = {
            "end": "failed",
            "message": str(error),
            "exit_status": error.exit_status,
            "rank": getattr(error, "rank", None),
            "traceback": getattr(error, "traceback", None),
        }
    _be_deaf()
    tell(frames.message(**end))


def _be_deaf() -> None:
    """Ignore what the starter may still send until it reads how the run has ended, and what its leaving sends
    then."""
    for number in (signal.SIGINT, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def _run(request: Mapping[str, Any], tell: Tell) -> None:
    from polyreme.launch.hosts import Hosts
    from polyreme.launch.options import LaunchOptions
    from polyreme.launch.torchrun import launch

    given, ranks = request["options"], len(request["slots"])
    hosts = (
        Hosts(request["index"], request["count"], request["count"], tuple(request["address"]))
        if request["address"]
        else None
    )
    variables = {**_devices(request["slots"]), **_interfaces(hosts), **given.pop("variables")}
    launch(
        request["command"],
        ranks,
        threads=request["threads"],
        saves=request["saves"],
        options=LaunchOptions(variables=variables, take=tell, **given),
        hosts=hosts,
        failing=lambda by_itself: tell(frames.message(failing=by_itself)),
    )


def _devices(slots: list[int]) -> dict[str, str]:
    """Return the variable that shows ranks only the GPUs of their slots, where there are GPUs."""
    import torch

    count = torch.cuda.device_count()
    if not count or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    if max(slots) >= count:
        raise LaunchError(
            f"slot {max(slots)} is asked for, but there are {count} GPUs here, from 0: give the host "
            f"slots={count} or fewer"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}


def _interfaces(hosts: Any) -> dict[str, str]:
    """Return variables with the interface that leads to where hosts meet, unless they are set: gloo would
    take that of the host's name, which may be loopback's."""
    from polyreme.distributed.rendezvous import INTERFACES

    if hosts is None:
        return {}
    way = hosts.address[0] if hosts.index == 0 else source(hosts.address[0])
    name = addresses().get(way or "")
    free = [variable for variable in INTERFACES if variable not in os.environ]
    return {variable: INTERFACES[variable] + name for variable in free} if name else {}


if __name__ == "__main__":
    main()
