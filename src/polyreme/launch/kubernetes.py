"""Manifests that run ranks in pods: of a Job with a headless Service, a JobSet, or a Kubeflow TrainJob.

`manifests` is a function of what was asked for, and speaks to no cluster. Each pod runs one launcher
(`polyreme launch` or `polyreme train`), which starts the pod's ranks and meets the others at pod 0.
Invariants: what the API server would take and then do something else with (names that are too long, a
variable or folder given twice) is refused here; "$" in an argument reaches the program as it is.
Communication: none."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from polyreme.distributed.environment import (
    LEAST_PODS,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    PODS,
    PORT,
    RANK,
    RANKS_PER_POD,
    WORLD_SIZE,
)
from polyreme.errors import LaunchError, Problem
from polyreme.launch.requests import STOPPED, RequestError, count_problems, size, size_problems

Manifest = dict[str, Any]

KINDS = ("job", "jobset", "trainjob")
ENDING = 30  # seconds that pods get to end by themselves, where they do not save
CONFIGS = "/etc/polyreme"
"""The folder of the pods in which the config is."""
LONGEST = 63  # characters of a host name
LARGEST = 2**20  # bytes of a ConfigMap
CONTAINER = {"job": "ranks", "jobset": "ranks", "trainjob": "node"}
OURS = (
    *(MASTER_ADDR, MASTER_PORT, PODS, LEAST_PODS, RANKS_PER_POD, "JOB_COMPLETION_INDEX"),
    *(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE),
)
TRAINER = "trainer.kubeflow.org/v1alpha1"
QUEUE = "kueue.x-k8s.io/queue-name"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


@dataclass(frozen=True)
class Request:
    """What to run in pods, as the options of the command say it.

    `command` is the program of each pod, `files` the texts of files in CONFIGS by name, `grace` the seconds
    that pods get to end after SIGTERM. `saves`: a run that was stopped ends with STOPPED, and goes on from
    its checkpoint."""

    command: Sequence[str]
    image: str
    name: str
    ranks: int = 1
    pods: int = 1
    kind: str = "job"
    namespace: str | None = None
    queue: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory: str | None = None
    shm: str | None = None
    volumes: Sequence[str] = ()
    env: Sequence[str] = ()
    restarts: int | None = None
    elastic: tuple[int, int] | None = None
    saves: bool = False
    grace: int = ENDING
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Pods at most."""
        return self.elastic[1] if self.elastic else self.pods

    @property
    def first_pod(self) -> str:
        """The host name of pod 0, without its domain."""
        return {"job": "{}-0", "jobset": "{}-ranks-0-0", "trainjob": "{}-node-0-0"}[self.kind].format(
            self.name
        )


def manifests(request: Request) -> list[Manifest]:
    """What `kubectl apply` takes. Raises RequestError with all that is wrong with `request`."""
    if problems := list(_problems(request)):
        raise RequestError("Kubernetes", problems)
    written = []
    if request.files:
        written.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": _metadata(request, queued=False),
                "data": dict(request.files),
            }
        )
    return [*written, *{"job": _job, "jobset": _jobset, "trainjob": _trainjob}[request.kind](request)]


class _Dumper(yaml.SafeDumper):
    """Quotes also what kubectl's reader, but not Python's, takes for a number or a truth: 1e-3, 08, y."""


_NUMBER = r"[-+]?(0[xXbBoO][0-9a-fA-F_]+|(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?)"
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"(?:{_NUMBER}|[yYnN])$"), list("-+.0123456789yYnN")
)


def text(documents: Iterable[Manifest]) -> str:
    """The manifests as YAML."""
    listed = list(documents)

    def written(as_it_is: bool) -> str:
        dumped: str = yaml.dump_all(
            listed, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=110, allow_unicode=as_it_is
        )
        return dumped

    # those would be read as ends of lines
    return found if not re.search("[\x85\u2028\u2029]", found := written(True)) else written(False)


def apply(documents: Iterable[Manifest]) -> str:
    """Hand the manifests to the cluster that kubectl speaks to, and return what it says.

    Raises LaunchError where there is no kubectl, or where it fails."""
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=text(documents),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise LaunchError(
            f"--apply runs kubectl, which does not start: {error.strerror}; install it, or write the "
            "manifests with --output FILE and apply them elsewhere"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"kubectl apply ended with status {done.returncode}: {done.stderr.strip()}; "
            "without --apply the manifests are only written"
        )
    return done.stdout


# ---- what is wrong with a request


