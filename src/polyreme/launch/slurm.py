"""Batch scripts that run ranks under Slurm: one launcher on each node, which starts the node's ranks.

`script` depends only on the request; `submit` hands it to sbatch.
Invariants: an argument reaches the program unchanged, whatever is in it; the job is requeued only after
Slurm's own warning, and where the run ended with STOPPED, so never after `scancel`.
Communication: none."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyreme.errors import LaunchError, Problem
from polyreme.launch.requests import STOPPED, RequestError, count_problems, gpu_problems, size_problems

WARNING = 300
"""Seconds before the end of its time at which a run that saves is warned, by default."""
OURS = {
    "job-name": "give --name",
    "nodes": "give --nodes or --elastic",
    "ntasks": "give -n, the ranks of each node",
    "ntasks-per-node": "give -n, the ranks of each node",
    "cpus-per-task": "give --cpus, the cores of each node",
    "gpus-per-node": "give --gpus",
    "mem": "give --memory",
    "time": "give --time",
    "account": "give --account",
    "partition": "give --partition",
    "qos": "give --qos",
    "constraint": "give --constraint",
    "output": "give --name, after which its file is called",
    "open-mode": "leave it out: what it prints is appended",
    "requeue": "give --restarts",
    "no-requeue": "give --restarts 0",
    "signal": "give --warning",
    "array": "submit each run by itself: its tasks would write the same files",
    "wait": "leave it out: the command itself waits, unless --detach is given",
    "wrap": "leave it out: the script is the one that is written here",
}
"""Options of sbatch that the script sets, or cannot have, and what to do instead."""
OF_STEP = {
    "ntasks": OURS["ntasks"],
    "ntasks-per-node": OURS["ntasks"],
    "nodes": OURS["nodes"],
    "cpus-per-task": OURS["cpus-per-task"],
    "wait": "leave it out: launchers that another one's failure does not end are killed so",
    "kill-on-bad-exit": "leave it out: it kills nodes that are about to end by themselves",
}
"""Options of srun that the script sets, or cannot have, and what to do instead."""
ANSWER = 10.0  # seconds that Slurm may take to say how large a partition is
LEFT = 30  # seconds after one launcher's end after which srun kills the others
FOREVER = 1000  # most restarts by default, so that a job without progress ends at last


@dataclass(frozen=True)
class Request:
    """A request to run on nodes, from the options of the command.

    `command` is the program of each node. `least` is the fewest nodes, where not all of `nodes` need to be
    free. `saves`: a run that was stopped ends with STOPPED, and goes on from its checkpoint. `gpus` are a
    number, or TYPE:NUMBER. `options` are added to sbatch's, and `step` are words that follow srun: options of
    its own, and perhaps a program that runs the command. `prologue` is a script, and `setup` lines, to run
    before it; a line that fails ends the job. `folder` is where the job is submitted, and where its output
    file is."""

    command: Sequence[str]
    name: str
    ranks: int = 1
    nodes: int = 1
    least: int | None = None
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: str | None = None
    cpus: int | None = None
    memory: str | None = None
    warning: int | None = None
    restarts: int | None = None
    options: Sequence[str] = ()
    step: Sequence[str] = ()
    prologue: str = ""
    setup: Sequence[str] = ()
    saves: bool = False
    folder: str = ""

    @property
    def warned(self) -> int:
        """The seconds before the end at which the run is warned; 0 if it is not."""
        return (WARNING if self.warning is None else self.warning) if self.saves else 0

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that are enough."""
        return self.nodes if self.least is None else self.least


