"""The loss scale's rules, norms that do not depend on the layout, and the finder of the module that made a
NaN."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import polyreme
from examples import examples
from polyreme.layout.bucket_layout import ALIGN, BucketLayout, TensorSpec
from polyreme.step.precision import (
    LossScale,
    cast_floating,
    clip_factor,
    master_dtype,
    norm_of,
    watch_nonfinite,
)
from polyreme.zero.bucket_gradients import squares_by_row


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_dynamic_scale(overflows: list[bool], interval: int) -> None:
    """Halves at each overflow (not below the minimum), doubles after `interval` good steps in a row since the
    last change."""
    scale = LossScale(2.0**10, True, interval=interval, minimum=2.0**6)
    exponent, good = 10, 0
    for overflow in overflows:
        scale.update(overflow)
        good = 0 if overflow else good + 1
        if overflow:
            exponent = max(exponent - 1, 6)
        elif good == interval:
            exponent, good = exponent + 1, 0
        assert scale.value == 2.0**exponent


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.booleans())
def test_dynamic_scale_falls_after_several_overflows(
    overflows: list[bool], count: int, forgets: bool
) -> None:
    """Overflows count since the last growth, or with `forgets` since the last good step."""
    scale = LossScale(2.0**10, True, interval=3, minimum=2.0**6, hysteresis=count, forgets=forgets)
    exponent, good, seen = 10, 0, 0
    for overflow in overflows:
        scale.update(overflow)
        if overflow:
            good, seen = 0, seen + 1
            exponent = max(exponent - (seen >= count), 6)
        else:
            good += 1
            seen = 0 if forgets else seen
            if good == 3:
                exponent, good, seen = exponent + 1, 0, 0
        assert scale.value == 2.0**exponent


def test_static_scale() -> None:
    scale = LossScale(128.0)
    for overflow in (True, False, False):
        scale.update(overflow)
    assert scale.value == 128.0


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=2, max_size=2)
)
@examples(40)
def test_norm_does_not_depend_on_shards_or_buckets(sizes: list[int], worlds: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    exact = sum(t.double().square().sum() for t in tensors)
    norms = []
    for world in worlds:
        for bucketed in ([range(len(sizes))], [[i] for i in range(len(sizes))]):
            squares = 0.0
            for indices in bucketed:
                layout = BucketLayout.build([TensorSpec(str(i), (sizes[i],)) for i in indices], world)
                flat = torch.zeros(layout.size)
                for slot in layout.slots:
                    flat[slot.start : slot.stop] = tensors[int(slot.name)]
                squares += sum(
                    squares_by_row(flat[slice(*layout.shard(rank))]).sum().item() for rank in range(world)
                )
            norms.append(norm_of(squares, 1.0, torch.float32))
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(math.sqrt(exact), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_of_half_precision_is_not_rounded_to_it(dtype: torch.dtype) -> None:
    flat = torch.full((2 * ALIGN,), 60000.0, dtype=dtype)  # finite, but not the norm of a row
    assert squares_by_row(flat).sum().item() == pytest.approx(
        2 * ALIGN * flat[0].double().item() ** 2, rel=1e-6
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_norm_shows_an_overflow(bad: float) -> None:
    flat = torch.zeros(4 * ALIGN)
    flat[100] = bad
    squares = squares_by_row(flat).sum().item()
    assert not math.isfinite(squares) and norm_of(squares, 1.0, torch.float32) == math.inf


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clip_as_torch_does(size: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    parameter.grad = torch.full((5,), size, dtype=torch.float64)
    wanted = parameter.grad * clip_factor(parameter.grad.norm().item(), limit)
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=0)
    assert clip_factor(size, None) == 1.0


def test_cast_and_master() -> None:
    ids = torch.arange(3)
    batch = {"x": [torch.ones(2), "text"], "ids": ids, "mask": (torch.tensor([True]), None)}
    found = cast_floating(batch, torch.bfloat16)
    assert isinstance(found, dict)
    assert found["x"][0].dtype == torch.bfloat16 and found["mask"][0].dtype == torch.bool
    assert found["x"][1] == "text" and found["ids"] is ids
    assert [master_dtype(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32
    ] * 3 + [torch.float64]


@pytest.mark.parametrize(
    ("made", "precision", "warned"),
    [
        (torch.bfloat16, {}, 'precision.compute: write precision.compute = "bf16", or "fp32"'),
        (torch.float64, {}, 'precision.compute: write precision.compute = "fp64", or "fp32"'),
        (torch.bfloat16, {"compute": "fp32"}, ""),
        (torch.bfloat16, {"compute": "bf16"}, ""),
        (torch.float32, {}, ""),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_another_format_than_the_models_is_told(
    made: torch.dtype, precision: dict[str, str], warned: str, built: bool
) -> None:
    make = lambda: nn.Linear(2, 2, dtype=made)  # noqa: E731
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with polyreme.initialize(make if built else make(), {"precision": precision, "batch": {"size": 1}}):
            pass
    told = [str(each.message) for each in found if "precision.compute" in str(each.message)]
    assert len(told) == bool(warned) and warned in "".join(told)


class Step(nn.Module):
    """x -> f(x) + weight."""

    def __init__(self, function: str = "same") -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(3)), function

    def forward(self, x: Tensor) -> Tensor:
        if self.function == "log":
            return torch.log(x - x)
        if self.function == "root":  # finite, with an infinite derivative
            return (x - x.detach()).abs().sqrt() + x.sum()
        if self.function == "parameter":
            return x + (self.weight - self.weight.detach()).abs().sqrt()
        return x * self.weight


def first_of(*functions: str, weight: float = 1.0) -> list[str]:
    model = nn.Sequential(*(Step(function) for function in functions), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[1].weight.fill_(weight)
    with watch_nonfinite(model) as found:
        model(torch.rand(2, 3, requires_grad=True) + 1).sum().backward()
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules()), (
        "the watch leaves nothing behind"
    )
    assert not any(p._backward_hooks for p in model.parameters())
    return found


def test_names_the_first_module() -> None:
    assert first_of("same", "same", "same") == []
    assert first_of("same", "log", "same") == ["the forward of 1 (Step) from finite inputs"]
    assert first_of("same", "same", weight=math.nan) == [
        "the forward of 1 (Step) from finite inputs; its parameters are not finite"
    ]
    assert first_of("same", "root", "same") == ["the backward of 1 (Step) from finite output gradients"]
    assert first_of("same", "same", "parameter") == ["the gradient of the parameter 2.weight"]
