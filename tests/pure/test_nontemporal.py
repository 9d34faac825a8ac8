"""Copies past the processor's cache: the same numbers wherever they begin and end, and nothing beside them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyreme import nontemporal

HAS_LLVM = nontemporal._compiled() is not None


def numbers(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(
    to=st.integers(0, 70),
    origin=st.integers(0, 70),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    count=st.one_of(st.integers(0, 40), st.integers(100, 3000)),
)
def test_any_place_and_size(to: int, origin: int, dtype: torch.dtype, count: int) -> None:
    size = dtype.itemsize
    source, target = numbers(8192 * size), numbers(8192 * size, seed=1)
    expected = target.clone()
    low, high = to * size, (to + count) * size
    expected[low:high] = source[origin * size : (origin + count) * size]
    with patch.object(nontemporal, "LEAST", 256):
        part = target.view(dtype)[to : to + count]
        assert nontemporal.copy(part, source.view(dtype)[origin : origin + count]) is part
    assert torch.equal(target, expected)


@pytest.mark.skipif(not HAS_LLVM, reason="llvmlite is not installed: torch copies all")
def test_what_is_large_is_copied_by_the_compiled_loop() -> None:
    calls: list[int] = []
    with patch.object(nontemporal, "_compiled", lambda: lambda to, origin, nbytes: calls.append(nbytes)):
        nontemporal.copy(torch.zeros(1 << 20, dtype=torch.uint8), numbers(1 << 20))
        nontemporal.copy(torch.zeros(nontemporal.LEAST - 1, dtype=torch.uint8), numbers(nontemporal.LEAST - 1))
    assert len(calls) == 1 and calls[0] % nontemporal.RUN == 0 and calls[0] > (1 << 20) - 2 * nontemporal.RUN


@pytest.mark.parametrize("of", ["another dtype", "another shape", "columns"])
def test_what_is_not_flat_and_alike_is_torchs(of: str) -> None:
    source = torch.arange(1 << 18, dtype=torch.float32)
    target = torch.zeros(1 << 18, dtype=torch.float64 if of == "another dtype" else torch.float32)
    if of == "another shape":  # broadcast
        target = torch.zeros(4, 1 << 18)
    if of == "columns":
        target = torch.zeros(512, 512).t()
        source = source.view(512, 512)
    expected = target.clone().copy_(source)
    nontemporal.copy(target, source)
    assert torch.equal(target, expected)


def test_shapes_that_torch_refuses() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        nontemporal.copy(torch.zeros(512, 1024), torch.zeros(1024, 512))


def test_autograd_records_what_torch_copies() -> None:
    source = torch.randn(1 << 18, requires_grad=True)
    assert nontemporal.copy(torch.zeros(1 << 18), source).requires_grad
    with torch.no_grad():
        assert not nontemporal.copy(torch.zeros(1 << 18), source).requires_grad


def test_several_shapes_of_one_size() -> None:
    source = torch.randn(512, 1024)
    assert torch.equal(nontemporal.copy(torch.zeros(512, 1024), source), source)


def test_threads_at_once() -> None:
    nontemporal._compile.cache_clear()  # so that they all want it compiled
    sources = [numbers(1 << 20, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda source: nontemporal.copy(torch.zeros_like(source), source), sources))
    assert all(map(torch.equal, found, sources))


def test_without_llvmlite_torch_copies() -> None:
    nontemporal._compile.cache_clear()
    try:
        with patch.dict(sys.modules, {"llvmlite": None}):
            source = numbers(1 << 20)
            assert nontemporal._compiled() is None
            assert torch.equal(nontemporal.copy(torch.zeros_like(source), source), source)
    finally:
        nontemporal._compile.cache_clear()
