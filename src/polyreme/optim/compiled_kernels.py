"""Optimizer updates of a flat float32 piece in one pass over memory, compiled by numba, an optional extra
(importing this fails without it).

Every function reads a gradient in one of three formats, scales it, updates the parameter and its states in
place, and writes the rounded parameter, number by number. The order of operations, and which of them are
fused, is that of torch's vectorised CPU kernels (AVX2 and AVX-512), so that the bits are equal. Options that
are None are compiled away.

float32 arrays are passed as they are, bfloat16 as uint16 and float16 as int16, as numpy and numba have no
type for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.compiler import Compiler
from numba.extending import intrinsic, overload
from torch import Tensor

from polyreme.layout.bucket_layout import ALIGN
from polyreme.layout.intervals import ceil_div, round_up
from polyreme.optim.compiled_cache import keep

LEAST = 1 << 19
"""Fewest elements for which another thread is used, as it takes about 0.3 ms to wake up."""
VIEWS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
"""Formats of gradients and of rounded parameters, each with the numpy dtype in which it is passed."""
INT, FLOAT, BYTES = ir.IntType(32), ir.FloatType(), ir.IntType(8).as_pointer()
RUN = 32
"""Numbers between two prefetches: a cache line of the narrowest format."""
AHEAD = 96
"""The distance, in numbers, from those that are read to those that are prefetched. More than 128 slows a fast
memory down (bench/LOG.md)."""
LINE = 64
"""Bytes of a cache line."""


def run(
    function: Callable[..., None],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[float | None],
    offset: int | None = None,
    threads: int | None = None,
) -> None:
    """Call `function(*tensors, *numbers)` on several threads, each with a share of the flat tensors. They
    have one size, but for scales of blocks. numbers: passed as float32. offset: passed last, plus the first
    place of the share. threads: by default torch's number."""
    views = [None if t is None else _array(t) for t in tensors]
    scalars = [None if x is None else np.float32(x) for x in numbers]
    size = views[0].size  # type: ignore[union-attr]
    threads = max(1, min(threads or torch.get_num_threads(), size // LEAST))
    share = round_up(ceil_div(size, threads), ALIGN)
    calls = []
    for at in range(0, size, share):
        inside = [
            v
            if v is None or threads == 1
            else v[at * v.size // size : min(at + share, size) * v.size // size]
            for v in views
        ]
        calls.append((*inside, *scalars, *(() if offset is None else (np.uint32(offset + at & 0xFFFFFFFF),))))
    others = [pool(threads - 1).submit(function, *call) for call in calls[1:]]
    function(*calls[0])
    for other in others:
        other.result()


def each(function: Callable[[int], None], starts: Sequence[int]) -> None:
    """Call `function` with each of `starts`, on torch's number of threads. It may run compiled loops on less
    than 2 * LEAST elements, which use one thread."""
    threads = min(torch.get_num_threads(), len(starts))
    for _ in map(function, starts) if threads < 2 else pool(threads).map(function, starts):
        pass


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """The pool of so many threads that all updates of this process share."""
    return ThreadPoolExecutor(threads, "polyreme-update")


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(VIEWS[tensor.dtype])


class NoAlias(Compiler):
    """A numba compiler for functions whose arrays do not overlap."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state.flags.noalias = True


@intrinsic
def prefetch(context: Any, values: Any, at: Any) -> Any:
    """Prefetch the RUN numbers from `at` on of every array in `values` into the cache. `at` may be past the
    end."""

    def emit(target: Any, build: Any, _: Any, given: Any) -> Any:
        form = ir.FunctionType(ir.VoidType(), [BYTES, INT, INT, INT])
        function = build.module.declare_intrinsic("llvm.prefetch", [BYTES], form)
        for k, array in enumerate(values):
            if not isinstance(array, types.Array):
                continue
            memory = target.make_array(array)(target, build, build.extract_value(given[0], k)).data
            for offset in range(0, RUN, LINE // (array.dtype.bitwidth // 8)):
                address = build.gep(memory, [build.add(given[1], ir.Constant(given[1].type, offset))])
                # arguments: for reading, into all levels, data
                build.call(
                    function, [build.bitcast(address, BYTES), *(ir.Constant(INT, k) for k in (0, 3, 1))]
                )
        return target.get_dummy_value()

    return types.void(values, types.int64), emit


def elementwise(step: Callable[..., None]) -> Callable[..., None]:
    """Compile the loop that calls `step(i, *given)` for every element i of the given flat arrays, which have
    one size and do not overlap.

    The loop is vectorised in short runs, and prefetches the next numbers between them: an update's chain of a
    root and two divisions fills the processor's queues before it comes to the next reads, and the processor's
    own prefetching ends at every page."""
    one = njit(step, forceinline=True, error_model="numpy")

    @njit(nogil=True, error_model="numpy", pipeline_class=NoAlias)
    def loop(*given):  # type: ignore[no-untyped-def]
        size = given[0].size
        whole = size // RUN * RUN
        for at in range(0, whole, RUN):
            prefetch(given, at + AHEAD)
            for i in range(RUN):
                one(np.uint64(at + i), *given)  # unsigned: no code for negative indices
        for i in range(whole, size):
            one(np.uint64(i), *given)

    return loop


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a * b + c, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), lambda _, build, __, values: build.fma(
        *values
    )


@intrinsic
def bits(context: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32."""
    return types.uint32(types.float32), lambda _, build, __, values: build.bitcast(values[0], INT)


@intrinsic
def number(context: Any, x: Any) -> Any:
    """Return the float32 with the bits of a uint32."""
    return types.float32(types.uint32), lambda _, build, __, values: build.bitcast(values[0], FLOAT)


@intrinsic
def widen(context: Any, x: Any) -> Any:
    """Convert a number in one of the three formats to float32."""

    def emit(_: Any, build: Any, __: Any, values: Any) -> Any:
        if x == types.uint16:
            return build.bitcast(build.shl(build.zext(values[0], INT), ir.Constant(INT, 16)), FLOAT)
        return build.fpext(build.bitcast(values[0], ir.HalfType()), FLOAT) if x == types.int16 else values[0]

    return types.float32(x), emit


@intrinsic
def to_float16(context: Any, x: Any) -> Any:
    """Round a float32 to float16, as int16."""
    narrow, wide = ir.HalfType(), ir.IntType(16)
    return types.int16(types.float32), lambda _, build, __, values: build.bitcast(
        build.fptrunc(values[0], narrow), wide
    )


@njit(inline="always")
def to_bfloat16(x: Any) -> Any:
    """Round a float32 to bfloat16, as uint16."""
    whole = bits(x)
    rounded = np.uint16(
        (whole + np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    )
    return rounded if x == x else np.uint16(0xFFFF)


def put(out: Any, at: int, x: Any) -> None:
    """Write x to out[at] in the format of `out`, unless that is None."""


@overload(put, inline="always")
def _put(out: Any, at: Any, x: Any) -> Callable[..., None]:
    def nothing(out: Any, at: Any, x: Any) -> None:
        pass

    def wide(out: Any, at: Any, x: Any) -> None:
        out[at] = x

    def as_bfloat16(out: Any, at: Any, x: Any) -> None:
        out[at] = to_bfloat16(x)

    def as_float16(out: Any, at: Any, x: Any) -> None:
        out[at] = to_float16(x)

    if isinstance(out, types.NoneType):
        return nothing
    return {types.float32: wide, types.uint16: as_bfloat16, types.int16: as_float16}[out.dtype]


@njit
def lerp(a: Any, b: Any, weight: Any) -> Any:
    """Interpolate as torch.lerp does, from the nearer of the two ends."""
    if abs(weight) < np.float32(0.5):
        return fma(weight, b - a, a)
    return fma(weight - np.float32(1), b - a, b)


@elementwise
def adam(i, p, g, m, v, out, factor, keep, decay, rate1, beta2, rate2, root2, eps, size):  # type: ignore[no-untyped-def]
    """Update by Adam or AdamW. keep: 1 - lr * decay (AdamW); decay: L2 (Adam); rate1, rate2: 1 - beta; root2:
    the root of the second bias correction; size: lr over the first bias correction."""
    x, grad = p[i], widen(g[i]) * factor
    if keep is not None:
        x *= keep
    if decay is not None:
        grad = fma(x, decay, grad)
    first = lerp(m[i], grad, rate1)
    second = fma(rate2 * grad, grad, v[i] * beta2)
    m[i], v[i] = first, second
    x -= size * first / (math.sqrt(second) / root2 + eps)
    p[i] = x
    put(out, i, x)


@elementwise
def sgd(i, p, g, m, out, factor, decay, momentum, damped, ahead, size):  # type: ignore[no-untyped-def]
    """Update by SGD. m: None without momentum; damped: 1 - dampening; ahead: the momentum for Nesterov's,
    else None; size: -lr."""
    x, grad = p[i], widen(g[i]) * factor
    if decay is not None:
        grad = fma(x, decay, grad)
    if m is not None:
        mean = fma(grad, damped, m[i] * momentum)
        m[i] = mean
        grad = fma(mean, ahead, grad) if ahead is not None else mean
    x = fma(grad, size, x)
    p[i] = x
    put(out, i, x)


# ---- states in fewer bits; see `quantized_states`


@njit(inline="always")
def mixed(x: Any) -> Any:
    """Compute `quantized_states.mixed` of a uint32."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))  # numba widens every product
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(nogil=True, error_model="numpy", pipeline_class=NoAlias)
def stochastic_bfloat16(values, stored, offset):  # type: ignore[no-untyped-def]
    """Compute `quantized_states.StochasticBfloat16.encode`."""
    for i in range(values.size):
        chance = mixed(np.uint32(offset + np.uint32(i))) & np.uint32(0xFFFF)
        stored[i] = np.uint16(np.uint32(bits(values[i]) + chance) >> np.uint32(16))


def quantizer(signed: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the loops by which `quantized_states.BlockQuantizer(signed)` turns float32 numbers into 8-bit
    codes with a scale for each block (`encode`), and back (`decode`). Returns both."""

    @njit(inline="always")
    def value(code, unit):  # type: ignore[no-untyped-def]
        x = code * code * unit
        return x if signed else x * x

    @njit(nogil=True, error_model="numpy", pipeline_class=NoAlias)
    def encode(values, codes, scales, top, unit, nudge, offset):  # type: ignore[no-untyped-def]
        for block in range(scales.size):
            begin = np.uint64(block * ALIGN)
            most = np.uint32(0)
            for i in range(ALIGN):
                # compared as integers, without code for NaN
                most = max(most, bits(abs(values[begin + np.uint64(i)])))
            scale = number(most)
            scales[block] = scale
            safe = scale if scale > 0 else np.float32(1)
            first = np.uint32(offset + np.uint32(begin))
            for i in range(ALIGN):
                x = values[begin + np.uint64(i)]
                size = abs(x)
                root = math.sqrt(size / safe)
                if not signed:
                    root = math.sqrt(root)
                low = min(np.float32(np.int32(root * top + nudge)), top - np.float32(1))
                high = low + np.float32(1)
                below, above = value(low, unit) * scale, value(high, unit) * scale
                uniform = np.float32(
                    np.int32(mixed(np.uint32(first + np.uint32(i))) >> np.uint32(8))
                ) * np.float32(2.0**-24)
                # float32: numba widens sums of integers
                code = high if uniform * (above - below) < size - below else low
                if signed:
                    code = -code if x < 0 else code
                elif size > 0:
                    code = max(code, np.float32(1))
                codes[begin + np.uint64(i)] = np.int32(code)

    @njit(nogil=True, error_model="numpy", pipeline_class=NoAlias)
    def decode(values, codes, scales, unit):  # type: ignore[no-untyped-def]
        for block in range(scales.size):
            begin, scale = np.uint64(block * ALIGN), scales[block]
            for i in range(ALIGN):
                code = np.float32(codes[begin + np.uint64(i)])
                values[begin + np.uint64(i)] = (
                    code * abs(code) * unit if signed else value(code, unit)
                ) * scale

    return encode, decode


QUANTIZERS = {signed: quantizer(signed) for signed in (True, False)}
keep(
    __file__,
    adam=adam,
    sgd=sgd,
    stochastic_bfloat16=stochastic_bfloat16,
    **{f"encode_{signed}": encode for signed, (encode, _) in QUANTIZERS.items()},
    **{f"decode_{signed}": decode for signed, (_, decode) in QUANTIZERS.items()},
)
