"""Messages between neighbouring stages of a pipeline, for scripts that send their own."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import OrderError, refused

_grid: Any = None


def can_send_recv() -> bool:
    """Whether the transport has sends and receives: it has."""
    return True


def init_process_groups(grid: Any) -> None:
    """Send and receive by the places of `grid`, a PipelineParallelGrid. Raises OrderError for one stage."""
    global _grid
    if grid.pipe_parallel_size < 2:
        raise OrderError("There is no pipeline parallelism: give a grid of two stages or more")
    _grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
    """Send to this rank's counterpart of a neighbouring stage (the last and the first are neighbours)."""
    dist.send(tensor, _rank(dest_stage, async_op))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> None:
    """Receive into `tensor` from this rank's counterpart of a neighbouring stage."""
    dist.recv(tensor, _rank(src_stage, async_op))


def wait() -> None:
    """Wait until the device has done what it was given."""
    get_accelerator().synchronize()


def send_obj(msg: Any, dest: int) -> None:
    """Send numbers, texts, lists and dictionaries of them to the rank `dest`. Raises TypeError for others."""
    encoded = torch.frombuffer(bytearray(json.dumps(msg).encode()), dtype=torch.uint8)
    device = get_accelerator().device_name()
    dist.send(torch.tensor([encoded.numel()], device=device), dest)
    dist.send(encoded.to(device), dest)


def recv_obj(sender: int) -> Any:
    """What the rank `sender` sends by `send_obj`."""
    device = get_accelerator().device_name()
    length = torch.zeros(1, dtype=torch.long, device=device)
    dist.recv(length, sender)
    encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(encoded, sender)
    return json.loads(encoded.cpu().numpy().tobytes())


def _rank(stage: int, async_op: bool) -> int:
    """The rank of the other stage at this rank's place."""
    if async_op:
        raise refused(
            "p2p.send and recv with async_op", "they end when they return", "use deepspeed.comm.isend"
        )
    if _grid is None:
        raise OrderError("p2p before init_process_groups(grid): call it first")
    if abs(stage - _grid.get_stage_id()) not in (1, _grid.pipe_parallel_size - 1):
        raise OrderError(f"stage {stage} is no neighbour of stage {_grid.get_stage_id()}: send step by step")
    return _grid.stage_to_global(stage_id=stage)
