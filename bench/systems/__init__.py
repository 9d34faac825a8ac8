"""The training systems under comparison.

Each module has `build(model, job, **options)`, which takes the fp32 model and returns the system's train
step: a function from this rank's batch to an `Outcome`. A train step is forward, backward, clip at `CLIP`,
AdamW, and leaves the gradients cleared."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

FLOOR = "floor"
BEFORE = "-before"
"""Ends the name of a system whose Polyreme is that of another checkout (`--before`)."""


@dataclass(frozen=True)
class System:
    """Which module builds a system, with which options, for which compute dtypes."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    variant: bool = False  # measured only when named, not under "all"
    divides_model: bool = False  # so every rank gets the whole global batch

    @property
    def is_ours(self) -> bool:
        """Whether it is a layout of Polyreme."""
        return self.module.startswith("polyreme") or self.options.get("by") == "polyreme"

    def load(self) -> ModuleType:
        """Imports the system; raises what its import raises where it is not installed."""
        return importlib.import_module(f"systems.{self.module}")

    def build(self, model: Any, job: Any) -> Callable[[Any], Any]:
        """The system's train step on this model."""
        step: Callable[[Any], Any] = self.load().build(model, job, **self.options)
        return step


TIERS = {"host": "host", "file": "files"}
"""By what a system's name says, where its numbers are."""

# In this order they are started, so that rivals share a group (and its floor) when memory cannot hold all at
# once.
SYSTEMS: dict[str, System] = {
    FLOOR: System("floor"),
    "ddp": System("ddp"),
    "polyreme0": System("polyreme_zero", {"stage": 0}),
    "deepspeed0": System("deepspeed_zero", {"stage": 0}),
    "polyreme1": System("polyreme_zero", {"stage": 1}),
    "zero1": System("ddp", {"shard_states": True}),
    "deepspeed1": System("deepspeed_zero", {"stage": 1}),
    "polyreme2": System("polyreme_zero", {"stage": 2}),
    "deepspeed2": System("deepspeed_zero", {"stage": 2}),
    "fsdp2-keep": System("fsdp2", {"reshard": False}),
    "polyreme3": System("polyreme_zero", {"stage": 3}),
    "fsdp2": System("fsdp2", {"reshard": True}),
    "deepspeed3": System("deepspeed_zero", {"stage": 3}),
    # bf16 on the wire instead of fp32, for those that can choose
    "ddp-bf16": System("ddp", {"reduce": "bf16"}, ("bf16",), variant=True),
    "fsdp2-bf16": System("fsdp2", {"reshard": True, "reduce": "bf16"}, ("bf16",), variant=True),
    "fsdp2-keep-bf16": System("fsdp2", {"reshard": False, "reduce": "bf16"}, ("bf16",), variant=True),
    "deepspeed2-bf16": System("deepspeed_zero", {"stage": 2, "reduce": "bf16"}, ("bf16",), variant=True),
    "deepspeed3-bf16": System("deepspeed_zero", {"stage": 3, "reduce": "bf16"}, ("bf16",), variant=True),
    **{
        f"polyreme{stage}-bf16": System(
            "polyreme_zero", {"stage": stage, "reduce": "bf16"}, ("bf16",), variant=True
        )
        for stage in range(4)
    },
    # over gloo's sockets alone, as ranks of different hosts would
    **{
        f"polyreme{stage}-sockets": System(
            "polyreme_zero", {"stage": stage, "shared_memory": False}, variant=True
        )
        for stage in range(4)
    },
    # nothing checked while it trains
    **{
        f"polyreme{stage}-unwatched": System(
            "polyreme_zero", {"stage": stage, "sentinels": False}, variant=True
        )
        for stage in range(4)
    },
    # states, and with "+params" parameters too, in host memory or in files
    **{
        f"polyreme{stage}+{name}": System("polyreme_zero", {"stage": stage, "states": home}, variant=True)
        for stage in range(4)
        for name, home in TIERS.items()
    },
    **{
        f"polyreme3+{name}+params": System(
            "polyreme_zero", {"stage": 3, "states": home, "params": home}, variant=True
        )
        for name, home in TIERS.items()
    },
    "fsdp2+cpu": System("fsdp2", {"reshard": True, "offload": True}, variant=True),
    "deepspeed2+cpu": System("deepspeed_zero", {"stage": 2, "states": "cpu"}, variant=True),
    **{
        f"deepspeed3+{home}": System("deepspeed_zero", {"stage": 3, "states": home}, variant=True)
        for home in ("cpu", "nvme")
    },
    **{
        f"deepspeed3+{home}+params": System(
            "deepspeed_zero", {"stage": 3, "states": home, "params": home}, variant=True
        )
        for home in ("cpu", "nvme")
    },
}

# Blocks alone, forward and backward, divided over the ranks.
# sums left out: wrong numbers
TENSOR: dict[str, System] = {
    FLOOR: System("layers"),
    "polyreme": System("layers", {"by": "polyreme"}, divides_model=True),
    "dtensor": System("layers", {"by": "dtensor"}, divides_model=True),
    "polyreme-sequence": System("layers", {"by": "polyreme", "sequence_parallel": True}, divides_model=True),
    "polyreme-silent": System("layers", {"by": "polyreme", "silent": True}, divides_model=True),
}

# The whole model, one stage on each rank.
# cut where the others are
PIPELINE: dict[str, System] = {
    FLOOR: System("floor"),
    "polyreme": System("polyreme_pipeline", divides_model=True),
    "polyreme-even": System("polyreme_pipeline", {"blocks": "even"}, divides_model=True),
    "polyreme-time": System("polyreme_pipeline", {"blocks": "time"}, divides_model=True),
    "torch": System("torch_pipeline", divides_model=True),
    "deepspeed": System("deepspeed_pipeline", dtypes=("fp32",), divides_model=True),
    **{
        f"polyreme-{schedule}": System(
            "polyreme_pipeline", {"schedule": schedule}, variant=True, divides_model=True
        )
        for schedule in ("gpipe", "1f1b", "1f1b-w", "interleaved", "zb-h1", "zb-v")
    },
}

SUITES: dict[str, dict[str, System]] = {"step": SYSTEMS, "tensor": TENSOR, "pipeline": PIPELINE}
"""What is compared, by the script that compares it."""
for _systems in SUITES.values():
    _systems |= {
        name + BEFORE: replace(system, variant=True) for name, system in _systems.items() if system.is_ours
    }
