"""Attention over a sequence that ranks divide: each way of `mesh.cp` beside DeepSpeed's Ulysses, keys and
values gathered for torch's masked attention, and no communication at all.

    python bench/context.py --ranks 2 --tokens 4096,16384,65536 --out bench/results/NAME.json
    torchrun --nproc-per-node 8 bench/context.py --tokens 65536     # beside torch's context_parallel

One causal attention, forward and backward. All ways have turns in a new order each round, and a ratio is of
turns of one round. The floor has the heads of one rank and all tokens, and exchanges nothing. The rows of
packed documents are of a ring; their floor is its zigzag of the whole sequence. torch's `context_parallel`
has no rule for attention on a CPU. Exit status: 1 where two losses differ."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.layout.mesh_axes import AXES
from polyreme.sequence.methods import Across, Method, attention
from polyreme.sequence.parts import Balance, Parts, Work, cut
from polyreme.sequence.visible import Rule, Tokens
from report import spread, write
from step import environment, say

HEADS, WIDTH = 8, 64
FLOOR, GATHERED, DEEPSPEED, TORCH = "no communication", "gathered, masked sdpa", "DeepSpeed Ulysses", "torch"
MEDIAN, SIGMA = 600, 1.2
"""Of the lengths of packed documents, which are lognormal."""
LARGEST = 2**29
"""The most pairs of a query and a key that a mask is made of."""
CLOSE = 1e-3
"""By how much losses may differ, of the root of the numbers that they are sums over."""
Turn = Callable[[], float]
"""Takes a step, and returns this rank's sum of losses."""


def documents(tokens: int, packed: bool) -> Tensor:
    """The document of each token of one sample."""
    if not packed:
        return torch.zeros(1, tokens, dtype=torch.long)
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < tokens:
        lengths.append(max(1, round(MEDIAN * draw.lognormvariate(0, SIGMA))))
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None, :tokens]


