"""The reduced gradients of a step, between its last backward and its update, for the user to read, measure,
scale and clip.

Invariant: they are those of the mean loss over the whole global batch, the same for any layout. All ranks
call alike.
Communication: one small all-reduce over each axis for norms of parameters, and for the global one after
`scale_`; all-gathers for whole tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.errors import ModelError
from polyreme.placement.placement import Placement
from polyreme.step.step import Step, measure


class Gradients:
    """The result of `Engine.gradients`, valid until the update.

    Raises ModelError where it is used later, and for gradients that are in files (`memory.gradients`), except
    by `norm` and `clip_`."""

    def __init__(self, placement: Placement, mesh: Mesh, step: Step) -> None:
        self._placement, self._mesh, self._step, self._of = placement, mesh, step, step.state.step

    @property
    def norm(self) -> float:
        """The global norm, as `StepResult.grad_norm`."""
        self._check()
        return self._step.norm

    def norms(self) -> dict[str, float]:
        """Return the norm of each parameter's gradient, by the first of its names, without gathering
        gradients."""
        self._check()
        buckets = self._placement.trainable
        squares = torch.cat(
            [bucket.gradients.squares_by_slot() for bucket in buckets]
            or [torch.zeros(0, dtype=torch.float64)]
        )
        self._mesh.axis("loss", "tp").all_reduce(squares).wait()
        found: dict[str, float] = {}
        names = [names[0] for bucket in buckets for names, _ in self._placement.named(bucket)]
        by_stage: list[Any] = self._mesh.pp.gather_objects(dict(zip(names, squares.tolist(), strict=True)))
        for stage in by_stage:
            for name, square in stage.items():
                found[name] = found.get(name, 0.0) + square
        # in the order of registration
        in_order = [name for name in self._placement.division.parameters if name in found]
        return {name: math.sqrt(found[name]) * self._step.to_mean for name in in_order}

    def whole(self) -> dict[str, Tensor]:
        """Return copies of all gradients, whole, under each of their parameters' names, on every rank. They
        take as much memory as the model."""
        self._check()
        return {
            name: tensor * self._step.to_mean
            for names, tensor in self._placement.gradients()
            for name in names
        }

    def clip_(self, max_norm: float) -> float:
        """Clip to this global norm in this step, instead of `optimizer.clip`. Returns the norm before."""
        self._check()
        return self._step.clip_at(max_norm)

    def scale_(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradients of the named parameters, the same on all ranks. Clipping comes after it."""
        self._check()
        where, known = self._placement.where, self._placement.division.parameters
        if unknown := [
            name for name in factors if name not in known or (name in where and not where[name][0].trainable)
        ]:
            raise ModelError(
                f"{unknown[0]} is no parameter that is trained: scale_ takes the names that norms() has"
            )
        for name, factor in factors.items():
            if name in where:
                where[name][0].gradients.scale(where[name][1], factor)
        measure(self._step)

    def _check(self) -> None:
        if self._step.order.phase != "reduced" or self._step.state.step != self._of:
            raise ModelError(
                "these gradients are gone: engine.gradients() "
                "holds from the last backward of a step to its step()"
            )
