"""Times collectives of torch tensors over gloo, MPI and shared memory, beside mpi4py's own, on one host or on
two, and a step of training over each.

    python bench/transport.py --library mpich --sizes 64K,1M,16M --rounds 10 --out bench/results/NAME.json
    python bench/transport.py --library mpich --hosts 2        # two namespaces, as root
    python bench/transport.py --sizes "" --step 60m            # a step alone, of a model of `cases`

All ways are timed in the same processes, in turns; a ratio is only ever taken between turns of one round:
mpi4py's time over a way's, above 1 where the way is faster; of a step, which has the weights' gathers and the
gradients' sums of stage 3, gloo's. mpi4py's reduce-scatter is the faster of the library's own and an
all-to-all with a sum. Exit status: 0, 1 where a rank failed, 2 for bad usage."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent / "tests")]
OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "message")
"""A message goes from each rank to the next one, all at the same time."""
WAYS = {
    "polyreme": "an axis, as in training: shared memory within a host, MPI between hosts",
    "polyreme, MPI alone": "an axis with mesh.shared_memory = false",
    "torch over MPI": 'torch.distributed over init_process_group("mpi")',
    "polyreme, gloo": "an axis over gloo with mesh.shared_memory = false",
    "torch over gloo": "torch.distributed over gloo; its reduce-scatter is an all-reduce",
}
RAW = "mpi4py"
STEP, AXES = "step", ("polyreme", "polyreme, MPI alone", "polyreme, gloo")
"""A whole step as an operation, and the ways that there are of it, the last of which it is compared to."""
MESHES: dict[str, dict[str, Any]] = dict(
    zip(AXES, ({}, {"shared_memory": False}, {"shared_memory": False, "backend": "gloo"}), strict=True)
)
UNITS = {"B": 1, "K": 2**10, "M": 2**20}


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


def sizes_of(options: argparse.Namespace) -> list[str]:
    return options.sizes.split(",") if options.sizes else []


# ---- on a rank


def serve(options: argparse.Namespace) -> None:
    """Time everything, as one of the ranks; rank 0 writes the seconds of every turn."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from polyreme.distributed.mesh import Mesh
    from polyreme.distributed.process_group import close

    torch.set_num_threads(1)
    comm, world = MPI.COMM_WORLD, {"dp": MPI.COMM_WORLD.size}
    axes = {name: Mesh.open(world, **mesh).dp for name, mesh in MESHES.items()}
    groups = {"torch over MPI": dist.group.WORLD, "torch over gloo": dist.new_group(backend="gloo")}
    found = []
    for operation in OPERATIONS:
        for size in sizes_of(options):
            turns = _turns(operation, size_of(size) // 4, comm, axes, groups)
            found += _timed(operation, size, turns, options.rounds, comm)
    if options.step:
        turns, losses = _steps(options, comm)
        found += _timed(STEP, options.step, turns, options.rounds, comm)
        assert len({tuple(each) for each in losses.values()}) == 1, losses  # the same work over each
    if comm.rank == 0:
        options.serve.write_text(json.dumps({"turns": found}))
    close()


def _timed(
    operation: str, size: str, turns: dict[str, Callable[[], object]], rounds: int, comm: Any
) -> list[dict[str, Any]]:
    """The seconds of every turn."""
    from mpi4py import MPI

    found = []
    for number in range(rounds + 2):  # the first two warm up
        names = list(turns)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            comm.Barrier()
            began = time.perf_counter()
            turns[name]()
            seconds = comm.allreduce(time.perf_counter() - began, MPI.MAX)
            if number >= 2:
                turn = {"operation": operation, "size": size, "way": name, "round": number, "s": seconds}
                found.append(turn)
    return found


def _steps(
    options: argparse.Namespace, comm: Any
) -> tuple[dict[str, Callable[[], object]], dict[str, list[float]]]:
    """By way, what trains one step at stage 3, and the losses that come of it."""
    from cases import Job, build_batch, build_model
    from systems.polyreme_zero import initialize

    job = Job(STEP, options.step, "fp32", options.batch, options.sequence, comm.rank, comm.size, 1)
    turns: dict[str, Callable[[], object]] = {}
    losses: dict[str, list[float]] = {name: [] for name in AXES}
    for name in AXES:
        engine = initialize(build_model(options.step), job, stage=3, mesh=MESHES[name])

        def step(engine: Any = engine, losses: list[float] = losses[name]) -> None:
            losses.append(engine.train_step(build_batch(job, len(losses), [comm.rank])).loss)

        turns[name] = step
    return turns, losses


def _turns(
    operation: str, numbers: int, comm: Any, axes: Any, groups: Any
) -> dict[str, Callable[[], object]]:
    """By way, what does the operation once, of `numbers` fp32 numbers in all."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    n, rank = comm.size, comm.rank
    mine, other = torch.ones(numbers), torch.empty(numbers)

    def of_axis(axis: Any) -> Callable[[], object]:
        full = axis.empty(numbers, torch.float32, torch.device("cpu")).fill_(1)
        part = axis.empty(numbers // n, torch.float32, torch.device("cpu")).fill_(rank)
        return {
            "all-gather": lambda: axis.all_gather(full, part).settle(),
            "reduce-scatter": lambda: axis.reduce_scatter(part, full).settle(),
            "all-reduce": lambda: axis.all_reduce(full).settle(),
            "all-to-all": lambda: axis.all_to_all(other, full).settle(),
            "message": lambda: _message(axis, mine, other),
        }[operation]

    turns = {name: of_axis(axis) for name, axis in axes.items()}
    full, part = torch.ones(numbers), torch.ones(numbers // n)

    def of_group(name: str, group: Any) -> Callable[[], object]:
        def all_reduce() -> None:
            dist.all_reduce(full, group=group)

        def reduce_scatter() -> None:
            dist.reduce_scatter_single(part, full, group=group)

        return {
            "all-gather": lambda: dist.all_gather_single(full, part, group=group),
            "reduce-scatter": all_reduce if "gloo" in name else reduce_scatter,
            "all-reduce": all_reduce,
            "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group),
            "message": lambda: _torch_message(group, full, n, rank),
        }[operation]

    turns |= {name: of_group(name, group) for name, group in groups.items()}
    whole, shard, received = full.numpy(), part.numpy(), torch.empty(numbers)

    def exchanged() -> None:
        comm.Alltoall(whole, received.numpy())
        torch.sum(received.view(n, -1), 0, out=part)

    raw = {
        "all-gather": {RAW: lambda: comm.Allgather(shard, whole)},
        "reduce-scatter": {
            RAW: lambda: comm.Reduce_scatter_block(whole, shard),
            f"{RAW}, all-to-all": exchanged,
        },
        "all-reduce": {RAW: lambda: comm.Allreduce(MPI.IN_PLACE, whole)},
        "all-to-all": {RAW: lambda: comm.Alltoall(whole, received.numpy())},
        "message": {
            RAW: lambda: comm.Sendrecv(whole, (rank + 1) % n, 0, received.numpy(), (rank - 1) % n, 0)
        },
    }[operation]
    return {**turns, **raw}


def _message(axis: Any, sent: Any, received: Any) -> None:
    sending = axis.send(sent, (axis.rank + 1) % axis.size)
    axis.receive(received, (axis.rank - 1) % axis.size).wait()
    sending.settle()


def _torch_message(group: Any, sent: Any, size: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    sending: Any = dist.isend(sent, group=group, group_dst=(rank + 1) % size)
    dist.recv(torch.empty_like(sent), group=group, group_src=(rank - 1) % size)
    sending.wait()


# ---- the table


def rows(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each operation, size and way: the median milliseconds, and the median of its ratios to mpi4py, or
    to gloo."""
    seconds: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for turn in turns:
        ways = seconds.setdefault((turn["operation"], turn["size"]), {})
        ways.setdefault(turn["way"], {})[turn["round"]] = turn["s"]
    found = []
    for (operation, size), ways in seconds.items():
        other = ways.pop(f"{RAW}, all-to-all", None)
        if other and statistics.median(other.values()) < statistics.median(ways[RAW].values()):
            ways[RAW] = other
        base = ways[AXES[-1] if operation == STEP else RAW]
        for way, each in ways.items():
            ratio = statistics.median(base[number] / s for number, s in each.items())
            ms = 1e3 * statistics.median(each.values())
            found.append({"operation": operation, "size": size, "way": way, "ms": ms, "ratio": ratio})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """As Markdown: the milliseconds of what each row is compared to, and each way's ratio."""
    lines = [
        f"| operation | size | compared to (ms) | {' | '.join(WAYS)} |",
        "|---|---|---" + "|--:" * len(WAYS) + "|",
    ]
    for operation, size in dict.fromkeys((row["operation"], row["size"]) for row in found):
        by = {row["way"]: row for row in found if (row["operation"], row["size"]) == (operation, size)}
        ratios = " | ".join(f"{by[way]['ratio']:.2f}" if way in by else "" for way in WAYS)
        base = AXES[-1] if operation == STEP else RAW
        lines.append(f"| {operation} | {size} | {base} ({by[base]['ms']:.2f}) | {ratios} |")
    return "\n".join(lines)


# ---- the conductor


def load() -> str:
    """How busy the machine has been."""
    return f"Load {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores, in the last five minutes."


def start(
    library: str, ranks: int, on: int, arguments: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the ranks, on this host or on two of `hosts`."""
    import mpirun

    words = mpirun.command(library, ranks, str(BENCH / "transport.py"), *arguments)
    if on == 1:
        return subprocess.run(words, env=mpirun.variables(), capture_output=True, text=True, timeout=1800)
    from hosts import hosts
    from ssh import logins

    with hosts(on) as made:
        login = logins(made, folder)
        enter = folder / "login"
        enter.write_text(f'#!/bin/sh\nexec {" ".join(login)} "$@"\n')
        enter.chmod(0o755)
        names = ",".join(f"{host.name}:{ranks // on}" for host in made)
        across = {
            "mpich": ["-launcher", "ssh", "-launcher-exec", str(enter), "-hosts", names, "-iface", "eth0"],
            "openmpi": [
                "--host", names, "--map-by", "node", "--mca", "plm_ssh_agent", str(enter),
                "--mca", "btl_tcp_if_include", "eth0", "--prtemca", "oob_tcp_if_include", "eth0",
                "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS",
            ],
        }[library]  # fmt: skip
        process = made[0].popen(words[0], *across, *words[1:], variables=mpirun.variables())
        printed = process.communicate(timeout=1800)[0]
        return subprocess.CompletedProcess(words, process.returncode, printed, "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default="mpich", choices=("mpich", "openmpi"))
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--ranks", type=int, default=2, help="in all")
    parser.add_argument("--sizes", default="16B,2K,64K,256K,1M,4M,16M,64M", help="bytes of the whole buffer")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--step", default="", metavar="SIZE", help="also a step of this model, such as 60m")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sample")
    parser.add_argument("--out", type=Path, help="the result as JSON, and beside it as Markdown")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "turns"
        given = ("sizes", "rounds", "step", "batch", "sequence")
        arguments = [f"--serve={out}", *(f"--{name}={getattr(options, name)}" for name in given)]
        ran = start(options.library, options.ranks, options.hosts, arguments, Path(temporary))
        if ran.returncode or not out.exists():
            print(ran.stdout, ran.stderr, file=sys.stderr)
            return 1
        result = json.loads(out.read_text())
    found = rows(result["turns"])
    where = f"{options.ranks} ranks on {options.hosts} host{'s' * (options.hosts > 1)}, {options.library}"
    ways = "\n".join(f"- {name}: {what}" for name, what in WAYS.items())
    what = (
        f"The time of what a row is compared to over each way's, median of {options.rounds} rounds; "
        f"above 1 is faster. {load()}"
    )
    text = f"# Transport: {where}\n\n{what}\n\n{table(found)}\n\n{ways}\n"
    print(text)
    if options.out:
        options.out.write_text(
            json.dumps({"command": sys.argv, "where": where, "rows": found}, indent=1) + "\n"
        )
        options.out.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
