"""One rank of a run of any size trains in this process: other ranks are taken to give what it gives."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import polyreme
import threads
from examples import always
from polyreme.config import Config
from polyreme.errors import ConfigError, ModelError, TransportError
from polyreme.simulation import META, simulated
from polyreme.step.step import StepResult

CPU = torch.device("cpu")
SIZES = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1}
STEPS = 2
Traffic = dict[str, dict[str, tuple[int, int]]]


def config_of(sizes: dict[str, int], count: int = 1, **sections: Any) -> Config:
    """On a mesh of these sizes, with `count` micro-batches of 2 samples in a step."""
    sizes = SIZES | sizes
    given = {
        "batch": {"size": 2 * count * sizes["dp"], "micro": 2},
        **sections,
        "mesh": sizes | sections.get("mesh", {}),
    }
    return Config.load(given).resolve(math.prod(sizes.values()))


def run(
    model: Callable[[], nn.Module],
    batch: Any,
    config: Config,
    rank: int,
    device: torch.device = CPU,
    loss_fn: Any = None,
) -> tuple[list[StepResult], Traffic]:
    with simulated(model, config, rank, device, loss_fn=loss_fn) as engine:
        results, tiers = [engine.train_step(batch) for _ in range(STEPS)], engine.tiers()
        # written are initial numbers, too, where there are numbers
        kinds = ("bytes", "memory", "read")
        kept = {name: {kind: (0, int(told[kind])) for kind in kinds} for name, told in tiers.items()}
        return results, engine.mesh.traffic() | kept


def steps(rank: int, sizes: dict[str, int], stage: int) -> tuple[list[tuple[float, float]], Traffic]:
    plan: dict[str, Any] = {"mesh": {"tp_plan": {"0": "colwise", "2": "rowwise"}}} if "tp" in sizes else {}
    config = config_of(sizes, zero={"stage": stage}, optimizer={"clip": "none"}, **plan)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 8, generator=generator), torch.randn(2, 4, generator=generator)
    results, traffic = run(lambda: model, batch, config, rank, loss_fn=nn.functional.mse_loss)
    return [(result.loss, result.grad_norm) for result in results], traffic


def test_what_cannot_be_simulated_is_refused() -> None:
    config = config_of({"dp": 4})
    for model, given, rank, kind, words in (
        (large, {"batch": {"size": 4}}, 0, ConfigError, r"call resolve\(world_size\)"),
        (large, config, 4, TransportError, "no rank 4 of 4: they are 0 to 3"),
        (large, config, -1, TransportError, "no rank -1 of 4"),
        (nn.Linear(2, 2), config, 0, ModelError, "a function that builds it"),
    ):
        with pytest.raises(kind, match=words), simulated(model, given, rank):  # type: ignore[arg-type]
            pass


@pytest.mark.filterwarnings("ignore:all 4 data-parallel ranks")
def test_a_simulated_rank_is_refreshed_and_has_no_whole_model(tmp_path: Path) -> None:
    batch = torch.randn(2, 8), torch.randn(2, 4)
    with simulated(
        lambda: nn.Linear(8, 4), config_of({"dp": 4}), 1, loss_fn=nn.functional.mse_loss
    ) as engine:
        for _ in range(2):
            engine.refresh()
            engine.train_step(batch)
        with pytest.raises(ModelError, match=r"engine.save on a simulated rank: .*: save from a run"):
            engine.save(tmp_path / "run")
        with pytest.raises(ModelError, match=r"load_state_dict on a simulated rank: .* engine.load\(path\)"):
            engine.load_state_dict({})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:all 4 data-parallel ranks")
def test_simulated_ranks_have_the_numbers_of_real_ones() -> None:
    """What one rank tells for all, a simulated one tells in its place: gradients are weighted on each. The
    norm of each counts its own shard four times."""
    ((loss, norm), _), _ = steps(0, {}, 0)
    found = [steps(rank, {"dp": 4}, 0)[0][0] for rank in range(4)]
    assert [loss for loss, _ in found] == [pytest.approx(loss, rel=1e-6)] * 4
    assert sum(each**2 / 4 for _, each in found) == pytest.approx(norm**2, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_tensor_parallelism_counts_its_loss(rank: int) -> None:
    found, _ = steps(rank, {"tp": 2}, 0)
    assert all(0 < number < 100 for each in found for number in each)


@pytest.mark.filterwarnings("ignore:all 1024 data-parallel ranks")
@pytest.mark.parametrize("rank", [0, 511, 1023])
@pytest.mark.parametrize("stage", [0, 3])
def test_of_a_thousand_ranks_any_one_steps(rank: int, stage: int) -> None:
    found, traffic = steps(rank, {"dp": 1024}, stage)
    assert all(0 <= number < 100 for each in found for number in each)
    padded = traffic["dp"]["reduce_scatter"][1] // 1023 // 2 * 1024
    assert padded % (4 * 64 * 1024) == 0  # every shard is of whole vectors, in each of the two steps


# ---- without numbers

HOST = {"states": "host", "params": "host", "activations": "host"}
TINY: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8}
CASES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    **{f"stage {stage}": ({"dp": 16}, 1, {"zero": {"stage": stage}}) for stage in range(4)},
    "several micro-batches": ({"dp": 4}, 3, {"zero": {"stage": 2}, "precision": {"compute": "bf16"}}),
    "fp16": ({"dp": 4}, 2, {"zero": {"stage": 1}, "precision": {"compute": "fp16"}}),
    "copies": ({"dp": 16}, 2, {"zero": {"stage": 3, "shard_over": 4}}),
    "in bytes": (
        {"dp": 16},
        1,
        {"zero": {"stage": 3, "shard_over": 4, "quantized_weights": True, "quantized_gradients": True}},
    ),
    "tp": ({"dp": 2, "tp": 2}, 1, {"zero": {"stage": 3}}),
    "sequence": ({"dp": 4, "tp": 8}, 2, {"zero": {"stage": 2}, "mesh": {"sequence_parallel": True}}),
    "host": ({"dp": 4}, 2, {"zero": {"stage": 3}, "memory": HOST, "precision": {"compute": "bf16"}}),
    "8 bits": ({"dp": 4}, 1, {"optimizer": {"states": "8bit"}}),
    "host, 8 bits": ({"dp": 4}, 1, {"memory": {"states": "host"}, "optimizer": {"states": "8bit"}}),
    "muon": ({"dp": 4}, 1, {"zero": {"stage": 2}, "optimizer": {"name": "muon"}}),
}


@pytest.mark.filterwarnings("ignore:all [0-9]+ data-parallel ranks")
@pytest.mark.parametrize(
    "case",
    always(
        CASES, "stage 3", "several micro-batches", "copies", "in bytes", "sequence", "host, 8 bits", "muon"
    ),
)
def test_a_rank_without_numbers_has_the_traffic_of_one_with(case: str) -> None:
    sizes, count, sections = CASES[case]
    zero = {"persistence_threshold": 0, "bucket_size": 4096, "min_bucket": 0} | sections.get("zero", {})
    ids = torch.randint(0, models.VOCABULARY, (2 * count, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    rank = math.prod(sizes.values()) - 2
    config = config_of(sizes, count, **sections | {"zero": zero})
    found = {
        device: run(partial(models.llama, **TINY), batch, config, rank, device) for device in (CPU, META)
    }
    results, traffic = found[META]
    assert traffic == found[CPU][1] and traffic
    for result, real in zip(results, found[CPU][0], strict=True):
        assert math.isnan(result.loss) and not result.skipped
        assert (result.step, result.tokens, result.samples) == (real.step, real.tokens, real.samples)


# ---- pipelines

PIPELINES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "1f1b": ({"pp": 4}, "llama", {}),
    "gpipe, dp": ({"dp": 2, "pp": 2}, "llama", {"pipeline": {"schedule": "gpipe"}, "zero": {"stage": 1}}),
    "interleaved": ({"pp": 2}, "llama", {"pipeline": {"schedule": "interleaved"}}),
    "zero bubble": ({"pp": 2}, "llama", {"pipeline": {"schedule": "zb-h1"}}),
    "zero bubble, both ways": ({"pp": 2}, "llama", {"pipeline": {"schedule": "zb-v"}}),
    "tied": ({"pp": 2}, "gpt2", {"precision": {"compute": "bf16"}}),
    "tp": ({"tp": 2, "pp": 2}, "llama", {"mesh": {"sequence_parallel": True}}),
    "other widths": ({"pp": 4}, "layers", {}),
    "frozen": ({"pp": 4}, "frozen", {"zero": {"stage": 1}}),
}


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))


def frozen() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[:2].requires_grad_(False)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(models.llama, num_hidden_layers=4),
    "gpt2": partial(models.gpt2, blocks=4),
    "layers": layers,
    "frozen": frozen,
}


def pipeline(case: str) -> tuple[Callable[[], nn.Module], Any, Config, Any]:
    sizes, family, sections = PIPELINES[case]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, models.VOCABULARY, (8, 16), generator=generator)
    batch: Any = {"input_ids": ids, "labels": ids}
    loss_fn = None
    if family in ("layers", "frozen"):
        width = 4 if family == "layers" else 8
        batch = torch.randn(8, 8, generator=generator), torch.randn(8, width, generator=generator)
        loss_fn = nn.functional.mse_loss
    return FAMILIES[family], batch, config_of(sizes, 4, **sections), loss_fn


def real(rank: int, world: int, case: str) -> Any:
    model, batch, config, loss_fn = pipeline(case)
    with polyreme.initialize(model, config, loss_fn=loss_fn) as engine:
        return [engine.train_step(batch).tokens for _ in range(STEPS)], engine.mesh.traffic()


@pytest.mark.filterwarnings("ignore:all [0-9]+ data-parallel ranks")
@pytest.mark.parametrize(
    "case", always(PIPELINES, "1f1b", "zero bubble, both ways", "tied", "other widths", "frozen")
)
def test_any_rank_of_a_pipeline_has_the_traffic_of_a_real_one(case: str) -> None:
    model, batch, config, loss_fn = pipeline(case)
    found = threads.run(math.prod(PIPELINES[case][0].values()), real, case)
    for rank, (tokens, traffic) in enumerate(found):
        for device in (META, CPU) if config.mesh.pp == 4 else (META,):
            results, said = run(model, batch, config, rank, device, loss_fn)
            assert said == traffic, (rank, device)
            assert [result.tokens for result in results] == tokens
            assert not any(result.skipped for result in results)


def large() -> nn.Module:
    """7 billion parameters."""
    return models.llama(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )


@pytest.mark.filterwarnings("ignore:all [0-9]+ data-parallel ranks")
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_any_of_a_thousand_ranks_steps_with_a_large_model(rank: int) -> None:
    """Of whose parameters this process has not one."""
    count, length = 2, 512
    ids = torch.randint(0, 32000, (2 * count, length))
    config = config_of({"dp": 32, "tp": 8, "pp": 4}, count, zero={"stage": 2}, precision={"compute": "bf16"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with simulated(large, config, rank) as engine:
        results = [engine.train_step({"input_ids": ids, "labels": ids}) for _ in range(STEPS)]
        traffic, pp = engine.mesh.traffic(), engine.mesh.pp.rank
        parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10
    assert (results[-1].step, results[-1].tokens) == (STEPS, 32 * ids.numel())
    activations = 2 * 2 * length * 4096 * STEPS * count * ((pp > 0) + (pp < 3))
    assert 0 <= traffic["pp"]["send"][1] - activations < 200  # the form of what is sent
    reduced = STEPS * parameters * 4 * 31 // 32
    assert reduced <= traffic["dp"]["reduce_scatter"][1] < 1.01 * reduced
    assert reduced // 2 <= traffic["dp"]["all_gather"][1] < 1.01 * reduced // 2