def script(request: Request) -> str:
    """Return the batch script. Raises RequestError with all problems of `request`."""
    if problems := list(_problems(request)):
        raise RequestError("Slurm", problems)
    header = "\n".join(f"#SBATCH --{option}" for option in _options(request))
    # Launchers end together (launch.peers), with the status of the first failure, which --kill-on-bad-exit
    # would make that of a signal. One that cannot would hold the job.
    options = ["--ntasks-per-node=1", f"--cpus-per-task={_cpus(request)}", f"--wait={LEFT}"]
    srun = shlex.join(["srun", *options, *request.step, *request.command])
    before = _before(request)
    if not request.warned:
        return f"#!/bin/bash\n{header}\n\n{before}exec {srun}\n"
    return f"""#!/bin/bash
{header}

step= warned= again=
# srun hands it to each node's launcher, and the ranks save
trap 'warned=1 again=1; [ -z "$step" ] || kill -USR1 "$step"' USR1
{before}{srun} &
step=$!
[ -z "$warned" ] || kill -USR1 "$step"
while again=; wait "$step"; status=$?; [ -n "$again" ]; do :; done  # the signal ends a wait, too
if [ -n "$warned" ] && [ "$status" -eq {STOPPED} ] && \\
   [ "${{SLURM_RESTART_COUNT:-0}}" -lt {FOREVER if request.restarts is None else request.restarts} ]; then
  # Slurm ends this script then; one that has ended before may fail the job
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
"""


def _before(request: Request) -> str:
    """Return the lines of the script before srun. They begin with a command, as sbatch reads comments only
    before the first one."""
    text = ":\n" if request.prologue or request.setup else ""
    if request.prologue:
        text += request.prologue.rstrip("\n") + "\nset +eu  # as what follows has it\n"
    for line in request.setup:
        says = f"printf 'error: --setup ended with status %d: %s\\n' $status {shlex.quote(line)} >&2"
        text += f"{line}\nstatus=$?; [ $status = 0 ] || {{ {says}; exit $status; }}\n"
    return text


@dataclass(frozen=True)
class Job:
    """A job that sbatch accepted. `cluster` names its cluster, where it is not this machine's."""

    number: str
    cluster: str = ""

    def words(self, program: str, *more: str) -> list[str]:
        """Return a command of Slurm's for the job's cluster."""
        return [program, *([f"--clusters={self.cluster}"] if self.cluster else []), *more]


def submit(text: str) -> Job:
    """Hand a batch script to sbatch.

    Raises LaunchError where there is no sbatch, or where it refuses the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=os.fsencode(text), capture_output=True, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"--slurm runs sbatch, which does not start: {error.strerror}; call it on a machine that submits "
            "jobs, or write the script with --dry-run and submit it there"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"sbatch ended with status {done.returncode}: {os.fsdecode(done.stderr).strip()}; "
            "see the script with --dry-run"
        )
    number, _, cluster = os.fsdecode(done.stdout).strip().partition(";")
    return Job(number, cluster)


def refuse_never(request: Request) -> None:
    """Raise RequestError for more nodes, or time, than the partition ever gives, if Slurm says so: the job
    would wait for ever."""
    clusters = any(each.startswith("--clusters") for each in request.options)
    asked = request.partition or os.environ.get("SBATCH_PARTITION", "")
    if clusters or not (found := _partitions(asked.split(","))):
        return
    problems = [list(_never(request, name, words)) for name, words in found.items()]
    if all(problems):
        raise RequestError("Slurm", [each for of_one in problems for each in of_one])


def _partitions(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the limits of partitions from `scontrol`, by their names; of the default one where none is
    named. Empty where it does not know them all."""
    try:
        answer = subprocess.run(
            ["scontrol", "--oneliner", "show", "partition"], capture_output=True, timeout=ANSWER, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}  # sbatch will say why
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word)
             for line in os.fsdecode(answer).splitlines()]  # fmt: skip
    by_name = {line.get("PartitionName", ""): line for line in lines}
    if names == [""]:
        names = [name for name, line in by_name.items() if line.get("Default") == "YES"]
    return {name: by_name[name] for name in names} if {*names} <= {*by_name} else {}


