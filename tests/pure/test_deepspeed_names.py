"""Names of DeepSpeed's that its own tests import: what they do, and that the others are refused when used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed import env_report, hjson
from polyreme.compat.deepspeed.comm.config import DeepSpeedCommsConfig
from polyreme.compat.deepspeed.config_values import parse
from polyreme.compat.deepspeed.refusal import UnsupportedError
from polyreme.compat.deepspeed.runtime import utils
from polyreme.compat.deepspeed.runtime.config import DeepSpeedConfig
from polyreme.compat.deepspeed.runtime.pipe import schedule, topology
from polyreme.pipeline.schedule import build

HJSON = """
  # a run
  train_batch_size: 8   // samples
  optimizer: {
    type: AdamW
    params: {lr: 1.5e-3, "betas": [0.9, 0.95], amsgrad: false}
  }
  note: text, to the end of the line # too
  quoted: 'it\\'s "so"'
  list: [
    1
    two /* still text */
  ]
  lines:
    '''
    one
      two
    '''
"""


def test_a_config_may_be_hjson(tmp_path: Path) -> None:
    assert parse(HJSON) == {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-3, "betas": [0.9, 0.95], "amsgrad": False}},
        "note": "text, to the end of the line # too",
        "quoted": 'it\'s "so"',
        "list": [1, "two /* still text */"],
        "lines": "one\n  two",
    }
    (tmp_path / "ds.hjson").write_text(
        "{\n  train_batch_size: 8\n  zero_optimization:\n  {\n    stage: 2\n  }\n}\n"
    )
    assert DeepSpeedConfig(str(tmp_path / "ds.hjson")).zero_config.stage == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2", "twice"),
        ("{a: 1", "line 1: no } ends it"),
        ("\na 1", "line 2: no colon follows 'a'"),
        ("a: }", "a value is missing"),
        ("a: 'x", "second quotation mark"),
        ("a: '''x", "second '''"),
        ("[1]\n2", "after the end"),
    ],
)
def test_what_is_neither_json_nor_hjson_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hjson.loads(text)
    with pytest.raises(ValueError, match=r"as JSON .*; as Hjson"):
        parse(text)


def test_sections_are_objects() -> None:
    made = DeepSpeedConfig(
        {"train_batch_size": 1, "comms_logger": {"enabled": True}, "flops_profiler": {"top_modules": 3}}
    )
    assert made.comms_config.comms_logger.enabled and made.comms_config.comms_logger.prof_all
    assert made.flops_profiler_config.top_modules == made.flops_profiler_config["top_modules"] == 3
    assert not DeepSpeedCommsConfig({}).comms_logger_enabled
    with pytest.raises(ValueError, match="has no key unknown"):
        DeepSpeedCommsConfig({"comms_logger": {"unknown": 1}})


def test_gradients_that_are_not_finite_are_found() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.sum().backward()
    checker = utils.CheckOverflow([[used], [unused]])
    assert not checker.check()
    unused.grad = torch.tensor([1.0, float("nan")])
    assert checker.check() and not checker.check([[used]])
    utils.mask_nan_or_inf_with_val_inplace(unused.grad, val=2.0)
    assert unused.grad.tolist() == [1.0, 2.0]


def test_parameters_of_the_backward_that_runs_are_counted() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    counts: list[int] = []
    every = [used, unused, frozen]
    used.register_hook(lambda _: counts.append(utils.count_used_parameters_in_backward(every)))
    (used.sum() + frozen.sum()).backward()
    (used * unused).sum().backward()
    assert counts == [1, 2]
    with pytest.raises(RuntimeError, match="call it in a hook"):
        utils.count_used_parameters_in_backward(every)


def test_prime_factors() -> None:
    assert [topology._prime_factors(n) for n in (1, 2, 9, 97, 360)] == [
        [], [2], [3, 3], [97], [2, 2, 2, 3, 3, 5]
    ]  # fmt: skip
    for wrong in (0, -4):
        with pytest.raises(ValueError, match="give 1 or more"):
            topology._prime_factors(wrong)


@pytest.mark.parametrize(
    ("given", "told", "known"),
    [(2, "4", 2), (-1, "4", 4), (None, "4", 4), (-1, None, None), (None, "0", None), (0, "many", None)],
)
def test_the_number_of_ranks_before_they_meet(
    given: int | None, told: str | None, known: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("WORLD_SIZE", told)
    found = importlib.import_module("polyreme.compat.deepspeed.comm.torch").known_world_size(given)
    assert found == known


def computes(steps: Any) -> list[tuple[str, int]]:
    """Forwards and backwards in order, with the buffer of each."""
    kinds = {"ForwardPass": "F", "BackwardPass": "B"}
    return [(kinds[each.name], each.buffer_id) for step in steps for each in step if each.name in kinds]


def messages(schedules: list[Any], kind: str) -> list[list[int]]:
    """The steps in which each stage has an instruction of this kind."""
    return [[at for at, step in enumerate(each) for done in step if done.name == kind] for each in schedules]


@pytest.mark.parametrize(("stages", "micro"), [(1, 4), (3, 8), (4, 2)])
def test_a_train_schedule_is_our_1f1b(stages: int, micro: int) -> None:
    table = build("1f1b", pp=stages, microbatches=micro)
    schedules = [schedule.TrainSchedule(micro, stages, stage) for stage in range(stages)]
    for given, row in zip(schedules, table, strict=True):
        steps = list(given)
        ours = [(a.op, (a.microbatch or 0) % given.num_pipe_buffers()) for a in row if a.op in ("F", "B")]
        assert computes(steps) == ours and len(steps) == 2 * (micro + stages - 1)
        assert [each.name for each in steps[-1][-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    # what is sent in a step is received in the same, every micro-batch
    sent, received = messages(schedules, "SendActivation"), messages(schedules, "RecvActivation")
    assert sent[:-1] == received[1:] and sent[-1] == received[0] == []
    back, taken = messages(schedules, "SendGrad"), messages(schedules, "RecvGrad")
    assert back[1:] == taken[:-1] and all(len(each) == micro for each in back[1:] + sent[:-1])


def test_an_inference_schedule_hands_every_micro_batch_on() -> None:
    schedules = [schedule.InferenceSchedule(3, 2, stage) for stage in range(2)]
    assert repr(next(iter(schedules[0]))) == "[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]"
    sent, received = messages(schedules, "SendActivation"), messages(schedules, "RecvActivation")
    assert sent == [[1, 2, 3], []] and received == [[], [1, 2, 3]]
    assert schedules[0].is_first_stage and schedules[1].is_last_stage and schedules[1].prev_stage == 0


def test_a_data_parallel_schedule_updates_at_its_end() -> None:
    steps = [*schedule.DataParallelSchedule(2, 1, 0)]
    assert [each.name for each in steps[0]] == ["LoadMicroBatch", "ForwardPass", "BackwardPass"]
    assert [each.name for each in steps[1][3:]] == ["ReduceGrads", "OptimizerStep"] and len(steps) == 2


def test_a_report_names_what_does_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    env_report.main()
    told = capsys.readouterr().out
    assert "deepspeed.ops.adam.FusedAdam" in told and "0.19.8, by Polyreme" in told


@pytest.mark.parametrize(
    "name",
    [
        "DeepSpeedHybridEngine",
        "InferenceEngine",
        "comm.torch.TorchBackend",
        "compression.compress.init_compression",
        "linear.OptimizedLinear",
        "linear.init_lora",
        "module_inject.auto_tp.AutoTP",
        "moe.sharded_moe.top1gating",
        "pipe.DualPipeVModule",
        "ops.DeepSpeedTransformerLayer",
        "ops.sparse_attention.SparseSelfAttention",
        "runtime.checkpoint_engine.FastCheckpointEngine",
        "runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
        "runtime.pipe.p2p.send",
        "runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
        "runtime.data_pipeline.data_routing.helper.convert_to_random_ltd",
        "runtime.fp16.onebit.adam.OnebitAdam",
        "runtime.lr_schedules.add_tuning_arguments",
        "runtime.pipe.schedule.DualPipeVSchedule",
        "runtime.sparse_tensor.SparseTensor",
        "runtime.state_dict_factory.SDLoaderFactory",
        "runtime.torch_autocast.init_autocast_params",
        "runtime.utils.PartitionedTensor",
        "runtime.utils.copy_to_device",
        "sequence.layer.DistributedAttention",
        "utils.timer.ThroughputTimer",
        "utils.numa.get_numactl_cmd",
        "utils.groups._get_expert_parallel_group",
        "zero.TiledLinear",
    ],
)
def test_what_is_not_there_is_refused_when_it_is_used(name: str) -> None:
    where, _, short = f"polyreme.compat.deepspeed.{name}".replace(".zero.", ".runtime.zero.").rpartition(".")
    found = getattr(importlib.import_module(where), short)
    assert not isinstance(nn.Linear(1, 1), found)
    with pytest.raises(UnsupportedError, match=r"(?s)is not available: .*fix: "):
        found(1, key=2)
    with pytest.raises(UnsupportedError):
        found.of_a_class(1)
    with pytest.raises(UnsupportedError):
        type("Derived", (found,), {})()
    assert not hasattr(found, "_private")


def test_the_smallest_tensor_that_deepspeed_moves_to_a_file_has_a_mebibyte() -> None:
    swap_tensor = importlib.import_module("polyreme.compat.deepspeed.runtime.swap_tensor")
    assert swap_tensor.MIN_SWAPPABLE_BYTES == 1024**2


def test_a_module_that_is_no_package_lacks_other_names() -> None:
    assert not hasattr(utils.groups, "no_such_name")
