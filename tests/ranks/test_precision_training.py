"""Half-precision training equals plain PyTorch with the same casts by hand; overflow, loss scale and NaN are
handled on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import polyreme
import training
from examples import whole
from polyreme.errors import NumericsError
from polyreme.layout.bucket_layout import ALIGN
from pool import Ranks

WORLD, STEPS, SCALE = 2, 3, 1024.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(rank: int, world: int, settings: list[dict[str, Any]]) -> list[training.Run]:
    return training.train(rank, world, "llama", settings, STEPS)


def padded(tensor: Tensor) -> Tensor:
    """Flat, and filled up to whole vectors: torch's fused kernels compute what is left over by other
    instructions."""
    return F.pad(tensor.detach().reshape(-1), (0, -tensor.numel() % ALIGN))


def by_hand(dtype: torch.dtype, accumulation: int, reduced: torch.dtype, scale: float) -> training.Run:
    """Half-precision copies of float32 masters; gradients of each micro-batch in half precision; sums in
    float32: first over a rank's micro-batches, then over the ranks; all divided by the global weight before
    the norm, the clip and the update."""
    model = models.build("llama", torch.float32)
    masters = {name: padded(p) for name, p in model.named_parameters()}
    matrices = {name for name, p in model.named_parameters() if p.dim() >= 2}
    for p in model.parameters():  # and no buffers: the rotary frequencies stay float32
        p.data = p.data.to(dtype)
    groups = [
        {"params": [p for name, p in masters.items() if name in matrices]},
        {"params": [p for name, p in masters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    records = []
    for step in range(STEPS):
        batch = models.batch_of("llama", training.SAMPLES, step)
        total, weight, losses = {}, float(training.SAMPLES * 11), 0.0
        hint = 2.0 ** round(math.log2(weight))
        for rank in range(WORLD):
            local: dict[str, Tensor] = {}
            for micro in range(accumulation):
                part = models.share(models.share(batch, rank, WORLD), micro, accumulation)
                loss, _ = models.causal_loss(model(input_ids=part["input_ids"]), part)
                losses += loss.item()
                model.zero_grad()
                (loss.float() * (scale / hint)).backward()
                for name, p in model.named_parameters():
                    gradient = p.grad.clone() if accumulation == 1 else p.grad.to(reduced)
                    local[name] = gradient if name not in local else local[name] + gradient
            for name, gradient in local.items():
                total[name] = (
                    gradient.to(reduced) if name not in total else total[name] + gradient.to(reduced)
                )
        to_mean = hint / (weight * scale)
        norm = math.sqrt(sum(t.double().square().sum().item() for t in total.values())) * to_mean
        factor = to_mean * min(1.0, 1.0 / (torch.tensor(norm, dtype=torch.float32).item() + 1e-6))
        for name, master in masters.items():
            master.grad = padded(total[name].float() * factor)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name][: p.numel()].view_as(p))
        records.append((losses / weight, norm))
    return records, {name: masters[name][: p.numel()].view_as(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("accumulation", "reduce"), [pytest.param(1, "fp32", marks=whole), (2, "fp32"), (1, "same")]
)
def test_equals_the_same_casts_by_hand(ranks: Ranks, compute: str, accumulation: int, reduce: str) -> None:
    """Bitwise weights; the norm is rounded once more here (see `zero.bucket_gradients.squares_by_row`)."""
    reduce = compute if reduce == "same" else reduce
    precision = {"compute": compute, "reduce": reduce} | ({"loss_scale": SCALE} if compute == "fp16" else {})
    zeros = [{"stage": stage, "reduce_every": "step"} for stage in (0, 2, 3)]
    settings = [training.config(WORLD, accumulation, zero=zero, precision=precision) for zero in zeros]
    scale = SCALE if compute == "fp16" else 1.0
    expected = by_hand(
        DTYPES[compute], accumulation, torch.float32 if reduce == "fp32" else DTYPES[compute], scale
    )
    for run in ranks(WORLD, train, settings)[0]:
        torch.testing.assert_close(torch.tensor(run[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0)
        for name, tensor in expected[1].items():
            assert torch.equal(run[1][name], tensor), f"{name} by {(run[1][name] - tensor).abs().max():g}"


class Exploding(nn.Module):
    """Its gradient overflows in float16 where a sample is large; NaN where one is NaN-making (a negative one
    in column 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.root = Root()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.root(x)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).masked_fill(x > 1e3, float("nan"))


