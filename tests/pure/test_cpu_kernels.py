"""The CPU update of one piece against the torch optimizer's own step, bit by bit, in chunks and compiled."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from polyreme.layout.bucket_layout import ALIGN
from polyreme.optim import cpu_kernels
from polyreme.optim.groups import Lion

CASES: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"betas": (0.9, 0.95)}),
    "adamw without decay": (AdamW, {"weight_decay": 0.0}),
    "adamw, slow": (AdamW, {"betas": (0.3, 0.4), "eps": 1e-3}),
    "adamw, amsgrad": (AdamW, {"amsgrad": True}),
    "adamw, maximize": (AdamW, {"maximize": True}),
    "adam": (Adam, {}),
    "adam with decay": (Adam, {"weight_decay": 0.1}),
    "adam, decoupled": (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (SGD, {}),
    "sgd with decay": (SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "dampened": (SGD, {"momentum": 0.9, "dampening": 0.3}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "adagrad with decay": (Adagrad, {"weight_decay": 0.1}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "lion, slow": (Lion, {"betas": (0.4, 0.3)}),
    "foreach": (AdamW, {"foreach": True, "fused": False}),
    "class": (torch.optim.NAdam, {}),
    "class with other states": (torch.optim.ASGD, {"weight_decay": 0.1}),
}
SIZE = 15 * ALIGN
FACTORS = (1.0, 1 / 3, 7.0, 1.0)
RATES = (0.0, 0.1, 0.05, 0.7)


def build(name: str, tensor: Tensor) -> Optimizer:
    cls, options = CASES[name]
    return cls(
        [tensor],
        **({"fused": True} if cls not in (Lion, torch.optim.NAdam, torch.optim.ASGD) else {}) | options,
    )


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in FACTORS]


def start(dtype: torch.dtype) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def plain(name: str, dtype: torch.dtype, gradient: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """What `zero.update` did for each piece before there were kernels."""
    tensor = start(dtype)
    optimizer = build(name, tensor)
    for each, factor, rate in zip(gradients(gradient), FACTORS, RATES, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        tensor.grad = each.to(dtype) * factor
        optimizer.step()
    return tensor, optimizer.state[tensor]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, the sign of zero too."""
    if not isinstance(a, Tensor):
        return a == b
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


