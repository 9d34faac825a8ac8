"""Jobs that `polyreme ... --kubernetes` wrote, in the pods of the tests' own kubelet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from command import SOURCE, TINY, polyreme, write_text
from examples import whole
from hosts import Host, hosts, lacking
from kubelet import CLAIM, Kubelet, NotStartedError, Pod

pytestmark = [
    pytest.mark.skipif(bool(lacking()), reason=lacking()),
    pytest.mark.skipif(
        sys.prefix.startswith("/tmp/"), reason="Python is in /tmp, of which pods have their own"
    ),
]
STEPS = 200
SCRIPT = """
import sys, torch, polyreme
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
config = {"batch": {"size": 8}, "zero": {"stage": 3}}
engine = polyreme.initialize(model, config, loss_fn=torch.nn.functional.cross_entropy)
numbers, dp = torch.Generator().manual_seed(1), engine.mesh.dp
for _ in range(3):
    x, y = torch.randn(8, 8, generator=numbers), torch.randint(4, (8,), generator=numbers)
    engine.train_step((x.chunk(dp.size)[dp.rank], y.chunk(dp.size)[dp.rank]))
weights = b"".join(each.numpy().tobytes() for each in engine.state_dict().values())
print("trained rank", dp.rank)
if dp.rank == 0:
    open(sys.argv[1], "wb").write(weights + " ".join([str(dp.size), *sys.argv[2:]]).encode())
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The image's working folder, and a volume."""
    tmp_path.chmod(0o755)
    (tmp_path / "volume").mkdir()
    return tmp_path


def kubelet(nodes: list[Host], folder: Path) -> Kubelet:
    image = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": SOURCE,
        "HOME": "/root",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Kubelet(nodes, folder, {"runs": folder / "volume"}, image, {"tracker": {"api-key": "a $(b)"}})


