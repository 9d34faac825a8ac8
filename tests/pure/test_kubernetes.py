"""Manifests: what they say, whether Kubernetes takes them, and what is refused before it is asked."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.distributed.environment import detect
from polyreme.errors import LaunchError
from polyreme.launch import kubernetes
from polyreme.launch.hosts import Hosts, hosts
from polyreme.launch.kubernetes import Request, manifests, text
from polyreme.launch.requests import RequestError

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
    files={"run.toml": 'seed = 1\n[data]\npath = "/data"\n'},
)
FORMS = {
    "job-script": SCRIPT,
    "job-train": TRAIN,
    "job-elastic": dataclasses.replace(TRAIN, elastic=(2, 6)),
    "jobset": dataclasses.replace(TRAIN, kind="jobset"),
    "trainjob": dataclasses.replace(TRAIN, kind="trainjob", restarts=None),
    "trainjob-restarts": dataclasses.replace(TRAIN, kind="trainjob"),
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
    documents = manifests(FORMS[name])
    for each in documents:
        if each["kind"] in ("ConfigMap", "Service", "Job"):
            validate(each, "1.33", strict=True)
    for job in jobs(documents):
        validate({"apiVersion": "batch/v1", "kind": "Job", **job}, "1.33", strict=True)
        check_job(job["spec"])


@pytest.mark.parametrize("name", ["jobset", "trainjob", "trainjob-restarts"])
def test_kubeflow_takes_them(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    known = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    documents = [each for each in manifests(FORMS[name]) if each["kind"] != "ConfigMap"]
    for each in documents:
        assert known[each["kind"]].from_dict(each).to_dict() == each
    if name == "trainjob-restarts":
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
    st.sampled_from(kubernetes.KINDS),
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
        ({"memory": "1Gi", "shm": "2Gi"}, "counts as memory"),
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
    pod = {each["name"]: each["value"] for each in env} | {"JOB_COMPLETION_INDEX": "1"}
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
