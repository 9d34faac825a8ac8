"""Build the manifests that run ranks in pods: a Job with a headless Service, a JobSet, or a Kubeflow
TrainJob.

Each pod runs one launcher (`polyreme launch` or `polyreme train`), which starts the pod's ranks and meets the
others at pod 0.
Invariants: pods satisfy the Pod Security Standard "restricted", and their root is read-only; "$" in an
argument reaches the program unchanged.
Communication: none."""

from __future__ import annotations

import hashlib
from typing import Any

from polyreme.distributed.environment import LEAST_PODS, MASTER_ADDR, MASTER_PORT, PODS, PORT, RANKS_PER_POD
from polyreme.launch.pod_request import CONFIGS, CONTAINER, SCRATCH, SECRET, TOLERATION, Request
from polyreme.launch.requests import STOPPED

Manifest = dict[str, Any]

TRAINER = "trainer.kubeflow.org/v1alpha1"
QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = {"volcano": "scheduling.volcano.sh/v1beta1", "plugins": "scheduling.x-k8s.io/v1alpha1"}
SCHEDULER = {"volcano": "volcano", "plugins": "scheduler-plugins-scheduler"}
WRITABLE = {
    "HOME": SCRATCH,
    "USER": "polyreme",  # torch and others ask for a name, which a user missing in /etc/passwd lacks
    "XDG_CACHE_HOME": f"{SCRATCH}/cache",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/cache/inductor",
    "TRITON_CACHE_DIR": f"{SCRATCH}/cache/triton",
    "NUMBA_CACHE_DIR": f"{SCRATCH}/cache/numba",
}
"""Variables with the folders where libraries write. HF_HOME is below XDG_CACHE_HOME, unless the image has
models and sets it."""


def build(request: Request) -> list[Manifest]:
    """Return the manifests of a request that has no problems."""
    documents = _config(request) + _group(request)
    return documents + {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[request.kind](request)


def _metadata(request: Request, queued: bool = True) -> Manifest:
    found: Manifest = {"name": request.name}
    if request.namespace:
        found["namespace"] = request.namespace
    found["labels"] = _labels(request)
    if queued and request.queue:
        found["labels"][QUEUE] = request.queue
        if request.elastic:  # Kueue may admit fewer pods
            found["annotations"] = {
                "kueue.x-k8s.io/job-min-parallelism": str(request.elastic[0]),
                "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
            }
    return found


def _labels(request: Request) -> Manifest:
    return {"app.kubernetes.io/name": "polyreme", "app.kubernetes.io/instance": request.name}


def _given(**fields: Any) -> Manifest:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _suspended(request: Request) -> Manifest:
    """Return the field by which a queued job waits until Kueue resumes it."""
    return {"suspend": True} if request.queue else {}


def _config(request: Request) -> list[Manifest]:
    """Return the ConfigMap of the config. Its name has a digest, so that no later config of the same run
    replaces it."""
    if not request.files:
        return []
    metadata = {**_metadata(request, queued=False), "name": _config_name(request)}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": dict(request.files),
        }
    ]


def _config_name(request: Request) -> str:
    content = repr(sorted(request.files.items())).encode()
    return f"{request.name}-{hashlib.sha256(content).hexdigest()[:10]}"


def _group(request: Request) -> list[Manifest]:
    """Return the PodGroup, whose pods are scheduled together or not at all."""
    if request.gang is None:
        return []
    spec: Manifest = {"minMember": request.least}
    if request.gang == "volcano" and request.priority:
        spec["priorityClassName"] = request.priority
    metadata = _metadata(request, queued=False)
    return [{"apiVersion": GROUP[request.gang], "kind": "PodGroup", "metadata": metadata, "spec": spec}]


