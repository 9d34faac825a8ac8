"""Floating-point operations of a model, counted by running it on fake tensors, and their share of the
device's peak.

Invariant: counting reads shapes only. It allocates no tensor data, and leaves the model, its buffers, its
hooks and every random generator as they were. No communication.

Only matrix products, convolutions and attention are counted (a multiply and an add are two operations), as is
usual for model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B). Attention counts the whole
square of scores, masked or not."""

from __future__ import annotations

import copy
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from polyreme.errors import ModelError, PolyremeError

aten = torch.ops.aten
Formula = Callable[..., int]


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward and backward pass over one batch."""

    forward: int
    backward: int
    recompute: int  # forward operations done again in the backward pass by recomputation

    @property
    def model(self) -> int:
        """The operations of the mathematics, however activations are kept: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """The operations that the device really executes (HFU)."""
        return self.model + self.recompute


def count_flops(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    recompute: Iterable[str] = (),
    recompute_context: Callable[
        [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    ] = noop_context_fn,
    dtype: torch.dtype | None = None,
) -> Flops:
    """Count the operations of one forward and backward pass of `model` over `batch`.

    `batch` is what `forward(model, batch)` takes, any tree of tensors of which only shapes and dtypes are
    read; one sample of the true sequence length is enough. By default a mapping is passed as keyword
    arguments, a tuple or list as positional ones. The result's `loss` is differentiated where it has one,
    else the sum of all differentiable outputs. Frozen parameters cost no gradient, as in a real step.

    `recompute` names the submodules that are recomputed (by torch's non-reentrant
    checkpoint, with `recompute_context` for selective recomputation). `dtype` replaces the dtype of all
    floating-point parameters, buffers and inputs: operations do not depend on it, but some operators exist in
    few dtypes.

    Count before the training engine wraps the model. Hooks on the model do not run. Raises `ModelError` if
    the model's control flow depends on tensor values, or an operator cannot run on fake tensors."""
    tally: Counter[str] = Counter()
    phase = "forward"

    def counted(formula: Formula) -> Formula:
        @wraps(formula)
        def count(*args: Any, **kwargs: Any) -> int:
            # Gradients are computed with grad mode off; it is on in backward only where a checkpoint repeats
            # forward.
            again = phase == "backward" and torch.is_grad_enabled()
            tally["recompute" if again else phase] += (flops := formula(*args, **kwargs))
            return flops

        count._get_raw = True  # type: ignore[attr-defined]  # the counter passes tensors, not shapes
        return count

    formulas = {op: counted(formula) for op, formula in (flop_registry | FORMULAS).items()}
    log, onednn = logging.getLogger("torch._subclasses.fake_tensor"), torch.backends.mkldnn
    before = log.disabled, onednn.enabled
    # Our error is enough without a logged traceback. Fused recurrent and attention kernels give way to the
    # matrix products they stand for: the same count on every device, without a fused backward's own rework.
    log.disabled, onednn.enabled = True, False  # type: ignore[assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            fake = _fake_copy(model, dtype)
            again = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=recompute_context
            )
            for block in [fake.get_submodule(name) for name in recompute]:
                block.forward = partial(again, block.forward)
            inputs = tree_map_only(Tensor, lambda t: _fake_like(t, dtype), batch)
            with FlopCounterMode(display=False, custom_mapping=formulas):
                loss = _loss_of((forward or _call)(fake, inputs))
                phase = "backward"
                torch.autograd.backward(loss)
    except PolyremeError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(
            f"the operations of {type(model).__name__} cannot be "
            f"counted without running it: {type(error).__name__}: "
            f"{reason}. Training is not affected; to have FLOPs "
            "and MFU reported, keep the forward pass free of "
            f"decisions that depend on tensor values, or pass a `forward` that avoids them"
        ) from error
    finally:
        log.disabled, onednn.enabled = before
    return Flops(tally["forward"], tally["backward"], tally["recompute"])


def _fake_like(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    # All on one fake CPU, wherever the originals live: on the meta device, sharded away or on different
    # devices.
    dtype = dtype if dtype is not None and t.is_floating_point() else t.dtype
    fake = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="cpu")
    if isinstance(t, nn.Parameter):
        return nn.Parameter(fake, requires_grad=t.requires_grad)
    return fake.requires_grad_(t.requires_grad)


def _fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of `model` over fake tensors, without its hooks. Call under a `FakeTensorMode`."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                memo[id(value)] = _fake_like(value, dtype)
            elif "_hooks" in name and isinstance(value, dict):
                memo[id(value)] = type(value)()
    for t in (*model.parameters(), *model.buffers()):
        memo[id(t)] = _fake_like(t, dtype)
    return copy.deepcopy(model, memo)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [
        t for t in tree_leaves(output if loss is None else loss) if isinstance(t, Tensor) and t.requires_grad
    ]
    if not tensors:
        raise ModelError(
            "the operations cannot be counted: no output of the "
            "model depends on a parameter that requires a gradient; "
            "unfreeze a parameter or return the loss"
        )
    return torch.stack([t.sum() for t in tensors]).sum()


