"""How fast `zero.kernels` updates a shard on the CPU, beside what the memory can do, torch's AdamW and
DeepSpeed's CPU Adam.

    python bench/optimizer.py --numbers 64 --rounds 9 --out bench/results/NAME.json

Every system makes the same update of the same memory, in turns and in a new order each round; a ratio is only
ever taken between turns of the same round. Before it is timed, ours must give the bits of torch's fused
kernel. Exit status: 0, or 1 if it does not. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polyreme.optim import cpu_kernels
from polyreme.optim.groups import Lion
from polyreme.optim.quantized_states import BLOCK, QuantizedKernel, States
from report import spread, write
from step import environment

FACTOR = 0.999
LR = 1e-4
TENSORS = 16
"""In how many the shard is handed to torch's own optimizers."""
CASES = {
    "fp32": (torch.float32, 1.0),
    "fp32, clipped": (torch.float32, FACTOR),
    "bf16, clipped": (torch.bfloat16, FACTOR),
}
"""Format of the gradient and of the rounded copy (none for fp32), and the factor of the gradient. Masters and
states are float32."""
OTHERS: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adam": (Adam, {"fused": True}),
    "SGD with momentum": (SGD, {"momentum": 0.9, "fused": True}),
    "Adagrad": (Adagrad, {"fused": True}),
    "Lion": (Lion, {"weight_decay": 0.1}),
}
ADAMW: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1}
COMPACT: Mapping[str, States] = {"AdamW, bf16 states": "bf16", "AdamW, 8bit states": "8bit"}
OURS, PIECES, WALKED = "polyreme", "polyreme, pieces of 512K", "polyreme without numba"
FUSED, FOREACH, DEEPSPEED = RIVALS = ("torch fused", "torch foreach", "DeepSpeedCPUAdam")
STREAMS = {"a *= s": 8, "a += s * b": 12}
"""Torch's in-place kernels of one pass, and the bytes they move for an element: the faster one of the round
is "the stream"."""
TRAFFIC = "AdamW's traffic"
"""A compiled loop that reads and writes what AdamW does, 28 bytes for an element, and only adds: what is left
for arithmetic to cost."""
AIMS = [("fp32", OURS, None, 0.95), ("fp32, clipped", OURS, None, 0.95), ("bf16, clipped", OURS, None, 0.90),
        *((case, OURS, DEEPSPEED, 1.0) for case in CASES), *((case, OURS, FUSED, None) for case in CASES),
        *((case, OURS, TRAFFIC, None) for case in CASES),
        *((case, OURS, FOREACH, None) for case in CASES)]  # fmt: skip
"""Case, ours, what it is to be as fast as (None: the stream, in bytes a second), and how fast."""

Turn = Callable[[], object]