def batch(rank: int, size: int, value: float, bad_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(size, 8, generator=generator)
    if rank == bad_rank:
        x[0] = value
    return x, torch.zeros(size, 8)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def engine_for(world: int, stage: int, **precision: Any) -> polyreme.Engine:
    torch.manual_seed(0)
    return polyreme.initialize(
        Exploding(), training.config(world, zero={"stage": stage}, precision=precision), loss_fn=mean_square
    )


def overflow(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        engine = engine_for(
            world, stage, compute="fp16", initial_scale=2.0**12, growth_interval=2, min_scale=2.0**11
        )
        size = training.SAMPLES // world
        scales, before = [], engine.state_dict(master=True)
        # an overflow in the backward of the last rank alone: 300^2 * 2^12 does not fit float16
        for value in (1.0, 600.0, 600.0, 600.0, 1.0, 1.0):
            result = engine.train_step(batch(rank, size, value, world - 1))
            after = engine.state_dict(master=True)
            assert result.skipped == (value > 1), (stage, result)
            assert all(torch.equal(after[name], t) for name, t in before.items()) == result.skipped, stage
            assert result.loss_scale == (scales[-1] if scales else 2.0**12)
            scales.append(engine.state.loss_scale)
            before = after
        assert scales == [2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**11, 2.0**12], (stage, scales)
        assert engine.state.step == 6


def test_overflow_on_one_rank_skips_on_all(ranks: Ranks) -> None:
    """The scale halves (not below its minimum), weights stay, and it grows after two good steps."""
    ranks(2, overflow)


def static(rank: int, world: int) -> None:
    engine = engine_for(world, 2, compute="fp16", loss_scale=64.0, on_nonfinite="skip")
    good = batch(rank, training.SAMPLES // world, 1.0, 0)
    assert not engine.train_step(good).skipped and engine.state.loss_scale == 64.0
    assert (
        engine.train_step(batch(rank, training.SAMPLES // world, 2e4, 0)).skipped
        and engine.state.loss_scale == 64.0
    )


def test_static_scale_stays(ranks: Ranks) -> None:
    ranks(2, static)


def nan(rank: int, world: int, stage: int, compute: str) -> tuple[str, bool, bool]:
    size = training.SAMPLES // world
    engine = engine_for(world, stage, compute=compute)
    engine.train_step(batch(rank, size, 1.0, 0))
    before = engine.state_dict(master=True)
    try:
        engine.train_step(batch(rank, size, 1e5, world - 1))
        message = ""
    except NumericsError as error:
        message = str(error)
    unchanged = all(torch.equal(t, before[name]) for name, t in engine.state_dict(master=True).items())
    again = engine.train_step(batch(rank, size, 1.0, 0))  # the run could go on
    skipping = engine_for(world, stage, compute=compute, on_nonfinite="skip")
    result = skipping.train_step(batch(rank, size, 1e5, world - 1))
    return message, unchanged, not again.skipped and result.skipped


@pytest.mark.parametrize(("stage", "compute"), [(1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_nan_names_the_first_module_and_the_rank(ranks: Ranks, stage: int, compute: str) -> None:
    for message, unchanged, goes_on in ranks(2, nan, stage, compute):
        assert "step 2" in message and "rank 1: first made by the forward of root (Root)" in message, message
        assert "rank 0" not in message
        assert unchanged and goes_on


def pipelined_nan(rank: int, world: int, schedule: str, layer: int) -> tuple[str, bool]:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    if rank == 0:
        with torch.no_grad():
            model[layer].weight.mul_(1e35)  # its output overflows
    config = training.config(
        1, 2, mesh={"pp": 2}, pipeline={"schedule": schedule}, precision={"compute": "fp32"}
    )
    engine = polyreme.initialize(model, config, loss_fn=F.mse_loss)
    batch = (torch.full((training.SAMPLES, 6), 1e10), torch.zeros(training.SAMPLES, 6))
    before = engine.state_dict(master=True)
    with pytest.raises(NumericsError) as caught:
        engine.train_step(batch)
    return str(caught.value), all(
        torch.equal(t, before[name]) for name, t in engine.state_dict(master=True).items()
    )


@pytest.mark.parametrize(("schedule", "layer"), [("1f1b", 2), ("1f1b", 1), ("zb-h1", 2)])
def test_nan_in_a_pipeline_names_the_module_and_its_rank(ranks: Ranks, schedule: str, layer: int) -> None:
    at, other = layer // 2, 1 - layer // 2
    for message, unchanged in ranks(2, pipelined_nan, schedule, layer):
        assert f"rank {at}: first made by the forward of {layer} (Linear) from finite inputs" in message, (
            message
        )
        assert f"rank {other}" not in message and unchanged, message


def no_label(rank: int, world: int) -> None:
    engine = polyreme.initialize(
        models.build("llama", torch.float32), training.config(world, precision={"compute": "fp16"})
    )
    silent = models.batch_of("llama", training.SAMPLES // world)
    silent["labels"].fill_(-100)
    before, scale = engine.state_dict(), engine.state.loss_scale
    result = engine.train_step(silent)
    assert result.skipped and math.isnan(result.loss) and engine.state.loss_scale == scale
    assert all(torch.equal(t, before[name]) for name, t in engine.state_dict().items())


def test_a_batch_without_labels_is_no_overflow(ranks: Ranks) -> None:
    ranks(2, no_label)