class Case:
    """A sequence, the same on all ranks: queries, keys, values, and weights of the loss."""

    def __init__(self, mesh: Mesh, tokens: int, dtype: torch.dtype) -> None:
        self.mesh, self.axis, self.tokens, self.device = mesh, mesh.cp, tokens, mesh.device
        numbers = torch.randn(4, 1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.whole = numbers.to(dtype).to(self.device)

    def turn(self, mine: Tensor | Parts, attend: Callable[..., Tensor]) -> Turn:
        """A step of this rank's numbers by `attend`, which takes (samples, heads, tokens, width)."""
        numbers = mine if isinstance(mine, Tensor) else [mine.mine(n, self.axis.rank) for n in self.whole]
        *leaves, weights = (each.transpose(1, 2).detach() for each in numbers)
        leaves = [each.requires_grad_() for each in leaves]

        def step() -> float:
            loss = (attend(*leaves).double() * weights).sum()
            loss.backward()
            for each in leaves:
                each.grad = None
            return loss.item()

        return step

    def ours(self, method: Method, balance: Balance, packed: bool = False) -> Turn:
        """One of the ways of `mesh.cp`."""
        of, size = documents(self.tokens, packed), self.axis.size
        neighbours = {"ulysses": size, "mix": 2 - size % 2}.get(method, 1)
        heads, ring = self.mesh.split("cp", neighbours, ("cp_ulysses", "cp_ring"))
        parts = cut(of, ring.size, balance, Work())
        tokens = [Tokens(parts.order[:, r], parts.mine(of, r), parts.mine(of, r)) for r in range(ring.size)]
        across = Across(ring, tokens, Rule(WIDTH**-0.5), heads, method == "gather")
        return self.turn(parts.split(neighbours), lambda q, k, v: attention(q, k, v, None, across))

    def floor(self) -> Turn:
        """This rank's heads of all tokens."""
        heads = self.whole.chunk(self.axis.size, 3)[self.axis.rank]
        return self.turn(heads, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def gathered(self) -> Turn:
        """Each rank has all keys and values, and a mask of those that its zigzag of queries sees."""
        parts = cut(documents(self.tokens, False), self.axis.size, "zigzag", Work())
        mine, theirs = parts.order[0, self.axis.rank], parts.order[0].flatten()
        mask = (theirs[None, :] <= mine[:, None]).to(self.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (Gathered.apply(each, self.axis) for each in (k, v))
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        return self.turn(parts, attend)

    def deepspeed(self) -> Turn:
        """DeepSpeed's own exchange around torch's attention."""
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.init_distributed("nccl" if self.device.type == "cuda" else "gloo")

        def local(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        layer = DistributedAttention(local, dist.group.WORLD)

        def attend(*inputs: Tensor) -> Tensor:
            found: Tensor = layer(*(each.transpose(1, 2).contiguous() for each in inputs), 0)
            return found.transpose(1, 2)

        return self.turn(self.whole.chunk(self.axis.size, 2)[self.axis.rank], attend)

    def torchs(self) -> Turn:
        """torch's `context_parallel`, with its zigzag and its rotation of keys and values."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (self.axis.size,))

        def step() -> float:
            given = [each.transpose(1, 2).contiguous() for each in self.whole]  # which it cuts in place
            with context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * 4):
                q, k, v = (each.requires_grad_() for each in given[:3])
                found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                loss = (found.double() * given[3]).sum()
                loss.backward()
            return loss.item()

        return step


class Gathered(torch.autograd.Function):
    """All ranks' tokens, one rank's after the other's; in the backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis, flat = axis, tensor.movedim(2, 0).contiguous()
        return axis.gathered(flat.view(-1)).view(-1, *flat.shape[1:]).movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flat = grad.movedim(2, 0).contiguous()
        own = flat.new_empty(flat.numel() // ctx.axis.size)
        ctx.axis.reduce_scatter(own, flat.view(-1)).wait()
        return own.view(-1, *flat.shape[1:]).movedim(0, 2), None


def turns_of(case: Case) -> dict[str, Turn]:
    """All ways, those of packed documents after those of one."""
    found = {FLOOR: case.floor(), **{m: case.ours(m, "zigzag") for m in get_args(Method)}}
    if find_spec("deepspeed"):
        found[DEEPSPEED] = case.deepspeed()
    if case.tokens**2 // case.axis.size <= LARGEST:
        found[GATHERED] = case.gathered()
    if case.device.type == "cuda":
        found[TORCH] = case.torchs()
    return found | {f"packed, {each}": case.ours("ring", each, packed=True) for each in get_args(Balance)}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The seconds of each way in each round, of the slowest rank, and its loss."""
    turns, generator = turns_of(case), random.Random(0)
    order, losses, seconds = list(turns), dict[str, float](), list[dict[str, float]]()
    for number in range(rounds + 1):
        generator.shuffle(order)
        taken = {}
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            loss = turns[name]()
            if case.device.type == "cuda":
                torch.cuda.synchronize()
            told: list[Any] = case.axis.gather_objects([time.perf_counter() - began, loss])
            taken[name], losses[name] = max(each for each, _ in told), sum(each for _, each in told)
        seconds += [taken] * (number > 0)  # the first touches its memory
    return {"tokens": case.tokens, "seconds": seconds, "losses": losses}


def wrong(found: dict[str, Any]) -> list[str]:
    """Ways whose loss is not that of the others."""
    losses, size = found["losses"], (found["tokens"] * HEADS * WIDTH) ** 0.5
    firsts = {name: "packed, zigzag" if name.startswith("packed") else FLOOR for name in losses}
    return [
        f"{name}: {losses[name]:.6g}, not {losses[first]:.6g}"
        for name, first in firsts.items()
        if not abs(losses[name] - losses[first]) <= CLOSE * size
    ]


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| tokens | way | ms | of its floor |", "|--:|---|--:|--:|"]
    for found in results:
        for name in found["losses"]:
            floor = "packed, zigzag" if name.startswith("packed") else FLOOR
            own = spread([each[name] * 1e3 for each in found["seconds"]])
            ratio = spread([each[name] / each[floor] for each in found["seconds"]])
            lines.append(f"| {found['tokens']:,} | {name} | {own['median']:.4g} | {ratio['median']:.3f} |")
    return lines


def rank(args: argparse.Namespace) -> int:
    """Measure on this rank; rank 0 writes and prints."""
    size = int(os.environ["WORLD_SIZE"])
    mesh = Mesh.open({name: size if name == "cp" else 1 for name in AXES})
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    results = [measure(Case(mesh, n, dtype), args.rounds) for n in args.tokens]
    errors = [f"{found['tokens']} tokens, {each}" for found in results for each in wrong(found)]
    if mesh.rank == 0:
        absent = [] if find_spec("deepspeed") else ["DeepSpeed is not installed, and was left out."]
        lines = [*table(results), *absent, *(f"WRONG: {each}" for each in errors)]
        say("\n".join(lines))
        if args.out:
            result = {"environment": environment(), "ranks": size, "results": results}
            write(result, "\n".join([*lines, ""]), args.out)
    return int(bool(errors))


def main() -> int:
    parser = argparse.ArgumentParser(description="See the first lines of this file.")
    parser.add_argument("--ranks", type=int, default=2, help="to start on this host")
    parser.add_argument("--tokens", default="4096,16384,65536")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        launch = [sys.executable, "-m", "polyreme", "launch", "-n", str(args.ranks), "--threads", "1"]
        return subprocess.call([*launch, *sys.argv])
    args.tokens = [int(each) for each in args.tokens.split(",")]
    return rank(args)


if __name__ == "__main__":
    sys.exit(main())
