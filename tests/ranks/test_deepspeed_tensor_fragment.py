"""DeepSpeed's safe_get and safe_set functions: what they return and refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyreme
from polyreme.compat.deepspeed.utils import tensor_fragment as fragments
from polyreme.errors import ModelError
from pool import Ranks

WIDTH = 11  # two ranks have 61 and 60 numbers of a weight


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model[2].requires_grad_(False)
    return model


def full(rank: int, world: int) -> None:
    for stage in range(4):
        model = network()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        config = {"batch": {"size": 4 * world, "mean": "ranks"}, "zero": {"stage": stage, "min_bucket": 0}}
        engine = polyreme.initialize(model, config)
        p, frozen = model[0].weight, model[2].weight
        assert torch.equal(fragments.safe_get_full_fp32_param(p), weights["0.weight"])
        assert fragments.safe_get_full_optimizer_state(p, "exp_avg") is None
        assert fragments.safe_get_full_grad(p) is None
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
        gradient = fragments.safe_get_full_grad(p)
        assert gradient is not None and gradient.abs().max() > 0
        fragments.safe_set_full_grad(p, gradient.flatten() * 2)
        assert torch.equal(fragments.safe_get_full_grad(p), 2 * gradient)
        trained = [p for p in model.parameters() if p.requires_grad]
        fragments.safe_update_full_grad_vectorized(model.parameters(), lambda old, param: old * 0 + 1)
        for each in trained:
            assert torch.equal(fragments.safe_get_full_grad(each), torch.ones(each.shape))
        if stage == 3:
            size = -(-WIDTH * WIDTH // world)
            here = min(size, WIDTH * WIDTH - rank * size)
            local = fragments.safe_get_local_grad(p)
            assert torch.equal(local, (torch.arange(size) < here).to(local.dtype))
            fragments.safe_set_local_grad(p, local + rank)
            whole = 1.0 + torch.arange(WIDTH * WIDTH) // size
            assert torch.equal(fragments.safe_get_full_grad(p).flatten(), whole)
            with pytest.raises(ModelError, match=f"set to 3 elements, and has {size}"):
                fragments.safe_set_local_grad(p, torch.ones(3))
        engine.step()
        state = fragments.safe_get_full_optimizer_state(p, "exp_avg")
        assert state is not None and state.any()
        fragments.safe_set_full_optimizer_state(p, torch.full_like(state, 3.0), "exp_avg")
        assert (fragments.safe_get_full_optimizer_state(p, "exp_avg") == 3).all()
        fragments.safe_set_full_fp32_param(p, torch.full_like(state, 4.0))
        assert (engine.state_dict()["0.weight"] == 4).all()
        if stage == 3:
            for get, put, key in (
                (fragments.safe_get_local_fp32_param, fragments.safe_set_local_fp32_param, ()),
                (
                    fragments.safe_get_local_optimizer_state,
                    fragments.safe_set_local_optimizer_state,
                    ("exp_avg_sq",),
                ),
            ):
                old = get(p, *key)
                put(p, torch.full_like(old, 5.0 + rank), *key)
                assert (get(p, *key)[:here] == 5.0 + rank).all()
        else:
            with pytest.raises(AssertionError, match=r"safe_get_local_.*safe_get_full_"):
                fragments.safe_get_local_fp32_param(p)
        assert fragments.safe_get_full_fp32_param(frozen) is None
        fragments.safe_set_full_fp32_param(frozen, torch.zeros(WIDTH, WIDTH))
        assert torch.equal(engine.state_dict()["2.weight"], weights["2.weight"])
        engine.close()


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_of_an_engine(ranks: Ranks, world: int) -> None:
    ranks(world, full)


def test_parameters_of_none() -> None:
    p = nn.Parameter(torch.ones(3))
    assert fragments.safe_get_full_fp32_param(p) is None
    assert fragments.safe_get_full_optimizer_state(p, "exp_avg") is None
    assert fragments.safe_get_full_grad(p) is None
    fragments.safe_set_full_fp32_param(p, torch.zeros(3))
    (p * 2).sum().backward()
    fragments.safe_set_full_grad(p, torch.full((3,), 7.0))
    fragments.safe_update_full_grad_vectorized([p], lambda old, param: old + 1)
    assert torch.equal(fragments.safe_get_full_grad(p), torch.full((3,), 8.0)) and (p == 1).all()
    with pytest.raises(AssertionError, match="stage 3"):
        fragments.safe_get_local_grad(p)
