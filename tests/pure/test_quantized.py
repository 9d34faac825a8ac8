"""Numbers sent in a byte each: how far from themselves they come back, and in how many bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyreme.distributed import quantized
from polyreme.distributed.mesh import Axis
from polyreme.distributed.quantized import BLOCK, pack, packed_size, unpack


def there_and_back(numbers: torch.Tensor) -> torch.Tensor:
    packed = torch.empty(packed_size(numbers.numel()), dtype=torch.uint8)
    out = torch.empty_like(numbers)
    unpack(pack(numbers, packed), out)
    return out


@given(
    st.integers(0, 1200).map(lambda n: 4 * n),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(-20, 10),
    st.integers(0, 2**31),
)
def test_the_error_is_at_most_half_a_step_of_the_block(
    size: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(size, generator=draw) * 2.0**exponent).to(dtype)
    found = there_and_back(numbers)
    for start in range(0, size, BLOCK):
        block, back = numbers[start : start + BLOCK].double(), found[start : start + BLOCK].double()
        rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-6
        assert (block - back).abs().max() <= block.abs().max() * (1 / 254 + rounding) + 1e-7


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    assert not there_and_back(torch.zeros(300)).any()
    tiny = torch.full((256,), 2.7e-43)  # its 127th part is no float32 of many bits
    assert ((there_and_back(tiny) - tiny).abs() < 2.0**-127).all()
    for bad in (float("inf"), float("-inf"), float("nan")):
        numbers = torch.ones(512)
        numbers[3] = bad
        found = there_and_back(numbers)
        assert not found[3].isfinite() and found[BLOCK:].isfinite().all()


@pytest.mark.parametrize("size", [4, 256, 260, 1 << 18, (1 << 18) + 64])
def test_chunks_make_no_difference(size: int) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size))
    by_block = [there_and_back(numbers[start : start + BLOCK]) for start in range(0, size, BLOCK)]
    assert torch.equal(there_and_back(numbers), torch.cat(by_block))


def test_sums_and_gathers_count_their_bytes() -> None:
    axis, numbers = Axis("dp", 4, 1), torch.linspace(-1, 1, 1024)
    total = numbers.clone()
    quantized.all_reduce(axis, total).wait()
    assert (total - 4 * numbers).abs().max() <= 4 / 254 + 1e-6
    full = torch.empty(4096)
    quantized.all_gather(axis, full, numbers).wait()
    assert (full.view(4, -1) - numbers).abs().max() <= 1 / 254 + 1e-6
    assert (axis.counts["all_gather"].calls, axis.counts["all_gather"].bytes) == (2, 2 * 3 * (1024 + 16))
