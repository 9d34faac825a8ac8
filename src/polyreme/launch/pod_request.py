"""A request to a Kubernetes cluster, and the problems in it.

Invariants: values that the API server would accept and then treat in another way (names that are too long, a
variable or folder given twice) are refused here.
Communication: none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from polyreme.distributed.environment import (
    LEAST_PODS,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    PODS,
    RANK,
    RANKS_PER_POD,
    WORLD_SIZE,
)
from polyreme.errors import Problem
from polyreme.launch.requests import count_problems, gpu_problems, size, size_problems

KINDS = ("job", "jobset", "trainjob")
GANGS = ("volcano", "plugins")
ENDING = 30  # seconds that pods get to end by themselves, where they do not save
CONFIGS = "/etc/polyreme"
"""The folder with the config in each pod."""
SCRATCH = "/tmp"
"""The writable folder of each pod, which is empty at first."""
LONGEST = 63  # characters of a host name, and of a label
LARGEST = 2**20  # bytes of a ConfigMap
CONTAINER = {"job": "ranks", "jobset": "ranks", "trainjob": "node"}
OURS = (
    *(MASTER_ADDR, MASTER_PORT, PODS, LEAST_PODS, RANKS_PER_POD, "JOB_COMPLETION_INDEX"),
    *(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE),
)
SECRET = "secret:"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
WORD = r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
KEY = rf"({SUBDOMAIN}/)?{WORD}"
TOLERATION = re.compile(
    rf"(?P<key>{KEY})(=(?P<value>{WORD}))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)


@dataclass(frozen=True)
class Request:
    """A request to run in pods, from the options of the command.

    `command` is the program of each pod, `files` the texts of files in CONFIGS by name, `grace` the seconds
    that pods get to end after SIGTERM. `saves`: a run that was stopped ends with STOPPED, and goes on from
    its checkpoint. `folders`: those that the run writes to, by the keys of its config. `patches`: texts of
    patches by the names of their files."""

    command: Sequence[str]
    image: str
    name: str
    ranks: int = 1
    pods: int = 1
    kind: str = "job"
    namespace: str | None = None
    queue: str | None = None
    gang: str | None = None
    runtime: str | None = None
    user: str | None = None
    service_account: str | None = None
    priority: str | None = None
    pull_secrets: Sequence[str] = ()
    node_selector: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    gpus: int | None = None
    cpus: int | None = None
    memory: str | None = None
    shm: str | None = None
    scratch: str = "10Gi"
    volumes: Sequence[str] = ()
    env: Sequence[str] = ()
    restarts: int | None = None
    deadline: int | None = None
    ttl: int | None = None
    elastic: tuple[int, int] | None = None
    saves: bool = False
    grace: int = ENDING
    files: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[tuple[str, str]] = ()
    patches: Mapping[str, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The largest number of pods."""
        return self.elastic[1] if self.elastic else self.pods

    @property
    def least(self) -> int:
        """The number of pods that are enough to begin."""
        return self.elastic[0] if self.elastic else self.pods

    @property
    def limits(self) -> dict[str, str]:
        """The resources of each pod, both requested and allowed."""
        cpus, memory = (4, 16) if self.gpus else (1, 4)  # of each rank, where nothing was asked for
        return {
            "cpu": str(self.cpus or cpus * self.ranks),
            "memory": self.memory or f"{memory * self.ranks}Gi",
            "ephemeral-storage": self.scratch,
            **({"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}),
        }

    @property
    def first_pod(self) -> str:
        """The host name of pod 0, without its domain."""
        return {"job": "{}-0", "jobset": "{}-ranks-0-0", "trainjob": "{}-node-0-0"}[self.kind].format(
            self.name
        )


def request_problems(request: Request) -> Iterator[Problem]:
    """Yield all problems of a request that no cluster could fulfil."""
    yield from _name_problems(request)
    yield from size_problems(memory=request.memory, shm=request.shm, scratch=request.scratch)
    yield from _count_problems(request)
    yield from _elastic_problems(request)
    yield from _placement_problems(request)
    yield from _runtime_problems(request)
    yield from volume_problems(request.volumes)
    yield from _variable_problems(request.env)
    for word in (*request.command, *request.env):
        if bad := re.search("[\0\ud800-\udfff]", word):
            reason = f"it has {bad[0]!r}, which no text in a manifest can have"
            yield Problem("argument", word, reason, "rename the file, or leave it out")
    for option, value, known in (
        ("--kind", request.kind, KINDS),
        ("--gang", request.gang or GANGS[0], GANGS),
    ):
        if value not in known:
            yield Problem(option, value, "it is none that is written", f"give {', '.join(known)}")
    if not request.image or re.search(r"\s", request.image):
        fix = "give one that has Polyreme and the script, as registry/name:tag"
        yield Problem("--image", request.image, "it is no name of an image", fix)
    allowed = request.limits["memory"]
    memory, shm = (size(each or "") for each in (allowed, request.shm))
    if memory and shm and shm > memory:
        reason = f"it counts as memory of the pod, of which --memory allows {allowed}"
        yield Problem("--shm", request.shm, reason, "raise --memory, or lower --shm")
    if sum(len(each.encode()) for each in request.files.values()) > LARGEST:
        reason = f"it has more than {LARGEST:,} bytes, which no ConfigMap takes"
        yield Problem("CONFIG", ", ".join(request.files), reason, "shorten it")


def _name_problems(request: Request) -> Iterator[Problem]:
    """Yield names that are no DNS labels, or too long for the last pod's host name."""
    last = (
        request.first_pod.removesuffix("0") + str(request.most - 1) if request.kind in KINDS else request.name
    )
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", request.name):
        reason = "it becomes a Service's, which begin with a letter, and have a to z, 0 to 9 and - inside"
        yield Problem("--name", request.name, reason, "give another one, such as polyreme-1")
    elif len(last) > LONGEST:
        reason = (
            f"the host name of the last pod, {last}, has {len(last)} characters, and {LONGEST} is the most"
        )
        yield Problem("--name", request.name, reason, f"shorten it by {len(last) - LONGEST}")
    for option, value in (("--namespace", request.namespace), ("--queue", request.queue)):
        if value is not None and not (re.fullmatch(LABEL, value) and len(value) <= LONGEST):
            reason = f"it has other characters than a to z, 0 to 9 and - inside, or more than {LONGEST}"
            yield Problem(option, value, reason, "give the name that the cluster lists")


def _count_problems(request: Request) -> Iterator[Problem]:
    yield from count_problems(
        {
            "--nodes": (request.pods, 1),
            "-n": (request.ranks, 1),
            "--gpus": (request.gpus, 1),
            "--cpus": (request.cpus, 1),
            "--restarts": (request.restarts, 0),
            "--deadline": (request.deadline, 1),
            "--ttl": (request.ttl, 0),
        }
    )
    yield from gpu_problems(request.ranks, request.gpus, "pod")


def _elastic_problems(request: Request) -> Iterator[Problem]:
    if request.elastic is None:
        return
    least, most = request.elastic
    shown = f"{least}:{most}"
    if not 1 <= least <= most:
        reason = "the bounds are not 1 <= MIN <= MAX"
        yield Problem("--elastic", shown, reason, "give the fewest and the most pods, as in 2:8")
    if request.kind != "job":
        reason = f"the number of pods of a {request.kind} stays as it is"
        yield Problem("--elastic", shown, reason, "take --kind job, or give --nodes alone")
    if not request.saves:
        reason = "when the number of pods changes, the run saves and begins again"
        fix = "give --saves with a script that does, or --nodes alone"
        yield Problem("--elastic", shown, reason, fix)


def _placement_problems(request: Request) -> Iterator[Problem]:
    """Yield names, users, node selectors and tolerations that the API server does not take."""
    named = {
        "--runtime": [request.runtime],
        "--service-account": [request.service_account],
        "--priority": [request.priority],
        "--pull-secret": request.pull_secrets,
    }
    for option, names in named.items():
        for name in names:
            if name is not None and not (re.fullmatch(SUBDOMAIN, name) and len(name) <= 253):
                reason = "it has other characters than a to z, 0 to 9, and - and . inside"
                yield Problem(option, name, reason, "give the name that the cluster lists")
    user = re.fullmatch(r"(\d{1,10})(?::(\d{1,10}))?", request.user or "1", re.ASCII)
    if user is None or not all(0 < int(each) < 2**31 for each in user.groups("1")):
        reason = "it is no number of a user other than root, nor such a one with that of a group"
        yield Problem("--user", request.user, reason, "give UID or UID:GID, as in 1000")
    for each in request.node_selector:
        if not re.fullmatch(rf"{KEY}=({WORD})?", each):
            fix = "give KEY=VALUE, a label that kubectl get nodes --show-labels lists"
            yield Problem("--node-selector", each, "it is no label of nodes", fix)
    for each in request.tolerations:
        if not TOLERATION.fullmatch(each):
            fix = "give KEY:NoSchedule or KEY=VALUE:NoSchedule, as the nodes' taint is written; any other"
            yield Problem("--toleration", each, "it is no taint", f"{fix} goes by --patch")


def _runtime_problems(request: Request) -> Iterator[Problem]:
    """Yield options that a TrainJob cannot have, or not over a runtime of the cluster's."""
    if request.kind == "trainjob" and request.ttl is not None:
        fix = "leave it out and delete the TrainJob, or take --kind jobset"
        yield Problem("--ttl", request.ttl, "a TrainJob stays until it is deleted", fix)
    if request.runtime is None:
        return
    if request.kind != "trainjob":
        fix = "take --kind trainjob, or leave --runtime out"
        yield Problem("--runtime", request.runtime, f"a {request.kind} is over no runtime", fix)
    given = {"--restarts": request.restarts, "--priority": request.priority, "--gang": request.gang}
    for option, value in given.items():
        if value is not None:
            reason = f"that is for the runtime {request.runtime} to say, and not for its TrainJobs"
            yield Problem(option, value, reason, f"leave {option} out, or --runtime")


def volume_problems(volumes: Sequence[str]) -> Iterator[Problem]:
    """Yield volumes CLAIM:FOLDER that cannot be mounted, or whose folder another one has."""
    taken = {"/dev/shm", CONFIGS, SCRATCH}
    for volume in volumes:
        claim, _, path = volume.partition(":")
        key, fix = (
            "--volume",
            "give CLAIM:/FOLDER, the name of a PersistentVolumeClaim and where its files are",
        )
        names = PurePosixPath(path).parts
        if not re.fullmatch(SUBDOMAIN, claim) or len(claim) > 253:
            yield Problem(key, volume, f"{claim!r} is no name of a PersistentVolumeClaim", fix)
        elif not path.startswith("/") or len(names) < 2 or ".." in names or ":" in path:
            yield Problem(key, volume, f"{path!r} is no absolute path of a folder below /", fix)
        elif (folder := f"/{'/'.join(names[1:])}") in taken:
            yield Problem(key, volume, f"there is another volume at {folder}", "give another folder")
        else:
            taken.add(folder)


def _variable_problems(variables: Sequence[str]) -> Iterator[Problem]:
    names: set[str] = set()
    for each in variables:
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Problem("--env", each, "it is no variable with its value", "give NAME=VALUE")
        elif is_ours(name):
            reason = "where ranks are and meet is told by the Job and the launcher"
            yield Problem("--env", each, reason, "leave it out")
        elif name in names:
            yield Problem("--env", each, "it is given twice", "give it once")
        elif value.startswith(SECRET) and not re.fullmatch(rf"{SECRET}{SUBDOMAIN}/[-._A-Za-z0-9]+", value):
            fix = (
                f"give {name}=secret:NAME/KEY, the Secret and which of its keys; "
                "a value that begins with secret: goes by --patch"
            )
            yield Problem("--env", each, "it names no key of a Secret", fix)
        names.add(name)


def is_ours(variable: str) -> bool:
    """Return whether a variable tells ranks their place, or where they meet."""
    return variable in OURS or variable.startswith("PET_")
