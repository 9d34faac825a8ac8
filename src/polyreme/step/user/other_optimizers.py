"""The refusal of calls that would do nothing, of optimizers that a script made of parameters which an engine
trains.

Invariant: an optimizer without such parameters steps as in plain torch, and an engine's own are not checked.
No communication."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from polyreme.errors import ModelError
from polyreme.step.user.optimizer_view import SPREAD
from polyreme.zero.parameter import is_trained, name_of


def refuse_calls(given: Optimizer) -> list[RemovableHandle]:
    """Make `step`, `state_dict` and `load_state_dict` of an optimizer that was given to an engine raise
    ModelError, until the returned handles are removed."""
    return [
        given.register_step_pre_hook(_refuse_given),
        given.register_state_dict_pre_hook(_refuse_saving),
        given.register_load_state_dict_pre_hook(_refuse_states),
    ]


def is_given(optimizer: Optimizer) -> bool:
    """Return whether the optimizer was given to a live engine."""
    return _refuse_given in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()


def _refuse_given(optimizer: Optimizer, *_: Any) -> None:
    raise ModelError(
        f"{type(optimizer).__name__}.step() of an optimizer that was given to an engine, whose shards have "
        "optimizers of their own: call engine.step(), or engine.optimizer.step()"
    )


def _refuse_saving(optimizer: Optimizer) -> None:
    raise ModelError(SPREAD)


def _refuse_states(optimizer: Optimizer, *_: Any) -> None:
    raise ModelError(
        f"{type(optimizer).__name__}.load_state_dict() of an optimizer that was given to an engine, whose "
        "shards have the states: engine.save(path) writes and engine.load(path) reads them, "
        "engine.numbers(parameter).set_whole(name, tensor) sets one"
    )


def _refuse_others(optimizer: Optimizer, *_: Any) -> None:
    """Raise ModelError for a step over an engine's parameters by an optimizer that is no engine's and was
    given to none."""
    if getattr(optimizer, "is_of_engine", False) or is_given(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_trained(parameter):
                kind = type(optimizer).__name__
                raise ModelError(
                    f"{kind}.step() over {name_of(parameter)}, which an engine trains: its "
                    "gradients and updates are the engine's. engine.train_step makes the step itself, and so "
                    f"does engine.step() after backward. To train by this {kind}, make it of "
                    "model.parameters() before, and give it: initialize(model, config, optimizer=...)"
                )


register_optimizer_step_pre_hook(_refuse_others)
# once for the process: hooks for each engine would come and go while another thread steps
