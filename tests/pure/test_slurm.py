"""Batch scripts: what they say, what bash makes of them with Slurm's commands replaced, and what is
refused."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import ALL, examples
from polyreme.errors import LaunchError
from polyreme.launch import slurm
from polyreme.launch.requests import STOPPED, RequestError
from polyreme.launch.slurm import Request, script

GOLDEN = Path(__file__).parents[1] / "data" / "clusters"
SCRIPT = Request(
    ["python", "-m", "polyreme", "launch", "-n", "2", "train.py", "it's $HOME"], "first", ranks=2
)
TRAIN = Request(
    ["/venv/bin/python", "-m", "polyreme", "train", "run.toml", "-n", "8", "--stopped-status", "75"],
    name="llama",
    ranks=8,
    nodes=4,
    time="1-12:00:00",
    account="physics",
    partition="gpu",
    qos="long",
    constraint="a100&nvlink",
    gpus="8",
    cpus=64,
    memory="512Gi",
    restarts=20,
    options=["--exclusive", "--mail-type=END,FAIL"],
    saves=True,
)
FORMS = {
    "slurm-script": SCRIPT,
    "slurm-train": TRAIN,
    "slurm-setup": dataclasses.replace(
        SCRIPT,
        gpus="a100:2",
        prologue="# ours\nmodule purge\n",
        setup=["module load cuda  # 12.8", "source 'my venv'/bin/activate"],
        step=["--container-image=registry/me:1", "--container-mounts=/data:/data,/home/it's me"],
    ),
    "slurm-elastic": Request(
        ["polyreme", "launch", "--saves", "train.py"], "second", nodes=8, least=2, saves=True
    ),
}


@pytest.mark.parametrize(
    ("asked", "slurms"),
    [
        ("512Gi", "512G"),
        ("1.5Gi", "1536M"),
        ("100M", "100M"),
        ("0.1k", "1M"),
        ("2k", "2K"),
        ("1Pi", "1073741824M"),
    ],
)
def test_memory_is_in_slurms_units(asked: str, slurms: str) -> None:
    assert f"#SBATCH --mem={slurms}\n" in script(dataclasses.replace(TRAIN, memory=asked))


@pytest.mark.parametrize("name", FORMS)
def test_scripts_are_those_that_were_read_through(name: str) -> None:
    file, written = GOLDEN / f"{name}.sh", script(FORMS[name])
    if "POLYREME_WRITE_GOLDEN" in os.environ:
        file.write_text(written)
    assert written == file.read_text()
    subprocess.run(["bash", "-n"], input=written, text=True, check=True)


def slurm_of_the_test(folder: Path, srun: str) -> dict[str, str]:
    """Variables with which bash finds srun and scontrol in `folder`. scontrol notes what it is told, and ends
    the script."""
    for name, body in {"srun": srun, "scontrol": f'echo "$*" >> {folder}/scontrol.txt; kill $PPID'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("saves", [False, True])
def test_what_comes_before_srun(tmp_path: Path, saves: bool) -> None:
    variables = slurm_of_the_test(tmp_path, f'printf \'%s\\0\' "$WORD" "$@" > {tmp_path}/words; false')
    request = dataclasses.replace(
        SCRIPT, saves=saves, prologue="set -eu\nWORD=a", setup=["export WORD=\"$WORD b\"  # it's"],
        step=["--container-image=a b", "singularity", "exec", "$IMAGE"],
    )  # fmt: skip
    done = subprocess.run(["bash"], input=script(request).encode(), env=variables, check=False)
    assert done.returncode == 1
    told = (tmp_path / "words").read_text().split("\0")[:-1]
    assert told == [
        "a b",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--wait=30",
        *request.step,
        *SCRIPT.command,
    ]
    wrong = dataclasses.replace(request, setup=["module() { return 7; }", "module load 100% it\\'s"])
    (tmp_path / "words").unlink()
    done = subprocess.run(
        ["bash"], input=script(wrong).encode(), env=variables, check=False, capture_output=True
    )
    assert done.returncode == 7 and not (tmp_path / "words").exists()
    assert done.stderr.decode() == "error: --setup ended with status 7: module load 100% it\\'s\n"


PARTITIONS = """
PartitionName=small Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 TotalNodes=4
PartitionName=large Default=NO MaxNodes=8 MaxTime=UNLIMITED TotalNodes=16
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 4}, None),
        ({"nodes": 5}, "--nodes = 5: the partition small never gives a job more than 4 (TotalNodes)"),
        ({"nodes": 5, "least": 4}, None),
        ({"nodes": 6, "least": 5}, "--elastic = 5"),
        ({"nodes": 9, "partition": "large"}, "more than 8 (MaxNodes)"),
        ({"nodes": 9, "partition": "large", "qos": "all"}, None),
        ({"nodes": 17, "partition": "large", "qos": "all"}, "more than 16 (TotalNodes)"),
        ({"nodes": 5, "partition": "small,large"}, None),
        ({"nodes": 9, "partition": "small,large"}, "large"),
        ({"nodes": 9, "partition": "none"}, None),
        ({"nodes": 9, "options": ["--clusters=other"]}, None),
        ({"time": "25:00:00"}, "--time = '25:00:00': the partition small never gives a job more than 1-00"),
        ({"time": "25:00:00", "partition": "large"}, None),
    ],
)
def test_what_a_partition_never_gives(
    changes: dict[str, Any], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path))
    request = dataclasses.replace(SCRIPT, **changes)
    slurm.refuse_never(request)  # no scontrol
    for fails in (True, False):
        scontrol.write_text(f"#!/bin/sh\necho '{PARTITIONS}'; exit {int(fails)}\n")
        scontrol.chmod(0o755)
        if said is None or fails:
            slurm.refuse_never(request)
            continue
        with pytest.raises(RequestError, match=re.escape(said)):
            slurm.refuse_never(request)


WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))


@examples(300)
@given(WORDS)
def test_arguments_are_words_of_a_shell(words: list[str]) -> None:
    command = script(Request(["polyreme", *words], "name")).partition("\n\nexec ")[2]
    assert shlex.split(command)[4:] == ["polyreme", *words]


@examples(30 if ALL in os.environ else 5)
@given(many=st.lists(WORDS, min_size=20, max_size=20), saves=st.booleans())
def test_arguments_reach_the_program_as_they_are(
    many: list[list[str]], saves: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, words = tmp_path_factory.mktemp("slurm"), [word for words in many for word in words]
    variables = slurm_of_the_test(folder, f"printf '%s\\0' \"$@\" > {folder}/words")
    text = script(Request(["polyreme", *words], "name", saves=saves))
    done = subprocess.run(["bash"], input=text.encode(), env=variables, check=False)
    assert done.returncode == 0
    told = (folder / "words").read_bytes().decode().split("\0")[:-1]
    assert told == ["--ntasks-per-node=1", "--cpus-per-task=1", "--wait=30", "polyreme", *words]


# The step ends by itself, or after the signal; bash's own wait ends with the signal, before the step has.
WAITS = "trap 'sleep 0.3; exit {status}' USR1; touch {folder}/started; while true; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("status", "warned", "before", "queued"),
    [
        (STOPPED, True, "0", True),
        (STOPPED, True, "20", False),
        (STOPPED, False, "0", False),
        (0, True, "0", False),
        (1, True, "0", False),
        (138, True, "0", False),
    ],
)
def test_a_run_that_was_warned_and_saved_goes_on(
    tmp_path: Path, status: int, warned: bool, before: str, queued: bool
) -> None:
    srun = WAITS.format(status=status, folder=tmp_path) if warned else f"exit {status}"
    variables = slurm_of_the_test(tmp_path, srun) | {"SLURM_RESTART_COUNT": before}
    (tmp_path / "job.sh").write_text(script(TRAIN))
    process = subprocess.Popen(["bash", tmp_path / "job.sh"], env=variables)
    while warned and not (tmp_path / "started").exists():
        time.sleep(0.02)
    if warned:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == (-signal.SIGTERM if queued else status)
    told = tmp_path / "scontrol.txt"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if queued else "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "a b"}, "--name = 'a b'"),
        ({"name": "runs/a"}, "--name = 'runs/a'"),
        ({"account": "a\nb"}, "--account = 'a\\nb'"),
        ({"partition": ""}, "--partition = ''"),
        ({"constraint": "a'"}, "--constraint"),
        ({"options": ["exclusive"]}, "--sbatch = 'exclusive'"),
        ({"options": ["--nodes=7"]}, "--sbatch = '--nodes=7'"),
        ({"options": ["--array=0-3"]}, "--sbatch = '--array=0-3'"),
        ({"options": ["--comment=a b"]}, "--sbatch = '--comment=a b'"),
        ({"nodes": 0}, "--nodes = 0"),
        ({"gpus": "0"}, "--gpus = 0"),
        ({"gpus": "a100"}, "write 4, or TYPE:4, as in a100:4"),
        ({"gpus": "a100:4"}, "-n = 8: each node has 4 (--gpus), and a GPU takes one rank"),
        ({"gpus": "a b:4"}, "--gpus = 'a b:4'"),
        ({"step": ["--nodes=3"]}, "--srun = '--nodes=3'"),
        ({"step": ["-n4"]}, "--srun = '-n4'"),
        ({"prologue": "#SBATCH --mem=1G\n"}, "give it as --sbatch=--OPTION=VALUE"),
        ({"prologue": "if true\n"}, "bash cannot read it: "),
        ({"setup": ["true", "echo 'a"]}, '--setup = "echo \'a": bash cannot read it: '),
        ({"setup": [""]}, "--setup = ''"),
        ({"least": 5}, "--elastic = '5:4'"),
        ({"memory": "many"}, "--memory = 'many'"),
        ({"memory": "2000"}, "write 2000M"),
        ({"folder": "/home/me/50%j"}, "folder = '/home/me/50%j'"),
        ({"folder": "/home/me/a\\b"}, "of what the job prints"),
        ({"time": "soon"}, "--time = 'soon'"),
        ({"time": "0"}, "--time = '0'"),
        ({"time": "5"}, "of 300 s (--time)"),
        ({"warning": 70000}, "up to 65535"),
        ({"warning": 60, "saves": False}, "would be ended so much earlier"),
        ({"restarts": 3, "saves": False}, "each time that a node failed"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        script(dataclasses.replace(TRAIN, **changes))
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:3", 93780), ("1-0:0:9", 86409)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-1", "1-", "1h", "٣", "1-2-3"])
def test_what_is_no_time_limit(text: str) -> None:
    assert slurm.seconds(text) is None


def test_submitting_says_what_sbatch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch, which does not start"):
        slurm.submit("")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f'#!/bin/sh\n[ "$*" = --parsable ] && /bin/cat > {tmp_path}/job.sh && echo "12;cluster"\n'
    )
    sbatch.chmod(0o755)
    job = slurm.submit(script(SCRIPT))
    assert job.words("scancel", job.number) == ["scancel", "--clusters=cluster", "12"]
    assert (tmp_path / "job.sh").read_text() == script(SCRIPT)
    sbatch.write_text("#!/bin/sh\necho no such account >&2; exit 1\n")
    with pytest.raises(LaunchError, match="status 1: no such account"):
        slurm.submit("")
