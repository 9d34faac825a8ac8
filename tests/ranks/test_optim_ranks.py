"""Optimizers on real ranks: every elementwise one against plain torch in float64, Muon to the last bit, and
what the caller passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import models
import polyreme
import probe
import threads
from examples import whole
from pool import Ranks

STEPS, SAMPLES, STAGES = 3, 12, (0, 2, 3)
Records = list[tuple[float, float, float]]
"""Loss, gradient norm and learning rate of each step."""

OPTIMIZERS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("adam", {"options": {"amsgrad": True}}, "Adam", {"betas": (0.9, 0.95), "amsgrad": True}),
    ("adamw", {"betas": [0.8, 0.9], "eps": 1e-6}, "AdamW", {"betas": (0.8, 0.9), "eps": 1e-6}),
    ("sgd", {"momentum": 0.9, "nesterov": True}, "SGD", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "options": {"dampening": 0.5}}, "SGD", {"momentum": 0.9, "dampening": 0.5}),
    (
        "adagrad",
        {"options": {"initial_accumulator_value": 0.1}},
        "Adagrad",
        {"eps": 1e-8, "initial_accumulator_value": 0.1},
    ),
    ("lion", {"betas": [0.9, 0.99]}, "Lion", {}),
    ("NAdam", {"options": {"decoupled_weight_decay": True}}, "NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {"betas": [0.8, 0.9]}, "RAdam", {"betas": (0.8, 0.9)}),
    ("Adamax", {}, "Adamax", {}),
    ("Adadelta", {}, "Adadelta", {}),
    (
        "RMSprop",
        {"momentum": 0.5, "options": {"centered": True}},
        "RMSprop",
        {"momentum": 0.5, "centered": True},
    ),
    ("Rprop", {}, "Rprop", {}),
    ("ASGD", {"options": {"t0": 1.0}}, "ASGD", {"t0": 1.0}),
    ("Adafactor", {}, "Adafactor", {}),
]
"""Name and keys in the config, and the class of torch.optim and arguments that it should be."""

LR, WEIGHT_DECAY = 1e-2, 0.1
NO_DECAY: list[Any] = ["vectors", "none", ["nodes.1.*", "scale"]]


class PaperLion(torch.optim.Optimizer):
    """Lion as algorithm 2 of its paper writes it."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].get("m", torch.zeros_like(p))
                c = 0.9 * m + (1 - 0.9) * p.grad
                p.copy_(p - group["lr"] * (torch.sign(c) + group["weight_decay"] * p))
                self.state[p]["m"] = 0.99 * m + (1 - 0.99) * p.grad


def run_all(
    rank: int,
    world: int,
    case: str,
    settings: Iterable[dict[str, Any]],
    given: str | None = None,
    steps: int = STEPS,
) -> list[tuple[Records, dict[str, Tensor]]]:
    """Records and final weights under each of `settings`, with the optimizer and scheduler named `given`."""
    found = []
    for each in settings:
        optimizer, scheduler = GIVEN[given][:2] if given else (None, None)
        engine = polyreme.initialize(
            models.build(case),
            each,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            loss_fn=models.CASES[case][2],
        )
        records = []
        for step in range(steps):
            result = engine.train_step(models.share(models.batch_of(case, SAMPLES, seed=step), rank, world))
            records.append((result.loss, result.grad_norm, result.lr))
        found.append((records, engine.state_dict(rank0_only=True)))
    return found