def check(name: str, dtype: torch.dtype, gradient: torch.dtype, out: torch.dtype | None) -> None:
    """The numbers, states, step counts and rounded copies of a few steps are the plain optimizer's."""
    parameter, state = start(dtype), {}
    kernel = cpu_kernels.kernel(build(name, torch.zeros(ALIGN, dtype=dtype)))
    rounded = None if out is None else torch.empty(SIZE, dtype=out)
    for each, factor, rate in zip(gradients(gradient), FACTORS, RATES, strict=True):
        kernel.optimizer.param_groups[0]["lr"] = rate
        kept, before = each.clone(), {k: v for k, v in state.items() if isinstance(v, Tensor)}
        kernel.step(parameter, each, state, factor, rounded)
        assert torch.equal(each, kept), "the gradient is only read"
        assert all(state[k] is v for k, v in before.items())
        assert rounded is None or torch.equal(rounded, parameter.to(rounded.dtype))
    expected, states = plain(name, dtype, gradient)
    assert same(parameter, expected)
    assert state.keys() == states.keys() and all(same(state[k], states[k]) for k in states)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "gradient", "out"),
    [
        (torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float64, torch.float64, None),
        (torch.float32, torch.float64, torch.bfloat16),
    ],
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_bits_are_those_of_the_optimizers_own_step(
    name: str,
    dtype: torch.dtype,
    gradient: torch.dtype,
    out: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK", 2 * ALIGN)
    check(name, dtype, gradient, out)


COMPILED = [
    name for name, (cls, options) in CASES.items() if cls in (AdamW, Adam, SGD) and options.get("fused", True)
]
NOT_COMPILED = ("adamw, amsgrad", "adamw, maximize")


def compiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes loops be compiled for any size, on two threads."""
    pytest.importorskip("numba")
    from polyreme.optim import compiled_kernels

    monkeypatch.setattr(cpu_kernels, "WORTH", 1)
    monkeypatch.setattr(cpu_kernels, "_COMPILED", set())
    monkeypatch.setattr(compiled_kernels, "LEAST", 2 * ALIGN)
    return compiled_kernels


@pytest.mark.parametrize(
    ("name", "out"),
    [*((name, torch.bfloat16) for name in COMPILED), ("adamw", torch.float16), ("adamw", None)],
)
def test_compiled_loops_give_the_same_bits(
    name: str, out: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling(monkeypatch)
    check(name, torch.float32, out or torch.float32, out)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert bool(cpu_kernels._COMPILED) == (name not in NOT_COMPILED)


@pytest.mark.parametrize("size", [1, 31, 33, 997])
def test_a_compiled_loop_makes_the_same_of_numbers_that_fill_no_run(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_kernels = compiling(monkeypatch)
    ends = []
    for count in (size, 1024):
        parameter, gradient, first, second, out = (
            torch.linspace(0.1, k, 1024)[:count].clone() for k in range(1, 6)
        )
        out = out.bfloat16()
        numbers = (0.5, 0.99, None, 0.1, 0.95, 0.05, 0.9, 1e-8, 1e-2)
        compiled_kernels.run(
            compiled_kernels.adam, [parameter, gradient, first, second, out], numbers, threads=1
        )
        ends.append(torch.stack([parameter, first, second, out.float()])[:, :size])
    assert torch.equal(*ends) and not torch.equal(ends[0][0], torch.linspace(0.1, 1, 1024)[:size])


def test_loops_are_for_processors_whose_bits_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling(monkeypatch)
    cpu_kernels.compiler.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    try:
        check("adamw", torch.float32, torch.bfloat16, torch.bfloat16)
    finally:
        cpu_kernels.compiler.cache_clear()
    assert not cpu_kernels._COMPILED


@pytest.mark.parametrize("name", ["adamw", "momentum", "dampened", "adagrad", "lion", "class"])
def test_memory_that_is_given_for_states_is_begun_and_kept(name: str) -> None:
    parameter, memory = start(torch.float32), {}
    kernel = cpu_kernels.kernel(build(name, torch.zeros(ALIGN)))
    kernel.step(start(torch.float32), gradients(torch.float32)[0], memory)
    state = {
        key: torch.full_like(value, torch.nan)
        for key, value in memory.items()
        if isinstance(value, Tensor) and value.dim()
    }
    given = dict(state)
    for each, factor, rate in zip(gradients(torch.float32), FACTORS, RATES, strict=True):
        kernel.optimizer.param_groups[0]["lr"] = rate
        kernel.step(parameter, each, state, factor, first=factor == 1.0 and rate == 0.0)
    expected, states = plain(name, torch.float32, torch.float32)
    assert same(parameter, expected) and all(same(state[k], states[k]) for k in states)
    assert all(state[key] is value for key, value in given.items())


def test_whole_tensors_go_to_optimizers_that_look_at_them() -> None:
    matrix = start(torch.float32).view(15, ALIGN)
    expected = matrix.clone()
    gradient = torch.ones_like(matrix)
    rounded = torch.empty_like(matrix, dtype=torch.bfloat16)
    optimizer, state = torch.optim.Muon([expected], lr=0.1), {}
    expected.grad = gradient * 0.5
    optimizer.step()
    cpu_kernels.kernel(torch.optim.Muon([torch.zeros_like(matrix)], lr=0.1)).step(
        matrix, gradient, state, 0.5, rounded
    )
    assert same(matrix, expected) and same(
        state["momentum_buffer"], optimizer.state[expected]["momentum_buffer"]
    )
    assert torch.equal(rounded, matrix.bfloat16())


def test_workers_end_jobs_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    workers, turn, ended = cpu_kernels.Workers(), threading.Event(), []
    workers.do(turn.wait, lambda: ended.append(0))  # type: ignore[arg-type]
    for at in range(1, workers.most):
        workers.do(lambda: None, lambda at=at: ended.append(at))
    assert not ended, "the first is still being done"
    turn.set()
    workers.do(lambda: None, lambda: ended.append(workers.most))
    assert ended[:1] == [0], "there is room for one more"
    workers.finish()
    assert ended == list(range(workers.most + 1))


def test_a_job_that_fails_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    workers = cpu_kernels.Workers()
    workers.do(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        workers.finish()