def _job(request: Request) -> list[Manifest]:
    """Return an Indexed Job, and the Service in whose domain its pods have host names."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request, queued=False),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "publishNotReadyAddresses": True,  # pods meet before they count as ready
        },
    }
    restarts = 3 if request.restarts is None else request.restarts
    spec = _given(ttlSecondsAfterFinished=request.ttl, activeDeadlineSeconds=request.deadline)
    spec |= _job_spec(request, {"subdomain": request.name})
    # When one pod fails, the others lose it and fail, too: counted by index, that is once.
    spec |= {"backoffLimitPerIndex": restarts, "maxFailedIndexes": 0}
    if request.elastic:  # spare pods, which wait for the others to end, do not delay success
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(request)}
    return [service, {**job, "spec": {**_suspended(request), **spec}}]


def _job_spec(request: Request, network: Manifest) -> Manifest:
    labels, annotations = _labels(request), {}
    if request.gang == "volcano":
        annotations = {"annotations": {"scheduling.k8s.io/group-name": request.name}}
    elif request.gang == "plugins":
        labels["scheduling.x-k8s.io/pod-group"] = request.name
    volumes, mounts = _volumes(request)
    pod = {
        "restartPolicy": "Never",
        **network,
        "terminationGracePeriodSeconds": request.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_placement(request),
        "securityContext": _pod_security(request),
        "containers": [
            {
                "name": CONTAINER[request.kind],
                "image": request.image,
                "command": [_literal(word) for word in request.command],
                "env": _env(request),
                "resources": _resources(request),
                "securityContext": _container_security(),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {
        "completions": request.most,
        "parallelism": request.most,
        "completionMode": "Indexed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                *([_on_status(request, "Ignore", STOPPED)] if request.saves else []),
                _on_status(request, "FailJob", 2),  # bad usage or config, which trying again does not mend
            ]
        },
        "template": {"metadata": {"labels": labels, **annotations}, "spec": pod},
    }


def _on_status(request: Request, action: str, status: int) -> Manifest:
    codes = {"containerName": CONTAINER[request.kind], "operator": "In", "values": [status]}
    return {"action": action, "onExitCodes": codes}


def _jobset(request: Request) -> list[Manifest]:
    """Return a JobSet of one Job: when a pod fails, all are started again."""
    ttl = _given(ttlSecondsAfterFinished=request.ttl)
    spec = {**_suspended(request), **ttl, **_jobset_spec(request, "ranks", {})}
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(request)}
    return [{**head, "spec": spec}]


def _jobset_spec(request: Request, name: str, metadata: Manifest) -> Manifest:
    job = _job_spec(request, {}) | {"backoffLimit": 0}
    if request.kind == "jobset":  # a TrainJob has its own
        job = _given(activeDeadlineSeconds=request.deadline) | job
    # A pod that was evicted, or saved and stopped, is replaced within its Job. So a Job that fails by the
    # policy of its pods has ended with status 2, and one that fails otherwise is worth another try.
    final = {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": 3 if request.restarts is None else request.restarts,
            "rules": [final],
        },
        "replicatedJobs": [{"name": name, "replicas": 1, "template": {**metadata, "spec": job}}],
    }


def _trainjob(request: Request) -> list[Manifest]:
    """Return a TrainJob of Kubeflow Trainer v2, with a runtime of its own, or over one of the cluster's, of
    which it can change only the pods."""
    job = {"apiVersion": TRAINER, "kind": "TrainJob", "metadata": _metadata(request)}
    reference = {"name": request.runtime}
    if request.runtime is None:
        reference = {"apiGroup": TRAINER.partition("/")[0], "kind": "TrainingRuntime", "name": request.name}
    spec = {
        **_suspended(request),
        **_given(activeDeadlineSeconds=request.deadline),
        "runtimeRef": reference,
        "trainer": {
            "image": request.image,
            "command": [_literal(word) for word in request.command],
            "numNodes": request.pods,
            "numProcPerNode": request.ranks,
            "env": _env(request),
            "resourcesPerNode": _resources(request),
        },
        **({} if request.runtime is None else _patches(request)),
    }
    runtime = [_runtime(request)] if request.runtime is None else []
    return [*runtime, {**job, "spec": spec}]


def _runtime(request: Request) -> Manifest:
    """Return the runtime of one TrainJob, with a JobSet as `_jobset`'s."""
    metadata = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    return {
        "apiVersion": TRAINER,
        "kind": "TrainingRuntime",
        "metadata": _metadata(request, queued=False),
        "spec": {
            "mlPolicy": {"numNodes": request.pods, "torch": {}},
            "template": {"spec": _jobset_spec(request, "node", metadata)},
        },
    }


