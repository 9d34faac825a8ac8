"""The data that monitors log: the run, each step, messages, and the end.

Invariant: plain values only. A record holds no tensor and no reference into the engine, so a monitor may keep
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The facts of a run, logged once before the first step."""

    model: str  # the model's class or its folder
    parameters: int  # parameters of the whole model
    ranks: int
    stage: int  # ZeRO stage
    dtype: str  # the computation's dtype, as in the config
    steps: int | None = None  # length of the run in optimizer steps, None where it cannot be known
    step: int = 0  # optimizer steps done before this process began: 0, or where a resumed run left off
    config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One optimizer step. Counts and the loss are over all ranks, memory and FLOP/s are this rank's."""

    step: int  # optimizer steps done, from 1
    samples: int  # seen since the start of training
    tokens: int
    loss: float  # mean over the global batch, in nats per token for a language model
    grad_norm: float  # global L2 norm before clipping
    lr: float
    tokens_per_second: float  # over all ranks
    seconds: float  # that the step took with the wait for its data, without validation and checkpoints
    elapsed: float = 0.0  # since this process began to train, all included
    skipped: bool = False  # no update was made, because gradients overflowed
    loss_scale: float | None = None
    validation_loss: float | None = None  # only on the steps that measured it
    bits_per_byte: float | None = None  # bits per byte of the validation text, so that tokenizers compare
    flops_per_second: float | None = None  # model FLOPs
    mfu: float | None = None  # fraction of 1
    # how sequences were divided over mesh.cp: method, balance, load (of the fullest rank, over the mean)
    context: Mapping[str, object] | None = None
    # Bytes by category: parameters, gradients, states, activations, buffers; and the most that was ever in
    # use, "peak_rss" of the process or "peak_device" of the accelerator.
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    # axis, operation: calls, bytes
    traffic: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)


class Monitor(Protocol):
    """A destination of records. Only rank 0 has monitors. Any method may raise: the caller then drops the
    monitor."""

    def start(self, run: Run) -> None: ...

    def log(self, record: Record) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self, summary: Mapping[str, object]) -> None: ...


def plain(value: object) -> Any:
    """Return `value` as JSON can hold it: NaN and infinities become None, unknown objects their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of `record` under the names that TensorBoard, Weights & Biases and MLflow group
    by."""
    values: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/loss_scale": record.loss_scale,
        "train/skipped": record.skipped,
        "train/samples": record.samples,
        "train/tokens": record.tokens,
        "validation/loss": record.validation_loss,
        "validation/bits_per_byte": record.bits_per_byte,
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/flops_per_second": record.flops_per_second,
        "speed/mfu": record.mfu,
    }
    if record.context is not None:
        values["context/load"] = cast("float", record.context["load"])
    values |= {f"memory/{category}": size for category, size in record.memory_bytes.items()}
    for axis, operations in record.traffic.items():
        for operation, (calls, size) in operations.items():
            values |= {f"traffic/{axis}/{operation}_calls": calls, f"traffic/{axis}/{operation}_bytes": size}
    return {name: float(value) for name, value in values.items() if value is not None}
