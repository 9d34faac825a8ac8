"""What is checked in every run: copies of numbers on several ranks, the ranks' data, spikes, and parameters
without a gradient."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flips
import models
import polyreme
import probe
import threads
import training
from cover import some
from polyreme.config.schema import SentinelsSection
from polyreme.errors import ModelError
from polyreme.placement.full_parameters import checksum
from polyreme.step import replicas
from polyreme.step.batch.batches import ROWS, lowest_rows
from polyreme.step.sentinels import FEWEST, WINDOW, Spikes

LLAMA = "model.layers.1.post_attention_layernorm.weight"
DAG = [name for name, parameter in models.build("dag").named_parameters() if parameter.numel()]


def of(dp: int = 1, every: int = 1, **sections: Any) -> dict[str, Any]:
    return training.config(dp, sentinels={"every": every}, **sections)


# ---- copies of numbers


@given(
    st.integers(1, 5), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), st.integers(0, 63),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_checksum_depends_on_every_bit(
    lines: int, dtype: torch.dtype, bit: int, drawn: random.Random
) -> None:
    words = torch.tensor([drawn.randrange(-(2**63), 2**63) for _ in range(lines * 8 * dtype.itemsize)])
    before = checksum(words.view(dtype))
    place = drawn.randrange(len(words))
    words[place] ^= -(2**63) if bit == 63 else 1 << bit
    assert checksum(words.view(dtype)) != before


@settings(max_examples=12)
@given(st.sampled_from(DAG), st.sampled_from([0, 9, 12, 20]), st.integers(1, 6), st.integers(2, 3), st.data())
def test_any_bit_of_any_parameter_is_found_while_all_is_compared_once(
    name: str, bit: int, every: int, world: int, data: Any
) -> None:
    """But those that the rounding of the next updates may take away."""
    at = data.draw(st.integers(0, world - 1))
    cut = of(world, every, zero={"stage": 0}, batch={"size": 12, "micro": 12 // world})
    apart = f"rank {at} from ranks" if world == 3 else "rank 1 from rank 0"
    with patch.object(replicas, "LEAST", 64), patch.object(training, "SAMPLES", 12):
        for steps, error in threads.run(world, flips.flipped, "dag", cut, name, bit, True, at):
            assert 0 < steps <= every and f": {name} (over dp: {apart}" in error


KINDS: dict[str, tuple[int, str, str, dict[str, Any], str]] = {
    "stage 0": (2, "dag", DAG[0], of(2, zero={"stage": 0}), "dp: rank 1 from rank 0"),
    "stage 0, bf16": (
        2, "dag", DAG[0], of(2, zero={"stage": 0}, precision={"compute": "bf16"}), "dp: rank 1 from rank 0",
    ),
    "stage 0, states on the host": (
        2, "dag", DAG[0], of(2, zero={"stage": 0}, memory={"states": "host"}), "dp: rank 1 from rank 0",
    ),
    "stage 0, states in bytes": (
        2, "dag", DAG[0], of(2, zero={"stage": 0}, optimizer={"states": "8bit"}), "dp: rank 1 from rank 0",
    ),
    "copies of shards": (
        4, "llama", LLAMA, of(4, zero={"stage": 3, "shard_over": 2}), "dp_replicate: rank 3 from rank 1",
    ),
    "copies of shards, bf16": (
        4, "llama", LLAMA, of(4, zero={"stage": 2, "shard_over": 2}, precision={"compute": "bf16"}),
        "dp_replicate: rank 3 from rank 1",
    ),
    "tp": (2, "llama", LLAMA, of(1, zero={"stage": 0}, mesh={"tp": 2}), "tp: rank 1 from rank 0"),
    "tp, bf16, sequence parallel": (
        2, "llama", LLAMA, of(1, precision={"compute": "bf16"}, mesh={"tp": 2, "sequence_parallel": True}),
        "tp: rank 1 from rank 0",
    ),
    "tp, states on the host": (
        2, "llama", LLAMA, of(1, memory={"states": "host"}, mesh={"tp": 2}), "tp: rank 1 from rank 0",
    ),
    "tied stages": (
        2, "gpt2", "transformer.wte.weight", of(1, 1, mesh={"pp": 2}, batch={"micro": 2}),
        "pp: rank 1 from rank 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_sign_that_is_lost_is_found_in_the_next_step(kind: str) -> None:
    world, case, name, config, where = KINDS[kind]
    for steps, error in threads.run(world, flips.flipped, case, config, name):
        assert steps == 1 and f"{name} (over {where})" in error


@pytest.mark.parametrize("stage", [1, 2])
def test_gathered_parameters_are_compared_too(stage: int) -> None:
    """Until the next update publishes them again."""
    for compute in ("fp32", "bf16"):
        config = of(2, zero={"stage": stage}, precision={"compute": compute})
        for steps, error in threads.run(2, flips.flipped, "dag", config, DAG[0], 9, False):
            assert steps == 1 and f"{DAG[0]} (over dp: rank 1 from rank 0)" in error


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("stage", [0, 3])
def test_after_a_load_and_over_part_of_the_ranks(mesh: dict[str, int], stage: int, tmp_path: Path) -> None:
    dp = mesh.get("dp", 1)
    config = of(dp, zero={"stage": stage}, mesh=mesh)
    found = threads.run(2 * dp, flips.flipped, "llama", config, LLAMA, 0, True, -1, tmp_path)
    assert {steps for steps, _ in found} == {1} and all(LLAMA in error for _, error in found)


def test_a_last_digit_over_tp_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = threads.run(2, flips.flipped, "llama", of(1, 4, mesh={"tp": 2}), LLAMA, 31)
    told = [text for each in said if "differ in their last digits" in (text := str(each.message))]
    assert found == [(0, "")] * 2 and len(told) == 1 and f"{LLAMA} (over tp: rank 1 from rank 0)" in told[0]


def ahead(rank: int, world: int) -> str:
    engine = flips.made("dag", of(world))
    engine.train_step(flips.share(engine, "dag", 0))
    probe.count_samples(engine, rank)
    with pytest.raises(ModelError) as caught:
        engine.train_step(flips.share(engine, "dag", 1))
    return str(caught.value)


def test_ranks_that_have_come_unlike_far_are_told() -> None:
    for text in threads.run(2, ahead):
        assert text.startswith("engine.state.samples is 8 on rank 0; 9 on rank 1"), text


MESHES: dict[str, dict[str, Any]] = {
    "dp": {}, "tp": {"tp": 2}, "sequence": {"tp": 2, "sequence_parallel": True}, "pp": {"pp": 2},
}  # fmt: skip
MEMORY: tuple[dict[str, Any], ...] = ({}, {"states": "host"}, {"activations": "recompute"})
RUNS = [
    *some(
        2, tuple(MESHES), (0, 1, 2, 3), ("fp32", "bf16"), MEMORY, (1, 2), ("llama", "gpt2"), ("adamw", "8bit")
    ),
    ("dp", 0, "fp32", {}, 1, "llama", "muon"),
    ("dp", 0, "autocast-bf16", {}, 1, "gpt2", "adamw"),
    ("tp", 0, "fp64", {}, 2, "llama", "adamw"),
]


def trained(rank: int, world: int, run: tuple[Any, ...], enabled: bool) -> tuple[Any, ...]:
    """Losses, weights and traffic under `run`."""
    mesh, stage, compute, memory, accumulation, case, optimizer = run
    dp = world // 2 if MESHES[mesh] else world
    config = training.config(
        dp, accumulation, zero={"stage": stage}, mesh=MESHES[mesh], precision={"compute": compute},
        memory=memory, optimizer={"states": "8bit"} if optimizer == "8bit" else {"name": optimizer},
        sentinels={"enabled": enabled, "every": 2},
    )  # fmt: skip
    with flips.made(case, config) as engine:
        results = [engine.train_step(flips.share(engine, case, step)) for step in range(4)]
        weights = engine.state_dict(rank0_only=True, master=True)
        return [(r.loss, r.grad_norm) for r in results], weights, engine.traffic()


def calls(traffic: dict[str, Any]) -> dict[str, int]:
    return {f"{axis} {name}": n for axis, counts in traffic.items() for name, (n, _) in counts.items()}


def sent(traffic: dict[str, Any]) -> int:
    return sum(size for counts in traffic.values() for _, size in counts.values())


@pytest.mark.parametrize("world, run", [*((2, run) for run in RUNS[::6]), *((4, run) for run in RUNS[1::16])])
def test_nothing_is_told_of_a_good_run_and_nothing_changes_by_looking(
    world: int, run: tuple[Any, ...]
) -> None:
    """Neither losses nor weights to the last bit, nor the number of exchanges, of which one is 8 bytes longer
    to each other rank."""
    with warnings.catch_warnings(), patch.object(replicas, "LEAST", 256):
        for text in ("copies of a parameter", ".*same samples", ".*have had a gradient", ".*the same batch"):
            warnings.filterwarnings("error", text)
        on, off = (threads.run(world, trained, run, enabled) for enabled in (True, False))
    for one, other in zip(on, off, strict=True):
        assert not training.differences(one[:2], other[:2])
        assert calls(one[2]) == calls(other[2])
        assert 0 < sent(one[2]) - sent(other[2]) <= 4 * 8 * (world - 1)


# ---- the ranks' data


def told_of_samples(rank: int, world: int, batches: list[list[Tensor]], own: bool, **sections: Any) -> None:
    """Train on `batches`, one of each rank for each step."""
    engine = polyreme.initialize(
        nn.Linear(3, 1),
        {"batch": {"size": world * len(batches[0][0])}, "sentinels": {"every": 2}, **sections},
        loss_fn=lambda output, _: output.square().mean(),
    )
    for of_step in batches:
        x = of_step[engine.mesh.data.rank]
        if own:
            with torch.no_grad():
                engine(x)
            engine.backward(engine(x).square().mean())
            engine.step()
        else:
            engine.train_step((x, x))


def messages(world: int, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads.run(world, told_of_samples, *args)
    return [text for each in said if "DistributedSampler" in (text := str(each.message))]


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("own", [False, True])
def test_two_of_many_ranks_with_the_same_samples_are_told(own: bool) -> None:
    data = [list(each) for each in drawn(5, 4, 6, 3)]
    assert messages(4, data, own) == []
    data[2][3] = data[2][1].flip(0)  # in another order, and not from the first step on
    (text,) = messages(4, data, own)
    assert text.startswith("ranks 1 and 3 have the same samples in their batches of step 3,")
    assert messages(4, [*data[:2], data[3], data[2]], own) == []  # in a step that does not compare


def test_one_sample_that_is_there_twice_is_no_fault_unless_it_is_again() -> None:
    data = [list(each) for each in drawn(5, 3, 1, 3)]
    data[0][2] = data[0][0]
    assert messages(3, data, False) == []
    data[2][2] = data[2][0]
    assert len(messages(3, data, False)) == 1


def test_switched_off_only_first_batches_are_compared() -> None:
    data = [list(each) for each in drawn(3, 2, 6, 3)]
    data[2] = [data[2][0]] * 2
    assert len(messages(2, data, False)) == 1

    def off(*args: Any) -> None:
        told_of_samples(*args, sentinels={"enabled": False})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads.run(2, off, data, False)


@given(st.integers(1, 40), st.randoms(use_true_random=False), st.booleans())
def test_the_lowest_rows_are_those_of_a_batch_in_any_order(n: int, drawn: random.Random, cut: bool) -> None:
    ids = torch.tensor([[drawn.randrange(9) for _ in range(12)] for _ in range(n)])
    mask, order = ids > 3, torch.tensor(drawn.sample(range(n), n))
    whole = lowest_rows({"ids": ids, "mask": mask})
    other = {"ids": ids[order], "mask": mask[order]}
    parts = [
        {key: value[rows] for key, value in other.items()} for rows in (slice(0, n // 2), slice(n // 2, n))
    ]
    assert whole == lowest_rows(parts if cut and n > 1 else other)
    assert len(whole) == min(ROWS, len({*map(tuple, ids.tolist())}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.float64, torch.complex128])
def test_rows_of_any_format_have_digests(dtype: torch.dtype) -> None:
    rows = (torch.arange(6).view(3, 2) % 3 > 0).to(dtype)
    assert len(lowest_rows((rows, torch.ones(3)))) == len({*map(str, rows.tolist())})
    assert lowest_rows({"x": torch.eye(2).to_sparse()}) != lowest_rows({"x": torch.ones(2, 2).to_sparse()})


# ---- spikes


def series(limit: float | None, numbers: Iterator[float] | list[float]) -> list[int]:
    spikes = Spikes(limit)
    return [at for at, number in enumerate(numbers) if spikes.see({"loss": number})]


def noisy(seed: int, steps: int) -> list[float]:
    made = random.Random(seed)
    return [8 * 0.99**step + 2 + made.gauss(0, 0.05) for step in range(steps)]


def test_a_spike_is_told_once() -> None:
    numbers = noisy(0, 300)
    assert series(10.0, numbers) == []
    numbers[150:154] = [60.0] * 4  # one spike of four steps
    numbers[200] = numbers[250] = 40.0
    numbers[5] = 1e9  # before there are enough to compare with
    numbers[220] = float("nan")
    assert series(10.0, numbers) == [150, 200, 250]
    assert series(None, numbers) == []
    level = [1.0] * WINDOW + [2.0] * WINDOW + [3.0]
    assert series(10.0, level) == [WINDOW, 2 * WINDOW]  # and what stays is usual at last


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
def test_noise_is_no_spike(seed: int, scale: float) -> None:
    assert series(10.0, [scale * number for number in noisy(seed, 200)]) == []


def test_what_a_spike_is_of_and_what_it_is_beside() -> None:
    spikes = Spikes(10.0)
    for number in [2.0] * FEWEST:
        assert spikes.see({"loss": number, "grad_norm": 1.0}) == ""
    text = spikes.see({"loss": 5.0, "grad_norm": 9.0})
    assert (
        text == "loss is 5, beside 2 in the last 16 steps and grad_norm is 9, beside 1 in the last 16 steps"
    )


def located(rank: int, world: int, enabled: bool) -> list[str]:
    data = [(torch.ones(3), torch.ones(1)) for _ in range(22)]
    data[20] = (torch.full((3,), 50.0), torch.ones(1))
    engine = polyreme.initialize(
        nn.Linear(3, 1),
        {
            "batch": {"size": 2}, "optimizer": {"lr": 1e-9}, "data": {"shuffle": False},
            "sentinels": {"enabled": enabled},
        },
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    found = []
    for batch in engine.loader(data):
        found.append(engine.train_step(batch).spike)
        if len(found) == 25:
            return found
    raise AssertionError


def test_a_spike_is_told_with_its_place_in_the_data() -> None:
    for found in threads.run(2, located, True):
        (at, text), *_ = [(at, text) for at, text in enumerate(found) if text]
        assert at == 21 and text.startswith("loss is ") and text.endswith("begin at sample 20 of epoch 1"), (
            found
        )
    assert not any(threads.run(2, located, False)[0])


# ---- parameters without a gradient


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.late = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
        self.steps, self.on = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.used(x) + (self.late(x) if self.steps == 3 and self.on else 0)


def unreached(rank: int, world: int, stage: int, every: int) -> None:
    model = Branches()
    engine = polyreme.initialize(
        model,
        {"batch": {"size": world}, "sentinels": {"every": every}, "zero": {"stage": stage}},
        loss_fn=nn.functional.mse_loss,
    )
    model.on = rank  # one rank alone has a gradient of `late`, in one step
    for step in range(8):
        engine.train_step((drawn(1, 3) + rank, drawn(1, 1) + step))


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_that_never_have_a_gradient_are_named_once(stage: int) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads.run(2, unreached, stage, 4)
    (text,) = [text for each in said if "has had a gradient" in (text := str(each.message))]
    assert "never.weight, never.bias in the first 4 steps" in text and "late" not in text


def test_the_section_has_one_switch() -> None:
    assert SentinelsSection().enabled and SentinelsSection.model_validate({"spike": "none"}).spike is None
