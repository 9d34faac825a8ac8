"""Optimizer states in fewer bits: what a rounding may be off by, that it is unbiased and independent of the
cut, and that training converges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from examples import examples
from polyreme.layout.bucket_layout import ALIGN
from polyreme.optim import cpu_kernels, quantized_states
from polyreme.optim.groups import Lion
from polyreme.optim.quantized_states import BLOCK, SIGNED, Key, QuantizedKernel, States, format_of

FORMATS: list[tuple[States, str]] = [("bf16", "exp_avg"), ("8bit", "exp_avg"), ("8bit", "exp_avg_sq")]


def kept(states: States, name: str, values: Tensor, key: Key | None = None) -> dict[str, Tensor]:
    """`values` as they are stored."""
    form = format_of(states, name)
    stored = {
        part: torch.empty(count, dtype=dtype) for part, (dtype, count) in form.fields(values.numel()).items()
    }
    form.encode(values.clone(), stored, key or Key(name, 1, 0))
    return stored


def back(states: States, name: str, stored: dict[str, Tensor]) -> Tensor:
    values = torch.empty_like(stored[""], dtype=torch.float32)
    format_of(states, name).decode(stored, values)
    return values


def bound(states: States, name: str, values: Tensor) -> Tensor:
    """The stated error of each number."""
    if states == "bf16":
        return values.abs() * 2.0**-7
    y = values.double().abs().view(-1, BLOCK)
    scale = y.amax(1, keepdim=True)
    y = y / torch.where(scale > 0, scale, 1)
    error = (2 * y.sqrt() + 1 / 127) / 127 if SIGNED[name] else (y.sqrt().sqrt() + 1 / 255) ** 4 - y
    return (scale * error * (1 + 1e-5)).view(-1)


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Two blocks of magnitudes over many decades, zeros too."""
    seed, decades, scale = draw(st.integers(0, 2**31)), draw(st.floats(0, 20)), draw(st.integers(-8, 8))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2 * BLOCK, generator=generator) * 10.0 ** (
        scale - decades * torch.rand(2 * BLOCK, generator=generator)
    )
    return values * (torch.rand(2 * BLOCK, generator=generator) > draw(st.sampled_from([0.0, 0.5, 1.0])))


@pytest.mark.parametrize(("states", "name"), FORMATS)
@examples(60)
@given(values=numbers(), count=st.integers(0, 2**24), at=st.integers(0, 2**40))
def test_the_error_is_as_stated_and_rounding_again_changes_nothing(
    states: States, name: str, values: Tensor, count: int, at: int
) -> None:
    values = values if SIGNED[name] else values.abs()
    stored = kept(states, name, values, Key(name, count, at))
    found = back(states, name, stored)
    assert ((found.double() - values.double()).abs() <= bound(states, name, values)).all()
    assert (found[values == 0] == 0).all() and (found * values >= 0).all()
    assert SIGNED[name] or (found[values > 0] > 0).all(), "the root of a second moment is divided by"
    again = kept(states, name, found, Key(name, count + 1, at + 1))
    assert all(torch.equal(again[part], stored[part]) for part in stored)


@pytest.mark.parametrize(("states", "name"), FORMATS)
def test_the_mean_of_roundings_is_the_number(states: States, name: str) -> None:
    values = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0)) + 0.01
    times = 2000
    mean = (
        torch.stack(
            [back(states, name, kept(states, name, values, Key(name, count, 0))) for count in range(times)]
        )
        .double()
        .mean(0)
    )
    assert ((mean - values).abs() <= 4 * bound(states, name, values) / math.sqrt(times)).all()


@pytest.mark.parametrize(("states", "name"), FORMATS)
def test_compiled_loops_round_to_the_same_bits(
    states: States, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    values = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(0)) ** 5
    values[:BLOCK] = 0
    values = values if SIGNED[name] else values.abs()
    key = Key(name, 3, 2**32 - 5 * BLOCK)
    walked = kept(states, name, values, key)
    expected = back(states, name, walked)
    from polyreme.optim import compiled_kernels

    monkeypatch.setattr(cpu_kernels, "WORTH", 1)
    monkeypatch.setattr(compiled_kernels, "LEAST", 2 * BLOCK)
    found = kept(states, name, values, key)
    assert all(torch.equal(found[part], walked[part]) for part in walked)
    assert torch.equal(back(states, name, found), expected)