def _problems(request: Request) -> Iterator[Problem]:
    yield from _name_problems(request)
    yield from size_problems(memory=request.memory, shm=request.shm)
    yield from _count_problems(request)
    yield from _elastic_problems(request)
    yield from _volume_problems(request.volumes)
    yield from _variable_problems(request.env)
    for word in (*request.command, *request.env):
        if bad := re.search("[\0\ud800-\udfff]", word):
            reason = f"it has {bad[0]!r}, which no text in a manifest can have"
            yield Problem("argument", word, reason, "rename the file, or leave it out")
    if request.kind not in KINDS:
        yield Problem("--kind", request.kind, "it is none that is written", f"give {', '.join(KINDS)}")
    if not request.image or re.search(r"\s", request.image):
        fix = "give one that has Polyreme and the script, as registry/name:tag"
        yield Problem("--image", request.image, "it is no name of an image", fix)
    memory, shm = (size(each or "") for each in (request.memory, request.shm))
    if memory and shm and shm > memory:
        reason = f"it counts as memory of the pod, of which --memory allows {request.memory}"
        yield Problem("--shm", request.shm, reason, "raise --memory, or lower --shm")
    if sum(len(each.encode()) for each in request.files.values()) > LARGEST:
        reason = f"it has more than {LARGEST:,} bytes, which no ConfigMap takes"
        yield Problem("CONFIG", ", ".join(request.files), reason, "shorten it")


def _name_problems(request: Request) -> Iterator[Problem]:
    """Names that are no DNS labels, or too long for the last pod's host name."""
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
        }
    )
    if request.gpus is not None and request.ranks > request.gpus:
        reason = f"each pod has {request.gpus} (--gpus), and a GPU takes one rank"
        yield Problem("-n", request.ranks, reason, f"give -n {request.gpus}, or more GPUs")


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


def _volume_problems(volumes: Sequence[str]) -> Iterator[Problem]:
    taken = {"/dev/shm", CONFIGS}
    for volume in volumes:
        claim, _, path = volume.partition(":")
        key, fix = (
            "--volume",
            "give CLAIM:/FOLDER, the name of a PersistentVolumeClaim and where its files are",
        )
        parts = PurePosixPath(path).parts
        if not re.fullmatch(rf"{LABEL}(\.{LABEL})*", claim) or len(claim) > 253:
            yield Problem(key, volume, f"{claim!r} is no name of a PersistentVolumeClaim", fix)
        elif not path.startswith("/") or len(parts) < 2 or ".." in parts or ":" in path:
            yield Problem(key, volume, f"{path!r} is no absolute path of a folder below /", fix)
        elif (folder := f"/{'/'.join(parts[1:])}") in taken:
            yield Problem(key, volume, f"there is another volume at {folder}", "give another folder")
        else:
            taken.add(folder)


def _variable_problems(variables: Sequence[str]) -> Iterator[Problem]:
    names: set[str] = set()
    for each in variables:
        name, equals, _ = each.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Problem("--env", each, "it is no variable with its value", "give NAME=VALUE")
        elif name in OURS or name.startswith("PET_"):
            reason = "where ranks are and meet is told by the Job and the launcher"
            yield Problem("--env", each, reason, "leave it out")
        elif name in names:
            yield Problem("--env", each, "it is given twice", "give it once")
        names.add(name)


# ---- the manifests


def _metadata(request: Request, queued: bool = True) -> Manifest:
    labels = {"app.kubernetes.io/name": "polyreme", "app.kubernetes.io/instance": request.name}
    found: Manifest = {"name": request.name}
    if request.namespace:
        found["namespace"] = request.namespace
    found["labels"] = labels
    if queued and request.queue:
        found["labels"] = labels | {QUEUE: request.queue}
        if request.elastic:  # Kueue may admit fewer pods
            found["annotations"] = {
                "kueue.x-k8s.io/job-min-parallelism": str(request.elastic[0]),
                "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
            }
    return found


def _suspended(request: Request) -> Manifest:
    """Kueue resumes what it admits."""
    return {"suspend": True} if request.queue else {}