def job(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The manifests that the command writes, with the volume at CLAIM, of pods that are not root's."""
    command, *rest = words
    options = ["--kubernetes", "--image", "here", "--volume", f"runs:{CLAIM}", "--user", "4711"]
    options += [] if "--elastic" in rest else ["--pods", "2"]
    status, output, errors = polyreme(folder, command, *options, *rest)
    assert status == 0, errors
    return list(yaml.safe_load_all(output))


def test_a_script_in_two_pods_has_the_weights_of_one_host(nodes: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    words = ["-n", "1", "script.py"]
    outcome = kubelet(nodes, folder).run(
        job(folder, "launch", "--restarts", "0", *words, f"{CLAIM}/weights", "$(HOME) '$$")
    )
    assert outcome.complete, outcome.said
    assert sorted((pod.index, pod.status) for pod in outcome.pods) == [(0, 0), (1, 0)], outcome.said
    first, second = (each.output.read_text() for each in sorted(outcome.pods, key=lambda pod: pod.index))
    assert first == "polyreme-script-0: rank 0 (Indexed Job)\ntrained rank 0\n"
    assert second == "polyreme-script-1: rank 1 (Indexed Job)\n[polyreme-script-1 1] trained rank 1\n"
    status, _, errors = polyreme(folder, "launch", "-n", "2", "script.py", "alone", "$(HOME) '$$")
    assert status == 0, errors
    weights = (folder / "volume" / "weights").read_bytes()
    assert weights.endswith(b"2 $(HOME) '$$") and weights == (folder / "alone").read_bytes()


PROBE = """
import contextlib, os, sys, tempfile
for folder in (".", "/", "/etc", "/etc/polyreme", "/var/tmp", "/srv", os.path.dirname(sys.executable)):
    with contextlib.suppress(OSError):
        open(os.path.join(folder, "written"), "w")
        print("wrote to", folder)
caches = [value for name, value in os.environ.items() if "CACHE" in name]
for folder in ("/tmp", "/dev/shm", sys.argv[1], os.path.expanduser("~"), tempfile.gettempdir(), *caches):
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "written"), "w")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(status[name].split()[-1] for name in ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs")))
print(os.environ["API_KEY"])
"""
LIBRARIES = """
import getpass, huggingface_hub.constants, numba, torch._inductor.codecache
numba.njit(cache=True)(lambda x: x + 1)(1)
assert os.listdir("/tmp/cache/numba"), "numba"
assert torch._inductor.codecache.cache_dir() == "/tmp/cache/inductor"
assert huggingface_hub.constants.HF_HOME == "/tmp/cache/huggingface"
assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(4)).tolist() == [1.0] * 4
assert getpass.getuser() == "polyreme"
"""


@pytest.mark.parametrize("more", ["", pytest.param(LIBRARIES, marks=whole, id="libraries")])
def test_pods_run_as_their_user_and_write_to_volumes_alone(
    nodes: list[Host], folder: Path, more: str
) -> None:
    (folder / "probe.py").write_text(PROBE + more)
    words = ["launch", "--restarts", "0", "--env", "API_KEY=secret:tracker/api-key", "--user", "4711:4712"]
    documents = job(folder, *words, "--pods", "1", "probe.py", CLAIM)
    outcome = kubelet(nodes, folder).run(documents)
    assert outcome.complete and "wrote to" not in outcome.said, outcome.said
    credentials, key = outcome.pods[0].output.read_text().splitlines()[1:]
    assert credentials == f"4711 4712 4712 {0:016x} {0:016x} 1" and key == "a $(b)"
    written = (folder / "volume" / "written").stat()
    assert (written.st_uid, written.st_gid) == (4711, 4712)


def test_pods_of_an_image_of_root_do_not_start_without_a_user(nodes: list[Host], folder: Path) -> None:
    documents = job(folder, "launch", "--user", "1", "script.py")
    del documents[-1]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    with pytest.raises(NotStartedError, match="runAsNonRoot"):
        kubelet(nodes, folder).run(documents)


@whole
def test_a_job_ends_where_its_command_is_wrong(nodes: list[Host], folder: Path) -> None:
    outcome = kubelet(nodes, folder).run(job(folder, "launch", "--restarts", "0", "none.py"))
    assert not outcome.complete and "the script 'none.py' is not a file" in outcome.said


def write_run(folder: Path, steps: int = STEPS) -> None:
    """A config, and its text."""
    write_text(folder)
    section = f'[checkpoint]\nfolder = "{CLAIM}"\n'
    (folder / "run.toml").write_text(
        TINY.replace("length = 20", f"length = {steps}").replace("[checkpoint]\n", section)
    )


def steps(folder: Path) -> int:
    """How far the run in the volume is."""
    log = folder / "volume" / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


@whole
@pytest.mark.timeout(900)
def test_a_run_whose_pod_is_evicted_goes_on(nodes: list[Host], folder: Path) -> None:
    write_run(folder)
    evicted: list[Pod] = []

    def evict(running: list[Pod]) -> None:
        if not evicted and steps(folder) > 3:
            evicted.extend(pod for pod in running if pod.index == 1)
            evicted[0].terminate()

    documents = job(folder, "train", "run.toml", "-n", "1")
    outcome = kubelet(nodes, folder).run(documents, evict)
    assert outcome.complete, outcome.said
    ends = sorted((pod.index, pod.status) for pod in outcome.pods)
    assert ends == [(0, 0), (0, 75), (1, 0), (1, 75)], outcome.said
    alone = f'checkpoint.folder="{folder}/alone"'
    status, _, errors = polyreme(folder, "train", "run.toml", "-n", "2", "--set", alone)
    assert status == 0, errors
    weights = [
        next(each.glob(f"step-{STEPS}/model.safetensors")) for each in (folder / "volume", folder / "alone")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


class EnoughError(Exception):
    """A run that has shown what it was to show."""


@whole
@pytest.mark.timeout(900)
def test_an_elastic_run_begins_on_one_pod_and_takes_another(nodes: list[Host], folder: Path) -> None:
    write_run(folder, steps=100_000)
    cluster = kubelet(nodes, folder)
    cluster.room = 1
    seen: list[Pod] = []

    def make_room(running: list[Pod]) -> None:
        seen.extend(pod for pod in running if pod not in seen)
        if steps(folder) > 3:
            cluster.room = 2
        if len(seen) == 3 and " 2 ranks, " in seen[2].output.read_text() + seen[1].output.read_text():
            raise EnoughError
        assert len(seen) < 4, [pod.output.read_text() for pod in seen]

    with pytest.raises(EnoughError):
        cluster.run(job(folder, "train", "--elastic", "1:2", "run.toml", "-n", "1"), make_room)
    assert [(pod.index, pod.status) for pod in seen] == [(0, 75), (1, None), (0, None)]
    assert " 1 rank, " in seen[0].output.read_text()
    assert "stopped by SIGUSR1 after step" in seen[0].output.read_text()