def _never(request: Request, name: str, words: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the reasons why a partition never fulfils the request. A QOS may lift its limits, but adds no
    nodes."""
    limits = ("TotalNodes",) if request.qos else ("MaxNodes", "TotalNodes")
    counts = {each: int(words[each]) for each in limits if words.get(each, "").isdigit()}
    limit = min(counts, key=counts.__getitem__, default="")
    if counts and request.least_nodes > counts[limit]:
        option = "--nodes" if request.least is None else "--elastic"
        reason = f"the partition {name} never gives a job more than {counts[limit]} ({limit})"
        fix = f"give at most {counts[limit]}, or another --partition"
        yield Problem(option, request.least_nodes, reason, fix)
    longest, asked = seconds(words.get("MaxTime", "")), seconds(request.time or "")
    if longest and asked and asked > longest and not request.qos:
        reason = f"the partition {name} never gives a job more than {words['MaxTime']} (MaxTime)"
        yield Problem(
            "--time", request.time, reason, f"give at most {words['MaxTime']}, or another --partition"
        )


def seconds(time: str) -> int | None:
    """Return the seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for
    any other text."""
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time, re.ASCII):
        return None
    days, dash, rest = time.rpartition("-")
    numbers = [int(each) for each in rest.split(":")]
    if dash or len(numbers) == 3:  # hours come first
        hours, minutes, more = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, more) = 0, (*numbers, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + more


def _cpus(request: Request) -> int:
    return request.ranks if request.cpus is None else request.cpus


def _options(request: Request) -> Iterator[str]:
    yield f"job-name={request.name}"
    if request.least is None:
        yield f"nodes={request.nodes}"
        yield "ntasks-per-node=1"
    else:  # a number of tasks would be one for each of the fewest nodes, and Slurm would give no more
        yield f"nodes={request.least}-{request.nodes}"
    yield f"cpus-per-task={_cpus(request)}"
    named = {
        "gpus-per-node": request.gpus,
        "mem": _memory(request.memory),
        "time": request.time,
        "account": request.account,
        "partition": request.partition,
        "qos": request.qos,
        "constraint": request.constraint,
    }
    yield from (f"{option}={value}" for option, value in named.items() if value is not None)
    yield f"output={request.name}-%j.out"
    yield "open-mode=append"  # when it goes on, what it printed before stays
    yield "requeue" if request.restarts != 0 else "no-requeue"
    if request.warned:
        yield f"signal=B:USR1@{request.warned}"
    yield from (option.removeprefix("--") for option in request.options)


def _memory(size: str | None) -> str | None:
    """Return a size in Slurm's notation: units of 1024 without the i, whole numbers, and up to T."""
    if size is None:
        return None
    number, unit = float(size.rstrip("kKMGTPi")), size.removesuffix("i")[-1].upper()
    if number.is_integer() and unit in "KMGT":
        return f"{number:.0f}{unit}"
    return f"{math.ceil(number * 1024.0 ** ('KMGTP'.index(unit) - 1))}M"


def _problems(request: Request) -> Iterator[Problem]:
    for option in ("name", "account", "partition", "qos", "constraint"):
        value = getattr(request, option)
        if value is not None and not re.fullmatch(r"[^\s'\"\\#\x00-\x1f]+", value):
            reason = "in a line of sbatch's options it would not be read as one word"
            yield Problem(f"--{option}", value, reason, "leave spaces, quotes, \\ and # out of it")
    if re.search("[/%]", request.name):
        reason = "the file of what the job prints is called after it"
        yield Problem("--name", request.name, reason, "leave / and % out of it")
    for option in request.options:
        if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s'\"\\#\x00-\x1f]+)?", option):
            reason = "it is none of sbatch's long options in one word"
            yield Problem(
                "--sbatch", option, reason, "write --sbatch=--OPTION=VALUE, without spaces and quotes"
            )
        elif (fix := OURS.get(option[2:].partition("=")[0])) is not None:
            yield Problem("--sbatch", option, "it would change what the script says of that", fix)
    yield from _line_problems(request)
    gpus = re.fullmatch(r"(?:[^\s'\"\\#:,=]+:)?(\d{1,6})", request.gpus or "", re.ASCII)
    if request.gpus is not None and gpus is None:
        reason = "it is no number of GPUs, nor one behind a type"
        yield Problem("--gpus", request.gpus, reason, "write 4, or TYPE:4, as in a100:4")
    count = int(gpus[1]) if gpus else None
    yield from gpu_problems(request.ranks, count, "node")
    yield from count_problems(
        {
            "--nodes": (request.nodes, 1),
            "--elastic": (request.least, 1),
            "-n": (request.ranks, 1),
            "--gpus": (count, 1),
            "--cpus": (request.cpus, 1),
            "--warning": (request.warning, 0),
            "--restarts": (request.restarts, 0),
        }
    )
    if request.restarts and not request.saves:
        reason = "Slurm itself starts a script again, each time that a node failed"
        fix = "give 0 for never, or --saves with a script that goes on from its checkpoint"
        yield Problem("--restarts", request.restarts, reason, fix)
    if request.least is not None and request.least > request.nodes:
        reason = "the bounds are not MIN <= MAX"
        fix = "give the fewest and the most nodes, as in 2:8"
        yield Problem("--elastic", f"{request.least}:{request.nodes}", reason, fix)
    yield from size_problems(memory=request.memory)
    if re.fullmatch(r"[\d.]+", request.memory or ""):
        reason = "it has no unit, and Slurm's would be MiB"
        yield Problem("--memory", request.memory, reason, f"write {request.memory}M, or another unit")
    if re.search(r"[%\\]", request.folder):
        reason = "Slurm takes % and \\ in the path of what the job prints for patterns of its own"
        yield Problem("folder", request.folder, reason, "run it in one without them")
    yield from _time_problems(request)


def _line_problems(request: Request) -> Iterator[Problem]:
    """Yield words and lines that cannot stand before, or behind, srun."""
    for word in request.step:
        if not word.startswith("-"):
            break  # a program, and its own arguments
        if not word.startswith("--"):
            reason = "it is none of srun's long options in one word"
            yield Problem("--srun", word, reason, "write --srun=--OPTION=VALUE")
        elif (fix := OF_STEP.get(word[2:].partition("=")[0])) is not None:
            yield Problem("--srun", word, "it would change what the script says of that", fix)
    for option, text in (("--prologue", request.prologue), *(("--setup", line) for line in request.setup)):
        if re.search(r"^#SBATCH\b", text, re.MULTILINE):
            reason = "it has a line of #SBATCH, which counts for nothing there"
            yield Problem(option, text, reason, "give it as --sbatch=--OPTION=VALUE")
        elif "\0" in text or (option == "--setup" and not text.strip()):
            yield Problem(option, text, "it is no line of a script", "give commands of bash")
        elif said := _misread(text):
            yield Problem(option, text, f"bash cannot read it: {said}", "give whole commands of bash")


def _misread(text: str) -> str:
    """Return bash's message about a text that is no script; "" if it is one, or there is no bash."""
    try:
        done = subprocess.run(["bash", "-n"], input=os.fsencode(text), capture_output=True, check=False)
    except OSError:
        return ""
    return os.fsdecode(done.stderr).strip().partition("\n")[0]


def _time_problems(request: Request) -> Iterator[Problem]:
    limit = None if request.time is None else seconds(request.time)
    if request.time is not None and not limit:
        reason = "it is no time limit of Slurm's"
        yield Problem("--time", request.time, reason, "write HH:MM:SS, or D-HH:MM:SS, above 0")
    if request.warning and not request.saves:
        reason = "a script that does not save would be ended so much earlier"
        yield Problem(
            "--warning", request.warning, reason, "give --saves with a script that does, or leave it out"
        )
    elif request.warned > 65535:
        yield Problem("--warning", request.warned, "Slurm takes up to 65535", "give fewer seconds")
    elif limit and request.warned >= limit:
        reason = f"so many seconds before its end the job, of {limit} s (--time), has not begun"
        yield Problem("--warning", request.warned, reason, "give fewer seconds, or a longer --time")
