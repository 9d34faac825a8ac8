"""Manifests: what they say, whether Kubernetes takes them, and what is refused before it is asked."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from examples import examples, whole
from kubelet import verdict
from pod_security import broken, pods
from polyreme.distributed.environment import detect
from polyreme.errors import LaunchError
from polyreme.launch import kubernetes
from polyreme.launch.hosts import Hosts, hosts
from polyreme.launch.kubernetes import manifests, text
from polyreme.launch.pod_request import KINDS, Request
from polyreme.launch.requests import RequestError
from polyreme.launch.strategic_merge import MERGE_KEYS

GOLDEN = Path(__file__).parents[1] / "data" / "clusters"
SCRIPT = Request(
    ["polyreme", "launch", "-n", "2", "train.py", "--note", "$(HOME) is $HOME"], "reg/me:1", "first"
)
TRAIN = Request(
    ["polyreme", "train", "/etc/polyreme/run.toml", "-n", "8", "--stopped-status", "75"],
    image="registry.example:5000/team/train:2",
    name="llama",
    ranks=8,
    pods=4,
    namespace="research",
    queue="gpus",
    gpus=8,
    cpus=64,
    memory="512Gi",
    shm="64Gi",
    volumes=["corpora:/data", "runs:/run/out", "corpora:/more"],
    env=["NCCL_DEBUG=INFO", "WORDS=a $(b) c"],
    restarts=5,
    saves=True,
    grace=916,
    files={"run.toml": 'seed = 1  \n\t[data]\n\npath = "/data"\n'},
    folders=[("checkpoint.folder", "/run/out/a"), ("memory.states", "/tmp/states")],
)
PLACED = dataclasses.replace(
    SCRIPT,
    pods=4,
    gang="volcano",
    user="1000:2000",
    service_account="trainer",
    priority="high",
    pull_secrets=["registry"],
    node_selector=["cloud.example.com/gpu=h200", "zone="],
    tolerations=["nvidia.com/gpu:NoSchedule", "team=a:NoExecute", "spot"],
    env=["WANDB_API_KEY=secret:wandb/api-key"],
    scratch="50Gi",
    deadline=86400,
    ttl=3600,
    patches={
        "spread.yaml": """
kind: Job
spec:
  template:
    metadata:
      annotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "false"}
    spec:
      topologySpreadConstraints:
      - {topologyKey: zone, maxSkew: 4, whenUnsatisfiable: DoNotSchedule}
      containers:
      - name: ranks
        imagePullPolicy: Always
        env: [{name: USER, $patch: delete}, {name: WORDS, value: "secret:a"}]
"""
    },
)
FORMS = {
    "job-script": SCRIPT,
    "job-train": TRAIN,
    "job-elastic": dataclasses.replace(TRAIN, elastic=(2, 6)),
    "jobset": dataclasses.replace(TRAIN, kind="jobset"),
    "trainjob": dataclasses.replace(TRAIN, kind="trainjob"),
    "trainjob-runtime": dataclasses.replace(
        TRAIN, kind="trainjob", restarts=None, runtime="torch-distributed", user="1000", deadline=60
    ),
    "job-placed": PLACED,
    "jobset-placed": dataclasses.replace(PLACED, kind="jobset", gang="plugins", patches={}),
}


@pytest.mark.parametrize("name", FORMS)
def test_manifests_are_those_that_were_read_through(name: str) -> None:
    file = GOLDEN / f"{name}.yaml"
    written = text(manifests(FORMS[name]))
    if "POLYREME_WRITE_GOLDEN" in os.environ:
        file.write_text(written)
    assert written == file.read_text()


@pytest.mark.parametrize("name", FORMS)
def test_kubernetes_takes_them(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate

    def valid(document: dict[str, Any]) -> None:
        for version in ("1.33", "1.37"):  # the first that has all of it, and the last
            validate(document, version, strict=True)

    documents = manifests(FORMS[name])
    for each in documents:
        if each["kind"] in ("ConfigMap", "Service", "Job"):
            valid(each)
    for job in jobs(documents):
        valid({"apiVersion": "batch/v1", "kind": "Job", **job})
        check_job(job["spec"])
    for pod, _ in pods(documents):
        check_pod(pod)


@pytest.mark.parametrize("name", ["jobset", "jobset-placed", "trainjob", "trainjob-runtime"])
def test_kubeflow_takes_them(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    known = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    documents = [each for each in manifests(FORMS[name]) if each["kind"] in known]
    for each in documents:
        assert known[each["kind"]].from_dict(each).to_dict() == each
    if name == "trainjob":
        runtime, job = documents
        named = {"apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"], "name": "llama"}
        assert job["spec"]["runtimeRef"] == named and "runtimePatches" not in job["spec"]
        assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == TRAIN.restarts


def jobs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each Job, also those in a JobSet: metadata and spec."""
    found = []
    for each in documents:
        if each["kind"] == "Job":
            found.append({"metadata": each["metadata"], "spec": each["spec"]})
        if each["kind"] in ("JobSet", "TrainingRuntime"):
            spec = each["spec"] if each["kind"] == "JobSet" else each["spec"]["template"]["spec"]
            found += [{"metadata": {"name": "x"}, **job["template"]} for job in spec["replicatedJobs"]]
    return found