def test_random_bits_are_those_of_each_place() -> None:
    key = Key("exp_avg", 7, 1000)
    found = quantized_states.random(key, 300, torch.device("cpu"))
    assert [x & 0xFFFFFFFF for x in found.tolist()] == [
        quantized_states.mixed(key.random_offset + i) for i in range(300)
    ]
    assert torch.equal(found[100:], quantized_states.random(key._replace(at=1100), 200, torch.device("cpu")))
    others = (key._replace(steps=8), key._replace(name="exp_avg_sq"), key._replace(at=1000 + 2**32))
    assert all(
        (quantized_states.random(other, 300, torch.device("cpu")) == found).sum() < 3 for other in others
    )


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW, {"fused": True}),
        (SGD, {"momentum": 0.9, "fused": True}),
        (Adagrad, {"fused": True}),
        (Lion, {}),
        (SGD, {"fused": True}),
    ],
)
def test_results_do_not_depend_on_the_cut(
    cls: Any, options: dict[str, Any], states: States, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_kernels = (
        pytest.importorskip("polyreme.optim.compiled_kernels", exc_type=ImportError) if compiles else None
    )
    monkeypatch.setattr(cpu_kernels, "compiler", lambda: compiled_kernels)
    if compiled_kernels is not None:
        monkeypatch.setattr(compiled_kernels, "LEAST", 2 * ALIGN)  # on two threads
    size = 7 * ALIGN
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(size, generator=generator), torch.randn(4, size, generator=generator)
    ends = []
    for chunk, cuts in ((1 << 17, (0, size)), (2 * ALIGN, (0, size)), (1 << 17, (0, ALIGN, 4 * ALIGN, size))):
        monkeypatch.setattr(cpu_kernels, "CHUNK", chunk)
        kernel = QuantizedKernel(cls([torch.zeros(1)], lr=0.01, **options), states)
        parameter = start.clone()
        out = torch.empty(size, dtype=torch.bfloat16)
        pieces = [{} for _ in cuts[1:]]
        for gradient in gradients:
            for state, low, high in zip(pieces, cuts, cuts[1:], strict=False):
                kernel.step(parameter[low:high], gradient[low:high], state, 0.5, out[low:high], at=low)
        assert torch.equal(out, parameter.bfloat16())
        assert all(state["step"] == 4 and state.keys() == {*kernel.fields(size), "step"} for state in pieces)
        assert all(
            state[n].dtype == d and state[n].numel() == c
            for state, low, high in zip(pieces, cuts, cuts[1:], strict=False)
            for n, (d, c) in kernel.fields(high - low).items()
        )
        ends.append(
            torch.cat([parameter, *(torch.cat([s[n].float() for s in pieces]) for n in kernel.fields(size))])
        )
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_a_slow_second_moment_follows_its_gradients(states: States) -> None:
    """It grows and falls by a thousandth a step, less than either format can show: rounded to the nearest, it
    would stand still."""
    size, steps = 16 * ALIGN, 700
    kernel = QuantizedKernel(AdamW([torch.zeros(1)], lr=0.0, betas=(0.9, 0.999), fused=True), states)
    parameter, state = torch.zeros(size), {}
    expected = 0.0
    for step in range(2 * steps):
        gradient = 1.0 if step < steps else 0.1
        kernel.step(parameter, torch.full((size,), gradient), state)
        expected = 0.999 * expected + 0.001 * gradient**2
        if step % steps == steps - 1:
            stored = {
                part: state["exp_avg_sq" + part] for part in ("", ".scale") if "exp_avg_sq" + part in state
            }
            assert float(back(states, "exp_avg_sq", stored).mean()) == pytest.approx(expected, rel=0.03)


def test_optimizers_with_other_states_are_refused() -> None:
    for optimizer in (
        torch.optim.NAdam([torch.zeros(1)]),
        AdamW([torch.zeros(1)], fused=True, amsgrad=True),
        AdamW([torch.zeros(1)]),
    ):
        with pytest.raises(ValueError, match="other states"):
            QuantizedKernel(optimizer, "bf16")


# ---- convergence


class Letters(nn.Module):
    """A transformer of two layers that says the next letter."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x) + self.place.weight[: x.shape[1]], mask, is_causal=True))


STEPS = 110


def trained(states: States | None) -> tuple[float, float]:
    """The loss of the first steps and of the last, of a flat float32 master that AdamW updates as `states`
    says."""
    text = " ".join(f"{a} times {b} is {a * b}." for a in range(2, 14) for b in range(2, 14))
    letters = sorted(set(text))
    corpus = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    model = Letters(len(letters))
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    master = torch.zeros(-(-size // ALIGN) * ALIGN)
    master[:size] = nn.utils.parameters_to_vector(parameters).detach()
    optimizer = AdamW([torch.zeros(1)], lr=3e-3, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    kernel, state = (
        cpu_kernels.kernel(optimizer) if states is None else QuantizedKernel(optimizer, states),
        {},
    )
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (STEPS - step) / 60)
        nn.utils.vector_to_parameters(master[:size], parameters)
        starts = torch.randint(len(corpus) - 33, (16, 1))
        rows = corpus[starts + torch.arange(33)]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.zeros_like(master)
        flat[:size] = nn.utils.parameters_to_vector(gradients)
        kernel.step(master, flat, state)
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-20:]) / 20


def test_training_converges_as_with_float32() -> None:
    began, ended = trained(None)
    assert ended < began / 4
    for states in ("bf16", "8bit"):
        assert trained(states)[1] == pytest.approx(ended, rel=0.01)