def expected(
    case: str,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    no_decay: Any = "none",
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    steps: int = STEPS,
) -> tuple[Records, dict[str, Tensor]]:
    """Ordinary PyTorch on whole batches."""
    model = models.build(case)
    vectors = {n for n, p in model.named_parameters() if p.dim() < 2}
    spared = (
        vectors
        if no_decay == "vectors"
        else {n for n, _ in model.named_parameters() if n == "scale" or n.startswith("nodes.1.")}
    )
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if no_decay == "none":
        groups: list[dict[str, Any]] = [{"params": list(trainable.values())}]
    else:
        groups = [
            {"params": [p for n, p in trainable.items() if n not in spared]},
            {"params": [p for n, p in trainable.items() if n in spared], "weight_decay": 0.0},
        ]
    optimizer = make(groups)
    schedule = scheduler(optimizer) if scheduler else None
    records = []
    for step in range(steps):
        batch = models.batch_of(case, SAMPLES, seed=step)
        optimizer.zero_grad()
        loss = models.CASES[case][2](model(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(trainable.values()), clip or math.inf)
        model.nothing.grad = None  # of no elements, which Adafactor would divide by
        records.append((loss.item(), norm.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return records, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def config(world: int, stage: int, clip: float | None = None, **optimizer: Any) -> dict[str, Any]:
    return {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": SAMPLES // world},
        "zero": {"stage": stage, "min_bucket": 0},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip": clip or "none", **optimizer},
    }


def assert_same(
    found: tuple[Records, dict[str, Tensor]], reference: tuple[Records, dict[str, Tensor]], where: object
) -> None:
    torch.testing.assert_close(found[0], reference[0], rtol=1e-10, atol=1e-10, msg=lambda m: f"{where}: {m}")
    for name, tensor in reference[1].items():
        torch.testing.assert_close(
            found[1][name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{where}, {n}: {m}"
        )


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=whole), 4])
def test_every_elementwise_optimizer_equals_torch(world: int) -> None:
    """At every stage, at two of the three on two ranks and at the other on four; one rank holds everything
    whole at every stage."""
    settings, references = [], []
    for i, (name, keys, class_name, arguments) in enumerate(OPTIMIZERS):
        cls = PaperLion if class_name == "Lion" else getattr(torch.optim, class_name)
        clip, no_decay = (None, 0.05)[i % 2], NO_DECAY[(i + world) % 3]
        arguments = {
            "lr": LR,
            **({} if class_name == "Rprop" else {"weight_decay": WEIGHT_DECAY}),
            **arguments,
        }
        reference = expected("dag", lambda groups, c=cls, a=arguments: c(groups, **a), no_decay, clip)
        mine = STAGES[i % 3]
        for stage in [each for each in STAGES if each != mine] if world == 2 else [mine]:
            settings.append(config(world, stage, clip, name=name, no_decay=no_decay, **keys))
            references.append(reference)
    found = threads.run(world, run_all, "dag", settings)[0]
    for setting, run, reference in zip(settings, found, references, strict=True):
        assert_same(run, reference, (setting["optimizer"], setting["zero"]))


# ---- what the caller passes


def by_dimension(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Two groups, each with a learning rate of its own."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0},
        ],
        lr=2e-2,
    )


def flattened(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    return lambda groups: make([p for group in groups for p in group["params"]])


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    rise = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    fall = schedulers.CosineAnnealingLR(optimizer, 4)
    return schedulers.SequentialLR(optimizer, [rise, fall], [2])


def plain_factory(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-2)


GIVEN: dict[str | None, tuple[Any, Any, Callable[..., Any], Any]] = {
    "class": (
        torch.optim.NAdam,
        None,
        lambda g: torch.optim.NAdam(g, lr=LR, weight_decay=WEIGHT_DECAY),
        None,
    ),
    "factory": (plain_factory, None, plain_factory, None),
    "two groups": (by_dimension, None, flattened(by_dimension), None),
    "scheduler factory": (by_dimension, warmed, flattened(by_dimension), warmed),
    "cycled momentum": (
        plain_factory,
        lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=9),
        plain_factory,
        lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=9),
    ),
    "scheduler object": (
        plain_factory,
        schedulers.ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=2e-2), 0.5),
        plain_factory,
        lambda o: schedulers.ExponentialLR(o, 0.5),
    ),
}
"""By name: optimizer and lr_scheduler as passed to initialize, and what plain torch gets."""


@pytest.mark.parametrize("given", list(GIVEN))
def test_what_the_caller_passes_equals_torch(ranks: Ranks, given: str) -> None:
    _, _, make, scheduler = GIVEN[given]
    settings = [config(2, 3, no_decay="none")]  # a scheduler object serves one engine
    found = ranks(2, run_all, "dag", settings, given, 5)
    reference = expected("dag", make, scheduler=scheduler, steps=5)
    assert_same(found[0][0], reference, given)
    assert found[1][0][0] == found[0][0][0], "every rank must report the same"
    if scheduler is not None:
        assert [record[2] for record in found[0][0][0]] == [record[2] for record in reference[0]]
        assert len({record[2] for record in reference[0]}) >= 3


# ---- Muon

TOKENS = 12


def muon_model() -> nn.Module:
    """All sizes multiples of 64, so that a kernel treats a whole tensor as it does a part of a flat buffer,
    without a tail."""
    torch.manual_seed(0)
    return models.llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2).train()


def muon_batch(step: int) -> dict[str, Tensor]:
    return models.tokens(8, TOKENS, seed=step)


def muon_runs(rank: int, world: int, clip: float | None) -> list[tuple[Any, ...]]:
    """By stage, what `muon_run` finds."""
    return [muon_run(rank, world, stage, clip) for stage in range(4)]


