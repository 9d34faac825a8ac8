"""What an engine's optimizer is taken for, and sizes that change, on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from polyreme.compat.deepspeed.refusal import OrderError, UnsupportedError
from polyreme.compat.deepspeed.runtime import utils
from polyreme.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from polyreme.compat.deepspeed.runtime.fp16.fused_optimizer import FP16_UnfusedOptimizer
from polyreme.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from polyreme.compat.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from polyreme.compat.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from polyreme.compat.deepspeed.utils import safe_get_full_grad
from pool import Ranks, RanksFailed

ADAM: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def started(given: Any = None, model: nn.Module | None = None, parameters: Any = None, **more: Any) -> Any:
    model = nn.Linear(2, 2) if model is None else model
    settings = {"train_micro_batch_size_per_gpu": 1, **more}
    return deepspeed.initialize(model=model, optimizer=given, model_parameters=parameters, config=settings)


def kinds(rank: int, world: int) -> None:
    _, found, *_ = started(**ADAM)
    assert isinstance(found, FusedAdam) and isinstance(found, DeepSpeedOptimizer)
    assert found.adam_w_mode and not isinstance(found, DeepSpeedZeroOptimizer)
    for offload in ({"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}):
        _, found, *_ = started(**ADAM, zero_optimization={"stage": 2, **offload})
        assert isinstance(found.optimizer, DeepSpeedCPUAdam) and isinstance(found, DeepSpeedZeroOptimizer)
    _, found, *_ = started(**ADAM, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    assert isinstance(found, DeepSpeedZeroOptimizer_Stage3) and not isinstance(found, DeepSpeedZeroOptimizer)
    model = nn.Linear(2, 2)
    given = torch.optim.AdamW(model.parameters())
    _, found, *_ = started(given, model, bf16={"enabled": True})
    assert found == given and hash(found) == hash(given) and isinstance(found, torch.optim.AdamW)
    assert isinstance(found, FP16_UnfusedOptimizer) and found.low_precision_dtype is torch.bfloat16


def muon(rank: int, world: int) -> None:
    """A step of the config's Muon beside one of torch's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    section = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    some = {"model_parameters": list(model[0].parameters())}
    with pytest.raises(UnsupportedError, match="model_parameters"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1, **section}, **some)
    plain = copy.deepcopy(model)
    kinds = [[p for p in plain.parameters() if p.dim() == size] for size in (2, 1)]
    both = (
        torch.optim.Muon(kinds[0], lr=0.1, weight_decay=0.0),
        torch.optim.AdamW(kinds[1], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    )
    plain(torch.ones(1, 4)).square().sum().backward()
    for optimizer in both:
        optimizer.step()
    more = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    engine, found, *_ = started(None, model, **section, **more)
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    engine.step()
    assert isinstance(found, torch.optim.Muon)
    torch.testing.assert_close(engine.module.state_dict(), plain.state_dict(), rtol=0, atol=1e-5)


def refusals(rank: int, world: int) -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(OrderError, match="zero_allow_untested_optimizer"):
        started(**sgd, zero_optimization={"stage": 1})
    started(**sgd, zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
    engine, *_ = started(**sgd)  # which is not sharded
    with engine.no_sync(), pytest.raises(AssertionError, match="inner one out"), engine.no_sync():
        pass
    for stage in (2, 3):
        engine, *_ = started(**ADAM, zero_optimization={"stage": stage})
        with pytest.raises(AssertionError, match=f"at ZeRO stage {stage}"), engine.no_sync():
            pass


def sizes(rank: int, world: int) -> list[float]:
    """Weights after windows of two, one, three and two micro-batches."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 2}
    engine, *_ = started(torch.optim.SGD(model.parameters(), lr=1.0), model, **settings)

    def window(*values: float) -> float:
        for value in values:
            engine.backward(engine(torch.full((1, 1), value + rank)).sum())
            engine.step()
        return engine.module.weight.item()

    found = [window(1.0, 3.0)]
    engine.set_train_batch_size(world)
    assert engine.get_batch_info() == (world, 1, 1)
    found.append(window(1.0))
    engine.set_train_batch_size(3 * world)
    found.append(window(1.0))
    found.append(window(2.0, 6.0))
    engine.set_train_batch_size(4 * world)
    found.append(window(1.0, 3.0))  # the eighth micro-batch ends a window of four
    engine.set_train_batch_size(3 * world)
    with pytest.raises(ValueError, match="no whole number of micro-batches"):
        engine.set_train_batch_size(2 * world + 1)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15 * world, 5, 3)
    return found


def unreduced(rank: int, world: int, stage: int, fp16: bool) -> list[list[float]]:
    """The gradient in `no_sync` with windows of one, then the weight after the window."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    half = {"fp16": {"enabled": True, "initial_scale_power": 4}} if fp16 else {}
    more = {
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **half,
    }
    more["zero_allow_untested_optimizer"] = True
    engine, *_ = started(torch.optim.SGD(model.parameters(), lr=1.0), model, **more)
    found = []

    def backward(value: float) -> None:
        engine.backward(engine(torch.full((1, 1), value)).sum())
        gradient = safe_get_full_grad(engine.module.weight)
        found.append(None if gradient is None else gradient.item())

    backward(1.0)
    engine.step()
    with engine.no_sync():
        backward(2.0 + rank)
        backward(3.0)
    engine.zero_grad()
    with engine.no_sync():
        backward(1.0 + rank)
    backward(4.0)
    engine.step()
    engine.set_train_batch_size(2 * world)
    backward(1.0)
    engine.step()
    return [*found, engine.module.weight.item(), engine.global_steps]


class Watched(nn.Linear):
    """A layer that notes, in its forward, whether its weights are whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [parameter.ds_status for parameter in self.parameters()]
        return super().forward(x)


def statuses(rank: int, world: int) -> None:
    model = nn.Sequential(Watched(4, 4), Watched(4, 2))
    more = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine, *_ = started(None, model, **ADAM, **more)
    weight = model[0].weight
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and not hasattr(
        nn.Linear(1, 1).weight, "ds_status"
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.allreduce_gradients()
    engine.step()
    assert {*model[0].seen, *model[1].seen} == {ZeroParamStatus.AVAILABLE}
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
    whole, *_ = started(None, nn.Linear(4, 2), **ADAM, zero_optimization={"stage": 2})
    assert not hasattr(whole.module.weight, "ds_status")


def unused(rank: int, world: int, offload: bool = False, stage: int = 2) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "others": nn.Linear(2, 2)})
    more = {"zero_optimization": {"stage": stage, "ignore_unused_parameters": False, "cpu_offload": offload}}
    given = [p for name, p in model.named_parameters() if "others" not in name]
    engine, *_ = started(None, model, given, **ADAM, **more)
    engine.module.forward = lambda x: model["used"](x)
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()


def overflows(rank: int, world: int) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([float("inf") if rank else 1.0])
    assert utils.CheckOverflow([[parameter]], zero_reduce_scatter=True).check()
    assert utils.CheckOverflow([[parameter]]).check() == bool(rank)


def test_an_optimizer_is_taken_for_deepspeeds(ranks: Ranks) -> None:
    ranks(1, kinds)
    ranks(1, muon)
    ranks(1, refusals)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_with_windows_of_one(ranks: Ranks, stage: int, fp16: bool) -> None:
    for rank, found in enumerate(ranks(2, unreduced, stage, fp16)):
        assert found == [1.0, 2.0 + rank, 5.0 + rank, 1.0 + rank, 5.5, 0.5, -6.5, 2], rank


def test_parameters_tell_whether_they_are_whole(ranks: Ranks) -> None:
    ranks(2, statuses)


def test_unused_parameters_may_be_an_error(ranks: Ranks) -> None:
    ranks(1, unused)
    ranks(1, unused, True, 3)
    with pytest.raises(RanksFailed, match=r"unused.weight got no gradient.*ignore_unused_parameters"):
        ranks(1, unused, True)


def test_the_batch_size_may_change(ranks: Ranks) -> None:
    assert ranks(2, sizes) == [[-2.5, -4.0, -4.0, -7.5, -8.75]] * 2


def test_an_overflow_is_found_on_all_ranks(ranks: Ranks) -> None:
    ranks(2, overflows)
