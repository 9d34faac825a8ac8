"""What ranks will have in memory, as people and programs read it. Rendering only: figures come from
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
    """What a rank of axis pp, the first one on every other axis, will have in memory.

    rank: its place on axis pp; parameters: how many numbers of the model it works on; memory: bytes between
    steps, as `Engine.memory` has them, and working_set: the most bytes that a step takes, as
    `Engine.working_set` has them, both by category and without activations."""

    rank: int
    parameters: int
    memory: dict[str, int]
    working_set: dict[str, int]

    @property
    def coming(self) -> int:
        """Bytes of the device that come in a step, and go again."""
        return sum(self.working_set[each] - self.memory[each] for each in ("parameters", "gradients"))

    @property
    def device(self) -> int:
        """All bytes of the device."""
        here = ("parameters", "gradients", "states", "buffers")
        return sum(self.memory[each] for each in here) + self.coming

    @property
    def files(self) -> int:
        """All bytes of files."""
        return sum(size for each, size in self.memory.items() if each.endswith("_files"))


def of_ranks(config: Config) -> list[RankMemory]:
    """What each rank of axis pp will have, in their order, under a resolved config; nothing where its model
    is not known on this machine. Raises what `initialize` would of the model."""
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
        works["states"] += placed.updates.nbytes
        found.append(RankMemory(at, placed.parameters, placed.memory, works))
    return found


def fitted(config: Config) -> tuple[Config, str | None]:
    """A resolved config with the micro-batches that fit ranks on this machine, and why; None where the config
    says how large they are, or names no model. Where nothing fits, ranks are meant to be elsewhere."""
    if config.origins["batch.micro"] != "derived" or (config.model.path is config.model.config is None):
        return config, None
    # only here: most configs are shown without torch
    from polyreme.job import fit

    found = fit.fit(config, fit.memory_of_ranks(config))
    here = "as on this machine" if found.fits else "on a machine like this"
    micro = found.micro if found.fits else None
    return (config if micro is None else config.fitted(micro)), f"{found.reason}, {here}"


COLUMNS: dict[str, Callable[[RankMemory], int]] = {
    "weights": lambda part: part.memory["parameters"] + part.memory["buffers"],
    "gradients": lambda part: part.memory["gradients"],
    "states": lambda part: part.memory["states"],
    "in a step": lambda part: part.coming,
    "device": lambda part: part.device,
    "host": lambda part: part.working_set["tiers"],
    "files": lambda part: part.files,
}
"""What is told of a rank. host: with the memory through which files go."""


def render(config: Config) -> Group:
    """What ranks will have, as a table; see `of_ranks`."""
    parts = of_ranks(config)
    if not parts:
        return Group()
    shown = {
        name: [value(part) for part in parts]
        for name, value in COLUMNS.items()
        if name not in ("host", "files") or any(value(part) for part in parts)
    }
    table = Table(
        title="memory of a rank, beside activations"
        + (", by its place on axis pp" if len(parts) > 1 else ""),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0 if len(shown) > 5 else 1),  # all are as wide as a terminal
    )
    for name in (*(("pp",) if len(parts) > 1 else ()), "parameters", *shown):
        table.add_column(name, justify="right")
    for at, part in enumerate(parts):
        place = (str(part.rank),) if len(parts) > 1 else ()
        table.add_row(*place, decimal(part.parameters), *(binary(column[at]) for column in shown.values()))
    return Group(table)
