"""Copies that go past the processor's cache, for what is not read again soon.

An ordinary store first has the cache read what it is about to overwrite, and drives out what others still need. Non-temporal stores spare
memory a third of the traffic of a copy: 1.7 to 1.9 times as many bytes a second (docs/LOG.md). LLVM compiles them where llvmlite is
installed, which comes with numba, an optional extra; elsewhere torch copies. No communication.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST = 1 << 18
"""Bytes. What is smaller may well be read again before the cache forgets it."""
VECTOR = 32
"""Bytes stored at once; their place is a multiple."""
RUN = 4 * VECTOR
"""Bytes that each round of the loop copies."""

_compiling = threading.Lock()
_engines: list[Any] = []
"""What is compiled lasts as long as its engine."""


def copy(target: Tensor, source: Tensor) -> Tensor:
    """`target.copy_(source)`, for tensors that do not overlap; by non-temporal stores where both are in host memory, contiguous, of one
    dtype and shape, have at least LEAST bytes, and autograd has nothing to record."""
    nbytes = source.nbytes
    if not _is_plain(target, source) or nbytes < LEAST or (copy_runs := _compiled()) is None:
        return target.copy_(source)
    to, origin = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    begin = -to.data_ptr() % VECTOR
    end = begin + (nbytes - begin) // RUN * RUN
    to[:begin].copy_(origin[:begin])
    copy_runs(to.data_ptr() + begin, origin.data_ptr() + begin, end - begin)
    to[end:].copy_(origin[end:])
    return target


def _is_plain(target: Tensor, source: Tensor) -> bool:
    return (
        target.device.type == source.device.type == "cpu"
        and (target.dtype, target.shape) == (source.dtype, source.shape)
        and target.is_contiguous()
        and source.is_contiguous()
        and not (torch.is_grad_enabled() and (target.requires_grad or source.requires_grad))
    )


def _compiled() -> Callable[[int, int, int], None] | None:
    with _compiling:  # threads share it
        return _compile()


@cache
def _compile() -> Callable[[int, int, int], None] | None:
    """Copies, to an address that is a multiple of VECTOR, from another, a number of bytes that is a positive multiple of RUN; other threads
    run meanwhile. None without llvmlite. Takes some hundredths of a second."""
    try:
        from llvmlite import binding, ir
    except ImportError:
        return None
    byte, size = ir.IntType(8).as_pointer(), ir.IntType(64)
    vector = ir.VectorType(ir.IntType(32), VECTOR // 4)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [byte, byte, size]), "copy_runs")
    to, origin, nbytes = function.args
    begin, loop, done = (function.append_basic_block(name) for name in ("begin", "loop", "done"))
    ir.IRBuilder(begin).branch(loop)
    build = ir.IRBuilder(loop)
    at = build.phi(size)
    places = [build.add(at, ir.Constant(size, k)) for k in range(0, RUN, VECTOR)]
    values = [build.load(build.bitcast(build.gep(origin, [place]), vector.as_pointer()), align=1) for place in places]
    for place, value in zip(places, values, strict=True):
        store = build.store(value, build.bitcast(build.gep(to, [place]), vector.as_pointer()), align=VECTOR)
        store.set_metadata("nontemporal", module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    after = build.add(at, ir.Constant(size, RUN))
    at.add_incoming(ir.Constant(size, 0), begin)
    at.add_incoming(after, loop)
    build.cbranch(build.icmp_unsigned("<", after, nbytes), loop, done)
    build = ir.IRBuilder(done)
    build.fence("seq_cst")  # such stores are seen by other threads in any order, but for this
    build.ret_void()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=2)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("copy_runs"))
