"""Parameters of an engine of the DeepSpeed door: those that it does not train, and what a script reads and
writes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme.compat.deepspeed as deepspeed
from polyreme.compat.deepspeed.ops.lamb import FusedLamb
from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from polyreme.errors import ModelError
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
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
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
    engine.zero_grad()
    assert left.grad is None
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


def parts(rank: int, world: int, stage_3: dict[str, Any], precision: dict[str, Any]) -> None:
    """Tries of `ds_tensor` of an engine at stage 3: 5 numbers, and 25, on two ranks."""
    model = Network()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **stage_3}
    engine, *_ = deepspeed.initialize(model=model, config=settings(3, zero_optimization=zero, **precision))
    bias, weight = model.layers[0].bias, model.layers[0].weight
    before = engine.polyreme.state_dict(master=True)
    part = bias.ds_tensor
    assert (part.numel(), part.shape, part.ds_numel, weight.ds_tensor.numel()) == (3, (3,), 3, 13)
    assert part.dtype == bias.dtype and "layers.0.bias" in repr(part) and not part.requires_grad
    assert (bias.ds_shape, bias.ds_numel) == ((WIDTH,), WIDTH) and weight.ds_id != bias.ds_id
    wanted = torch.cat([before["layers.0.bias"], torch.zeros(1)])[3 * rank : 3 * rank + 3].to(bias.dtype)
    assert torch.equal(part, wanted) and torch.equal(part.clone().double(), wanted.double())
    part[0] = 7.0  # the first element, and the fourth, of which masters alone change
    after = engine.polyreme.state_dict(master=True)
    assert after["layers.0.bias"].tolist() == [
        7.0 if k in (0, 3) else value for k, value in enumerate(before["layers.0.bias"].tolist())
    ]
    with pytest.raises(ModelError, match="which is a copy"):
        part[:2].fill_(1.0)
    with pytest.raises(ModelError, match="4 elements, and has 3"):
        bias.ds_tensor.data = torch.zeros(4)
    bias.ds_tensor.data = torch.full_like(bias.ds_tensor.data, 1.0 + rank)
    weight.ds_tensor.data.copy_(torch.zeros(13))
    weight.ds_tensor += 0.5
    torch.add(bias.ds_tensor, 1.0, out=bias.ds_tensor)
    with deepspeed.zero.GatheredParameters([bias, weight]):
        assert bias.tolist() == [2.0, 2.0, 2.0, 3.0, 3.0] and weight.unique().tolist() == [0.5]

    def look(*_: Any) -> None:
        assert bias.ds_tensor.numel() == 3 and bias.ds_tensor.data.dtype == bias.dtype
        with pytest.raises(ModelError, match="inside of a forward"):
            bias.ds_tensor.sum()

    hook = model.layers[0].register_forward_pre_hook(look)
    loss = engine(batch(rank, 0))
    hook.remove()
    engine.backward(loss)
    assert torch.equal(bias.ds_tensor, torch.tensor([2.0, 2.0, 2.0] if rank == 0 else [3.0, 3.0, 0.0]))
    engine.step()
    assert 0 < (bias.ds_tensor.float()[:2] - 2.0 - rank).abs().min() < 0.11  # Adam's first step
    plain, *_ = deepspeed.initialize(model=Network(), config=settings(2))
    assert not hasattr(next(plain.module.parameters()), "ds_tensor")


@pytest.mark.parametrize(
    ("stage_3", "precision"),
    [
        ({}, {}),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            {"bf16": {"enabled": True}},
        ),
    ],
)
def test_a_rank_reads_and_writes_its_part(ranks: Ranks, stage_3: Any, precision: Any) -> None:
    ranks(2, parts, stage_3, precision)


def buffers(rank: int, world: int) -> None:
    model = Network()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=some(model), config=settings(3, gradient_clipping=0.0)
    )
    assert [len(group) for group in optimizer.fp16_groups] == [1, 2] and optimizer._global_grad_norm is None
    with pytest.raises(ModelError, match="from the last backward of a step"):
        optimizer.averaged_gradients[0][0].sum()
    sums = []
    for _ in range(2):
        engine.backward(engine(batch(0, 0)))
        found = optimizer.averaged_gradients
        whole = safe_get_full_grad(model.layers[2].bias)
        padded = torch.cat([whole, torch.zeros(1)])[3 * rank : 3 * rank + 3]
        assert {*found} == {0, 1} and torch.equal(found[1][1], padded) and found[0][0].numel() == 13
        assert torch.equal(optimizer.get_fp32_grad_partitions()[1][1], padded) and whole.abs().max() > 0
        sums.append(whole)
    assert torch.allclose(sums[1], 2 * sums[0])
    found[1][1].mul_(0.0)
    engine.step()
    assert torch.equal(safe_get_full_fp32_param(model.layers[2].bias), Network().layers[2].bias)
    assert optimizer._global_grad_norm > 0
    with pytest.raises(AttributeError, match="safe_get_full_fp32_param"):
        optimizer.parallel_partitioned_bit16_groups  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'gone'"):
        optimizer.gone  # noqa: B018
    _, other, *_ = deepspeed.initialize(model=Network(), config=settings(2))
    with pytest.raises(AttributeError, match=r"no optimizer.averaged_gradients .*safe_get_full_grad"):
        other.averaged_gradients  # noqa: B018


def test_the_optimizer_has_parts_of_gradients(ranks: Ranks) -> None:
    ranks(2, buffers)


def lamb(rank: int, world: int, stage: int, folder: Path) -> Tensor:
    """Weights after four steps with the config's LAMB, of which two are done after a checkpoint; or of torch
    with the same class."""
    options = {"lr": 0.05, "weight_decay": 0.1, "max_coeff": 5.0}
    section = settings(max(stage, 0), optimizer={"type": "Lamb", "params": options})
    section |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    model = Network()
    if stage < 0:
        optimizer = FusedLamb(model.parameters(), **options)
        for step in range(4):
            for each in range(world):
                (model(batch(each, step)) / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(model.parameters())
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=section)
    assert isinstance(optimizer, FusedLamb)
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(folder)
            engine, *_ = deepspeed.initialize(model=Network(), config=section)
            engine.load_checkpoint(folder)
        engine.backward(engine(batch(rank, step)))
        engine.step()
    return weights(engine)


def test_lamb_goes_by_whole_tensors(ranks: Ranks, tmp_path: Path) -> None:
    wanted, *_ = ranks(2, lamb, -1, tmp_path)
    for stage in (0, 2, 3):
        for found in ranks(2, lamb, stage, tmp_path / str(stage)):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), stage


def plain_clamped(world: int) -> Tensor:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(world):
            (model(batch(rank, step)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.layers[1].bias.clamp_(-0.05, 0.05)
            model.layers[1].weight[0].zero_()
    return flat(model.parameters())


def small(rank: int, world: int, memory: dict[str, Any], folder: Path) -> Tensor:
    """Biases are at the threshold, weights above it."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": WIDTH, **memory}
    model = Network()
    section = settings(3, zero_optimization=zero, gradient_clipping=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=section)
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(folder)
            model = Network()
            other = settings(2, gradient_clipping=0.0) if memory else section
            engine, *_ = deepspeed.initialize(model=model, config=other)
            engine.load_checkpoint(folder)
        engine.backward(engine(batch(rank, step)))
        engine.step()
        bias, weight = model.layers[1].bias, model.layers[1].weight
        with torch.no_grad():
            bias.clamp_(-0.05, 0.05)
        if engine.zero_optimization_stage() == 3:
            assert [p.ds_status.name for p in (bias, weight)] == ["AVAILABLE", "NOT_AVAILABLE"]
            assert bias.ds_tensor.numel() == 3
            with pytest.raises(ModelError, match=r"layers\.1\.weight"):
                weight.sum()
        with deepspeed.zero.GatheredParameters([bias, weight], modifier_rank=0):
            assert bias.abs().max() <= 0.05
            if rank == 0:
                with torch.no_grad():
                    weight[0].zero_()
    return weights(engine)


@pytest.mark.parametrize("memory", [{}, {"offload_param": {"device": "cpu"}}], ids=["device", "host"])
def test_small_parameters_stay_whole(ranks: Ranks, memory: dict[str, Any], tmp_path: Path) -> None:
    wanted = plain_clamped(2)
    for found in ranks(2, small, memory, tmp_path):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Empty(Network):
    """A network with parameters of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.none = nn.Parameter(torch.empty(0)), nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.first.sum() + self.none(x).sum()


def empty(rank: int, world: int, stage: int, init: bool, folder: Path) -> None:
    with deepspeed.zero.Init(enabled=init):
        model = Empty()
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage))
    for step in range(2):
        engine.backward(engine(batch(rank, step)))
        assert safe_get_full_grad(model.none.weight).shape == (0, WIDTH)
        engine.step()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    shapes = {name: tensor.shape for name, tensor in engine.module_state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in Empty().state_dict().items()}


@pytest.mark.parametrize(("stage", "init"), [(1, False), (3, True)])
def test_parameters_may_have_no_elements(ranks: Ranks, stage: int, init: bool, tmp_path: Path) -> None:
    ranks(2, empty, stage, init, tmp_path)