def _patches(request: Request) -> Manifest:
    """Return the fields that a TrainJob adds to the pods of the cluster's runtime."""
    volumes, mounts = _volumes(request)
    pod = {
        "terminationGracePeriodSeconds": request.grace,
        **_placement(request),
        "securityContext": _pod_security(request),
        "volumes": volumes,
        "containers": [
            {
                "name": CONTAINER[request.kind],
                "securityContext": _container_security(),
                "volumeMounts": mounts,
            }
        ],
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


def _placement(request: Request) -> Manifest:
    """Return the account, the priority and the nodes of pods."""
    found = {
        "serviceAccountName": request.service_account,
        "imagePullSecrets": [{"name": each} for each in request.pull_secrets],
        "priorityClassName": request.priority,
        "schedulerName": SCHEDULER[request.gang] if request.gang else None,
        "nodeSelector": dict(each.split("=", 1) for each in request.node_selector),
        "tolerations": [_toleration(each) for each in request.tolerations],
    }
    return {name: value for name, value in found.items() if value}


def _toleration(taint: str) -> Manifest:
    found = TOLERATION.fullmatch(taint)
    assert found  # others were refused before
    tolerated = {name: found[name] for name in ("key", "value", "effect") if found[name]}
    return {**tolerated, "operator": "Equal" if found["value"] else "Exists"}


def _pod_security(request: Request) -> Manifest:
    found: Manifest = {"runAsNonRoot": True}
    if request.user:
        user, _, group = request.user.partition(":")
        found |= {"runAsUser": int(user), "runAsGroup": int(group or user), "fsGroup": int(group or user)}
        # else each start changes the owner of all files of a claim
        found["fsGroupChangePolicy"] = "OnRootMismatch"
    return {**found, "seccompProfile": {"type": "RuntimeDefault"}}


def _container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _literal(word: str) -> str:
    """Escape a word so that Kubernetes finds no $(VARIABLE) in it."""
    return word.replace("$", "$$")


def _env(request: Request) -> list[Manifest]:
    ours = {
        **WRITABLE,
        MASTER_ADDR: f"{request.first_pod}.{request.name}",
        MASTER_PORT: PORT,
        PODS: request.most,
        **({RANKS_PER_POD: request.ranks} if request.most > 1 else {}),  # one pod is like one host
        **({LEAST_PODS: request.elastic[0]} if request.elastic else {}),
    }
    given = dict(each.split("=", 1) for each in request.env)
    return [_variable(name, str(value)) for name, value in {**ours, **given}.items()]


def _variable(name: str, value: str) -> Manifest:
    if not value.startswith(SECRET):
        return {"name": name, "value": _literal(value)}
    secret, _, key = value.removeprefix(SECRET).partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _resources(request: Request) -> Manifest:
    return {"requests": request.limits, "limits": request.limits}


def _volumes(request: Request) -> tuple[list[Manifest], list[Manifest]]:
    """Return the pod's volumes, and the mounts of its container. /dev/shm has its own volume, as the default
    of 64 MiB is too little for ranks that exchange through it."""
    shm = {"medium": "Memory", **({"sizeLimit": request.shm} if request.shm else {})}
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": shm},
        {"name": "tmp", "emptyDir": {"sizeLimit": request.scratch}},
    ]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": SCRATCH}]
    if request.files:
        volumes.append({"name": "config", "configMap": {"name": _config_name(request)}})
        mounts.append({"name": "config", "mountPath": CONFIGS, "readOnly": True})
    names: dict[str, str] = {}
    for claim, _, path in (each.partition(":") for each in request.volumes):
        if claim not in names:
            names[claim] = f"claim-{len(names)}"
            volumes.append({"name": names[claim], "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": names[claim], "mountPath": path})
    return volumes, mounts
