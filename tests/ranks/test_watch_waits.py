"""Ranks that do not make the same calls, or run the same blocks: each says so, of whom, and none waits until
the deadline."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyreme
from polyreme.distributed.mesh import Mesh, everyone
from polyreme.distributed.watch import BACKGROUND, Watch, WatchedGroup
from polyreme.distributed.world import current
from polyreme.errors import PolyremeError, TransportError
from pool import Ranks

WIDTH = 64
BATCH = {"batch": {"size": 4}}


class Branches(nn.Module):
    """Of two blocks `which` chooses one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[2 - self.which](x)


@contextlib.contextmanager
def watched(patience: float, period: float, every: float = 60.0) -> Iterator[None]:
    """Look at waits this often meanwhile, from now on."""
    watch = current().of(Watch)
    before = watch.patience, watch.period, watch.every
    watch.patience, watch.period, watch.every = patience, period, every
    watch._wake.set()  # it may have begun to sleep for longer
    watch._wake.clear()
    try:
        yield
    finally:
        watch.patience, watch.period, watch.every = before


def apart(rank: int, world: int, case: str, folder: Path) -> tuple[str, float]:
    """What a rank says where rank 1 does something else than rank 0."""
    width = 8 if "small" in case else WIDTH
    model = Branches(width)
    stage = 3 if case in ("blocks", "small blocks", "validation", "state_dict", "full_parameters") else 2
    zero = {"stage": stage, "min_bucket": 0}
    engine = polyreme.initialize(model, {**BATCH, "zero": zero}, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(2, width), torch.randn(2, width)
    engine.train_step(batch)
    began = time.monotonic()
    with watched(0.2, 0.05):
        try:
            if "blocks" in case:
                model.which = rank
                engine.train_step(batch)
            elif rank == 0:
                engine.train_step(batch)
            elif "validation" in case:
                engine.module(batch[0])
                engine.train_step(batch)
            elif "eval" in case:
                engine.eval_step(batch)
            elif case == "state_dict":
                engine.state_dict()
            elif case == "full_parameters":
                with engine.full_parameters():
                    pass
            else:
                engine.save(folder)
        except PolyremeError as error:
            # at once, and over other connections, too: the other rank has left
            with pytest.raises(PolyremeError, match="rank"):
                engine.save(folder)
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


def alone(call: str) -> tuple[str, ...]:
    """What is said where rank 1 alone makes a call."""
    return (
        f"because rank 1 alone called engine.{call}, and rank 0 engine.train_step in its place; every rank "
        f"has to call engine.{call}, outside of any `if rank == 0:`",
    )


CASES = {
    "blocks": ("blocks.1.weight", "zero.keep"),
    "small blocks": ("blocks.1.weight", "zero.keep"),
    "eval": ("in eval_step failed", "in train_step failed", *alone("eval_step")),
    "small eval": alone("eval_step"),
    "save": alone("save"),
    "state_dict": alone("state_dict"),
    "full_parameters": alone("full_parameters"),
    "validation": (
        ". Before, rank ",
        " outside of the engine's methods, as where engine.module is called",
        "; a model that each rank calls as often",
        "by engine.eval_step",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_say_what_the_other_does(ranks: Ranks, tmp_path: Path, case: str) -> None:
    answers: list[Any] = ranks(2, apart, case, tmp_path / "checkpoint")
    for rank, (said, seconds) in enumerate(answers):
        assert f"rank {1 - rank}" in said and said.startswith(("TransportError", "CheckpointError")), (
            rank,
            said,
        )
        assert seconds < 120, "far before the deadline of ten minutes"
    for name in CASES[case]:
        assert any(name in said for said, _ in answers), (name, answers)
    if alone(case)[0] in CASES[case]:
        assert not any("zero.keep" in said or "generate" in said for said, _ in answers), answers


def late(rank: int, world: int, told: Path) -> float:
    """The loss of a step to which rank 1 comes once rank 0 has said that it waits."""
    engine = polyreme.initialize(Branches(), BATCH, loss_fn=nn.functional.mse_loss)
    batch = torch.ones(2, WIDTH), torch.zeros(2, WIDTH)
    with watched(0.05, 0.05, every=0.1):
        if rank == 0:
            with told.open("w") as stream, contextlib.redirect_stderr(stream):
                return engine.train_step(batch).loss
        while not (told.exists() and "\n" in told.read_text()):
            time.sleep(0.01)
        return engine.train_step(batch).loss


def caught(rank: int, world: int) -> list[str]:
    """What each rank says of a call in which rank 1 alone fails, and whose error its script catches; and that
    nobody takes it for one of a later call."""
    said = []

    def fails(*_: object) -> None:
        if rank == 1:
            raise ValueError("of rank 1")

    engine = polyreme.initialize(Branches(), {**BATCH, "zero": {"stage": 2}}, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    with pytest.raises(polyreme.BatchError):  # on all ranks
        engine.train_step((batch[0][:1], batch[1]))
    with watched(0.1, 0.05):
        if rank == 1:
            time.sleep(0.4)
        engine.train_step(batch)
        engine.module.blocks[0].register_forward_hook(fails)
        try:
            engine.train_step(batch)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        if rank == 1:
            time.sleep(1.0)  # it has not ended
    return said


def test_an_error_that_a_script_catches_is_told_to_who_waits(ranks: Ranks) -> None:
    (first,), (second,) = ranks(2, caught)
    assert second == "ValueError: of rank 1"
    assert first.startswith("TransportError: ") and "because rank 1 raised ValueError: of rank 1" in first


def test_a_long_wait_says_for_whom_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks(2, late, tmp_path / "told")
    assert losses[0] == losses[1]
    # Which operation comes first in a step is not told of here: a first step compares its batches, too.
    assert re.match(
        r"polyreme: rank 0 has waited \d+ s for rank 1 in train_step: .+ over dp \(",
        (tmp_path / "told").read_text(),
    )


def around(rank: int, world: int) -> str:
    """What a rank says where each waits for the next one, over one axis of the mesh or the other."""
    mesh = Mesh.open({"dp": 2, "tp": 2})
    axes = [mesh.dp, mesh.tp] if mesh.dp.rank == mesh.tp.rank else [mesh.tp, mesh.dp]
    try:
        with watched(0.2, 0.05):
            for axis in axes:
                axis.all_reduce(torch.ones(4)).wait()
    except TransportError as error:
        return str(error)
    return ""


def test_ranks_that_wait_in_a_circle_are_named(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(4, around)):
        assert "same calls in the same order" in said, (rank, said)
        for other in range(4):
            assert f"rank {other} waits for rank" in said or f"and rank {other} for rank" in said, (
                rank,
                said,
            )


def beside(rank: int, world: int) -> float:
    """The sum where rank 1 waits for rank 0, whose saving thread waits for rank 1, and which comes after both
    have looked some times."""
    dp, control = Mesh.open({"dp": 2}).dp, everyone()
    before, total = [_reports(each) for each in range(2)], torch.ones(1)
    dp.barrier()
    with watched(0.05, 0.02):
        if rank == 0:
            saving = threading.Thread(target=control.barrier, name=BACKGROUND)
            saving.start()
            while any(_reports(each) < before[each] + 6 for each in range(2)):
                time.sleep(0.01)
        dp.all_reduce(total).settle()
        if rank == 0:
            saving.join()
        else:
            control.barrier()
    return total.item()


def _reports(rank: int) -> int:
    store = current().of(Watch)._store
    return int(json.loads(store.get(f"at/{rank}"))["report"]) if store.check([f"at/{rank}"]) else 0


def test_a_thread_that_saves_is_in_no_circle(ranks: Ranks) -> None:
    assert ranks(2, beside) == [2.0, 2.0]


def left_over(rank: int, world: int) -> int:
    """How many of the watched groups that were there before the process group was left are still reported."""
    kept = polyreme.initialize(Branches(), BATCH, loss_fn=nn.functional.mse_loss)
    before = list(current().of(Watch).groups)
    current().close()
    assert kept is not None
    return len(set(before) & set(current().of(Watch).groups)) - (not before)


def test_no_watched_group_outlives_its_process_group(ranks: Ranks) -> None:
    assert ranks(2, left_over) == [0, 0]


class Gone(WatchedGroup):
    """Ranks whose process group was destroyed while a wait for them was looked at."""

    def __init__(self, looks: threading.Semaphore) -> None:
        self.looks, self.broken = looks, ""

    def abort(self, why: str) -> None:
        self.looks.release()
        raise ValueError("the default process group has not been initialized")


def test_the_watch_outlives_a_group_that_is_gone() -> None:
    watch, looks = Watch(), threading.Semaphore(0)
    watch.patience, watch.period = 0.0, 0.001
    with watch.waiting(Gone(looks), "all-reduce", 0):
        watch.failure = "rank 1 left"
        threading.Thread(target=watch._look_again, daemon=True).start()
        assert all(looks.acquire(timeout=60) for _ in range(3)), "it looks on after an error"
    watch.period = 3600.0  # its thread has nothing more to do
