"""The command `polyreme`: arguments in, the library called, errors as messages.

Invariants: a config that cannot run is refused before any rank starts; the exit status is 0, 1 (failed), 2
(bad usage or config) or 128 + the signal that stopped it. Nothing heavy is imported before a command needs
it, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect as introspection
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from polyreme.cli import cluster as clusters
from polyreme.cli import endings, unknown_option
from polyreme.cli.goals import Goals
from polyreme.compat.finder import variables
from polyreme.distributed.environment import LAUNCHED, Environment, detect
from polyreme.distributed.failure import LAST
from polyreme.errors import LaunchError, PolyremeError, printable, shortened
from polyreme.launch import limits
from polyreme.launch.signals import importing
from polyreme.version import VERSION

if TYPE_CHECKING:
    from polyreme.config import Config
    from polyreme.job.run import Summary
    from polyreme.launch.hosts import Hosts


UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, which typer has a copy of


class _Commands(TyperGroup):
    """The group of commands. Turns an error of Polyreme into a message and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            for note in getattr(interrupt, "__notes__", ()):
                typer.echo(printable(note), err=True)
            ctx.exit(128 + signal.SIGINT)
        except PolyremeError as error:
            if LAUNCHED in os.environ:
                raise  # our launcher makes one report of all ranks
            if ctx.params["debug"]:
                typer.echo(getattr(error, "traceback", None) or traceback.format_exc(), err=True)
            # the launcher's errors name ranks already
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            _report(
                text,
                "" if hasattr(error, "rank") else _rank_of_several(),
                how="" if getattr(error, "ended_well", False) else "error: ",
            )
            ctx.exit(error.exit_status)
        except UsageError as error:
            unknown_option.explain(error)
            raise
        except BrokenPipeError:  # nobody reads on, as behind `| head`: typer ends without a word
            raise
        except OSError as error:  # files and folders that are not what the arguments say
            if LAUNCHED in os.environ or ctx.params["debug"]:
                raise
            if (limit := limits.named(error)) is not None:
                _report("\n".join([str(limit), *getattr(error, "__notes__", ())]), _rank_of_several())
                ctx.exit(limit.exit_status)
            where = f": {shortened(str, error.filename)}" if error.filename is not None else ""
            said = f"{error.strerror or error}{where}; give another path (with --debug before the command, "
            text = "\n".join([f"{said}the traceback is shown)", *getattr(error, "__notes__", ())])
            _report(text, _rank_of_several())
            ctx.exit(PolyremeError.exit_status)
        except (ImportError, MemoryError, RuntimeError) as error:
            limit = None if LAUNCHED in os.environ or ctx.params["debug"] else limits.named(error)
            if limit is None:
                raise
            _report("\n".join([str(limit), *getattr(error, "__notes__", ())]), _rank_of_several())
            ctx.exit(limit.exit_status)


def _report(text: str, who: str = "", how: str = "error: ") -> None:
    """Print an error as any terminal can show it; `who` names its rank."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)
    LAST.report = f"{who}{shown}"
    typer.secho(how, fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(LAST.report, err=True)


def _rank_of_several() -> str:
    """Return the beginning of a message that names this rank, where torchrun or the like started several and
    reports only their exit status; else ""."""
    try:
        environment = detect()
    except LaunchError:
        return ""
    who = f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()} failed: "
    return who if environment.world_size > 1 else ""


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A config: .toml, .yaml or .json.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one key of the config; may be given again."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, for programs.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"polyreme {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train PyTorch models that are too big or too slow for one device."""
    limits.check()
    try:
        Path.cwd()
    except OSError as error:  # libraries of torch end the process in such a folder
        raise PolyremeError(
            f"the current folder cannot be used ({error.strerror}): "
            "has it been deleted? Go to another one first"
        ) from None


