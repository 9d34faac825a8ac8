"""The zero-bubble schedules with real ranks: what B and W each do, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import models
import polyreme
import probe
import training
from examples import whole
from polyreme.pipeline.schedule import build, halves
from polyreme.pipeline.weight_gradients import current
from polyreme.step.step import Step
from polyreme.tensor import ops
from polyreme.zero.bucket_gradients import BucketGradients
from pool import Ranks

ACCUMULATION = 4


@contextmanager
def watched(events: list[str]) -> Iterator[None]:
    """Note each backward, or half of one, when it begins, the products for weights put off, and the
    reductions of buckets."""
    whole = Step.differentiate
    inputs = Step.differentiate_inputs
    product = ops.Shape.weight_grad
    reduce = BucketGradients.reduce

    def differentiate(self: Step, stage: int, *rest: Any) -> None:
        events.append(f"{stage}B")
        whole(self, stage, *rest)

    def differentiate_inputs(self: Step, stage: int, *rest: Any) -> Callable[[], None]:
        events.append(f"{stage}B")
        compute = inputs(self, stage, *rest)

        def weights() -> None:
            events.append(f"{stage}W")
            compute()

        return weights

    def weight_grad(self: ops.Shape, *tensors: torch.Tensor) -> torch.Tensor:
        events.append("product")
        return product(self, *tensors)

    def noted(self: BucketGradients) -> None:
        events.append("reduction")
        reduce(self)

    with (
        mock.patch.object(Step, "differentiate", differentiate),
        mock.patch.object(Step, "differentiate_inputs", differentiate_inputs),
        mock.patch.object(ops.Shape, "weight_grad", weight_grad),
        mock.patch.object(BucketGradients, "reduce", noted),
    ):
        yield


def step(
    rank: int, world: int, schedule: Any, stage: int, recompute: bool
) -> tuple[list[str], dict[int, int], int]:
    """What happened in one step; how many linear layers each of the rank's stages has, and how many buckets
    the rank."""
    engine = polyreme.initialize(
        models.llama(num_hidden_layers=5),
        training.config(
            world // 2,
            ACCUMULATION,
            mesh={"pp": 2},
            zero={"stage": stage, "reduce_every": "microbatch" if stage > 1 else "step"},
            pipeline={"schedule": schedule},
            memory={"activations": "recompute" if recompute else "keep"},
        ),
        loss_fn=models.causal_loss,
    )
    dp = engine.mesh.dp
    events: list[str] = []
    with watched(events):
        engine.train_step(
            models.share(models.batch_of("llama", training.SAMPLES, 0, torch.float32), dp.rank, dp.size)
        )
    return events, linear_layers(engine), len(probe.trainable(engine))


def linear_layers(engine: polyreme.Engine) -> dict[int, int]:
    """Of each of the rank's stages."""
    return {index: 7 * blocks + is_last for index, (blocks, is_last) in probe.stages(engine).items()}


@pytest.mark.parametrize(
    ("schedule", "stage", "recompute"), [("1f1b-w", 2, False), ("zb-h1", 3, True), ("zb-v", 1, False)]
)
def test_b_leaves_products_and_reductions_to_w(
    ranks: Ranks, schedule: Any, stage: int, recompute: bool
) -> None:
    rows = build(schedule, 2, ACCUMULATION)
    pp_rank = lambda rank: rank // 2  # noqa: E731  pp is outermost
    for rank, (events, linear, buckets) in enumerate(ranks(4, step, schedule, stage, recompute)):
        parts: list[tuple[str, list[str]]] = []  # each half with what happened in it
        for event in events:
            if event in ("product", "reduction"):
                parts[-1][1].append(event)
            else:
                parts.append((event, []))
        actions = [action for action in rows[pp_rank(rank)] if action.op in ("B", "W")]
        assert [name for name, _ in parts] == [f"{a.stage}{a.op}" for a in actions]
        halved = halves([actions])
        for action, (_, done) in zip(actions, parts, strict=True):
            assert done.count("product") == (linear[action.stage] if action.op == "W" else 0)
            assert action not in halved or not done
        reductions = sum(done.count("reduction") for _, done in parts)
        assert reductions == buckets * (ACCUMULATION if stage > 1 else 1)
        last = parts[-1][1]
        # stages have several blocks: the last's gradients are reduced while others are computed
        if schedule == "zb-h1" and rank > 1:
            assert last.index("reduction") < len(last) - 1 - last[::-1].index("product")


def listening(rank: int, world: int, schedule: str) -> tuple[list[float], int, int, int]:
    """Gradient norms of two steps. Of the last: how often a hook of the user's on a weight heard of its
    gradient, how many products were added in place, and how many linear layers the rank has."""
    config = training.config(
        1, ACCUMULATION, mesh={"pp": 2}, precision={"compute": "fp64"}, pipeline={"schedule": schedule}
    )
    engine = polyreme.initialize(models.llama(num_hidden_layers=4), config, loss_fn=models.causal_loss)
    heard = added = 0

    def hear(parameter: torch.Tensor) -> None:
        nonlocal heard
        heard += current() is None  # in the first half autograd calls it, too, without a gradient

    product = ops.Shape.weight_grad

    def weight_grad(
        self: ops.Shape, grad: Any, x: Any, weight: Any, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        nonlocal added
        added += into is not None
        return product(self, grad, x, weight, into)

    weight = next(
        p for name, p in engine.module.named_parameters() if p.dim() == 2 and p.numel() and "layers" in name
    )
    weight.register_post_accumulate_grad_hook(hear)
    norms = []
    for step in range(2):
        heard = added = 0
        with mock.patch.object(ops.Shape, "weight_grad", weight_grad):
            norms.append(
                engine.train_step(models.batch_of("llama", training.SAMPLES, step, torch.float64)).grad_norm
            )
    return norms, heard, added, linear_layers(engine)[rank]


def test_w_adds_products_to_the_buckets(ranks: Ranks) -> None:
    """From the second micro-batch on, but for weights for whose gradients somebody listens."""
    expected = ranks(2, listening, "1f1b")
    for rank, (norms, heard, added, linear) in enumerate(ranks(2, listening, "zb-h1")):
        torch.testing.assert_close(norms, expected[rank][0], rtol=1e-10, atol=0)
        assert heard == ACCUMULATION
        assert added == (rank > 0) * (linear - 1) * (ACCUMULATION - 1)  # the first rank divides none


def precisions(rank: int, world: int, schedule: str) -> list[list[float]]:
    found = []
    for precision in ({"compute": "bf16"}, {"compute": "fp16", "loss_scale": "dynamic"}):
        config = training.config(
            1, ACCUMULATION, mesh={"pp": 2}, precision=precision, pipeline={"schedule": schedule}
        )
        engine = polyreme.initialize(models.llama(num_hidden_layers=5), config, loss_fn=models.causal_loss)
        found.append(
            [engine.train_step(models.batch_of("llama", training.SAMPLES, step)).loss for step in range(3)]
        )
    return found


@whole
def test_low_precision(ranks: Ranks) -> None:
    """Losses as of 1F1B, but for the order in which gradients are added up."""
    for schedule in ("zb-h1", "zb-v"):
        torch.testing.assert_close(
            ranks(2, precisions, schedule)[0], ranks(2, precisions, "1f1b")[0], rtol=5e-3, atol=0
        )