class Shard:
    """The memory that all systems update."""

    def __init__(self, numbers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(numbers, generator=generator)
        self.gradient = torch.randn(numbers, generator=generator)
        self.first, self.second = torch.zeros(numbers), torch.ones(numbers)
        self.narrow = self.gradient.bfloat16()
        self.out, self.wide = torch.empty_like(self.narrow), torch.empty_like(self.master)

    def states(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """In parts: master, both gradients, both moments, the rounded copy."""
        tensors = (self.master, self.gradient, self.narrow, self.first, self.second, self.out)
        yield from zip(*(t.split(size) for t in tensors), strict=True)


def ours(
    shard: Shard, case: str, size: int, cls: type[Optimizer] = AdamW, options: Mapping[str, Any] | None = None
) -> Turn:
    dtype, factor = CASES[case]
    options = {**ADAMW, "fused": True} if options is None else {"lr": LR, **options}
    kernel = cpu_kernels.kernel(cls([torch.zeros(64)], **options))
    names = {
        Adam: ("exp_avg", "exp_avg_sq"),
        AdamW: ("exp_avg", "exp_avg_sq"),
        SGD: ("momentum_buffer",),
        Adagrad: ("sum",),
    }
    pieces = []
    for master, wide, narrow, first, second, out in shard.states(size):
        state: dict[str, Any] = dict(
            zip(
                names.get(cls, ("exp_avg",)),
                (second, first) if cls is Adagrad else (first, second),
                strict=False,
            )
        )
        state["step"] = torch.tensor(10.0)
        pieces.append(
            (
                master,
                narrow if dtype == torch.bfloat16 else wide,
                state,
                out if dtype == torch.bfloat16 else None,
            )
        )

    def turn() -> None:
        for master, gradient, state, out in pieces:
            kernel.step(master, gradient, state, factor, out)

    return turn


def compacted(shard: Shard, case: str, states: States) -> Turn:
    dtype, factor = CASES[case]
    kernel = QuantizedKernel(AdamW([torch.zeros(64)], **ADAMW, fused=True), states)
    state: dict[str, Any] = {}
    narrow = dtype == torch.bfloat16
    return lambda: kernel.step(
        shard.master, shard.narrow if narrow else shard.gradient, state, factor, shard.out if narrow else None
    )


def walked(turn: Turn) -> Turn:
    """`turn` as it is without numba."""

    def plain() -> None:
        with mock.patch.object(cpu_kernels, "compiler", lambda: None):
            turn()

    return plain


def theirs(shard: Shard, case: str, name: str) -> Turn:
    """What users of another optimizer do: gradients widened into a buffer that is kept, scaled in place, a
    step, masters rounded."""
    dtype, factor = CASES[case]
    parts = list(shard.states(shard.master.numel() if name == DEEPSPEED else shard.master.numel() // TENSORS))
    masters = [part[0] for part in parts]
    narrow = dtype == torch.bfloat16
    for master, gradient in zip(
        masters, (shard.wide if narrow else shard.gradient).split(masters[0].numel()), strict=True
    ):
        master.grad = gradient
    if name == DEEPSPEED:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(masters, **ADAMW, adamw_mode=True)
    else:
        optimizer = AdamW(masters, **ADAMW, fused=name == FUSED, foreach=name == FOREACH)
    for master, _, _, first, second, _ in parts:
        optimizer.state[master] = {
            "step": 10 if name == DEEPSPEED else torch.tensor(10.0),
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    def turn() -> None:
        if narrow:
            shard.wide.copy_(shard.narrow)
        if factor != 1.0:
            (shard.wide if narrow else shard.gradient).mul_(factor)
        optimizer.step()
        if narrow:
            shard.out.copy_(shard.master)

    return turn


def streams(shard: Shard) -> dict[str, Turn]:
    found: dict[str, Turn] = {
        "a *= s": lambda: shard.first.mul_(0.999),
        "a += s * b": lambda: shard.first.add_(shard.gradient, alpha=1e-9),
    }
    if cpu_kernels.compiler() is not None:
        from polyreme.optim import compiled_kernels

        found[TRAFFIC] = lambda: compiled_kernels.run(
            _traffic(), [shard.master, shard.gradient, shard.first, shard.second], [1e-9]
        )
    return found


def _traffic() -> Callable[..., None]:
    """Compiled: AdamW's reads and writes with an addition for each."""
    if not hasattr(_traffic, "made"):
        from numba import njit

        def traffic(p, g, m, v, s):  # type: ignore[no-untyped-def]
            for i in range(p.size):
                x = s * g[i]
                p[i] += x
                m[i] += x
                v[i] += abs(x)

        _traffic.made = njit(nogil=True)(traffic)  # type: ignore[attr-defined]
    return _traffic.made  # type: ignore[attr-defined]


def same_bits(case: str) -> bool:
    """Whether ours, compiled and in chunks, changes a small shard as torch's fused kernel does."""
    ends = []
    for way in (
        lambda shard: ours(shard, case, 1 << 18),
        lambda shard: walked(ours(shard, case, 1 << 18)),
        lambda s: theirs(s, case, FUSED),
    ):
        shard = Shard(1 << 18)
        way(shard)()
        ends.append(torch.stack([shard.master, shard.first, shard.second]))
        ends[-1] = torch.cat([ends[-1].flatten(), *([shard.out.float()] if "bf16" in case else [])])
    return torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[2])


def others_cores(began: tuple[float, float, float]) -> float:
    """Cores that other processes used since `began` (see `clock`)."""
    wall, own, busy = (now - then for now, then in zip(clock(), began, strict=True))
    return max(0.0, busy - own) / wall


def clock() -> tuple[float, float, float]:
    """Seconds: of the wall, of this process on all cores, of all processes."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return time.perf_counter(), time.process_time(), (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measure(numbers: int, rounds: int, rivals: Sequence[str]) -> dict[str, Any]:
    """On this process's threads, beside `rivals`: the seconds of every turn by what was done; and what could
    not run."""
    wrong = [case for case in CASES if not same_bits(case)]
    if wrong:
        raise SystemExit(f"other bits than torch's: {wrong}")
    shard = Shard(numbers << 20)
    turns = {f"stream/{name}": turn for name, turn in streams(shard).items()}
    absent = {} if cpu_kernels.compiler() is not None else {"numba": "not installed"}
    for case in CASES:
        systems = {
            OURS: ours(shard, case, numbers << 20),
            PIECES: ours(shard, case, 1 << 19),
            WALKED: walked(ours(shard, case, numbers << 20)),
        }
        for name in rivals:
            try:
                systems[name] = theirs(shard, case, name)
            except Exception as error:  # DeepSpeed's build: whatever it raises
                absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        turns |= {f"{case}/{name}": turn for name, turn in systems.items()}
        for name, (cls, options) in OTHERS.items():
            turns[f"{case}/{OURS}, {name}"] = ours(shard, case, numbers << 20, cls, options)
        for name, states in COMPACT.items():
            turns[f"{case}/{OURS}, {name}"] = compacted(shard, case, states)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order, generator = list(turns), random.Random(0)
    began = clock()
    for number in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            start = time.perf_counter()
            turns[name]()
            if number:  # the first compiles, and touches its memory
                seconds[name].append(time.perf_counter() - start)
        if not number:
            began = clock()
    return {
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "absent": absent,
        "others_cores": others_cores(began),
    }


# ---- the table


def bytes_of(case: str, name: str) -> float:
    """That an update must move for each element, with the gradient read and the parameter, rounded,
    written."""
    others = {
        "SGD with momentum": 4,
        "Adagrad": 4,
        "Lion": 4,
        "AdamW, bf16 states": 2 + 2,
        "AdamW, 8bit states": 2 * (1 + 4 / BLOCK),
    }
    states = next((size for other, size in others.items() if name.endswith(other)), 4 + 4)
    return 2 * (4 + states) + CASES[case][0].itemsize + (2 if "bf16" in case else 0)


def memory(run: Mapping[str, Any], numbers: int) -> list[float]:
    """Bytes a second of the fastest in-place stream, by round."""
    found = [
        [moved * numbers / s for s in run["seconds"][f"stream/{name}"]] for name, moved in STREAMS.items()
    ]
    return [max(speeds) for speeds in zip(*found, strict=True)]


def shown(values: Sequence[float], form: str = ".2f") -> str:
    found = spread(values)
    return f"{found['median']:{form}} | {found['low']:{form}} to {found['high']:{form}}"


def markdown(result: Mapping[str, Any]) -> str:
    machine, numbers = result["environment"], result["numbers"] << 20
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# The optimizer's step on the CPU",
        "",
        f"{machine['date']}, commit {machine['commit']}; Python "
        f"{machine['python']}, {versions}; {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB.",
        "",
        f"    {machine['command']}",
        "",
        f"{result['numbers']}M parameters, masters and states float32, "
        f"{result['rounds']} rounds. Of the stream: bytes a second over",
        "those of the fastest in-place stream of the round.",
    ]
    for run in result["runs"]:
        top = memory(run, numbers)
        lines += [
            "",
            f"## {run['threads']} thread{'s' * (run['threads'] > 1)}",
            "",
            f"Other processes used {run['others_cores']:.2f} cores.",
            *(f"{name}: {why}." for name, why in run["absent"].items()),
            "",
            "| | ms | M parameters/s | GB/s | of the stream | quartiles |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for key, seconds in run["seconds"].items():
            case, name = key.split("/")
            moved = ({**STREAMS, TRAFFIC: 28}[name] if case == "stream" else bytes_of(case, name)) * numbers
            middle = spread(seconds)["median"]
            share = shown([moved / s / t for s, t in zip(seconds, top, strict=True)])
            lines.append(
                f"| {case}: {name} | {middle * 1e3:.1f} | "
                f"{numbers / middle / 1e6:.0f} | {moved / middle / 1e9:.1f} | {share} |"
            )
        lines += ["", "| | as fast as | median | quartiles | aim |", "|---|---|--:|--:|--:|"]
        for case, name, rival, aim in AIMS:
            mine = run["seconds"][f"{case}/{name}"]
            if rival is None:
                values = [bytes_of(case, name) * numbers / s / t for s, t in zip(mine, top, strict=True)]
            elif (
                seconds := run["seconds"].get(f"{'stream' if rival == TRAFFIC else case}/{rival}")
            ) is not None:
                values = [theirs / s for s, theirs in zip(mine, seconds, strict=True)]
            else:
                continue
            verdict = (
                "" if aim is None else f"{aim:.2f} {'met' if spread(values)['median'] >= aim else 'missed'}"
            )
            lines.append(f"| {case}: {name} | {rival or 'the stream'} | {shown(values)} | {verdict} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=64, help="millions of parameters in the shard")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--rivals",
        default=",".join(RIVALS),
        help="whom to measure beside ours; DeepSpeed builds its kernel at first use",
    )
    parser.add_argument("--threads", default="1,2", help="numbers of threads, each in a process of its own")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        args.worker.write_text(
            json.dumps(measure(args.numbers, args.rounds, [name for name in args.rivals.split(",") if name]))
        )
        return 0
    runs = []
    for threads in args.threads.split(","):
        with tempfile.NamedTemporaryFile("r") as answer:
            passed = (
                "--numbers",
                str(args.numbers),
                "--rounds",
                str(args.rounds),
                "--rivals",
                args.rivals,
                "--worker",
                answer.name,
            )
            command = [sys.executable, __file__, *passed]
            if subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu"}, check=False
            ).returncode:
                return 1
            runs.append(json.load(answer))
    result = {"environment": environment(), "numbers": args.numbers, "rounds": args.rounds, "runs": runs}
    page = markdown(result)
    print(page)
    if args.out:
        write(result, page, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
