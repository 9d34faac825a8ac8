"""initialize(): from a model and a config to an engine, with what the config leaves open chosen for the ranks
that there are.

Communication: what a config says and what is chosen, compared over all ranks; then that of `Engine`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from polyreme.config import Config
from polyreme.distributed.agreement import same_config
from polyreme.distributed.mesh import Mesh, everyone
from polyreme.engine import Engine
from polyreme.errors import OutOfMemoryError, warn
from polyreme.optim.groups import Make
from polyreme.placement.opening import Model
from polyreme.planner.choice import Subject, choose
from polyreme.planner.dry_run import MakeBatch
from polyreme.planner.shortage import advice_on
from polyreme.step.loss.objective import LossFn
from polyreme.step.memory.out_of_memory import Advise
from polyreme.step.settings import rendezvous_settings
from polyreme.step.user.arguments import named_as_ours
from polyreme.step.user.grad_mode import with_gradients


@named_as_ours
@with_gradients
def initialize(
    model: Model,
    config: str | Path | Mapping[str, Any] | Config,
    *,
    optimizer: Optimizer | type[Optimizer] | Make | None = None,
    lr_scheduler: Any = None,
    loss_fn: LossFn | None = None,
    batch: MakeBatch | None = None,
) -> Engine:
    """Make `model` ready to train as `config` says, on all ranks of the process group (or of the environment;
    or this one process).

    model: a module (rank 0's weights count; with mesh.pp, other stages' parameters may be on the meta device,
        and each stage's own count), a function without arguments that builds one (then never built
        whole: its own initialisation is replayed tensor by tensor, with the config's seed), a sequence of
        layers or of such functions, one for each layer, to be called one after the other, or a Hugging Face
        model directory.
    config: a file, a mapping, or a Config.
    optimizer: a torch.optim class (lr, weight decay, groups and options from the config), a factory such as
        `lambda params: torch.optim.AdamW(params, lr=3e-4)` (which decides all that itself), an optimizer made
        of the model's parameters (whose class and groups the shards' optimizers have, and whose options, as
        they are at each step, they follow), or None: the config's.
    lr_scheduler: a torch scheduler, or a function of an optimizer that returns one: followed in place of the
        config's schedule, and stepped after every step.
    loss_fn: see `polyreme.step.loss.objective.LossFn`; None: the model returns its loss.
    batch: a function that makes a batch of so many samples, of which only shapes and dtypes are read: for
        "auto" in mesh, pipeline and memory with a model that is not one of Hugging Face's.

    Raises ConfigError with every problem of the config, and ModelError for a model that cannot be trained.
    """
    given = config
    ranks = everyone(*rendezvous_settings(lambda: Config.load(given)))
    config = same_config(ranks, lambda: Config.load(given).settled(ranks.size))
    advise: Advise | None = None
    if config.searched or config.plan.ranks == ranks.size:
        subject = Subject.of(model, config, optimizer, loss_fn, batch)
        if config.searched:
            config, said = choose(ranks, config, subject)
            if ranks.rank == 0:
                warn(said, every=True)
        advise = advice_on(subject)
    config = config.resolve(ranks.size)
    mesh = Mesh.open(
        config.axes,
        config.mesh.order,
        timeout=timedelta(seconds=config.mesh.timeout),
        shared_memory=config.mesh.shared_memory,
        backend=config.mesh.backend,
    )
    try:
        engine = Engine(model, config, mesh, optimizer, lr_scheduler, loss_fn)
    except OutOfMemoryError as error:
        if advise is not None:
            error.add_note(advise(config, mesh, 0, None))
        raise
    engine.advise = advise
    return engine