def _convolution_backward(grad_out: Tensor, x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    # As many operations for each wanted gradient as for the forward pass; torch's own formula overcounts with
    # groups.
    transposed, mask = args[4], args[7]
    positions = (x if transposed else grad_out).shape[2:]
    return 2 * x.shape[0] * weight.numel() * math.prod(positions) * (int(mask[0]) + int(mask[1]))


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    # With a two-dimensional operand its rows or columns, or the inner dimension, are divided among the
    # groups.
    return 2 * math.prod(a.shape if b.ndim == 3 else a.shape[-2:]) * b.shape[-1]


FORMULAS: dict[Any, Formula] = {
    aten.convolution_backward: _convolution_backward,
    aten._grouped_mm: _grouped_mm,
}


@dataclass(frozen=True)
class Peak:
    """The most operations per second a device can do in one dtype, and where the figure comes from."""

    flops: float
    source: str  # "NVIDIA H100 SXM, data sheet" or "measured: ..."


# Dense (no structured sparsity) TFLOP/s: device name as the driver gives it, label, bf16 and fp16, tf32,
# fp32, fp64. Matrix units where the type has them, with fp32 accumulation. From the makers' data sheets,
# whose sparse figures are halved: NVIDIA "B200 / GB200 NVL72", "H200 Tensor Core GPU", "H100 Tensor Core
# GPU", "A100 Tensor Core GPU", "L40S", "L4", "Ada GPU architecture" (white paper, appendix A); AMD "Instinct
# MI300X accelerator". The first match counts.
_PEAKS: tuple[tuple[str, str, float, float, float, float], ...] = (
    (r"\bGB200\b", "NVIDIA GB200", 2500, 1250, 80, 40),
    (r"\bB200\b", "NVIDIA B200", 2250, 1125, 75, 37),
    (r"\bH200 NVL\b", "NVIDIA H200 NVL", 835.5, 417.5, 60, 60),
    (r"\bH200\b", "NVIDIA H200 SXM", 989.4, 494.7, 66.9, 66.9),
    (r"\bH100 NVL\b", "NVIDIA H100 NVL", 835.5, 417.5, 60, 60),
    (r"\bH100 PCIe\b", "NVIDIA H100 PCIe", 756, 378, 51, 51),
    (r"\bH100\b", "NVIDIA H100 SXM", 989.4, 494.7, 66.9, 66.9),
    (r"\bA100\b", "NVIDIA A100", 312, 156, 19.5, 19.5),
    (r"\bL40S\b", "NVIDIA L40S", 362, 183, 91.6, 0),
    (r"\bL4\b", "NVIDIA L4", 121, 60, 30.3, 0),
    (r"\bRTX 4090$", "NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6, 0),
    (r"\bMI300X\b", "AMD Instinct MI300X", 1307.4, 653.7, 163.4, 163.4),
)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """Return the peak of `device` for matrix products in `dtype`, in operations per second.

    Known accelerators are looked up (dense figures). Everything else, CPUs, partitions of a GPU (MIG)
    and dtypes without a published figure, is measured by a short matrix product, about 50 ms, with the
    threads this process has; ranks that share cores should measure at the same time, so that each finds its
    share. Uses no random generator."""
    device = torch.device(device)
    if device.type == "cuda":
        known = _known_peak(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return _measured_peak(device, dtype)


def data_sheet(name: str) -> tuple[str, dict[str, float]] | None:
    """Return the label of the accelerator with this name, as its driver gives it, and its dense peak by
    dtype, in operations per second; None for one that is not in the table, or is part of one (MIG)."""
    for pattern, label, half, tf32, single, double in _PEAKS:
        if re.search(pattern, name) and "MIG" not in name:
            if torch.get_float32_matmul_precision() != "highest":
                single = tf32
            by_dtype = {"bf16": half, "fp16": half, "fp32": single, "fp64": double}
            return label, {dtype: tera * 1e12 for dtype, tera in by_dtype.items() if tera}
    return None


def _known_peak(name: str, dtype: torch.dtype) -> Peak | None:
    label, flops = data_sheet(name) or ("", {})
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    known = flops.get(short.get(dtype, ""))
    return Peak(known, f"{label}, data sheet, dense") if known else None


def _measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    n = 512 if device.type == "cpu" else 4096

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        a = torch.linspace(-1, 1, n * n, device=device).view(n, n).to(dtype)
        out = a @ a  # the first product sets up kernels and threads
        wait()
        best, until = math.inf, time.perf_counter() + 0.05
        while (start := time.perf_counter()) < until:
            torch.mm(a, a, out=out)
            wait()
            best = min(best, time.perf_counter() - start)
    where = f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else str(device)
    return Peak(
        2 * n**3 / best, f"measured: {n} x {n} {str(dtype).removeprefix('torch.')} matrix product on {where}"
    )


def mfu(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """Return the model FLOPs utilisation of one rank, as a fraction of 1.

    `flops_per_token`: operations the model asks for, `Flops.model` over the tokens of the counted batch.
    `tokens_per_second`: this rank's. `peak`: operations per second (`Peak.flops`)."""
    if peak <= 0:
        raise ModelError(
            f"peak = {peak!r}: a device's peak is positive; take it from `peak_flops(device, dtype)`"
        )
    return flops_per_token * tokens_per_second / peak
