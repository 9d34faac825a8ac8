"""The options of `polyreme launch` and `polyreme train` that run it on other hosts, or submit it to a
cluster, and their implementation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from polyreme.errors import PolyremeError

if TYPE_CHECKING:
    from polyreme.config import Config
    from polyreme.launch import pod_request

BOTH, SLURM, KUBERNETES = "On a cluster", "With --slurm", "With --kubernetes"
HOSTS, MPI = "With --hostfile", "With --mpi"
ALSO = {
    "nodes": ("--hostfile", "--mpi", "--ray"),
    "cpus": ("--ray",),
    "gpus": ("--ray",),
    "port": ("--ray",),
    "dry_run": ("--hostfile", "--mpi"),
    "env": ("--hostfile", "--mpi", "--ray"),
    "include": ("--mpi",),
    "exclude": ("--mpi",),
    "elastic": ("--slurm",),
}
"""Further ways of running to which an option applies, besides that of its panel."""
WHY = {
    "elastic": ": over ssh, MPI and Ray a run begins on all hosts that it was given; start it again with "
    "other --nodes, and it goes on there"
}


def _option(panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True)
class Options:
    """The user's request to a cluster; each field is an option of the command."""

    slurm: Annotated[bool, _option(BOTH, "--slurm", help="Submit the run as a batch job.")] = False
    kubernetes: Annotated[
        bool, _option(BOTH, "--kubernetes", help="Print the manifests of a Job; --apply submits.")
    ] = False
    hostfile: Annotated[
        Path | None,
        _option(
            BOTH,
            "--hostfile",
            "-H",
            metavar="FILE",
            help="Run it over ssh on these hosts, HOST slots=N in a line.",
        ),
    ] = None
    mpi: Annotated[
        bool, _option(BOTH, "--mpi", help="Have mpirun start the ranks, here or on a hostfile's hosts.")
    ] = False
    ray: Annotated[bool, _option(BOTH, "--ray", help="Run it on a Ray cluster that runs already.")] = False
    nodes: Annotated[
        int | None,
        _option(
            BOTH, "--nodes", "--pods", min=1, help="Hosts, with -n ranks each: 1, or all of the hostfile."
        ),
    ] = None
    name: Annotated[
        str | None,
        _option(BOTH, "--name", "--job-name", help="The job's name; by default from the script's."),
    ] = None
    gpus: Annotated[
        str | None,
        _option(
            BOTH,
            "--gpus",
            "--gpus-per-node",
            metavar="[TYPE:]N",
            help="GPUs of each host; with --slurm a type, too, as in a100:4.",
        ),
    ] = None
    cpus: Annotated[int | None, _option(BOTH, "--cpus", min=1, help="Cores of each host.")] = None
    memory: Annotated[
        str | None, _option(BOTH, "--memory", metavar="SIZE", help="Memory of each host, as in 64Gi.")
    ] = None
    restarts: Annotated[
        int | None, _option(BOTH, "--restarts", min=0, help="Most restarts; 1000 (Slurm) or 3 by default.")
    ] = None
    dry_run: Annotated[
        bool, _option(BOTH, "--dry-run", help="Print what would be submitted, and do nothing.")
    ] = False
    time: Annotated[str | None, _option(SLURM, "--time", metavar="HH:MM:SS", help="The time limit.")] = None
    account: Annotated[str | None, _option(SLURM, "--account", help="The account that is charged.")] = None
    partition: Annotated[str | None, _option(SLURM, "--partition", help="The partition it runs in.")] = None
    qos: Annotated[str | None, _option(SLURM, "--qos", help="The quality of service.")] = None
    constraint: Annotated[str | None, _option(SLURM, "--constraint", help="Features of the nodes.")] = None
    warning: Annotated[
        int | None,
        _option(
            SLURM,
            "--warning",
            metavar="SECONDS",
            help="Have the run save so long before the time is up; 300 by default.",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        _option(
            SLURM, "--sbatch", metavar="OPTION", help="Another option of sbatch's: --sbatch=--exclusive."
        ),
    ] = None
    prologue: Annotated[
        Path | None, _option(SLURM, "--prologue", metavar="FILE", help="Commands of bash to run before srun.")
    ] = None
    setup: Annotated[
        list[str] | None,
        _option(
            SLURM, "--setup", metavar="LINE", help="One of them, as in 'module load cuda'; may be repeated."
        ),
    ] = None
    srun: Annotated[
        list[str] | None,
        _option(SLURM, "--srun", metavar="OPTION", help="Another of srun's: --srun=--container-image=IMAGE."),
    ] = None
    python: Annotated[
        str | None,
        _option(SLURM, "--python", metavar="PATH", help="The nodes' Python, as in a container; this one."),
    ] = None
    detach: Annotated[
        bool, _option(SLURM, "--detach", help="Only submit it: do not follow what it prints to its end.")
    ] = False
    image: Annotated[
        str | None, _option(KUBERNETES, "--image", help="The image, with Polyreme and the script in it.")
    ] = None
    kind: Annotated[
        str | None, _option(KUBERNETES, "--kind", metavar="KIND", help="job (default), jobset or trainjob.")
    ] = None
    namespace: Annotated[str | None, _option(KUBERNETES, "--namespace", help="The namespace.")] = None
    queue: Annotated[str | None, _option(KUBERNETES, "--queue", help="Kueue's local queue.")] = None
    shm: Annotated[
        str | None, _option(KUBERNETES, "--shm", metavar="SIZE", help="The most that /dev/shm may hold.")
    ] = None
    volume: Annotated[
        list[str] | None,
        _option(
            KUBERNETES,
            "--volume",
            metavar="CLAIM:FOLDER",
            help="Mount a volume claim there; may be repeated.",
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        _option(KUBERNETES, "--env", metavar="NAME=VALUE", help="A variable of the ranks; may be repeated."),
    ] = None
    scratch: Annotated[
        str | None,
        _option(KUBERNETES, "--scratch", metavar="SIZE", help="The most that /tmp may hold; 10Gi."),
    ] = None
    user: Annotated[
        str | None,
        _option(KUBERNETES, "--user", metavar="UID[:GID]", help="Run as it, if the image is root's."),
    ] = None
    gang: Annotated[
        str | None,
        _option(KUBERNETES, "--gang", metavar="volcano|plugins", help="Schedule all pods or none."),
    ] = None
    runtime: Annotated[
        str | None, _option(KUBERNETES, "--runtime", metavar="NAME", help="The runtime of a trainjob.")
    ] = None
    service_account: Annotated[
        str | None, _option(KUBERNETES, "--service-account", metavar="NAME", help="The pods' account.")
    ] = None
    priority: Annotated[
        str | None, _option(KUBERNETES, "--priority", metavar="CLASS", help="The pods' priority class.")
    ] = None
    pull_secret: Annotated[
        list[str] | None,
        _option(KUBERNETES, "--pull-secret", metavar="NAME", help="What pulls the image; may be repeated."),
    ] = None
    node_selector: Annotated[
        list[str] | None,
        _option(KUBERNETES, "--node-selector", metavar="KEY=VALUE", help="Only nodes that have this label."),
    ] = None
    toleration: Annotated[
        list[str] | None,
        _option(KUBERNETES, "--toleration", metavar="KEY[=VALUE][:EFFECT]", help="Also nodes of this taint."),
    ] = None
    deadline: Annotated[
        int | None, _option(KUBERNETES, "--deadline", metavar="SECONDS", min=1, help="End it after so long.")
    ] = None
    ttl: Annotated[
        int | None,
        _option(KUBERNETES, "--ttl", metavar="SECONDS", min=0, help="Delete it so long after its end."),
    ] = None
    patch: Annotated[
        list[Path] | None,
        _option(KUBERNETES, "--patch", metavar="FILE", help="Change the manifests, as kubectl patch does."),
    ] = None
    elastic: Annotated[
        str | None,
        _option(
            KUBERNETES, "--elastic", metavar="MIN:MAX", help="Run on as many pods, or nodes, as there are."
        ),
    ] = None
    output: Annotated[
        Path | None,
        _option(KUBERNETES, "-o", "--output", metavar="FILE", help="Write the manifests to this file."),
    ] = None
    apply: Annotated[bool, _option(KUBERNETES, "--apply", help="Hand the manifests to kubectl apply.")] = (
        False
    )
    include: Annotated[
        str | None,
        _option(HOSTS, "--include", metavar="HOST[:SLOT,...]@...", help="Only these hosts and slots."),
    ] = None
    exclude: Annotated[
        str | None, _option(HOSTS, "--exclude", metavar="HOST[:SLOT,...]@...", help="All but these.")
    ] = None
    ssh: Annotated[
        str | None, _option(HOSTS, "--ssh", metavar="COMMAND", help="The ssh to use, as in 'ssh -p 2222'.")
    ] = None
    port: Annotated[
        int | None,
        _option(
            HOSTS, "--port", min=1, max=65535, help="Where ranks meet on the first host; any by default."
        ),
    ] = None

    interface: Annotated[
        str | None, _option(MPI, "--interface", metavar="NAME", help="The network interface that MPI takes.")
    ] = None
    mpirun: Annotated[
        list[str] | None,
        _option(
            MPI, "--mpirun", metavar="OPTION", help="Another of mpirun's, as in --mpirun=--oversubscribe."
        ),
    ] = None

    @property
    def asked(self) -> bool:
        """Whether it is to run on other hosts, or by mpirun. Raises a usage error for options that do not
        apply to the chosen way."""
        ways = {
            "--slurm": self.slurm,
            "--kubernetes": self.kubernetes,
            "--hostfile": self.hostfile,
            "--mpi": self.mpi,
            "--ray": self.ray,
        }
        chosen = [way for way, asked in ways.items() if asked]
        if len(chosen) > 1 and set(chosen) != {"--hostfile", "--mpi"}:
            raise typer.BadParameter(f"it runs by one of them: leave {' or '.join(chosen)} out")
        for each in dataclasses.fields(self):
            if getattr(self, each.name) == each.default or f"--{each.name}" in ways:
                continue
            [option] = get_type_hints(Options, include_extras=True)[each.name].__metadata__
            panel = option.rich_help_panel
            needed: tuple[str, ...] = (
                ("--slurm", "--kubernetes") if panel == BOTH else (panel.removeprefix("With "),)
            )
            needed = (*needed, *ALSO.get(each.name, ()))
            if not any(ways[way] for way in needed):
                raise typer.BadParameter(
                    f"it applies with {' or '.join(needed)} only{WHY.get(each.name, '')}",
                    param_hint=f"--{each.name.replace('_', '-')}",
                )
        return bool(chosen)

    @property
    def submits(self) -> bool:
        """Whether a job is submitted to a cluster, which starts the ranks."""
        return self.slurm or self.kubernetes

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The fewest and the most hosts of --elastic."""
        if self.elastic is None:
            return None
        found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", self.elastic, re.ASCII)
        if found is None:
            raise typer.BadParameter(
                f"{self.elastic!r} is no pair of bounds: write MIN:MAX, as in 2:8", param_hint="--elastic"
            )
        if self.nodes is not None:
            raise typer.BadParameter("it says how many there are: leave --nodes out", param_hint="--elastic")
        return int(found[1]), int(found[2])

    @property
    def gpu_count(self) -> int | None:
        """The GPUs of each host, where their type cannot be chosen."""
        if self.gpus is None:
            return None
        kind, _, count = self.gpus.rpartition(":")
        if re.fullmatch(r"[0-9]{1,6}", count) is None or int(count) < 1:
            raise typer.BadParameter(
                f"{self.gpus!r} is no number of GPUs: give 1 or more", param_hint="--gpus"
            )
        if kind:
            way = "pods get it by --node-selector, or Kueue's --queue"
            way = way if self.kubernetes else "on Ray choose a cluster that has it alone"
            raise typer.BadParameter(
                f"{self.gpus!r} has a type, which applies with --slurm only: give --gpus {count}; {way}",
                param_hint="--gpus",
            )
        return int(count)

    @property
    def hosts(self) -> int:
        """The largest number of hosts that it runs on."""
        return self.bounds[1] if self.bounds else self.nodes or 1


def with_options(
    function: Callable[..., None], options: type[Any] = Options, parameter: str = "cluster"
) -> Callable[..., None]:
    """Return `function` as a command with an option for each field of `options`, a dataclass, which it takes
    as its `parameter`."""

    def command(**given: Any) -> None:
        asked = {each.name: given.pop(each.name) for each in dataclasses.fields(options)}
        function(**given, **{parameter: options(**asked)})

    own = inspect.signature(function, eval_str=True).parameters
    hints = get_type_hints(options, include_extras=True)
    parameters = [each for name, each in own.items() if name != parameter] + [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
        )
        for each in dataclasses.fields(options)
    ]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def start(
    options: Options,
    arguments: Sequence[str],
    ranks: int,
    source: str,
    *,
    saves: bool = False,
    config: Path | None = None,
    folders: Sequence[tuple[str, str]] = (),
) -> None:
    """Submit `polyreme ARGUMENTS`, which runs `ranks` ranks, to the cluster, and print what was submitted. A
    batch job is followed to its end.

    `source` gives the job its name. `saves`: the run saves when it is asked to. `config`: the one that
    `arguments` name; pods get its text. `folders`: those that the run writes to, by their keys."""
    name = options.name or re.sub(r"[^a-z0-9]+", "-", f"polyreme-{Path(source).stem}".lower()).strip("-")
    if options.slurm:
        python = options.python or sys.executable
        _submit(options, [python, "-m", "polyreme", *arguments], ranks, name, saves)
    else:
        request = _request(options, ["polyreme", *arguments], ranks, name, saves, config)
        _write(options, dataclasses.replace(request, folders=folders))


def _submit(options: Options, command: Sequence[str], ranks: int, name: str, saves: bool) -> None:
    from polyreme.launch import slurm

    names = (
        *("time", "account", "partition", "qos", "constraint"),
        *("gpus", "cpus", "memory", "warning", "restarts"),
    )
    request = slurm.Request(
        command,
        name,
        ranks,
        options.hosts,
        least=options.bounds and options.bounds[0],
        options=options.sbatch or (),
        step=options.srun or (),
        prologue=_read(options.prologue, "--prologue", "bash commands", "surrogateescape")
        if options.prologue
        else "",
        setup=options.setup or (),
        saves=saves,
        folder=str(Path.cwd()),
        **{each: getattr(options, each) for each in names},
    )
    text = slurm.script(request)
    if options.dry_run:
        typer.echo(text.encode("utf-8", "surrogateescape"), nl=False)
        return
    slurm.refuse_never(request)
    job = slurm.submit(text)
    typer.echo(
        f"submitted batch job {job.number}: {name}, {_size(options, ranks, 'node')}\n"
        f"it prints to {name}-{job.number}.out",
        err=not options.detach,
    )
    if not options.detach:
        typer.echo("Ctrl-C cancels it; --detach only submits", err=True)
        from polyreme.launch import batch_job

        batch_job.follow(job, saves=saves)


def _request(
    options: Options, command: Sequence[str], ranks: int, name: str, saves: bool, config: Path | None
) -> pod_request.Request:
    from polyreme.launch import pod_request
    from polyreme.launch.options import PATIENCE, SAVING

    if options.image is None:
        raise typer.BadParameter("--kubernetes needs one, with Polyreme and the script", param_hint="--image")
    if options.apply and options.dry_run:
        raise typer.BadParameter(
            "apply them, or only print them: give one of the two", param_hint="--dry-run"
        )
    names = (
        *("image", "namespace", "queue", "gang", "runtime", "user", "service_account", "priority"),
        *("cpus", "memory", "shm", "scratch", "env", "restarts", "deadline", "ttl", "kind"),
    )
    given = {each: getattr(options, each) for each in names}
    return pod_request.Request(
        command,
        name=name,
        ranks=ranks,
        pods=options.nodes or 1,
        pull_secrets=options.pull_secret or (),
        node_selector=options.node_selector or (),
        tolerations=options.toleration or (),
        gpus=options.gpu_count,
        volumes=options.volume or (),
        elastic=options.bounds,
        saves=saves,
        grace=SAVING + 2 * PATIENCE if saves else pod_request.ENDING,
        files={} if config is None else {pod_file(config).name: config.read_text("utf-8")},
        patches={str(each): _read(each, "--patch", "YAML") for each in options.patch or ()},
        **{each: value for each, value in given.items() if value is not None},
    )


def _read(file: Path, option: str, of: str, errors: str = "strict") -> str:
    """Return the text of the file that an option names; `of` describes its contents in an error."""
    try:
        return file.read_text("utf-8", errors)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise typer.BadParameter(
            f"{file} cannot be read: {reason}; name a file of {of}", param_hint=option
        ) from None


def _write(options: Options, request: pod_request.Request) -> None:
    from polyreme.launch import kubernetes

    documents = kubernetes.manifests(request)
    if options.output and not options.dry_run:
        save("--output", options.output, kubernetes.text(documents))
    elif not options.apply:
        typer.echo(kubernetes.text(documents), nl=False)
    what = f"{documents[-1]['kind']} {request.name}, {_size(options, request.ranks, 'pod')}"
    if options.apply:
        typer.echo(kubernetes.apply(documents), nl=False)
        typer.echo(f"applied: {what}")
    else:
        file = None if options.dry_run else options.output
        how = f"it starts with: kubectl apply -f {file}" if file else "pipe it to: kubectl apply -f -"
        typer.echo(f"{what}; {how}", err=True)


def in_pods(config: Path, checked: Config) -> tuple[Path, list[str], list[tuple[str, str]]]:
    """Return the path of the config in pods, options for them, and the folders that the run writes to, by
    their keys."""
    from polyreme.config.schema import tiers_of
    from polyreme.launch.pod_request import SCRATCH

    memory = checked.memory
    homes = {each: getattr(memory, each) for each in ("states", "params", "gradients", "activations")}
    folders = [("checkpoint.folder", checked.checkpoint.folder)] + [
        (f"memory.{key}", folder)
        for key, home in homes.items()
        for folder in tiers_of(home)[0]
        if folder not in ("device", "host", "auto", "keep", "recompute")
    ]
    if Path(checked.data.cache).is_absolute():
        return pod_file(config), [], [*folders, ("data.cache", checked.data.cache)]
    # below the folder of the image, which is read-only
    return pod_file(config), ["--set", f"data.cache={SCRATCH}/cache/polyreme"], folders


def pod_file(config: Path) -> Path:
    """Return the path of the config in pods."""
    from polyreme.launch.pod_request import CONFIGS

    plain = re.fullmatch(r"[A-Za-z0-9][-._A-Za-z0-9]*", config.name)
    return Path(CONFIGS, config.name if plain else f"run{config.suffix}")


def _size(options: Options, ranks: int, host: str) -> str:
    hosts = f"{options.elastic.replace(':', ' to ')}" if options.elastic else str(options.hosts)
    return f"{hosts} {host}{'s' * (hosts != '1')} with {ranks} rank{'s' * (ranks != 1)} each"


def save(option: str, file: Path, text: str) -> None:
    """Write text to the file that an option names. Raises PolyremeError where it cannot be written."""
    from polyreme.files.direct_io import no_links

    try:
        with open(file, "w", encoding="utf-8", opener=no_links) as opened:
            opened.write(text)
    except OSError as error:
        raise PolyremeError(
            f"cannot write {option} {file}: {error.strerror}; name a file, not a link or a pipe, in a folder "
            "that can be written"
        ) from None
