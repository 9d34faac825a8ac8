"""How fast `zero.update.Update` is on this machine, one thread: pieces of several sizes against the whole shard at once.

    python bench/update.py [--numbers 16] [--rounds 7]

Every variant makes the same update from the same gradients (scaled by a factor that is not 1, so that the scaling is a pass of its own
where it is not in the cache); rounds are interleaved, and each variant's ratio is to "whole" of the same round (median of rounds).
The weights of all variants must be equal to the last bit, or the script fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyreme.config.keys import OptimizerSection
from polyreme.layout import BucketLayout, TensorSpec
from polyreme.mesh import Axis
from polyreme.zero import update as module
from polyreme.zero.bucket import Bucket, Formats, Pool
from polyreme.zero.optimizers import recipe
from polyreme.zero.residency import Residency

SIZES = {"whole": 1 << 40, "64K": 1 << 16, "256K": 1 << 18, "512K": 1 << 19, "1M": 1 << 20, "2M": 1 << 21}
"""Most elements of a piece."""
CASES = [("adamw", torch.float32), ("adamw", torch.bfloat16), ("sgd", torch.float32), ("lion", torch.float32), ("NAdam", torch.float32)]
"""Optimizer, and number format of the parameters and of the reduced gradients; masters are float32."""


def variant(name: str, dtype: torch.dtype, elements: int, chunk: int) -> tuple[Callable[[], None], Tensor]:
    """A step (update and copy to the parameters' format) of one bucket in pieces of `chunk`, and the bucket's master."""
    cpu = torch.device("cpu")
    layout = BucketLayout.build([TensorSpec("weight", (elements,))], 1)
    bucket = Bucket(layout, [nn.Parameter(torch.empty(0))], Axis("dp"), Residency.of_stage(0),
                    Formats(dtype, torch.float32, dtype, dtype), Pool(cpu), cpu)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    bucket.write(layout.slots[0], torch.randn(elements, generator=generator))
    gradient = torch.randn(elements, generator=generator).to(dtype)
    bucket.grad = gradient.clone()
    module.CHUNK = chunk
    groups = recipe(nn.Linear(2, 2), OptimizerSection(name=name, momentum=0.9 if name == "sgd" else 0.0)).groups
    update = module.Update(bucket, groups)
    options = [group.optimizer([torch.zeros(2, 2)]).param_groups[0] for group in groups]

    def step() -> None:
        update.step(0.999, options)
        bucket.publish().wait()

    return step, bucket.master


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=16, help="millions of parameters in the bucket")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, dtype in CASES:
        variants = {size: variant(name, dtype, arguments.numbers << 20, chunk) for size, chunk in SIZES.items()}
        times: dict[str, list[float]] = {size: [] for size in variants}
        for _ in range(arguments.rounds + 1):
            for size, (step, _) in variants.items():
                began = time.perf_counter()
                step()
                times[size].append(time.perf_counter() - began)
        print(f"{name}, {str(dtype).removeprefix('torch.')}, {arguments.numbers}M parameters")
        for size, (_, master) in variants.items():
            if not torch.equal(master, variants["whole"][1]):
                raise SystemExit(f"pieces of {size} give other weights")
            rounds = times[size][1:]  # the first makes the states
            ratio = statistics.median(t / w for t, w in zip(rounds, times["whole"][1:], strict=True))
            print(f"  {size:>6}  {statistics.median(rounds) * 1e3:8.1f} ms  {ratio:5.2f} of whole")


if __name__ == "__main__":
    main()
