"""A rank that leaves its loop before the others: whatever it does next, the others name it within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import polyreme

SCRIPT = """
import os, sys
import torch
import polyreme

rank, stage, way = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
config = {"batch": {"size": 4}, "zero": {"stage": stage, "min_bucket": 0}}
engine = polyreme.initialize(model, config, loss_fn=torch.nn.functional.mse_loss)
x = torch.ones(2, 6)
try:
    for step in range(3 - rank * (way != "saves")):
        engine.train_step((x, x))
    if not rank and way == "saves":
        engine.save("saved")
    if rank and way == "raises":
        raise ValueError("no more of it")
    if rank and way == "is killed":
        os.kill(os.getpid(), 9)
except polyreme.PolyremeError as error:
    print(rank, type(error).__name__, error, flush=True)
    sys.exit(1)
"""


@pytest.mark.parametrize(("stage", "way", "said"), [
    (3, "ends", "rank 1 ended before this one: all ranks have to make "
                "the same number of steps, and engine.ask_to_stop()"),
    (2, "saves", "rank 1 ended without it; every rank has to call engine.save, "
                 "outside of any `if rank == 0:`"),
    (2, "raises", "ValueError: no more of it"),
    (0, "is killed", "rank 1 of 2 failed first: it was ended by SIGKILL"),
])  # fmt: skip
def test_a_rank_that_leaves_early_is_named(tmp_path: Path, stage: int, way: str, said: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, output, errors = polyreme(tmp_path, "launch", "--ranks", "2", str(script), str(stage), way)
    assert status != 0 and said in output + errors, (status, output, errors)
