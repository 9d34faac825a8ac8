"""BatchNorm, and other modules that change buffers, in each way of `batch_norm`, against plain PyTorch on the
whole batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import polyreme
import training
from polyreme.errors import BatchError, ModelError
from pool import Ranks

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "1d sequences": (lambda: nn.BatchNorm1d(6), (6, 5)),
    "2d": (lambda: nn.BatchNorm2d(6, momentum=None), (6, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(6, affine=False), (6, 2, 2, 2)),
    "no statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False, eps=1e-3), (6, 2, 2)),
    "torch's": (lambda: nn.SyncBatchNorm(6), (6, 3)),
}


class Net(nn.Module):
    """Blocks of a product over the channels, and a BatchNorm."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(6, 6, bias=False), "norm": CASES[case][0]()}) for _ in range(2)
        )
        for block in self.blocks:
            block.forward = lambda x, block=block: torch.tanh(
                block["norm"](block["mix"](x.transpose(1, -1)).transpose(1, -1))
            )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def batch(case: str, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + step)
    x = torch.randn(training.SAMPLES, *CASES[case][1], dtype=torch.float64)
    return 2 * x + 1, x.sin()


def rows(accumulation: int, world: int, micro: int) -> list[int]:
    """Of a global batch those of one micro-batch of all ranks."""
    each = training.SAMPLES // world // accumulation
    return [rank * each * accumulation + micro * each + i for rank in range(world) for i in range(each)]