@app.command()
@clusters.with_options
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="Ranks to start on this host, or on each of several.",
            show_default="launch.ranks, or else 1",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Go on from this checkpoint, or another run's folder.",
            show_default="the run's own folder",
        ),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--no-resume", help="Begin anew, though the run's folder has checkpoints.")
    ] = False,
    as_json: AsJson = False,
    stopped_status: Annotated[
        int,
        typer.Option(metavar="STATUS", min=0, max=255, help="Exit status of a run that a signal stopped."),
    ] = 0,
    *,
    cluster: clusters.Options,
) -> None:
    """Train the model that CONFIG describes. A run goes on from the newest checkpoint in its folder.

    SIGTERM and SIGUSR1 make it save and end with status 0, Ctrl-C with 130; the same command then goes on.

    With -n it starts the ranks itself. Slurm or Kubernetes may start it once on each of several hosts: it
    then starts -n ranks on each, and all are one run. Started by torchrun or `polyreme launch`, it is one of
    their ranks. With --hostfile other hosts run it, with --slurm or --kubernetes a cluster."""
    from polyreme.config import Config

    changes = [*(overrides or []), *_resume(resume, anew)]
    checked = Config.load(config, [*changes, *(["monitor.console=false"] if as_json else [])])
    command = _TrainCommand(config, changes, as_json, stopped_status)
    if cluster.asked:
        with endings.explained(checked, speaks=not cluster.submits, knows=True):
            command.on(cluster, checked, ranks)
    if cluster.asked or _ended_or_announced(checked, config, ranks):
        return
    others = _hosts() if ranks is not None else None
    environment = detect() if others is None else Environment("launcher", 0, 1, 0, 1)
    started = _world_size(ranks, checked.launch.ranks, environment)
    resolved = checked.settled(started * (others.most if others else 1))
    launched = LAUNCHED in os.environ  # by a launcher of ours, which speaks for all ranks
    speaks = not launched and (others is None or others.index == 0)
    with endings.explained(
        checked, speaks, knows=others is None and environment.alone and not stopped_status
    ):
        # libraries print there, too
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            summary = _run(checked, resolved if started > environment.world_size or others else None, others)
        if summary is None:
            command.here(resolved, started, others)
    if summary is not None:
        if as_json and environment.rank == 0:
            typer.echo(json.dumps(dataclasses.asdict(summary)))
        _leave(summary.stopped, 0 if launched else 128 + signal.SIGINT, stopped_status)


def _run(config: Config, resolved: Config | None, others: Hosts | None) -> Summary | None:
    """Train in this process. For ranks that are to be started (`resolved`), check whether they can start, and
    whether the run has ended already; returns None if it has not."""
    with importing():
        from polyreme.job import run as job

    if resolved is None:
        return job.run(config)
    job.check_sources(config)
    job.check_division(config)
    return job.finished(resolved, alone=others is None)


def _leave(stopped: str | None, interrupted: int, stopped_status: int) -> None:
    """Exit with the status for a run that was `stopped` by a signal, if it was and there is one."""
    status = interrupted if stopped == signal.SIGINT.name else stopped_status
    if stopped is not None and status:
        raise typer.Exit(status)


def _ended_or_announced(config: Config, file: Path, ranks: int | None) -> bool:
    """Print that the run has ended already, and return True; or else what is about to be done, as torch takes
    seconds to import. Of several ranks, or launchers, only the first prints. Raises ConfigError."""
    try:
        environment = detect()
    except LaunchError:  # the start of ranks reports it
        return False
    if environment.rank or LAUNCHED in os.environ or not config.monitor.console:
        return False
    folder = shortened(str, config.checkpoint.folder)
    if not environment.alone:
        typer.echo(f"training as {shortened(str, file)} says, in the folder {folder}", err=True)
        return False
    count = _world_size(ranks, config.launch.ranks, environment)
    resolved = config.settled(count)
    from polyreme.job.ended import ended

    if (end := ended(resolved)) is not None:
        typer.echo(end)
        return True
    of = f"{count} rank{'s' * (count > 1)} of this host"
    typer.echo(f"training as {shortened(str, file)} says, on {of}, in the folder {folder}", err=True)
    return False


def _resume(resume: str | None, anew: bool) -> Sequence[str]:
    """Return the changes of the config that --resume and --no-resume make."""
    if resume is not None and anew:
        raise typer.BadParameter(
            "begin anew, or go on from PATH: give one of the two", param_hint="--no-resume"
        )
    if resume is None and not anew:
        return []
    return [f"checkpoint.resume={json.dumps('never' if anew else resume, ensure_ascii=False)}"]


