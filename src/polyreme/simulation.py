"""An engine on one rank of a run of any size that does not exist: for plans, and for what one rank does.

Invariant: this rank does what it would do in that run; every other one is taken to give what it gives
(`distributed.simulated`). Communication: none; `mesh.traffic()` tells what there would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from polyreme.config import Config
from polyreme.distributed.mesh import SimulatedMesh
from polyreme.distributed.without_numbers import WithoutNumbers
from polyreme.engine import Engine
from polyreme.errors import WARNS
from polyreme.placement.opening import Model

META = torch.device("meta")


@contextmanager
def simulated(
    model: Model, config: Config, rank: int, device: torch.device = META, **given: Any
) -> Iterator[Engine]:
    """The engine of rank `rank` of the run that `config`, resolved, is of; inside, it is used as any other,
    and at the end it is closed. `given`: what `initialize` takes beside model and config.

    On the meta device it takes no memory for the model, which is to be a function that builds one, and has no
    numbers: a step counts its bytes and calls, its loss is NaN, and its norm 0. Batches are real, for their
    tokens are counted. Raises what `initialize` would."""
    warns = WARNS.get()
    mesh = SimulatedMesh.of(config.axes, config.mesh.order, rank, device)
    with nullcontext() if mesh.has_numbers else WithoutNumbers():
        try:
            with Engine(model, config, mesh, **given) as engine:
                yield engine
        finally:
            WARNS.set(warns)