def plain(case: str, accumulation: int, world: int, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    model = Net(case).double()
    if case == "torch's":  # which refuses CPUs where there are ranks
        for block in model.blocks:
            block["norm"].__class__ = nn.BatchNorm1d
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, y = batch(case, step)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            at = rows(accumulation, world, micro)
            loss = F.mse_loss(model(x[at]), y[at]) / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    model.eval()
    return [*losses, F.mse_loss(model(batch(case, 9)[0]), batch(case, 9)[1]).item()], model.state_dict()


def config(world: int, accumulation: int, stage: int, way: str, **sections: Any) -> dict[str, Any]:
    made = training.config(world, accumulation, zero={"stage": stage}, **sections)
    made["optimizer"] |= {"weight_decay": 0.0, "clip": None}
    return {**made, "batch_norm": way}


SYNC = [
    (case, stage, accumulation, activations)
    for i, case in enumerate(CASES)
    for stage, accumulation, activations in [(0, 1, "keep"), (2, 2, "recompute"), (3, 1 + i % 2, "recompute")]
]


def synchronised(rank: int, world: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for case, stage, accumulation, activations in SYNC:
        sections = {"precision": {"compute": "fp64"}, "memory": {"activations": activations}}
        engine = polyreme.initialize(
            Net(case), config(world, accumulation, stage, "sync", **sections), loss_fn=F.mse_loss
        )
        losses = [engine.train_step(models.share(batch(case, step), rank, world)).loss for step in range(3)]
        losses.append(engine.eval_step(models.share(batch(case, 9), rank, world)).loss)
        found.append((losses, engine.state_dict()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_synchronised_is_one_process(ranks: Ranks, world: int) -> None:
    by_rank = ranks(world, synchronised)
    for at, (case, stage, accumulation, _) in enumerate(SYNC):
        losses, weights = plain(case, accumulation, world)
        for got, state in (found[at] for found in by_rank):
            if case == "no statistics":  # each rank evaluates by its own share's
                got = got[:-1]
            assert got == pytest.approx(losses[: len(got)], rel=1e-10), (case, stage, accumulation)
            assert state.keys() == weights.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(
                    state[name],
                    tensor,
                    rtol=0,
                    atol=1e-10,
                    msg=lambda m, at=(case, stage, name): f"{at}: {m}",
                )


def uneven(rank: int, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The loop of one's own, with 3 samples on one rank and 5 on the other."""
    engine = polyreme.initialize(Net("2d"), config(world, 1, 2, "sync", precision={"compute": "fp64"}))
    losses = []
    for step in range(3):
        x, y = (tensor[3:] if rank else tensor[:3] for tensor in batch("2d", step))
        engine.backward(F.mse_loss(engine(x), y), weight=len(x))
        losses.append(engine.step().loss)
    return losses, engine.state_dict()


def test_ranks_with_different_numbers_of_samples(ranks: Ranks) -> None:
    losses, weights = plain("2d", 1, 1)
    for got, state in ranks(2, uneven):
        assert got == pytest.approx(losses[:-1], rel=1e-10)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-10)


class Codebook(nn.Module):
    """A running mean of its own, replaced by each forward, one that is changed in place every other time, and
    a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.utils.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("fixed", torch.ones(6))
        self.register_buffer("times", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
            self.cache = x.detach()
            if self.mean.abs().sum() > 0:
                self.times += 1
        return x * self.fixed


def shared(rank: int, world: int, folder: Path) -> tuple[list[dict[str, Tensor]], int, int]:
    """The buffers after steps where each rank keeps its own, and where all have rank 0's; and what was sent
    for them in the steps after the first."""
    found, sent = [], [0]
    for way, others in (("rank", "local"), ("broadcast", "rank0")):
        torch.manual_seed(rank)
        engine = polyreme.initialize(
            Codebook(), {**training.config(world), "batch_norm": way, "buffers": others}, loss_fn=F.mse_loss
        )
        for step in range(3):
            torch.manual_seed(100 + 10 * step + rank)
            x = torch.randn(training.SAMPLES // world, 6)
            engine.train_step((x, x.sin()))
            sent.append(engine.traffic().get("dp", {}).get("broadcast", (0, 0))[0])
        found.append({name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    engine.save(folder / "saved")
    engine.load(folder / "saved")
    for name, buffer in engine.module.named_buffers():
        assert name == "cache" or torch.equal(buffer, found[1][name]), name
    return found, sent[-1] - sent[-2], sent[-4] - sent[-5]


def test_buffers_that_forwards_change_are_rank_0s_after_a_step(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks(2, shared, tmp_path)
    for name in ("norm.running_mean", "mean"):
        assert not torch.equal(one[0][0][name], other[0][0][name]), name
    for name, buffer in one[0][1].items():
        assert torch.equal(buffer, other[0][1][name]) == (name != "cache"), name
    assert one[1:] == (2, 0), "one broadcast for each dtype, and none where each rank keeps its own"


def half(rank: int, world: int) -> list[tuple[list[float], list[torch.dtype]]]:
    found = []
    for compute, way in (
        ("fp32", "broadcast"),
        ("bf16", "rank"),
        ("bf16", "broadcast"),
        ("bf16", "sync"),
        ("fp16", "broadcast"),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            section: dict[str, Any] = {"compute": compute} | (
                {"initial_scale": 1.0} if compute == "fp16" else {}
            )
            engine = polyreme.initialize(
                Net("2d").to(dtype), config(world, 1, 2, way, precision=section), loss_fn=F.mse_loss
            )
            losses = [
                engine.train_step(models.share(batch("2d", step), rank, world)).loss for step in range(3)
            ]
            losses.append(engine.eval_step(models.share(batch("2d", 9), rank, world)).loss)
            found.append(
                (losses, [b.dtype for name, b in engine.module.named_buffers() if "running" in name])
            )
            assert torch.isfinite(
                copy.deepcopy(engine.module.blocks[0]["norm"])(
                    torch.randn(4, 6, 2, 2).to(next(engine.module.parameters()).dtype)
                )
            ).all()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_half_precision_keeps_statistics_in_float32(ranks: Ranks, world: int) -> None:
    for found in ranks(world, half):
        for losses, dtypes in found:
            assert losses == pytest.approx(found[0][0], rel=0.05)
            assert {*dtypes} == {torch.float32}


class OwnForward(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def refused(rank: int, world: int) -> None:
    way = {**training.config(world), "batch_norm": "sync"}
    with pytest.raises(
        ModelError, match=r'1 \(OwnForward\) has a forward of its own.*batch_norm = "broadcast"'
    ):
        polyreme.initialize(nn.Sequential(nn.Linear(6, 6), OwnForward(6)), way)
    with pytest.raises(ModelError, match=r"1 is an nn\.SyncBatchNorm over a process group"):
        polyreme.initialize(nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6, process_group=object())), way)
    engine = polyreme.initialize(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), way)
    if world == 2:
        with pytest.raises(
            BatchError, match="more than one value a channel in training, but all 2 ranks together have 1"
        ):
            engine(torch.randn(1 - rank, 6))


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_synchronised_is_refused(ranks: Ranks, world: int) -> None:
    ranks(world, refused)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_lookups_change_are_refused(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"words": kind(10, 4, max_norm=1.0)})
    for given in (model, lambda: nn.ModuleDict({"words": kind(10, 4, max_norm=1.0)})):
        with pytest.raises(ModelError, match=r"words has max_norm = 1\.0.*leave max_norm out"):
            polyreme.initialize(given, training.config(1))