def _hosts() -> Hosts | None:
    """Return the place of this launcher among those of several hosts."""
    with importing():
        from polyreme.launch.hosts import hosts

    return hosts()


def _world_size(asked: int | None, configured: int | None, environment: Environment) -> int:
    """Return how many ranks train: those that were started already, or else `asked` (-n), or else
    `configured` (launch.ranks)."""
    if environment.alone:
        return asked or configured or 1
    if asked not in (None, environment.world_size):
        raise LaunchError(
            f"-n {asked}, but {environment.name} has already started {environment.world_size} "
            "ranks; leave -n out"
        )
    return environment.world_size


@dataclasses.dataclass(frozen=True)
class _TrainCommand:
    """The command `polyreme train`, to be run by ranks here or on other hosts."""

    config: Path
    changes: Sequence[str]
    as_json: bool
    stopped_status: int

    def arguments(self, config: Path, *more: str) -> list[str]:
        """Return the words after `polyreme` that make this command: "train", the config and its options."""
        sets = [argument for change in self.changes for argument in ("--set", change)]
        return ["train", str(config), *sets, *(["--json"] if self.as_json else []), *more]

    def here(self, resolved: Config, ranks: int, others: Hosts | None) -> None:
        """Train on ranks of this host."""
        with importing():
            from polyreme.job import resume
            from polyreme.launch.options import RanksFailedError
            from polyreme.launch.signals import SAVE_SIGNALS
            from polyreme.launch.torchrun import launch as start
            from polyreme.launch.torchrun import options_here

        command = ["-m", "polyreme", *self.arguments(self.config)]
        try:
            options = dataclasses.replace(options_here(), interrupt_saves=True)
            stopped_by = start(command, ranks, saves=True, options=options, hosts=others)
        except RanksFailedError as error:
            if self.stopped_status and error.exit_status in {128 + number for number in SAVE_SIGNALS}:
                _report(str(error))
                raise typer.Exit(self.stopped_status) from None
            if error.out_of_memory:
                from polyreme.config.advice import takes_less

                world = ranks * (others.most if others else 1)
                error.add_note(f"what takes less: {'; '.join(takes_less(resolved, world, host=True))}")
            raise
        if stopped_by == signal.SIGINT:
            raise typer.Exit(128 + signal.SIGINT)
        if self.stopped_status and not resume.find_beginning(resolved).finished:
            raise typer.Exit(self.stopped_status)

    def on(self, cluster: clusters.Options, config: Config, asked: int | None) -> None:
        """Submit it to a cluster, which starts it again until the run has ended."""
        from polyreme.launch.requests import STOPPED

        if self.stopped_status:
            raise typer.BadParameter(
                "it is for launchers on this host: leave it out", param_hint="--stopped-status"
            )
        if not cluster.submits:
            self.elsewhere(cluster, config, asked)
            return
        if config.checkpoint.resume == "never":
            raise typer.BadParameter(
                "a cluster may start the run again, which would begin anew each time: give it a "
                "checkpoint.folder of its own instead",
                param_hint="--no-resume (checkpoint.resume)",
            )
        ranks = asked or config.launch.ranks or 1
        config.settled(ranks * cluster.hosts)
        if cluster.kubernetes:
            there, more, folders = clusters.in_pods(self.config, config)
        else:
            there, more, folders = self.config, [], []
        arguments = self.arguments(there, *more, "-n", str(ranks), "--stopped-status", str(STOPPED))
        source = str(self.config)
        clusters.start(cluster, arguments, ranks, source, saves=True, config=self.config, folders=folders)

    def elsewhere(self, cluster: clusters.Options, config: Config, asked: int | None) -> None:
        """Run it on the hosts of a hostfile, or by mpirun."""
        with importing():
            from polyreme.cli import hosts

            active = hosts.slots(cluster, asked or config.launch.ranks)
            config.settled(sum(map(len, active.values())))
        command = ["-m", "polyreme", *self.arguments(self.config)]
        files = [str(self.config)]
        stopped_by = hosts.start(cluster, active, command, saves=True, files=files, interrupt_saves=True)
        if stopped_by == signal.SIGINT:
            raise typer.Exit(128 + signal.SIGINT)


class _Mode(StrEnum):
    structure = "structure"
    numerics = "numerics"


