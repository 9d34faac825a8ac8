"""Whether all ranks have the same options of the optimizer, which scripts set: each shard follows its own.

Communication: two numbers with the totals of a step; where options differ, all of them."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.errors import ModelError, ranks_named
from polyreme.optim.options import Options


def fingerprint(options: Options) -> float:
    """A whole number below 2^20 of the options, in float32: hosts may compute a rate not quite alike."""
    numbers = [n for group in options.groups for key in options.defaults for n in _numbers(group.get(key))]
    return float(zlib.crc32(array("f", numbers)) >> 12)


def compare(options: Options, mesh: Mesh) -> None:
    """Raise ModelError for an option that ranks have not alike. All ranks must call."""
    groups = enumerate(options.groups)
    told = mesh.gather_objects({
        f"[{at}]['{key}']": ", ".join(f"{n:.6g}" for n in _numbers(group.get(key)))
        for at, group in groups for key in options.defaults
    })  # fmt: skip
    for name in told[0]:
        values = [each[name] for each in told]
        if len({*values}) > 1:
            ranks = {each: [at for at, own in enumerate(values) if own == each] for each in values}
            by_rank = "; ".join(f"{each or None} on {ranks_named(ranks[each])}" for each in ranks)
            raise ModelError(
                f"optimizer.param_groups{name} is {by_rank}: each would update its shards by its own. Set it "
                "on all ranks before the step"
            )


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, (tuple, list)):
        return [number for each in value for number in _numbers(each)]
    return [float(value)] if isinstance(value, Tensor) and value.numel() == 1 else []
