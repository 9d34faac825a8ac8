"""Runs steps of a model in parallel, as a config says, and in plain PyTorch, and compares them.

Invariant: both begin with the same weights and get the same samples; what the config has that is not to be
compared exactly (rounding, compilation, dropout) is turned off, and said.
Communication: that of the engine; the ranks' samples once a step, and their findings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyreme.config import Config
from polyreme.distributed.mesh import everyone
from polyreme.engine import Engine
from polyreme.errors import ConfigError, ModelError, Problem
from polyreme.initialization import initialize
from polyreme.models import huggingface
from polyreme.pipeline.partition import layers
from polyreme.placement.opening import Model
from polyreme.step.settings import rendezvous_settings
from polyreme.verify.report import Verdict
from polyreme.verify.steps import Steps

Mode = Literal["structure", "numerics"]
MICRO = 4
"""Samples of a micro-batch where the config leaves that open."""
CHANGES = (
    ("optimizer.states", '"fp32"', "moments in 8 or 16 bits are rounded at random"),
    ("zero.quantized_weights", "false", "it rounds to a byte"),
    ("zero.quantized_gradients", "false", "it rounds to a byte"),
    ("compile", "false", "a compiled block cannot be watched"),
)
"""Keys that are verified with another value, and why."""
Batches = Callable[[int], Any]
"""Returns this data-parallel rank's share of a step's global batch."""


def verify(
    model: Model,
    config: str | Path | dict[str, Any] | Config,
    batch: Any,
    *,
    optimizer: Any = None,
    loss_fn: Any = None,
    steps: int = 3,
    mode: Mode = "structure",
) -> Verdict:
    """Train `model` for some steps as `config` says, on all ranks, and in plain PyTorch on one device, and
    compare losses, norms, every gradient and every weight. All ranks must call, and get the same verdict.

    model, config, optimizer, loss_fn: as for `polyreme.initialize`; a module is copied, and stays as it is.
    batch: this data-parallel rank's share of a global batch, as for `Engine.train_step`, for every step; or
    a function of the step's number, from 0, that returns it.
    mode: "structure" computes in float64, so that no fault hides as rounding; "numerics" in the config's
    dtype, where each tensor may be off by as much as plain training in that dtype is.

    Every rank holds the whole model once more. Raises what `initialize` and `train_step` raise, ConfigError
    for a mode or a number of steps that there is not, and ModelError for a model that draws random numbers
    beside dropout."""
    batches = batch if callable(batch) and not isinstance(batch, Tensor) else lambda _: batch
    return verified(
        model, config, lambda _: batches, optimizer=optimizer, loss_fn=loss_fn, steps=steps, mode=mode
    )


def verified(
    model: Model,
    config: str | Path | dict[str, Any] | Config,
    batches: Callable[[Engine], Batches],
    whole: Batches | None = None,
    *,
    optimizer: Any = None,
    loss_fn: Any = None,
    steps: int = 3,
    mode: Mode = "structure",
) -> Verdict:
    """As `verify`. batches: returns the function that gives an engine its batches. whole: returns a step's
    global batch, as one process reads it."""
    loaded, said = settings(Config.load(config), mode, steps)
    optimizer_of = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    ours, theirs = _copied(model, optimizer_of), _copied(model, optimizer_of)
    with (
        torch.autograd.set_multithreading_enabled(False),  # recomputed forwards are in the watched thread
        initialize(ours[0], loaded, optimizer=ours[1] or optimizer, loss_fn=loss_fn) as engine,
    ):
        plain = built(theirs[0], loaded).to(engine.mesh.device)
        run = Steps(engine, plain, theirs[1] or optimizer, loss_fn, mode == "structure")
        run.notes += said
        run.begin(compare=isinstance(theirs[0], nn.Module | str | Path))
        give = batches(engine)
        for step in range(steps):
            batch = give(step)
            run.step(batch, None if whole is None else whole(step))
            if run.first is not None:
                break
        else:
            run.compare_draws(batch)
        return run.verdict(mode)


def settings(config: Config, mode: str, steps: int) -> tuple[Config, list[str]]:
    """Return the config under which a run is verified, and what was changed. Raises ConfigError."""
    checks = [
        (
            mode in ("structure", "numerics"),
            Problem("mode", mode, "there is no such mode", 'give "structure" or "numerics"'),
        ),
        (
            isinstance(steps, int) and steps > 0,
            Problem("steps", steps, "nothing would be compared", "give 1 or more"),
        ),
    ]
    if problems := [problem for is_right, problem in checks if not is_right]:
        raise ConfigError(problems)
    resolved = config.resolve(everyone(*rendezvous_settings(lambda: config)).size)
    micro = next(n for n in range(min(MICRO, resolved.share), 0, -1) if resolved.share % n == 0)
    own = [("batch.micro", str(micro), "it would be found out by trying")] * (config.batch.micro == "auto")
    # Copies that differ would end the run before it is said what made them differ.
    changes, notes = ["sentinels.enabled=false"], list[str]()
    changes += ['precision.compute="fp64"', 'precision.reduce="auto"'] * (mode == "structure")
    for key, to, why in (*CHANGES, *own):
        if (before := str(config.value(key)).lower()) != to.strip('"'):
            notes.append(f"{key} = {before} was verified as {to}: {why}")
            changes.append(f"{key}={to}")
    return Config.load(config, changes), notes


def _copied(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return copies of a model given as a module, or as layers, and of an optimizer of it."""
    if isinstance(model, nn.Module | list | tuple):
        return copy.deepcopy((model, optimizer))
    return model, None


def built(model: Any, config: Config) -> nn.Module:
    """Return the whole model of what was given as a module, a function, layers or a directory."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        if isinstance(model, str | Path):
            section = config.model
            found = huggingface.build(
                str(model), None, section.trust_remote_code,
                allow_missing=section.allow_missing, allow_unused=section.allow_unused,
            )  # fmt: skip
        else:
            model = layers(model) if isinstance(model, list | tuple) else model
            found = model if isinstance(model, nn.Module) else model()
    if any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers())):
        raise ModelError(
            "verify needs the whole model on each rank, but parts of it are on the meta device: give the "
            "function that builds it"
        )
    return found.train()
