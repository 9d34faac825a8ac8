"""Show the memory that ranks will need to people and programs. Rendering only: figures come from
`step.memory.dry_run` and `placement.memory_model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from polyreme.cli.folding import binary, decimal
from polyreme.config import Config
from polyreme.layout.mesh_axes import lines


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank of axis pp, the first one on every other axis.

    `rank`: its place on axis pp. `parameters`: how many numbers of the model it works on. `memory`: bytes
    between steps, as `Engine.memory` has them. `working_set`: the most bytes that a step takes, as
    `Engine.working_set` has them. Both are by category and without activations."""

    rank: int
    parameters: int
    memory: dict[str, int]
    working_set: dict[str, int]

    @property
    def transient(self) -> int:
        """Bytes of the device that a step allocates and frees again."""
        return sum(self.working_set[each] - self.memory[each] for each in ("parameters", "gradients"))

    @property
    def device(self) -> int:
        """The most bytes of the device that a step takes, without activations."""
        here = ("parameters", "gradients", "states", "buffers")
        return sum(self.memory[each] for each in here) + self.transient

    @property
    def files(self) -> int:
        """Bytes in files."""
        return sum(size for each, size in self.memory.items() if each.endswith("_files"))


def of_ranks(config: Config) -> list[RankMemory]:
    """Return the memory of each rank of axis pp, in their order, under a resolved config; none where its
    model is not known on this machine. Raises what `initialize` would raise about the model."""
    if config.model.path is None and config.model.config is None:
        return []
    # only here: most configs are shown without torch
    from polyreme.placement.memory_model import working_set
    from polyreme.planner.meta_model import expected
    from polyreme.step.memory.dry_run import place
    from polyreme.step.settings import run_settings

    sizes: dict[str, int] = {name: getattr(config.mesh, name) for name in config.mesh.order}
    found = []
    for at, rank in enumerate(lines(sizes, config.mesh.order, "pp")[0]):
        if (model := expected(config.model, config.data)) is None:
            return []
        placed = place(model, run_settings(config), rank)
        works = working_set(placed.placement, config.zero.prefetch)
        works["states"] += placed.sharded_optimizer.nbytes
        found.append(RankMemory(at, placed.parameters, placed.memory, works))
    return found


def fitted(config: Config) -> tuple[Config, str | None]:
    """Return a resolved config with micro-batches that fit ranks on this machine, and the reason; None where
    the config gives their size, or names no model. Where nothing fits, the config stays as it is, since its
    ranks may be on another machine."""
    if config.origins["batch.micro"] != "derived" or (config.model.path is config.model.config is None):
        return config, None
    # only here: most configs are shown without torch
    from polyreme.job import fit

    found = fit.fit(config, fit.memory_of_ranks(config))
    here = "as on this machine" if found.fits else "on a machine like this"
    micro = found.micro if found.fits else None
    return (config if micro is None else config.fitted(micro)), f"{found.reason}, {here}"


COLUMNS: dict[str, Callable[[RankMemory], int]] = {
    "weights": lambda rank: rank.memory["parameters"] + rank.memory["buffers"],
    "gradients": lambda rank: rank.memory["gradients"],
    "states": lambda rank: rank.memory["states"],
    "in a step": lambda rank: rank.transient,
    "device": lambda rank: rank.device,
    "host": lambda rank: rank.working_set["tiers"],
    "files": lambda rank: rank.files,
}
"""The columns about a rank. "host" includes the memory through which files go."""


def render(config: Config) -> Group:
    """Return the memory of ranks as a table; see `of_ranks`."""
    ranks = of_ranks(config)
    if not ranks:
        return Group()
    shown = {
        name: [value(rank) for rank in ranks]
        for name, value in COLUMNS.items()
        if name not in ("host", "files") or any(value(rank) for rank in ranks)
    }
    table = Table(
        title="memory of a rank, beside activations"
        + (", by its place on axis pp" if len(ranks) > 1 else ""),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0 if len(shown) > 5 else 1),  # all are as wide as a terminal
    )
    for name in (*(("pp",) if len(ranks) > 1 else ()), "parameters", *shown):
        table.add_column(name, justify="right")
    for at, rank in enumerate(ranks):
        place = (str(rank.rank),) if len(ranks) > 1 else ()
        table.add_row(*place, decimal(rank.parameters), *(binary(column[at]) for column in shown.values()))
    return Group(table)