def check_pod(pod: dict[str, Any]) -> None:
    """That nothing of the pod's root is written to, and volumes are there for what is."""
    [container] = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert "emptyDir" in volumes[mounts["/tmp"]] and "emptyDir" in volumes[mounts["/dev/shm"]]


@pytest.mark.parametrize("name", FORMS)
def test_pods_are_restricted_and_ask_for_what_they_use(name: str) -> None:
    documents = manifests(FORMS[name])
    found = list(pods(documents))
    assert found and [broken(*each) for each in found] == [set()] * len(found)
    trainers = [each["spec"]["trainer"] for each in documents if each["kind"] == "TrainJob"]
    containers = [] if trainers else [container for pod, _ in found for container in pod["containers"]]
    for each in [*containers, *trainers]:
        resources = each.get("resources") or each["resourcesPerNode"]
        assert resources["requests"] == resources["limits"]
        assert {"cpu", "memory", "ephemeral-storage"} <= {*resources["limits"]}
        variables = {variable["name"]: variable.get("value") for variable in each["env"]}
        folders = [value for name, value in variables.items() if name.endswith("_DIR") or name == "HOME"]
        assert len(folders) == 4 and all(str(folder).startswith("/tmp") for folder in folders)


BROKEN: dict[str, tuple[str, Any]] = {
    "HostProcess": ("securityContext.windowsOptions", {"hostProcess": True}),
    "Host Namespaces": ("hostNetwork", True),
    "Privileged Containers": ("containers.0.securityContext.privileged", True),
    "Capabilities": ("containers.0.securityContext.capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
    "Capabilities dropped": ("containers.0.securityContext.capabilities.drop", ["NET_RAW"]),
    "HostPath Volumes": ("volumes.0", {"name": "shm", "hostPath": {"path": "/"}}),
    "Volume Types": ("volumes.0", {"name": "shm", "nfs": {"server": "a", "path": "/"}}),
    "Host Ports": ("containers.0.ports", [{"containerPort": 1, "hostPort": 1}]),
    "Host Probes / Lifecycle Hooks": ("containers.0.livenessProbe", {"tcpSocket": {"port": 1, "host": "a"}}),
    "AppArmor": ("containers.0.securityContext.appArmorProfile", {"type": "Unconfined"}),
    "SELinux": ("securityContext.seLinuxOptions", {"type": "spc_t"}),
    "SELinux user": ("securityContext.seLinuxOptions", {"user": "system_u"}),
    "/proc Mount Type": ("containers.0.securityContext.procMount", "Unmasked"),
    "Sysctls": ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    "Seccomp": ("securityContext.seccompProfile.type", "Unconfined"),
    "Seccomp of a container": ("containers.0.securityContext.seccompProfile", {"type": "Unconfined"}),
    "Privilege Escalation": ("containers.0.securityContext.allowPrivilegeEscalation", True),
    "Running as Non-root": ("securityContext.runAsNonRoot", False),
    "Running as Non-root of a container": ("containers.0.securityContext.runAsNonRoot", False),
    "Running as Non-root user": ("containers.0.securityContext.runAsUser", 0),
}


@pytest.mark.parametrize("control", BROKEN)
def test_each_control_of_the_restricted_standard_is_looked_at(control: str) -> None:
    [(pod, _)] = pods(manifests(TRAIN))
    assert not broken(pod)
    path, value = BROKEN[control]
    *within, last = path.split(".")
    place: Any = pod
    for step in within:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    [found, *_] = sorted(broken(pod), reverse=control == "Volume Types")
    assert control.startswith(found)


@pytest.mark.parametrize(
    ("where", "names"), [("containers.0", ["securityContext"]), ("", ["securityContext"])]
)
def test_the_restricted_standard_is_broken_by_what_is_left_out(where: str, names: list[str]) -> None:
    [(pod, annotations)] = pods(manifests(TRAIN))
    del (pod["containers"][0] if where else pod)["securityContext"]
    expected = {"Privilege Escalation", "Capabilities"} if where else {"Running as Non-root", "Seccomp"}
    assert broken(pod, annotations) == expected
    profile = {"container.apparmor.security.beta.kubernetes.io/ranks": "unconfined"}
    assert "AppArmor" in broken(pod, profile)


def check_job(spec: dict[str, Any]) -> None:
    """What the API server checks and kubernetes-validate does not."""
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert spec["completions"] == spec["parallelism"]
    volumes = [each["name"] for each in pod["volumes"]]
    mounts = [each["name"] for each in container["volumeMounts"]]
    assert set(mounts) == set(volumes) and len(volumes) == len(set(volumes))
    paths = [each["mountPath"] for each in container["volumeMounts"]]
    assert len(paths) == len(set(paths)) and all(":" not in path for path in paths)
    codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert all(each["containerName"] == container["name"] for each in codes)
    assert "backoffLimitPerIndex" in spec or "maxFailedIndexes" not in spec
    for name in (*volumes, container["name"]):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


def expanded(word: str, variables: dict[str, str]) -> str:
    """A word of a container's command, as Kubernetes reads it."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)


@examples(100)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
        | st.sampled_from(["$(A)", "$$(A)", "$", "$$", "\x85", "é\u2028"])
    )
)
def test_arguments_reach_the_program_as_they_are(words: list[str]) -> None:
    request = dataclasses.replace(SCRIPT, command=["polyreme", *words])
    job = list(yaml.safe_load_all(text(manifests(request))))[-1]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [expanded(word, {"A": "no"}) for word in command] == ["polyreme", *words]


@pytest.mark.parametrize(
    "word", ["1e-3", "-1E5", ".5e3", "1_0e3", "08", "0o17", "-0X1f", "0B1", "y", "n", "Y", "N"]
)
def test_words_that_kubectl_takes_for_numbers_and_truths_are_quoted(word: str) -> None:
    request = dataclasses.replace(SCRIPT, command=["polyreme", word], env=[f"A={word}"], namespace="y")
    lines = text(manifests(request)).splitlines()
    assert f"        - '{word}'" in lines and f"          value: '{word}'" in lines
    assert "  namespace: 'y'" in lines


@examples(200)
@given(
    st.text("ab1-_.A ", max_size=70) | st.from_regex(r"[a-z][-a-z0-9]{50,62}", fullmatch=True),
    st.integers(1, 2000),
    st.sampled_from(KINDS),
)
def test_names_are_host_names_of_every_pod_or_refused(name: str, pods: int, kind: str) -> None:
    request = dataclasses.replace(SCRIPT, name=name, pods=pods, kind=kind)
    first = request.first_pod
    good = all(
        re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", host)
        for host in (name, first, f"{first[:-1]}{pods - 1}")
    )
    try:
        documents = manifests(request)
    except RequestError as error:
        assert not good and "--name" in str(error) and "fix:" in str(error)
    else:
        assert good and documents[-1]["metadata"]["name"] == name


REFUSED = {
    "kind": ("pod", "--kind = 'pod'"),
    "image": ("", "--image = ''"),
    "namespace": ("Mine", "--namespace = 'Mine'"),
    "queue": ("a_b", "--queue = 'a_b'"),
    "pods": (0, "--nodes = 0"),
    "gpus": (1, "a GPU takes one rank"),
    "restarts": (-1, "--restarts = -1"),
    "memory": ("16GB", "--memory = '16GB'"),
    "shm": ("0Gi", "--shm = '0Gi'"),
    "env": (["A"], "--env = 'A'"),
    "volumes": (["Runs:/run"], "'Runs' is no name of a PersistentVolumeClaim"),
    "elastic": ((4, 2), "1 <= MIN <= MAX"),
    "gang": ("kueue", "--gang = 'kueue'"),
    "user": ("0", "--user = '0'"),
    "scratch": ("1GB", "--scratch = '1GB'"),
    "deadline": (0, "--deadline = 0"),
    "ttl": (-1, "--ttl = -1"),
    "service_account": ("A", "--service-account = 'A'"),
    "priority": ("a b", "--priority = 'a b'"),
    "pull_secrets": (["a", "b/c"], "--pull-secret = 'b/c'"),
    "node_selector": (["gpu"], "--node-selector = 'gpu'"),
    "tolerations": (["gpu:Never"], "--toleration = 'gpu:Never'"),
    "runtime": ("torch-distributed", "a job is over no runtime"),
    "command": (["a\0"], "argument = 'a\\x00'"),
    "files": ({"run.toml": "#" * 2**20 + "#"}, "more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_refused(field: str) -> None:
    value, said = REFUSED[field]
    with pytest.raises(RequestError) as caught:
        manifests(dataclasses.replace(TRAIN, **{field: value}))  # type: ignore[arg-type]
    assert said in str(caught.value) and "fix:" in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"volumes": ["a:/x", "b:/x/"]}, "there is another volume at /x"),
        ({"volumes": ["a:/dev/shm"]}, "there is another volume at /dev/shm"),
        ({"volumes": ["a:run"]}, "no absolute path"),
        ({"volumes": ["a:/../etc"]}, "no absolute path"),
        ({"volumes": ["a:/"]}, "no absolute path"),
        ({"env": ["A=1", "A=2"]}, "given twice"),
        ({"env": ["RANK=1"]}, "told by the Job"),
        ({"env": ["PET_NNODES=1"]}, "told by the Job"),
        ({"env": ["A=secret:B"]}, "give A=secret:NAME/KEY, the Secret and which of its keys"),
        ({"env": ["A=secret:b/"]}, "it names no key of a Secret"),
        ({"user": "1:0"}, "a user other than root"),
        ({"volumes": ["a:/tmp/"]}, "there is another volume at /tmp"),
        ({"memory": "1Gi", "shm": "2Gi"}, "counts as memory"),
        ({"memory": None, "shm": "129Gi"}, "of which --memory allows 128Gi"),
        ({"kind": "trainjob", "ttl": 1}, "a TrainJob stays until it is deleted"),
        ({"kind": "trainjob", "runtime": "a"}, "leave --restarts out, or --runtime"),
        ({"kind": "trainjob", "runtime": "a", "gang": "volcano"}, "leave --gang out, or --runtime"),
        ({"kind": "trainjob", "runtime": "a", "priority": "high"}, "leave --priority out, or --runtime"),
        ({"folders": [("memory.states", "./offload")]}, "the root of pods is read-only"),
        ({"folders": [("data.cache", "/tmpcache")]}, "give one below /tmp, or below the FOLDER of a"),
        ({"kind": "jobset", "elastic": (1, 2)}, "stays as it is"),
        ({"saves": False, "elastic": (1, 2)}, "the run saves and begins again"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        manifests(dataclasses.replace(TRAIN, **changes))


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        manifests(dataclasses.replace(TRAIN, name="A", memory="x", gpus=0))
    assert [problem.key for problem in caught.value.problems] == ["--name", "--memory", "--gpus", "-n"]


@pytest.mark.parametrize("name", FORMS)
def test_launchers_in_pods_know_their_place(name: str) -> None:
    request = FORMS[name]
    last = manifests(request)[-1]
    env = (
        jobs([last])[0]["spec"]["template"]["spec"]["containers"][0]["env"]
        if jobs([last])
        else last["spec"]["trainer"]["env"]
    )
    pod = {each["name"]: each.get("value", "") for each in env} | {"JOB_COMPLETION_INDEX": "1"}
    least, most = request.elastic or (request.pods, request.pods)
    address = (f"{request.first_pod}.{request.name}", 29500)
    assert hosts(pod) == (None if most == 1 else Hosts(1, least, most, address))
    assert most > 1 or detect(pod).alone  # where `train` starts ranks as anywhere


def test_launchers_that_are_not_one_on_each_host_are_refused() -> None:
    pod = {"JOB_COMPLETION_INDEX": "0", "POLYREME_PODS": "2", "MASTER_ADDR": "a-0.a"}
    with pytest.raises(LaunchError, match="must be a number from 1 to 2"):
        hosts(pod | {"POLYREME_LEAST_PODS": "3"})
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(LaunchError, match="start one on each host"):
        hosts(mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert hosts({}) is None and detect({}).world_size == 1


def test_apply_says_what_kubectl_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\n[ "$*" = "apply -f -" ] && /bin/grep -c kind:\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="does not start"):
        kubernetes.apply([])
    kubectl.chmod(0o755)
    assert int(kubernetes.apply(manifests(SCRIPT))) == 2
    kubectl.write_text("#!/bin/sh\necho no >&2; exit 3\n")
    with pytest.raises(LaunchError, match="status 3: no"):
        kubernetes.apply(manifests(SCRIPT))


@pytest.mark.parametrize(
    ("folder", "volumes", "fix"),
    [
        ("/run/a", [], {"volumes": ["runs:/run/a"]}),
        ("/tmp/a", ["b:/c"], {"volumes": ["runs:/tmp/a"]}),
        ("/etc/polyreme", ["b:/c"], {"folders": [("checkpoint.folder", "/c")]}),
        ("/c/../run", ["b:/c"], {"folders": [("checkpoint.folder", "/c")]}),
        ("run", ["b:/c"], {"folders": [("checkpoint.folder", "/c")]}),
        ("run", [], {"volumes": ["runs:/run/out"], "folders": [("checkpoint.folder", "/run/out")]}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_on_a_volume(kind: str, folder: str, volumes: list[str], fix: Any) -> None:
    request = dataclasses.replace(
        TRAIN, kind=kind, volumes=volumes, folders=[("checkpoint.folder", folder)], files={}
    )
    with pytest.raises(RequestError) as caught:
        manifests(request)
    [problem] = caught.value.problems
    assert (problem.key, problem.value) == ("checkpoint.folder", folder)
    words = [f"--volume {each.replace('runs', 'CLAIM')}" for each in fix.get("volumes", ())]
    words += [f"--set {key}={value}" for key, value in fix.get("folders", ())]
    assert problem.fix == f"give {' and '.join(words)}"
    manifests(dataclasses.replace(request, **fix))


def test_a_volume_of_a_patch_keeps_checkpoints() -> None:
    patch = """
kind: Job
spec:
  template:
    spec:
      volumes: [{name: nfs, nfs: {server: files, path: /}}]
      containers: [{name: ranks, volumeMounts: [{name: nfs, mountPath: /nfs}]}]
"""
    request = dataclasses.replace(TRAIN, folders=[("checkpoint.folder", "/nfs/run")])
    with pytest.raises(RequestError, match="it is on no volume"):
        manifests(request)
    with pytest.raises(RequestError, match="it is on no volume"):
        read_only = patch.replace("mountPath", "readOnly: true, mountPath")
        manifests(dataclasses.replace(request, patches={"a": read_only}))
    manifests(dataclasses.replace(request, patches={"a": patch}))


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize(
    ("status", "becomes"), [(0, "Succeed"), (75, "Ignore"), (1, "again"), (137, "again"), (2, "end")]
)
def test_how_a_pod_ends_decides_what_becomes_of_the_run(kind: str, status: int, becomes: str) -> None:
    *_, last = documents = manifests(dataclasses.replace(TRAIN, kind=kind))
    [job] = jobs(documents)
    pod = SimpleNamespace(status=status, disrupted=False)
    action = verdict(job["spec"], pod)  # type: ignore[arg-type]
    if kind != "job" and action in ("Count", "FailJob"):
        assert job["spec"]["backoffLimit"] == 0
        reason = {"Count": "BackoffLimitExceeded", "FailJob": "PodFailurePolicy"}[action]
        sets = last if kind == "jobset" else documents[-2]["spec"]["template"]
        rules = sets["spec"]["failurePolicy"]["rules"]
        named = [each["action"] for each in rules if reason in each["onJobFailureReasons"]]
        action = {"FailJobSet": "FailJob"}.get([*named, "Count"][0], "Count")
    assert action == {"again": "Count", "end": "FailJob"}.get(becomes, becomes)


@examples(200)
@given(st.text(st.sampled_from("a #:-é|>\t\n\r\x85\u2028'\"\\") | st.characters(exclude_categories=["Cs"])))
def test_configs_are_written_as_they_are(config: str) -> None:
    request = dataclasses.replace(TRAIN, files={"run.toml": config})
    written = text(manifests(request))
    first = next(yaml.safe_load_all(written))
    assert first["data"] == {"run.toml": config} and first["immutable"] is True


@pytest.mark.parametrize(
    "config", ["a\nb", "a  \n\tb = 'é'\n\n  \n", "  a\nb: '|'\n", "\n# é\U0001f600\n- a\n"]
)
def test_people_can_read_configs(config: str) -> None:
    written = text(manifests(dataclasses.replace(TRAIN, files={"run.toml": config})))
    assert "  run.toml: |" in written
    assert all(f"\n    {line}" in written for line in config.splitlines() if line.strip())


def test_a_config_has_a_name_by_its_content() -> None:
    names = []
    for config in ("seed = 1", "seed = 2", "seed = 1"):
        first, *_, last = manifests(dataclasses.replace(TRAIN, files={"run.toml": config}))
        volumes = {each["name"]: each for each in last["spec"]["template"]["spec"]["volumes"]}
        assert volumes["config"]["configMap"]["name"] == first["metadata"]["name"]
        names.append(first["metadata"]["name"])
    assert names[0] == names[2] != names[1] and all(each.startswith("llama-") for each in names)


def pod_patch(text: str) -> str:
    """A patch of the Job's pods."""
    return f"kind: Job\nspec: {{template: {{spec: {text}}}}}"


PATCHES = [
    pod_patch("{affinity: {nodeAffinity: {a: 1}}, hostNetwork: true}"),
    pod_patch("{containers: [{name: ranks, env: [{name: HOME, value: /x}, {name: USER, $patch: delete}]}]}"),
    pod_patch("{containers: [{name: side, image: a}], initContainers: [{name: side, image: a}]}"),
    pod_patch("{containers: [{name: ranks, resources: {limits: {cpu: null, memory: 1Gi}}}]}"),
    pod_patch("{containers: [{name: ranks, securityContext: {$patch: replace, privileged: true}}]}"),
    pod_patch("{containers: [{name: ranks, volumeMounts: [{mountPath: /more, $patch: delete}]}]}"),
    pod_patch("{volumes: [{name: shm, emptyDir: {sizeLimit: 1Gi}}, {name: a, emptyDir: {}}]}"),
    pod_patch("{volumes: [{name: a, emptyDir: {}}, {$patch: replace}]}"),
    pod_patch("{securityContext: {$patch: delete}, tolerations: [{key: a}]}"),
    pod_patch("{securityContext: null}"),
    "kind: Job\nmetadata: {name: llama, annotations: {a: b}}\nspec: {suspend: null}",
]


@pytest.mark.parametrize("patch", [*PATCHES[:3], *(pytest.param(each, marks=whole) for each in PATCHES[3:])])
def test_patches_are_merged_as_kubectl_does(patch: str, tmp_path: Path) -> None:
    request = dataclasses.replace(TRAIN, tolerations=["b"])
    before = manifests(request)[-1]
    after = manifests(dataclasses.replace(request, patches={"a": patch}))[-1]
    assert after != before
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "job.yaml").write_text(text([before]))
    words = ["patch", "--local", "-f", "job.yaml", "--type", "strategic", "-o", "yaml", "-p", patch]
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert in_order(yaml.safe_load(done.stdout)) == in_order(after)


