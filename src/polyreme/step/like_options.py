"""A check that all ranks have come equally far, and have the same optimizer options, which scripts set, as
each shard is updated by its rank's own.

Communication: two numbers with the totals of a step; where options differ, all of them."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyreme.distributed.mesh import Mesh
from polyreme.errors import ModelError, ranks_named
from polyreme.optim.options import Options


def fingerprint(options: Options, progress: Mapping[str, float]) -> float:
    """Return a whole number below 2^20 that depends on `progress` and on the options, which are rounded to
    float32, as hosts may compute a rate not quite alike."""
    numbers = [n for group in options.groups for key in options.defaults for n in _numbers(group.get(key))]
    return float(zlib.crc32(array("f", numbers), zlib.crc32(array("d", progress.values()))) >> 12)


def compare(options: Options, progress: Mapping[str, float], mesh: Mesh) -> None:
    """Raise ModelError for an option, or a count of `progress`, that differs between ranks. All ranks must
    call."""
    groups = enumerate(options.groups)
    shown = {f"engine.state.{name}": f"{count:.15g}" for name, count in progress.items()}
    gathered = mesh.gather_objects(shown | {
        f"optimizer.param_groups[{at}]['{key}']": ", ".join(f"{n:.6g}" for n in _numbers(group.get(key)))
        for at, group in groups for key in options.defaults
    })  # fmt: skip
    for name in gathered[0]:
        values = [each[name] for each in gathered]
        if len({*values}) > 1:
            ranks = {each: [at for at, own in enumerate(values) if own == each] for each in values}
            by_rank = "; ".join(f"{each or None} on {ranks_named(ranks[each])}" for each in ranks)
            raise ModelError(
                f"{name} is {by_rank}: each would update its shards by its own. "
                + ("Load the same checkpoint on all ranks" if name in shown else _SET)
            )


_SET = "Set it on all ranks before the step"


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, (tuple, list)):
        return [number for each in value for number in _numbers(each)]
    return [float(value)] if isinstance(value, Tensor) and value.numel() == 1 else []
