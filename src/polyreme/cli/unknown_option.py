"""Explain an option that a command does not have: it may be another launcher's, or a key of the config."""

from __future__ import annotations

from typing import Any

RANKS = {"nproc_per_node", "nproc", "np", "num_processes", "num_gpus", "world_size", "ntasks", "devices"}
"""Names that other launchers give to the number of ranks of a host."""
NODES = {"nnodes", "num_nodes", "num_machines"}


def explain(error: Any) -> None:
    """Add to the usage error of an unknown option which option or key does the same, where that is known."""
    if not hasattr(error, "possibilities") or error.ctx is None:
        return
    name = error.option_name.lstrip("-").replace("-", "_")
    options = {option for each in error.ctx.command.params for option in each.opts}
    if name in RANKS and "-n" in options:
        instead = "-n RANKS starts that many ranks"
    elif name in NODES and "--nodes" in options:
        instead = (
            "--nodes HOSTS runs on that many, with --hostfile, --slurm or another of the cluster's options"
        )
    elif "--set" in options and (key := _key(name)) is not None:
        instead = f"it is a key of the config: --set {key}"
    else:
        return
    error.message, error.possibilities = f"{error.message.rstrip('.')}: {instead}", None


def _key(name: str) -> str | None:
    """Return the key of the config with this name, and how to write its value; None if there is none."""
    from polyreme.config.loading import ACCUMULATION, ELSEWHERE, EPOCHS
    from polyreme.config.schema import LEAVES, SECTIONS

    if name in EPOCHS:
        return 'train.length="N samples", N being the number of epochs times that of samples in the data'
    if name in ACCUMULATION:
        return "batch.micro=N, N being batch.size / (dp x the micro-batches of a step on each rank)"
    named = [key for key in LEAVES if name in (key, key.replace(".", "_"))]
    named += [key for key in (ELSEWHERE.get(name),) if key is not None]
    alike = [key for key in LEAVES if key.rpartition(".")[2] == name]
    if not named and len(alike) != 1:
        return None
    key = (named or alike)[0]
    return f"{key}.name=VALUE" if key in SECTIONS else f"{key}=VALUE"