def _job(request: Request) -> list[Manifest]:
    """An Indexed Job, whose pods have host names in the domain of a Service."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request, queued=False),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "publishNotReadyAddresses": True,  # pods meet before anything says that they are ready
        },
    }
    restarts = 3 if request.restarts is None else request.restarts
    spec = _job_spec(request, {"subdomain": request.name})
    # When one pod fails, the others lose it and fail, too: counted by index, that is once.
    spec |= {"backoffLimitPerIndex": restarts, "maxFailedIndexes": 0}
    spec["podFailurePolicy"] = {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            *_on_status(request, "Ignore", STOPPED),
            *_on_status(request, "FailJob", 2),  # bad usage or config, which trying again does not mend
        ]
    }
    if request.elastic:  # pods that wait for the others to end are not waited for
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(request)}
    return [service, {**job, "spec": {**_suspended(request), **spec}}]


def _on_status(request: Request, action: str, status: int) -> list[Manifest]:
    if status == STOPPED and not request.saves:
        return []
    codes = {"containerName": CONTAINER[request.kind], "operator": "In", "values": [status]}
    return [{"action": action, "onExitCodes": codes}]


def _job_spec(request: Request, network: Manifest) -> Manifest:
    labels = {"app.kubernetes.io/name": "polyreme", "app.kubernetes.io/instance": request.name}
    volumes, mounts = _volumes(request)
    pod = {
        "restartPolicy": "Never",
        **network,
        "terminationGracePeriodSeconds": request.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {
                "name": CONTAINER[request.kind],
                "image": request.image,
                "command": [_literal(word) for word in request.command],
                "env": _env(request),
                **_resources(request, "resources"),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {
        "completions": request.most,
        "parallelism": request.most,
        "completionMode": "Indexed",
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _jobset(request: Request) -> list[Manifest]:
    """A JobSet of one Job: when a pod fails, all are started again."""
    job = {"name": "ranks", "replicas": 1, "template": {"spec": _job_of_jobset(request)}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(request),
        "spec": {
            **_suspended(request),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _restarts(request),
            "replicatedJobs": [job],
        },
    }
    return [jobset]


def _job_of_jobset(request: Request) -> Manifest:
    spec = _job_spec(request, {})
    spec["backoffLimit"] = 0
    # Where it was stopped, or a node given up, the Job fails for a reason of its own, which is not counted.
    spec["podFailurePolicy"] = {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            *_on_status(request, "FailJob", STOPPED),
        ]
    }
    return spec


def _restarts(request: Request) -> Manifest:
    """What a JobSet does when its Job fails."""
    rule = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": 3 if request.restarts is None else request.restarts, "rules": [rule]}


def _trainjob(request: Request) -> list[Manifest]:
    """A TrainJob of Kubeflow Trainer v2, over the cluster's runtime for PyTorch, or, where restarts are asked
    for, over a runtime of its own: a TrainJob can change no other than its runtime's pods."""
    job = {"apiVersion": TRAINER, "kind": "TrainJob", "metadata": _metadata(request)}
    trainer = {
        "image": request.image,
        "command": [_literal(word) for word in request.command],
        "numNodes": request.pods,
        "numProcPerNode": request.ranks,
        "env": _env(request),
        **_resources(request, "resourcesPerNode"),
    }
    if request.restarts is None:
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, **_patches(request)}
        return [{**job, "spec": {**_suspended(request), **spec}}]
    named = {"apiGroup": TRAINER.partition("/")[0], "kind": "TrainingRuntime", "name": request.name}
    spec = {**_suspended(request), "runtimeRef": named, "trainer": trainer}
    return [_runtime(request), {**job, "spec": spec}]


def _runtime(request: Request) -> Manifest:
    """The runtime of one TrainJob, whose JobSet is as `_jobset`'s."""
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _job_of_jobset(request),
    }
    return {
        "apiVersion": TRAINER,
        "kind": "TrainingRuntime",
        "metadata": _metadata(request, queued=False),
        "spec": {
            "mlPolicy": {"numNodes": request.pods, "torch": {}},
            "template": {
                "spec": {
                    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                    "failurePolicy": _restarts(request),
                    "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
                }
            },
        },
    }


def _patches(request: Request) -> Manifest:
    """What a TrainJob adds to the pods of the cluster's runtime."""
    volumes, mounts = _volumes(request)
    pod = {
        "terminationGracePeriodSeconds": request.grace,
        "volumes": volumes,
        "containers": [{"name": CONTAINER[request.kind], "volumeMounts": mounts}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "runtimePatches": [
            {
                "manager": "polyreme/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ]
    }


def _literal(word: str) -> str:
    """A word in which Kubernetes finds no $(VARIABLE)."""
    return word.replace("$", "$$")


def _env(request: Request) -> list[Manifest]:
    told = {
        MASTER_ADDR: f"{request.first_pod}.{request.name}",
        MASTER_PORT: PORT,
        PODS: request.most,
        **({RANKS_PER_POD: request.ranks} if request.most > 1 else {}),  # of one pod it is as on one host
        **({LEAST_PODS: request.elastic[0]} if request.elastic else {}),
    }
    given = dict(each.split("=", 1) for each in request.env)
    return [{"name": name, "value": _literal(str(value))} for name, value in {**told, **given}.items()]


def _resources(request: Request, key: str) -> Manifest:
    """Limits, which are requests as well where none are given."""
    asked = {"cpu": request.cpus, "memory": request.memory, "nvidia.com/gpu": request.gpus}
    limits = {name: str(value) for name, value in asked.items() if value is not None}
    return {key: {"limits": limits}} if limits else {}


def _volumes(request: Request) -> tuple[list[Manifest], list[Manifest]]:
    """The pod's volumes, and where its container has them. The default of /dev/shm, 64 MiB, is too little for
    ranks that exchange through it."""
    shm = {"medium": "Memory", **({"sizeLimit": request.shm} if request.shm else {})}
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if request.files:
        volumes.append({"name": "config", "configMap": {"name": request.name}})
        mounts.append({"name": "config", "mountPath": CONFIGS, "readOnly": True})
    names: dict[str, str] = {}
    for claim, _, path in (each.partition(":") for each in request.volumes):
        if claim not in names:
            names[claim] = f"claim-{len(names)}"
            volumes.append({"name": names[claim], "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": names[claim], "mountPath": path})
    return volumes, mounts
