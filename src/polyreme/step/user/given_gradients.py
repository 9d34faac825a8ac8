"""Gradients that a script sets by hand (`parameter.grad = tensor`), in the place of a backward.

Invariant: a parameter whose gradient was set is in the step's `given` until the step, or a restart of it,
takes the gradient away. No communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyreme.errors import ModelError
from polyreme.optim.groups import Recipe
from polyreme.zero.parameter import OWN_GRAD, name_of

if TYPE_CHECKING:
    from polyreme.placement.placement import Placement
    from polyreme.step.step import Step


def take(given: set[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Take the gradients that were set away from their parameters. Returns pairs of both."""
    taken = [(parameter, OWN_GRAD.__get__(parameter)) for parameter in given]
    given.clear()
    for parameter, _ in taken:
        OWN_GRAD.__set__(parameter, None)
    return taken


def backwards(step: Step) -> int:
    """Return how many backwards a step has had. Gradients that were set are one, of this rank's mean loss
    times the loss scale."""
    if step.given:
        products = [(p.double() * gradient.double()).sum() for p, gradient in take(step.given)]
        step.scale(products[0])
        step.enter(1.0, 0, 0)
        torch.autograd.backward(products)
        step.leave()
    return step.order.microbatches


def refuse(given: set[Tensor]) -> None:
    """Raise ModelError where a backward begins that would add to a gradient that was set."""
    for parameter in given:
        raise ModelError(
            f"{name_of(parameter)}.grad was set, and a backward would add to it: "
            "call step() before, or set it to None"
        )


def refuse_older(model: nn.Module, made: Recipe, before: Placement) -> None:
    """Raise ModelError where a parameter that joins a group of the optimizer has a gradient from earlier
    backwards."""
    trained = {id(parameter) for bucket in before.trainable for parameter in bucket.parameters}
    for name, parameter in model.named_parameters():
        older = made.trains(name, parameter) and id(parameter) not in trained
        if older and OWN_GRAD.__get__(parameter) is not None:
            raise ModelError(
                f"{name}.grad is the sum of the backwards before it was in a group of the optimizer, and "
                "would go into its first step: call model.zero_grad() before add_param_group"
            )