def replicated(job: str) -> str:
    """A patch of the pods of a JobSet's only Job."""
    pod = "{spec: {template: {spec: {hostNetwork: true}}}}"
    return f"replicatedJobs: [{{name: {job}, template: {pod}}}]"


@pytest.mark.parametrize(
    ("form", "patch"),
    [
        ("jobset", f"kind: JobSet\nspec: {{{replicated('ranks')}}}"),
        ("trainjob", f"kind: TrainingRuntime\nspec: {{template: {{spec: {{{replicated('node')}}}}}}}"),
        (
            "trainjob-runtime",
            "kind: TrainJob\nspec: {runtimePatches: [{manager: polyreme/launch, trainingRuntimeSpec: "
            f"{{template: {{spec: {{{replicated('node')}}}}}}}}}]}}",
        ),
    ],
)
def test_patches_reach_the_pods_of_every_kind(form: str, patch: str) -> None:
    def written(patch: str) -> list[dict[str, Any]]:
        return manifests(dataclasses.replace(FORMS[form], patches={"a": patch}))

    [(before, _)] = pods(manifests(FORMS[form]))
    [(after, _)] = pods(written(patch))
    assert after == {**before, "hostNetwork": True} and broken(after) == {"Host Namespaces"}
    with pytest.raises(RequestError, match="which the run depends on"):
        written(patch.replace("template:", "$patch: delete, x:"))
    with pytest.raises(RequestError, match="which the run depends on"):
        name = "node" if "node" in patch else "ranks"
        written(patch.replace("hostNetwork: true", f"containers: [{{name: {name}, $patch: delete}}]"))


