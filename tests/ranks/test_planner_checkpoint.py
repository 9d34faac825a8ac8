"""A plan says what saves and loads take of real ranks: live tensors at their most, and the bytes of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import Tensor

import planned
import polyreme
from cover import ALL
from planned import LARGE, Case
from polyreme.checkpoint import copy_on_write, reader
from polyreme.checkpoint.save import Saver
from polyreme.checkpoint.writer import BUFFERS, Writer
from polyreme.planner.dry_run import STEPS, recorded
from polyreme.planner.recorder import Recorder
from pool import Ranks


class Took(NamedTuple):
    """Bytes that a rank had beside what is there between steps, and those of the files."""

    save: int
    background: int
    load: int
    files: int


def most(recorder: Recorder) -> int:
    """The most bytes since what was there at the beginning."""
    changes = [by for record in recorder.segments for _, _, by, _ in record.changes]
    total = highest = 0
    for by in changes[recorder.segments[0].resting :]:
        total += by
        highest = max(highest, total)
    return highest


@contextmanager
def blocks_of(recorder: Recorder, told: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Follow blocks of memory that are not torch's own, too. told: called for each."""
    with ExitStack() as stack:
        for module in (copy_on_write, reader):

            def follow(nbytes: int, own: Callable[[int], Tensor] = module.aligned) -> Tensor:
                memory = own(nbytes)
                recorder._storage(memory, "temporary")
                told()
                return memory

            stack.enter_context(patch.object(module, "aligned", follow))
        yield


@contextmanager
def slow_disk() -> Iterator[tuple[threading.Semaphore, threading.Event, list[Saver]]]:
    """Write nothing before the event is set. The semaphore counts the blocks that are packed; the
    list has who saves."""
    packed, goes = threading.Semaphore(0), threading.Event()
    savers: list[Saver] = []
    save = Saver.save

    def noted(saver: Saver, *arguments: Any, **options: Any) -> None:
        savers.append(saver)
        save(saver, *arguments, **options)

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def pack(*arguments: Any) -> Any:
            found = own(*arguments)
            packed.release()
            return found

        return pack

    def late(own: Callable[..., Any]) -> Callable[..., Any]:
        def put(*arguments: Any) -> Any:
            goes.wait(60)
            return own(*arguments)

        return put

    with ExitStack() as stack:
        stack.enter_context(patch.object(Saver, "save", noted))
        for name, way in (("_fill", counted), ("_gather", counted), ("_put", late), ("_put_segment", late)):
            stack.enter_context(patch.object(Writer, name, way(getattr(Writer, name))))
        yield packed, goes, savers


def took(rank: int, world: int, case: Case, folder: str) -> Took:
    model, batch, loss_fn = LARGE[case.family]
    config, path = case.config(folder), Path(folder) / "checkpoint"
    with polyreme.initialize(model, config, loss_fn=loss_fn) as engine:
        share = batch(config.share)
        for _ in range(STEPS):
            engine.train_step(share)
        found = []
        with recorded(engine) as recorder, blocks_of(recorder):
            engine.save(path)
        found.append(most(recorder))
        with recorded(engine) as recorder, slow_disk() as (packed, goes, savers):
            calls = iter((lambda: None, goes.set))
            with blocks_of(recorder, lambda: next(calls)()):
                engine.save(path, wait=False)
                for _ in range(BUFFERS):
                    assert packed.acquire(timeout=60)
                savers[-1].wait_until_copied()
                engine.wait()
        found.append(most(recorder))
        with recorded(engine) as recorder, blocks_of(recorder):
            engine.load(path)
        found.append(most(recorder))
    return Took(*found, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


CASES = [
    Case("large llama", (("dp", 2),), 3, "device", "keep", "fp32", 1),
    Case("large llama", (), 0, "device", "keep", "fp32", 1),
    Case("large llama", (), 3, "host", "keep", "bf16", 1),
    Case("large llama", (("tp", 2),), 0, "device", "keep", "fp32", 1),
    Case("large llama", (("pp", 2),), 0, "device", "keep", "fp32", 4),
    Case("large gpt2", (("dp", 2),), 1, "device", "keep", "bf16", 4),
    Case("large llama", (("dp", 2),), 3, "host", "keep", "fp32", 1),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES if ALL in os.environ else CASES[:1], ids=lambda case: case.name)
def test_a_plan_says_what_checkpoints_take(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    folder = str(tmp_path)
    runs = ranks(case.world, took, case, folder) if case.world > 1 else [took(0, 1, case, folder)]
    for rank, did in enumerate(runs):
        said = planned.predicted(case, rank, folder).checkpoint
        assert said is not None
        expected = Took(said.save, said.background, said.load + said.load_device, said.files)
        if "tp" in dict(case.mesh):  # of what both need, each reads a part
            assert 0.7 * expected.load < did.load <= expected.load
            did = did._replace(load=expected.load)
        assert [*did] == pytest.approx([*expected], rel=0.02), (rank, did, expected)
