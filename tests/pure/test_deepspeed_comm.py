"""How a process joins by DeepSpeed's call, without others."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch.distributed

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.comm import initialize
from polyreme.distributed.environment import Environment, announce, detect
from polyreme.errors import LaunchError, PolyremeError
from warm import WarmPython

ALONE = """
import psutil, torch
from polyreme.compat.deepspeed import comm as dist
assert not dist.is_initialized()
dist.init_distributed()
dist.init_distributed()
assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)
dist.all_reduce(x := torch.ones(2))
out = torch.zeros(2)
dist.all_gather_into_tensor(out, x)
assert dist.inference_all_reduce(x) is x and out.sum() == 2
dist.barrier()
assert dist.get_all_ranks_from_group(dist.new_group([0])) == [0]
listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
assert set(listening) <= {"127.0.0.1", "::1"}, listening
dist.destroy_process_group()
assert not dist.is_initialized()
print("fine")
"""


def test_a_single_process_is_a_world_of_its_own_that_nobody_else_reaches(tmp_path: Path) -> None:
    process = WarmPython(["-c", ALONE], tmp_path, os.environ)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "fine\n"), errors


def test_calls_before_a_group_is_open_say_what_to_call() -> None:
    for call in (dist.get_rank, dist.get_world_size, dist.get_world_group, dist.get_local_rank,
                 dist.barrier, dist.log_summary, lambda: dist.new_group([0])):  # fmt: skip
        with pytest.raises(AssertionError, match="call init_distributed"):
            call()
    with pytest.raises(AssertionError, match="dist_init_required"):
        dist.init_distributed(dist_init_required=False)


def test_an_operation_between_two_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"give deepspeed\.comm\.isend or deepspeed\.comm\.irecv"):
        dist.P2POp(torch.distributed.isend, torch.zeros(1), 0)


class World:
    """MPI's second process of three, on the second host."""

    def Get_rank(self) -> int:
        return 2

    def Get_size(self) -> int:
        return 3

    def allgather(self, host: str) -> list[str]:
        return ["a", "b", host]

    def bcast(self, address: str | None, root: int) -> str:
        return "10.0.0.1"


def test_mpirun_is_asked_through_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = types.SimpleNamespace(COMM_WORLD=World(), Get_processor_name=lambda: "b")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=asked))
    written: dict[str, str] = {}
    monkeypatch.setattr(initialize, "announce", lambda place: announce(place, written))
    dist.mpi_discovery(distributed_port=1234)
    assert detect(written) == Environment("torchrun", 2, 3, 1, 2, ("10.0.0.1", 1234))


def test_one_of_several_processes_without_mpi4py_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(LaunchError, match="mpirun"):
        dist.init_distributed()


def test_ranks_that_cannot_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolyremeError, match="could not meet"):
        dist.init_distributed("gloo", init_method="nowhere://", rank=0, world_size=1)