def in_order(node: Any) -> Any:
    """A manifest whose lists are in one order, without what is empty."""
    if isinstance(node, dict):
        found = {key: in_order(value) for key, value in node.items()}
        return {key: value for key, value in found.items() if value not in ({}, None)}
    return (
        sorted(map(in_order, node), key=functools.partial(json.dumps, sort_keys=True))
        if isinstance(node, list)
        else node
    )


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("a: [", "it is no YAML"),
        ("", "it has a document that is no map"),
        ("- a", "it has a document that is no map"),
        ("spec: {}", "it is for no kind, and there are ConfigMap llama-"),
        ("kind: JobSet", "it is for JobSet, and there are"),
        ("kind: Job\nmetadata: {name: other}", "it is for Job other, and there are"),
        ("kind: Job", "it changes nothing of Job llama"),
        ("kind: Job\nspec: {suspend: true}", "it changes nothing of Job llama"),
        ("kind: Job\nspec: {ttlSecondsAfterFinished: null}", "it deletes spec.ttlSecondsAfterFinished"),
        ("kind: Job\nspec: {completions: 3}", "it changes spec.completions, which the run depends on"),
        ("kind: Job\nmetadata: {namespace: a}", "it changes metadata.namespace, which"),
        ("kind: Job\napiVersion: batch/v2", "it changes apiVersion, which"),
        ("kind: Job\nspec: {$retainKeys: [template]}", "spec has a directive other than $patch"),
        ("kind: Job\nspec: {$patch: merged}", "spec has a directive other than $patch"),
        ("kind: Job\nspec: {$patch: replace, a: 1}", "it changes spec.completions"),
        ("kind: Job\nspec: null", "it changes spec.completions"),
        ("kind: Service\nspec: {clusterIP: 1.2.3.4}", "it changes spec.clusterIP"),
        ("kind: ConfigMap\ndata: {run.toml: a}", "it changes data"),
        (pod_patch("{subdomain: a}"), "it changes spec.template.spec.subdomain"),
        (pod_patch("{containers: [{name: ranks, command: [a]}]}"), "containers[ranks].command"),
        (pod_patch("{containers: [{name: ranks, $patch: delete}]}"), "containers[ranks].name"),
        (
            pod_patch("{containers: [{name: a, $patch: delete}]}"),
            "it deletes spec.template.spec.containers[a]",
        ),
        (pod_patch("{containers: [{image: a}]}"), "has an element without name, by which they are merged"),
        (pod_patch("{containers: [a]}"), "containers has an element that is no map"),
        (pod_patch("{containers: [{name: ranks, env: [{name: RANK, value: a}]}]}"), "env[RANK]"),
        (pod_patch("{containers: [{name: ranks, env: null}]}"), "env[MASTER_ADDR]"),
    ],
)
def test_patches_that_are_refused(patch: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        manifests(dataclasses.replace(TRAIN, patches={"a.yaml": patch}))
    [problem] = caught.value.problems
    assert (problem.key, problem.value) == ("--patch", "a.yaml") and said in problem.reason


def test_lists_are_merged_by_the_keys_of_kubernetes() -> None:
    package = pytest.importorskip("kubernetes_validate")
    folder = Path(package.__file__).parent / "kubernetes-json-schema" / "v1.33.0-local"
    known = {}
    for kind in ("podspec", "container", "jobspec", "job"):
        properties = json.loads((folder / f"{kind}-{'batch-v1' if 'job' in kind else 'v1'}.json").read_text())
        for name, each in properties["properties"].items():
            if each.get("type") == "array" or "items" in each:
                known[name] = each.get("x-kubernetes-patch-merge-key")
    assert {"tolerations", "command"} <= {*known}
    ours = {name: key for name, key in MERGE_KEYS.items() if name in known}
    assert ours == {name: key for name, key in known.items() if key and name != "ports"}
