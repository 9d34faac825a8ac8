"""DeepSpeed's runtime helpers: topologies, divisions, estimates, norms and recomputation."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed import front
from polyreme.compat.deepspeed.moe.layer import MoE
from polyreme.compat.deepspeed.moe.utils import (
    has_moe_layers,
    is_moe_param,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from polyreme.compat.deepspeed.runtime import constants, utils
from polyreme.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from polyreme.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from polyreme.compat.deepspeed.runtime.sequence_parallel import ulysses_sp
from polyreme.compat.deepspeed.runtime.zero import stage3, stage_1_and_2
from polyreme.errors import PolyremeError


def test_a_topology_counts_in_rows() -> None:
    topology = ProcessTopology(["y", "x"], [2, 3])
    assert [topology.get_rank(y=r, x=c) for r in range(2) for c in range(3)] == list(range(6))
    assert topology.get_coord(4) == (1, 1) and topology.get_coord(4).x == 1
    assert topology.get_axis_list("y", 1) == [3, 4, 5] and topology.get_axis_list("x", 0) == [0, 3]
    assert topology.get_axis_names() == ["y", "x"] and topology.world_size() == 6
    assert (topology.get_dim("x"), topology.get_dim("depth")) == (3, 0)
    assert topology.get_axis_comm_lists("y") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("depth") == []
    with pytest.raises(ValueError, match="does not say one rank"):
        topology.get_rank(y=0)
    with pytest.raises(AssertionError, match="is outside of"):
        topology.get_rank(y=2, x=0)
    with pytest.raises(ValueError, match="rank 6 is none of"):
        topology.get_coord(6)


def test_data_parallel_ranks_are_next_to_each_other() -> None:
    assert PipeDataParallelTopology(2, 3).get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_rank_repr(3) == "model_01"
    assert topology.get_rank_repr(3, omit_axes=["pipe"], inner_sep="+", outer_sep=".") == "data+01.model+01"


def test_items_are_divided_evenly() -> None:
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([4, 1, 1, 2, 2, 6], 3, [0, 2, 5, 6]),
        ([5, 1, 1, 1, 1, 1], 2, [0, 1, 6]),
        ([2, 1], 4, [0, 1, 2, 2, 2]),
    ],
)
def test_weights_are_divided_evenly(weights: list[int], parts: int, bounds: list[int]) -> None:
    assert utils.partition_balanced(weights, parts) == bounds


def test_no_division_is_more_even() -> None:
    weights = [3, 9, 1, 4, 4, 2, 8, 1]
    bounds = utils.partition_balanced(weights, 3)
    sums = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]

    def spread(a: int, b: int) -> int:
        parts = [sum(weights[:a]), sum(weights[a:b]), sum(weights[b:])]
        return max(parts) - min(parts)

    assert max(sums) - min(sums) == min(spread(a, b) for a in range(1, 8) for b in range(a + 1, 8))


def test_estimates_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    million = 1_000_000
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(1000 * million, 8, 4) == (
        192 * 1000 * million, 2000 * million)  # fmt: skip
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(1000 * million, 4, 1, False) == (
        24 * 1000 * million, 6500 * million)  # fmt: skip
    assert stage3.estimate_zero3_model_states_mem_needs(1000 * million, million, 4, 2) == (
        13500 * million, 4 * million, 4 * million)  # fmt: skip
    assert stage3.estimate_zero3_model_states_mem_needs(
        1000 * million, million, 4, 2, cpu_offload=False, cpu_offload_params=False
    ) == (24 * million, 2254 * million, 4 * million)
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 2000, bias=False))
    model.append(model[0])
    assert stage3.model_to_params(model) == (3 * million, 2 * million)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "model: 3.0M parameters, 2.0M of them in the largest layer" and len(lines) == 10
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model)
    assert "hosts: 1, GPUs on each: 1" in capsys.readouterr().out


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    made[0].grad, made[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    return made


def test_gradients_are_clipped_by_their_norm() -> None:
    clipped = parameters()
    assert utils.get_grad_norm(clipped) == 5.0 and utils.get_grad_norm(clipped, math.inf) == 4.0
    assert utils.clip_grad_norm_(clipped, max_norm=1.0) == 5.0
    assert utils.get_grad_norm(clipped) == pytest.approx(1.0)
    kept = parameters()
    assert utils.clip_grad_norm_(kept, max_norm=10.0, norm_type=1) == 7.0
    assert kept[0].grad is not None and kept[0].grad.tolist() == [3.0, 0.0]
    kept[0].grad[0] = math.nan
    assert utils.get_grad_norm(kept) == -1.0
    assert utils.get_weight_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=2.5) == 5.0
    assert [each.item() for each in tensors] == pytest.approx([1.5, 2.0])


def test_numbers_that_are_not_finite_are_found() -> None:
    assert utils.get_global_norm([3.0, 4.0]) == 5.0
    assert utils.is_invalid_grad_norm(torch.tensor([1.0, -1.0])) and not utils.is_invalid_grad_norm(2.0)
    assert utils.get_global_norm([3.0, -1.0]) == math.inf == utils.get_global_norm([math.nan])
    for bad in (math.inf, -math.inf, math.nan):
        assert utils.has_inf_or_nan(torch.tensor([1.0, bad]))
    assert not utils.has_inf_or_nan(torch.ones(3)) and not utils.has_inf_or_nan(torch.ones(0))
    assert utils.has_inf_or_nan(torch.tensor([0.0, math.inf]).to_sparse())


def test_nested_things_are_moved(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    assert utils.move_to_device({"a": [tensor]}, "cpu", torch.is_tensor)["a"][0] is tensor
    utils.ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    assert (tmp_path / "a" / "b").is_dir()


def test_small_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    assert utils.call_to_str("f", 1, "a", k=2) == "f(1, 'a', k=2)"
    utils.set_random_seed(3)
    first = torch.rand(1)
    utils.set_random_seed(3)
    assert torch.equal(first, torch.rand(1))
    utils.see_memory_usage("not said")
    utils.see_memory_usage("said", force=True)
    assert capsys.readouterr().out.startswith("said\nMA ")
    assert utils.DummyOptim([tensor := torch.ones(1)]).param_groups == [{"params": [tensor]}]
    assert constants.ROUTE_TRAIN == "train" and constants.GRADIENT_CLIPPING_DEFAULT == 1.0


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_settings", checkpointing._Settings())
    checkpointing.get_cuda_rng_tracker().reset()


@pytest.mark.usefixtures("settings")
def test_a_recomputed_function_draws_the_same_random_numbers() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(5)
    calls: list[int] = []

    def block(x: torch.Tensor, scale: float) -> tuple[torch.Tensor]:
        calls.append(1)
        with tracker.fork():
            x = x * torch.rand_like(x)
        return (torch.nn.functional.dropout(x.exp(), 0.5) * scale,)

    def run(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(5)
        torch.manual_seed(1)
        x = torch.linspace(0, 1, 16, requires_grad=True)
        out = call(block, x, 2.0)
        with tracker.fork():
            torch.rand(3)  # between the forward and its recomputation
        out.sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    kept = run(lambda function, *args: function(*args)[0])
    calls.clear()
    again = run(checkpointing.checkpoint)
    assert len(calls) == 2 and all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.usefixtures("settings")
def test_checkpointing_is_configured(tmp_path: Path) -> None:
    assert not checkpointing.is_configured()
    (tmp_path / "ds.json").write_text(json.dumps({"activation_checkpointing": {"number_checkpoints": 3}}))
    checkpointing.configure(None, deepspeed_config=str(tmp_path / "ds.json"), profile=True)
    assert checkpointing.is_configured() and checkpointing._settings.number_checkpoints == 3
    checkpointing.configure(checkpoint_in_cpu=True, synchronize=True, partition_activations=True)
    x = torch.ones(2, requires_grad=True)
    checkpointing.checkpoint(lambda a, b: a * b, x, torch.ones(2)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1]
    with pytest.raises(ValueError, match="partition_activations"):
        checkpointing.configure(contiguous_checkpointing=True)
    with pytest.raises(ValueError, match="num_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True, partition_activations=True)
    unit = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    with pytest.raises(PolyremeError, match="tensor-parallel"):
        checkpointing.configure(unit, partition_activations=True)
    assert checkpointing._settings.cpu_checkpointing  # a call that fails changes nothing


@pytest.mark.usefixtures("settings")
def test_generators_have_names_and_seeds_of_their_own() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("a", 1)
    before = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(1)
    with tracker.fork("a"):
        assert not torch.equal(first, torch.rand(1))
    assert torch.equal(before, torch.get_rng_state())
    for name, seed in (("a", 2), ("b", 1)):
        with pytest.raises(ValueError, match="another stream has"):
            tracker.add(name, seed)
    with pytest.raises(ValueError, match="have begun"), tracker.fork("c"):
        pass


def test_a_batch_for_one_process_says_that_accelerate_sees_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(num_processes=1)
    state = SimpleNamespace(is_initialized=lambda: True, PartialState=lambda: seen)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)  # type: ignore[arg-type]
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    assert front._translated(nn.Linear(4, 4), config, 1, None).batch.size == 8
    with pytest.raises(
        PolyremeError, match=r"Accelerate sees a single process.*\n.*gloo.*\n.*train_batch_size"
    ):
        front._translated(nn.Linear(4, 4), config, 2, None)
    seen.num_processes = 2
    with pytest.raises(PolyremeError) as caught:
        front._translated(nn.Linear(4, 4), config, 2, None)
    assert "Accelerate" not in str(caught.value)


def test_what_is_not_there_is_refused_when_it_is_used() -> None:
    for use in (
        lambda: MoE(4, nn.Linear(4, 4)),
        lambda: ulysses_sp.UlyssesSPAttentionHF.register_with_transformers("path"),
        lambda: ulysses_sp.UlyssesSPDataLoaderAdapter([]),
        lambda: ulysses_sp.TiledMLP.apply(),
        lambda: ulysses_sp.sequence_tiled_compute(),
    ):
        with pytest.raises(NotImplementedError, match="fix:"):
            use()
    weight = nn.Parameter(torch.ones(1))
    assert has_moe_layers(nn.Linear(1, 1)) == (False, 0) and not is_moe_param(weight)
    group = {"params": [weight]}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    weight.allreduce = False  # type: ignore[attr-defined]
    other, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    weight.grad, other.grad = torch.zeros(1), torch.zeros(2)
    shared, experts = split_params_into_shared_and_expert_params([weight, other, without])
    assert [len(p) for p in shared] == [2, 3] and experts == [weight]
    shared, experts = split_params_grads_into_shared_and_expert_params([weight, other, without])
    assert [len(g) for g in shared] == [2] and [len(g) for g in experts] == [1]
    with pytest.raises(PolyremeError, match="experts"):
        split_params_into_different_moe_groups_for_optimizer([group])
