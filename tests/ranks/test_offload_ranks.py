"""Activations in host memory and in files, on meshes: the bits of keeping them, memory really freed, a
failure on one rank ends all."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import models
import polyreme
import probe
import threads
import training
from command import polyreme as command
from examples import ALL
from pool import Ranks

LAYERS = 6
CASES: dict[str, dict[str, Any]] = {
    "zero-3": {"mesh": {"dp": 2}, "zero": {"stage": 3}},
    "1f1b": {"mesh": {"pp": 2}, "batch": {"micro": 1}},
    "zb-v-bf16": {
        "mesh": {"pp": 2},
        "batch": {"micro": 2},
        "pipeline": {"schedule": "zb-v"},
        "precision": {"compute": "bf16"},
    },
    "sequence-parallel": {"mesh": {"tp": 2, "sequence_parallel": True}, "batch": {"micro": 4}},
}


def run(sections: dict[str, Any], activations: str) -> tuple[training.Run, dict[str, int], int, int]:
    """A run of two steps; bytes told; the most bytes of blocks' inputs that lived between forwards and
    backwards; bytes moved."""
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=LAYERS, attention_dropout=0.1)
    engine = polyreme.initialize(
        model, training.config(2, **sections, memory={"activations": activations}), loss_fn=models.causal_loss
    )
    given: dict[int, tuple[StorageWeakRef, int]] = {}
    alive = [0]

    def note(block: nn.Module, args: Any) -> None:
        storage = args[0].untyped_storage()
        given[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def count() -> None:
        gc.collect()
        alive.append(sum(nbytes for ref, nbytes in given.values() if not ref.expired()))

    probe.before_passes(engine, count)
    for block in engine.module.model.layers:
        block.register_forward_pre_hook(note)
    records = []
    for step in range(2):
        dp = engine.mesh.dp
        result = engine.train_step(
            models.share(models.batch_of("llama", training.SAMPLES, step), dp.rank, dp.size)
        )
        records.append((result.loss, result.grad_norm))
    deadline = time.monotonic() + 30  # the thread that copied the last one may not have let go of it yet
    while probe.activations_away(engine) and time.monotonic() < deadline:
        gc.collect()
    assert not probe.activations_away(engine)
    moved = probe.activations_written(engine)
    return (records, engine.state_dict(rank0_only=True, master=True)), engine.memory(), max(alive), moved


def runs(rank: int, world: int, sections: dict[str, Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return [run(sections, kind) for kind in ("keep", "recompute", "host", folder)]


@pytest.mark.parametrize("case", CASES if ALL in os.environ else ("zero-3", "sequence-parallel"))
def test_bits_and_bytes(ranks: Ranks, case: str) -> None:
    """On processes without tensor or pipeline parallelism, else on threads."""
    found = (ranks if case == "zero-3" or ALL in os.environ else threads.run)(2, runs, CASES[case])
    for results in found:
        plain = results[0][0]
        assert not [d for other, *_ in results[1:] for d in training.differences(plain, other)]
        _, (_, recompute, most, _), (_, host, less, to_host), (_, files, least, to_files) = results
        assert (
            host["activations"] + host["activations_host"]
            == files["activations"] + files["activations_files"]
            == recompute["activations"]
        )
        assert host["activations_host"] == files["activations_files"]
        assert to_files >= to_host > 0
        # where stages of one rank follow each other, what passes stays
        assert least == less <= most / (2 if case == "zb-v-bf16" else 3)
        # where the first micro-batch may find one block on a stage
        assert host["activations_host"] > 0 or case == "zb-v-bf16"


SCRIPT = """
import errno, os, sys
import torch
from torch import nn
import polyreme

rank = int(os.environ["RANK"])
real = os.pwritev

def write(*args):
    if rank == 1 and steps >= 2:  # a write is dropped where backward comes before it
        raise OSError(errno.EIO, "made up")
    return real(*args)

os.pwritev = write

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

config = {"zero": {"stage": 3, "min_bucket": 0}, "batch": {"size": 4}, "memory": {"activations": "./kept"}}
engine = polyreme.initialize(Model(), config, loss_fn=nn.functional.mse_loss)
torch.manual_seed(rank)  # ranks draw alike otherwise
steps = 0
while True:
    steps += 1
    engine.train_step((torch.randn(2, 8), torch.randn(2, 8)))
"""


def test_a_failing_disk_of_one_rank_ends_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    status, output, errors = command(tmp_path, "launch", "-n", "2", "script.py")
    assert (status, output) == (1, "")
    assert errors.startswith("error: rank 1 of 2 failed first")
    assert (
        "kept: write of 4,096 bytes failed with 4,096 to go (made up)" in errors
        and "are free" in errors
        and "Traceback" not in errors
    )
    assert not list((tmp_path / "kept").iterdir())
