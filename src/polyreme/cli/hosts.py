"""The implementation of --hostfile, --mpi and --ray of `polyreme launch` and `polyreme train`."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from polyreme.cli.cluster import Options
from polyreme.launch import hostfile
from polyreme.launch.hostfile import Active

if TYPE_CHECKING:
    from polyreme.launch.mpirun import Library, Request


def slots(options: Options, ranks: int | None) -> Active:
    """Return the hosts and their slots: those of the hostfile that the options leave, `ranks` of this host,
    or of nodes that Ray is to choose."""
    if options.ray:
        return {f"node {number}": list(range(ranks or 1)) for number in range(options.nodes or 1)}
    if options.hostfile is None:
        for name in ("include", "exclude", "nodes"):
            if getattr(options, name):
                raise typer.BadParameter("it applies with --hostfile only", param_hint=f"--{name}")
        return {"localhost": list(range(ranks or 1))}
    pool = hostfile.read(options.hostfile)
    if (options.include or options.exclude) and (options.nodes or ranks):
        raise typer.BadParameter(
            "each says which slots to use: leave --nodes and -n, or --include and --exclude, out",
            param_hint="-n",
        )
    if options.nodes and options.nodes > len(pool):
        raise typer.BadParameter(
            f"the hostfile names {len(pool)}: give at most as many", param_hint="--nodes"
        )
    left = hostfile.parse_inclusion_exclusion(pool, options.include or "", options.exclude or "")
    active = hostfile.apply_num_nodes_and_gpus(left, options.nodes or 0, ranks or 0)
    if not active:
        raise hostfile.ResourceError("--exclude leaves no slot; name fewer")
    return active


def start(
    options: Options,
    active: Active,
    command: Sequence[str],
    *,
    threads: int | None = None,
    saves: bool = False,
    variables: dict[str, str] | None = None,
    files: Sequence[str] = (),
    interrupt_saves: bool = False,
) -> signal.Signals | None:
    """Run `python COMMAND` on the slots of `active`, and print what is started; with --dry-run, only print
    it. Returns the signal at which ranks saved and ended; `interrupt_saves`: see `LaunchOptions`."""
    from polyreme.launch import mpirun, several
    from polyreme.launch.options import LaunchOptions

    more = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    given = {**several.forwarded(options.env or ()), **(variables or {}), **more}
    ssh = shlex.split(options.ssh) if options.ssh else ["ssh"]
    if options.mpi:
        library, request = _by_mpi(options, active, command, given, ssh)
        if options.dry_run:
            return None
        return mpirun.run(library, request, saves=saves, interrupt_saves=interrupt_saves)
    launch_options, port = LaunchOptions(interrupt_saves=interrupt_saves), options.port or 0
    what = several.RankCommand(command, threads, saves, launch_options, files, variables=given, port=port)
    if options.ray:
        from polyreme.launch import ray_cluster

        ranks = len(next(iter(active.values())))
        return ray_cluster.run(ray_cluster.Request(ranks, len(active), options.cpus, options.gpu_count), what)
    if options.dry_run:
        for host, its in active.items():
            typer.echo(
                f"{host}, {len(its)} rank{'s' * (len(its) > 1)}: {shlex.join(several.login(host, ssh))}"
            )
        return None
    return several.run(active, what, ssh=ssh)


def _by_mpi(
    options: Options, active: Active, command: Sequence[str], variables: dict[str, str], ssh: Sequence[str]
) -> tuple[Library, Request]:
    """Return the request to mpirun, and print its command."""
    from polyreme.launch import mpirun, several

    if path := several.python_path():
        variables = {"PYTHONPATH": path, **variables}
    hosts = mpirun.ranks_of(active)
    if options.port:
        raise typer.BadParameter("over MPI ranks meet where rank 0 says: leave it out", param_hint="--port")
    library = mpirun.find()
    logins = [*ssh, *several.SSH]  # which ask nothing, and end where a host does not answer
    request = mpirun.Request(command, hosts, variables, logins, options.interface, options.mpirun or ())
    typer.echo(mpirun.shown(library, request), err=not options.dry_run)
    return library, request
