"""An engine on one rank of a run of any size that does not exist: for plans, and to see what one rank does.

Invariant: this rank does what it would do in that run; every other rank is taken to send what this one sends
(`distributed.simulated`). Communication: none; `mesh.traffic()` counts what there would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from polyreme.config import Config
from polyreme.distributed.mesh import SimulatedMesh
from polyreme.distributed.without_numbers import WithoutNumbers
from polyreme.engine import Engine
from polyreme.errors import WARNS, ModelError
from polyreme.placement.opening import Model

META = torch.device("meta")


class SimulatedEngine(Engine):
    """An engine whose other ranks do not exist, so that nothing can be had that needs their numbers."""

    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError: a checkpoint needs the numbers of all ranks."""
        raise ModelError(_NO_OTHERS.format("save", "save from a run"))

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError: whole tensors are divided over ranks that do not exist."""
        raise ModelError(_NO_OTHERS.format("load_state_dict", "engine.load(path) reads this rank's part"))


_NO_OTHERS = "engine.{} on a simulated rank: the other ranks and their numbers do not exist: {}"


@contextmanager
def simulated(
    model: Model,
    config: Config,
    rank: int,
    device: torch.device = META,
    stands_for: torch.device | None = None,
    per_host: int | None = None,
    **given: Any,
) -> Iterator[Engine]:
    """Yield the engine of rank `rank` of the run of `config`, which is resolved, and close it at the end.
    `given`: the arguments of `initialize` beside model and config. stands_for: the device that computes in
    that run; by default `device`, or a CPU for the meta device. per_host: ranks of each host; by default as
    many as this one has GPUs, or all.

    On the meta device the model, which must be a function that builds one, takes no memory and has no
    numbers: a step counts its bytes and calls, its loss is NaN, and its norm 0. Batches are real, as their
    tokens are counted. Raises what `initialize` would."""
    warns, config = WARNS.get(), Config.load(config)
    if device == META and isinstance(model, nn.Module):
        raise ModelError(
            "the model is a module, but a rank on the meta device has no numbers: give a function that "
            'builds it, such as lambda: Model(config); or device=torch.device("cpu")'
        )
    mesh = SimulatedMesh.of(
        config.axes, config.mesh.order, rank, device, stands_for=stands_for, per_host=per_host
    )
    with nullcontext() if mesh.has_numbers else WithoutNumbers():
        try:
            with SimulatedEngine(model, config, mesh, **given) as engine:
                yield engine
        finally:
            WARNS.set(warns)