def muon_run(
    rank: int, world: int, stage: int, clip: float | None
) -> tuple[dict[str, Tensor], list[float], int, list[dict[str, Any]]]:
    """Weights, gradient norms, state bytes, and where the tensor-boundary buckets have their tensors."""
    settings = {
        "batch": {"size": 8, "micro": 8 // world},
        "zero": {"stage": stage, "min_bucket": 0},
        "optimizer": {
            "name": "muon",
            "lr": 1e-2,
            "matrix_lr": 0.05,
            "weight_decay": 0.1,
            "clip": clip or "none",
        },
    }
    engine = polyreme.initialize(muon_model(), settings, loss_fn=models.causal_loss)
    norms = [
        engine.train_step(models.share(muon_batch(step), rank, world)).grad_norm for step in range(STEPS)
    ]
    layouts = [b.layout for b in probe.trainable(engine) if b.layout.boundary == "tensor"]
    owners = []
    for at, layout in enumerate(layouts):
        for slot in layout.slots:
            parts = [
                (rank, part)
                for rank in range(world)
                for part in layout.ranges(rank)
                if part.name == slot.name
            ]
            owners.append(
                {
                    "name": slot.name,
                    "bucket": at,
                    "shard": layout.shard_size,
                    "size": slot.size,
                    "on": [rank for rank, _ in parts],
                    "whole": all(part.stop - part.start == slot.size for _, part in parts),
                }
            )
    return engine.state_dict(master=True), norms, engine.memory()["states"], owners


def muon_reference(world: int, clip: float | None) -> dict[str, Tensor]:
    """One process: gradients of each rank's share, summed in rank order, then torch.optim.Muon and AdamW on
    whole tensors."""
    model = muon_model()
    named = dict(model.named_parameters())
    whole = [p for n, p in named.items() if p.dim() == 2 and ".layers." in n]
    vectors = [p for p in named.values() if p.dim() < 2]
    rest = [p for p in named.values() if p.dim() == 2 and not any(p is w for w in whole)]
    muon = torch.optim.Muon(whole, lr=0.05, momentum=0.95, weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [{"params": rest}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    for step in range(STEPS):
        weight = 8 * (TOKENS - 1)
        hint = 2.0 ** round(math.log2(weight))  # what the engine divides by before it knows the whole weight
        sums: dict[str, Tensor] = {}
        for rank in range(world):
            model.zero_grad()
            loss, _ = models.causal_loss(
                model(input_ids=(share := models.share(muon_batch(step), rank, world))["input_ids"]), share
            )
            (loss * (1 / hint)).backward()
            for name, p in named.items():
                sums[name] = p.grad.clone() if rank == 0 else sums[name].add_(p.grad)
        factor = hint / weight
        norm = torch.tensor(
            math.sqrt(sum(float(g.double().square().sum()) for g in sums.values())) * factor
        ).item()
        for name, p in named.items():
            p.grad = sums[name].mul_(factor * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0))
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_equals_torch_to_the_last_bit(ranks: Ranks, world: int) -> None:
    reference = muon_reference(world, None)
    start = dict(muon_model().named_parameters())
    assert all((tensor - start[name]).abs().max() > 1e-3 for name, tensor in reference.items())
    launch = threads.run if world == 4 else ranks
    runs = list(zip(*launch(world, muon_runs, None), strict=True))
    for stage, run in enumerate(runs):
        different = {
            n: float((t - run[0][0][n]).abs().max())
            for n, t in reference.items()
            if not torch.equal(t, run[0][0][n])
        }
        assert not different, f"stage {stage}"
        assert [each[1] for each in run] == [runs[0][0][1]] * world
    states, owners = [each[2] for each in runs[2]], runs[2][0][3]
    assert {o["name"] for o in owners} == {
        n for n, t in reference.items() if t.dim() == 2 and ".layers." in n
    }
    assert all(o["whole"] and len(o["on"]) == 1 for o in owners)
    for bucket in {o["bucket"] for o in owners}:
        mine = [o for o in owners if o["bucket"] == bucket]
        loads = [sum(o["size"] for o in mine if o["on"] == [r]) for r in range(world)]
        largest = max(o["size"] for o in mine)
        assert max(loads) - min(loads) <= largest
        assert mine[0]["shard"] <= sum(loads) / world + largest
    assert max(states) <= min(states) + 2 * 4 * max(o["size"] for o in owners)


def test_muon_with_clipping_is_the_same_at_every_stage(ranks: Ranks) -> None:
    runs = ranks(2, muon_runs, 0.5)[0]
    assert min(runs[0][1]) > 0.5, "the clip has to cut for this test to test it"
    for run in runs[1:]:
        assert run[1] == runs[0][1]
        assert all(torch.equal(run[0][n], t) for n, t in runs[0][0].items())
    for name, tensor in muon_reference(2, 0.5).items():
        torch.testing.assert_close(runs[0][0][name], tensor, rtol=2e-2, atol=2e-3)
