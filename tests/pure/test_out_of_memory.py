"""Memory that runs out: one message, which says where, what there is, and what takes less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyreme
from polyreme.config import Config
from polyreme.config.advice import takes_less
from polyreme.files.machine import killed_for_memory
from polyreme.launch import local, torchrun
from polyreme.launch.options import RanksFailedError

ABSURD = 2**50


def fill(_: object = None) -> torch.Tensor:
    return torch.empty(ABSURD)


class Layer(nn.Module):
    """Fails in its forward or in its backward, if it is to."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.inner, self.at = nn.Linear(4, 4), at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.at == "forward":
            fill()
        if self.at == "backward" and x.requires_grad:
            x.register_hook(lambda gradient: fill())
        return x


def engine(at: str) -> polyreme.Engine:
    config = {"batch": {"size": 4, "micro": 4}, "zero": {"stage": 1}}
    return polyreme.initialize(nn.Sequential(nn.Linear(4, 4), Layer(at)), config, loss_fn=loss)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


BATCH = (torch.ones(4, 4), torch.ones(4, 4))
CALLS: dict[str, tuple[str, Callable[[polyreme.Engine], Any], str]] = {
    "step": ("forward", lambda e: e.train_step(BATCH), "the forward of 1 (Layer) of engine.train_step()"),
    "backward": ("backward", lambda e: e.train_step(BATCH), "the backward of engine.train_step()"),
    "eval": ("forward", lambda e: e.eval_step(BATCH), "the forward of 1 (Layer) of engine.eval_step()"),
    "call": ("forward", lambda e: e(BATCH[0]), "the forward of 1 (Layer) of engine(...)"),
    "loop": ("backward", lambda e: e.backward(e(BATCH[0]).mean()), "the backward of engine.backward()"),
}


@pytest.mark.parametrize("case", CALLS)
def test_who_asked_what_there_is_and_what_takes_less(case: str) -> None:
    at, call, where = CALLS[case]
    with engine(at) as made:
        with pytest.raises(polyreme.OutOfMemoryError) as caught:
            call(made)
        text = str(caught.value)
        assert text.startswith(f"out of memory in {where}: 4.0 PiB were asked for\n"), text
        assert "this rank has parameters 1.0 KiB" in text
        assert (
            'takes less: batch.micro = 2 (now 4); memory.activations = "recompute" (now "keep"); memory'
            in text
        )
        assert isinstance(caught.value, RuntimeError) and "allocate memory" in str(caught.value.__cause__)
        assert text.count("\n") <= 3


def test_a_smaller_batch_goes_on_after_it() -> None:
    with engine("never") as made:
        made.module[1].at = "forward"  # type: ignore[union-attr]
        with pytest.raises(polyreme.OutOfMemoryError):
            made.train_step(BATCH)
        made.module[1].at = "never"  # type: ignore[union-attr]
        assert made.train_step(BATCH).step == 1


def test_of_a_model_that_cannot_be_made_and_of_other_errors() -> None:
    with pytest.raises(polyreme.OutOfMemoryError, match=r"out of memory in initialize\(\): 4\.0 PiB"):
        polyreme.initialize(lambda: nn.Linear(2**25, 2**25), {"batch": {"size": 4}}, loss_fn=loss)
    with engine("never") as made, pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        made.train_step((torch.ones(4, 3), torch.ones(4, 4)))
    assert not isinstance(caught.value, polyreme.PolyremeError)


def advice(host: bool = False, ranks: int = 2, **sections: Any) -> list[str]:
    config = Config.load({"batch": {"size": 8, "micro": 1}, **sections})
    return takes_less(config.resolve(ranks), ranks, host)


def test_only_what_would_still_change_something_is_advised() -> None:
    assert advice() == [
        'memory.activations = "recompute" (now "keep")', "zero.stage = 3 (now 2)",
        'memory.states = "host" (now "device")',
    ]  # fmt: skip
    assert "zero.stage = 3 (now 2)" not in advice(ranks=1)
    given = {"activations": "recompute", "states": "host", "params": "host"}
    assert advice(memory=given, zero={"stage": 3}, batch={"size": 8, "micro": 4}) == [
        "batch.micro = 2 (now 4)", 'memory.activations = "host" (now "recompute")',
        'memory.states = "./offload" (now "host")', 'memory.params = "./offload" (now "host")',
    ]  # fmt: skip
    gone = {"activations": "/nvme", "states": "/nvme", "params": "/nvme"}
    assert advice(host=True, memory=gone, zero={"stage": 3}) == []


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        ({"proc/self/cgroup": "3:memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.oom_control":
          "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", "proc/vmstat": "oom_kill 9\n"}, 7),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "pgpgin 5\noom_kill 9\n"}, 9),
        ({"proc/vmstat": "pgpgin 5\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_how_many_the_kernel_has_killed(tmp_path: Path, files: dict[str, str], count: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert killed_for_memory(tmp_path) == count


@pytest.mark.parametrize("more", [0, 1])
def test_a_rank_that_the_kernel_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    counts = iter([5, 5 + more])
    monkeypatch.setattr(local, "killed_for_memory", lambda: next(counts))
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(RanksFailedError) as caught:
        torchrun.launch([str(script)], 1)
    how = "it was ended by SIGKILL" + ", which the kernel sent for lack of memory" * more
    assert str(caught.value) == f"rank 0 of 1 failed first: {how}"
    assert caught.value.out_of_memory == bool(more)
