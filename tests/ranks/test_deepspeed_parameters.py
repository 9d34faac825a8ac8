"""Parameters of an engine of the DeepSpeed door: those that it does not train, and what a script reads and
writes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.utils import safe_get_full_grad
from pool import Ranks

WIDTH = 5


class Network(nn.Module):
    """Returns the loss. The first and the last layer are between others in no order of groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def settings(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        **more,
    }


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])


def weights(engine: Any) -> Tensor:
    whole = engine.module_state_dict()
    return flat(whole[name] for name, _ in engine.module.named_parameters())


def some(model: Network) -> list[dict[str, Any]]:
    first, _, last = model.layers
    return [{"params": [last.weight], "weight_decay": 0.1}, {"params": [first.bias, last.bias], "lr": 0.05}]


def plain_some(world: int) -> Tensor:
    model = Network()
    optimizer = torch.optim.AdamW(some(model), lr=0.1, weight_decay=0)
    trained = [p for group in some(model) for p in group["params"]]
    for step in range(4):
        for rank in range(world):
            for i in range(2):
                (model(batch(rank, 2 * step + i)) / 2 / world).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        model.zero_grad()
    return flat(model.parameters())


def train_some(rank: int, world: int, stage: int, folder: Path) -> Tensor:
    model = Network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=some(model), config=settings(stage, 2))
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(folder)
            model = Network()
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=some(model), config=settings(3 - stage, 2)
            )
            engine.load_checkpoint(folder)
        for i in range(2):
            engine.backward(engine(batch(rank, 2 * step + i)))
            engine.step()
    left = model.layers[1].weight
    assert left.requires_grad and torch.equal(safe_get_full_grad(left), left.grad)
    assert safe_get_full_grad(model.layers[2].weight) is None
    with pytest.raises(ArgumentError, match="model_parameters is empty"):
        deepspeed.initialize(model=Network(), model_parameters=[], config=settings(stage))
    return weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_those_that_are_not_given_stay_as_they_are(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    wanted = plain_some(2)
    for found in ranks(2, train_some, stage, tmp_path):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def train_twice(rank: int, world: int, stage: int, accumulation: int) -> Tensor:
    section = settings(stage, accumulation, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    section |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=Network(), config=section)
    for k in range(accumulation + 2):
        engine.backward(engine(batch(rank, k)))
        if k < accumulation - 1:
            engine.step()
        elif k == accumulation:
            assert safe_get_full_grad(engine.module.layers[0].weight) is not None
    engine.step()
    assert engine.global_steps == 1 and engine.micro_steps == accumulation
    return weights(engine)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_backwards_after_the_end_of_a_window_add_up(ranks: Ranks, accumulation: int) -> None:
    model = Network()
    for k in range(accumulation + 2):
        for rank in range(2):
            (model(batch(rank, k)) / 2 / accumulation).backward()
    wanted = flat(model.parameters()) - flat(p.grad for p in model.parameters() if p.grad is not None)
    for stage in (0, 1, 3):
        for found in ranks(2, train_twice, stage, accumulation):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), stage