@app.command()
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Ranks to start here.", show_default="launch.ranks, or 1"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    mode: Annotated[
        _Mode, typer.Option(help="Compute in float64; or in the config's own dtype.")
    ] = _Mode.structure,
    shrink: Annotated[
        bool | None,
        typer.Option(
            "--shrink/--whole",
            help="Verify a smaller model by the same code; or the whole one.",
            show_default="smaller where the whole one does not fit",
        ),
    ] = None,
    as_json: AsJson = False,
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Prove that the run of CONFIG computes what one device computes: losses, norms, gradients and weights.

    It takes some steps as CONFIG says, on the model and data of CONFIG, and the same in plain PyTorch on one
    device. Where they differ it says which module is the first, and in what: its forward, its backward, the
    reduction of a gradient, or the update. The status is 0 if they are equal, 1 if they differ, 2 for a
    config that cannot run.

    With -n it starts the ranks itself; started by torchrun, srun, mpirun or `polyreme launch -m polyreme
    verify CONFIG`, it is one of their ranks."""
    from polyreme.config import Config

    checked = Config.load(config, overrides or [])
    environment = detect()
    count = _world_size(ranks, checked.launch.ranks, environment)
    checked.resolve(count)
    with importing():
        from polyreme.cli import verify as verification
        from polyreme.job import run as job
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if count > environment.world_size:
            job.check_sources(checked)
            job.check_division(checked)
            sets = [argument for change in overrides or [] for argument in ("--set", change)]
            size = [] if shrink is None else ["--shrink" if shrink else "--whole"]
            options = ["--steps", str(steps), "--mode", mode.value, *size]
            verdict = verification.start(["verify", str(config), *sets, *options], count)
        else:
            verdict = verification.run(checked, steps, mode.value, shrink)
    if environment.rank == 0:
        verification.show(verdict, as_json, result)
    if verdict.exit_status and result is None:
        raise typer.Exit(verdict.exit_status)


@app.command(context_settings={"allow_interspersed_args": False})
@clusters.with_options
def launch(
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="All that follows is the script's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="Ranks to start on this host, or on each of several.",
            show_default="1",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Computing threads per rank.", show_default="cores / ranks")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    with_deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="`import deepspeed` gives Polyreme, under DeepSpeed's names.")
    ] = False,
    saves: Annotated[
        bool,
        typer.Option(
            "--saves", help="SCRIPT saves at SIGTERM and SIGUSR1, and ends with status 75 to be run again."
        ),
    ] = False,
    *,
    cluster: clusters.Options,
) -> None:
    """Run any Python script as several ranks: polyreme launch -n 2 train.py

    The ranks find each other through the variables that torchrun sets. If one fails, the others are ended,
    and the one that failed first is shown.

    Slurm or Kubernetes may start the command once on each of several hosts: it then starts -n ranks on each,
    and all are one run. With --hostfile other hosts run it, with --slurm or --kubernetes a cluster."""
    command = [*(["-m"] if module else []), script, *(arguments or [])]
    door = variables("deepspeed") if with_deepspeed else {}
    if cluster.asked and not cluster.submits:
        with importing():
            from polyreme.cli import hosts
        files = [] if module else [script]
        active = hosts.slots(cluster, ranks)
        with _save_explained(saves):
            hosts.start(cluster, active, command, threads=threads, saves=saves, variables=door, files=files)
        return
    ranks = ranks or 1
    if cluster.asked:
        more = [
            *(["--threads", str(threads)] if threads else []),
            *(["--deepspeed"] if with_deepspeed else []),
            *(["--saves"] if saves else []),
        ]
        clusters.start(cluster, ["launch", "-n", str(ranks), *more, *command], ranks, script, saves=saves)
        return
    with importing():
        from polyreme.launch.torchrun import launch as start
        from polyreme.launch.torchrun import options_here

    others = _hosts()
    with _save_explained(saves):
        start(command, ranks, threads=threads, saves=saves, options=options_here(door), hosts=others)


@contextlib.contextmanager
def _save_explained(saves: bool) -> Iterator[None]:
    """Add to the error of a script that a request to save ended what the script lacks."""
    from polyreme.launch.options import RanksFailedError
    from polyreme.launch.signals import SAVE_SIGNALS

    try:
        yield
    except RanksFailedError as error:
        if error.out_of_memory:
            from polyreme.config.advice import KEYS

            error.add_note(f"what takes less, in the config of polyreme.initialize: {KEYS}")
        if saves and error.exit_status in {128 + number for number in SAVE_SIGNALS}:
            more = (
                "they have not saved: let SCRIPT call engine.ask_to_stop in a handler of SIGTERM and "
                "SIGUSR1, and save and exit with status 75 where a step's result has `stop`"
            )
        elif not saves and error.exit_status == 128 + signal.SIGUSR1:
            more = "with --saves a script is asked to save"
        else:
            raise
        raise RanksFailedError(f"{error}; {more}", error.exit_status) from None


@app.command(
    context_settings={
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def deepspeed(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENT]...", help="As DeepSpeed's command has them."),
    ] = None,
) -> None:
    """Run a DeepSpeed script on this host, with the options of the command `deepspeed`."""
    with importing():
        from polyreme.compat.deepspeed.launcher.runner import main as run

    run(arguments or [])


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def door(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A program on PATH, or its file.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="All that follows is the program's.")
    ] = None,
) -> None:
    """Run a program (accelerate launch, torchrun, ...) in which `import deepspeed` gives Polyreme.

    It holds for all Python processes that come of it. The program takes this process' place, with its
    signals and its exit status."""
    if (found := shutil.which(program)) is None:
        raise LaunchError(
            f"{program!r} is no program that can be run; give one on PATH, or the path of an executable"
        )
    os.execve(found, [program, *(arguments or [])], {**os.environ, **variables("deepspeed")})


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DIR",
            help="A config (a DeepSpeed JSON, too), or the folder of a checkpoint or run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="The number of ranks to show it for.",
            show_default="1; --schedule: the fewest possible",
        ),
    ] = None,
    as_json: AsJson = False,
    every: Annotated[bool, typer.Option("--all", help="Also the keys that have their default.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Also what the keys mean.")] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Draw the timeline of a pipeline's step instead.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --schedule: also write the timeline as an SVG file."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write what CONFIG says as TOML; never over another file."),
    ] = None,
) -> None:
    """Show what a config says for -n ranks, or what is in a checkpoint.

    CONFIG: the keys that differ from their defaults, where each value comes from, and which ranks form which
    axis. Of a DeepSpeed JSON, first what becomes of each of its keys; the rest, and what --write writes, is
    the Polyreme config that it becomes for that number of ranks.

    With --schedule: what each pipeline rank does when, its bubble (the share of the step in which it has no
    work), and of how many micro-batches it keeps activations at once. It assumes that all stages take the
    same time, and a backward twice that of a forward.

    DIR, a checkpoint of Polyreme, Hugging Face, DeepSpeed or torch.distributed.checkpoint, or a run's folder
    for its newest one: tensors, sizes, the ranks that wrote it and how far training was. All bytes are
    compared with their checksums; the status is 1 if any differ."""
    if path.is_dir():
        if overrides or ranks or schedule or svg or every or describe or write:
            raise typer.BadParameter(
                f"{path} is a folder, so that a checkpoint is shown: of the options only --json applies"
            )
        from polyreme.cli import checkpoint

        checkpoint.show(path, as_json)
        return
    if svg and not schedule:
        raise typer.BadParameter("it is a picture of the timeline: give --schedule, too", param_hint="--svg")
    if schedule and (every or describe):
        raise typer.BadParameter("--schedule draws no keys: leave --all and --describe out")
    from polyreme.cli import inspect as inspection
    from polyreme.cli import translated

    loaded, notes = translated.load(path, overrides or [], ranks or 1, fill_auto=not write)
    if write:
        translated.write(loaded, write, path)
        typer.echo(f"wrote {shortened(str, write)}", err=True)
    if schedule:
        inspection.draw(loaded, ranks, svg, as_json)
    else:
        inspection.show(loaded, ranks or 1, notes, as_json, every, describe)


@app.command()
@functools.partial(clusters.with_options, options=Goals, parameter="goals")
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A config: .toml, .yaml or .json; needed but with --measure.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, help="Ranks of the job.", show_default="launch.ranks, or else 1"
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A preset (h100, a100, ...), or a description in TOML.")
    ] = "h100",
    tries: Annotated[
        int, typer.Option(min=1, help="Layouts to run dry at most, for keys that are auto.")
    ] = 64,
    as_json: AsJson = False,
    *,
    goals: Goals,
) -> None:
    """Show what a job takes and how long its steps run, without its devices.

    The engine's own step runs on one rank of each kind, on tensors without numbers: memory and traffic are
    those of the job. Seconds are those of the cluster's description. Where mesh.tp, mesh.pp,
    pipeline.virtual, memory.states, memory.params or memory.activations is "auto", the fastest layout that
    fits is chosen, with zero.stage and batch.micro if they are "auto"; with --cheapest also the number of
    ranks. The status is 1 where none fits, or none meets the deadline.

    --measure alone, also started by `polyreme launch -m` or mpirun, describes a machine or a cluster."""
    goals.check()
    if config is None and goals.measure is None:
        raise typer.BadParameter("give a config to plan, or --measure FILE", param_hint="CONFIG")
    from polyreme.config import Config

    loaded = None if config is None else Config.load(config, overrides or [])
    ranks = ranks or (loaded and loaded.launch.ranks) or 1
    if goals.measure is not None:
        from polyreme.cli.measured import describe

        if not describe(goals.measure, ranks):
            return
        cluster = str(goals.measure)
    if loaded is None or config is None:
        return
    from polyreme.cli import plan as planning

    request = planning.Request(config, loaded, ranks, cluster, tries, goals)
    if not planning.show(request, as_json):
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: AsJson = False,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", "-H", metavar="FILE", help="Check these hosts, over ssh.")
    ] = None,
    include: Annotated[str | None, typer.Option(metavar="HOST@...", help="Only these of them.")] = None,
    exclude: Annotated[str | None, typer.Option(metavar="HOST@...", help="All but these.")] = None,
    ssh: Annotated[str | None, typer.Option(metavar="COMMAND", help="The ssh to use.")] = None,
) -> None:
    """Check that this machine can train: versions, memory, disk, and an all-reduce over two ranks.

    With --hostfile, or started by mpirun or srun, check several hosts: versions, clocks, interfaces, the
    folder, shared memory, file limits, GPUs, and latency and bandwidth between each two."""
    from polyreme.cli import doctor as local

    if hostfile is not None:
        with importing():
            from polyreme.cli import hosts

            options = clusters.Options(hostfile=hostfile, include=include, exclude=exclude, ssh=ssh)
            one_each = {host: its[:1] for host, its in hosts.slots(options, None).items()}
        hosts.start(options, one_each, ["-m", "polyreme", "doctor", *(["--json"] if as_json else [])])
        return
    if include or exclude or ssh:
        raise typer.BadParameter(
            "it applies with --hostfile only", param_hint="--include, --exclude or --ssh"
        )
    more: dict[str, Any] = {}
    looking: Iterable[local.Check]
    if detect().world_size > 1:
        from polyreme.cli import between_hosts
        from polyreme.launch.survey import survey

        found = survey()
        if found is None:
            return
        looking = between_hosts.examine(found)
        more = {"hosts": found.facts, "pairs": [dataclasses.asdict(pair) for pair in found.pairs]}
    else:
        looking = local.examine()
    wide = max([15 if more else 14, *(len("".join(pair["hosts"])) + 5 for pair in more.get("pairs", []))])
    checks = []
    for check in looking:
        checks.append(check)
        if not as_json:  # at once: the last one takes seconds
            local.show(check, wide)
    if as_json:
        facts = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"checks": facts, **more} if more else facts, indent=2))
    if failed := sum(not check.ok for check in checks):
        if more:  # whoever started the ranks reports it
            raise LaunchError(f"{failed} of {len(checks)} checks failed: see above")
        raise typer.Exit(1)


for _each in app.registered_commands:  # typer keeps line breaks within all paragraphs but the first
    _each.help = re.sub(r"(?<!\n)\n(?!\n)", " ", introspection.getdoc(_each.callback) or "")


def main() -> None:
    """Run the command line."""
    if os.environ.get("COLUMNS", "1").strip("0") == "":  # a terminal of width 0 would show nothing
        del os.environ["COLUMNS"]
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper) and stream.encoding != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # unencodable output must not end a run
    app(prog_name="polyreme")
