"""Names of DeepSpeed's that its own tests import: what they do, and that the others are refused when used."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed import env_report, hjson
from polyreme.compat.deepspeed.comm.config import DeepSpeedCommsConfig
from polyreme.compat.deepspeed.comm.torch import known_world_size
from polyreme.compat.deepspeed.compile.config import CompileConfig
from polyreme.compat.deepspeed.config_values import parse
from polyreme.compat.deepspeed.linear import LoRAConfig, OptimizedLinear
from polyreme.compat.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from polyreme.compat.deepspeed.refusal import OrderError, UnsupportedError
from polyreme.compat.deepspeed.runtime import utils
from polyreme.compat.deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from polyreme.compat.deepspeed.runtime.config import DeepSpeedConfig
from polyreme.compat.deepspeed.runtime.pipe import p2p, schedule
from polyreme.compat.deepspeed.runtime.sparse_tensor import SparseTensor
from polyreme.compat.deepspeed.runtime.swap_tensor import MIN_SWAPPABLE_BYTES
from polyreme.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
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


def test_the_least_size_of_what_goes_to_files_is_a_mebibyte() -> None:
    assert MIN_SWAPPABLE_BYTES == 1024**2


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


def computes(steps: Any) -> list[tuple[str, int]]:
    """Forwards and backwards in order, with the buffer of each."""
    kinds = {"ForwardPass": "F", "BackwardPass": "B"}
    return [(kinds[each.name], each.buffer_id) for step in steps for each in step if each.name in kinds]


@pytest.mark.parametrize(("stages", "micro"), [(1, 4), (3, 8), (4, 2)])
def test_a_train_schedule_is_our_1f1b(stages: int, micro: int) -> None:
    table = build("1f1b", pp=stages, microbatches=micro)
    channels: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for stage in range(stages):
        given = schedule.TrainSchedule(micro, stages, stage)
        steps = list(given)
        ours = [(a.op, a.microbatch % given.num_pipe_buffers()) for a in table[stage] if a.op in ("F", "B")]
        assert computes(steps) == ours and len(steps) == 2 * (micro + stages - 1)
        assert [each.name for each in steps[-1][-3:]] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        for at, step in enumerate(steps):
            for each in step:
                if each.name in ("SendActivation", "RecvActivation"):
                    edge = stage if each.name == "SendActivation" else stage - 1
                    channels.setdefault((each.name, edge), []).append((at, repr(each)))
    for edge in range(stages - 1):  # what is sent in a step is received in the same
        sent, received = channels["SendActivation", edge], channels["RecvActivation", edge]
        assert [at for at, _ in sent] == [at for at, _ in received] and len(sent) == micro


def test_an_inference_schedule_hands_every_micro_batch_on() -> None:
    first, last = (list(schedule.InferenceSchedule(3, 2, stage)) for stage in range(2))
    assert [repr(each) for each in first[0]] == ["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)"]
    sends = [
        at for at, step in enumerate(first) for each in step if isinstance(each, schedule.SendActivation)
    ]
    receives = [
        at for at, step in enumerate(last) for each in step if isinstance(each, schedule.RecvActivation)
    ]
    assert sends == receives == [1, 2, 3]


def test_tiles_compute_what_the_whole_layer_does() -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(7, 5), torch.randn(3, 7)
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=3, init_linear=copy.deepcopy(whole))
    torch.testing.assert_close(tiled(x), whole(x))
    assert [tile.bias is None for tile in tiled.linears[0]] == [True, False]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="in_splits is 8"):
        TiledLinear(7, 5, in_splits=8)

    class Apart(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return nn.functional.linear(input, self.weight), self.bias

    output, bias = TiledLinearReturnBias(7, 5, in_splits=2, linear_cls=Apart, init_linear=whole)(x)
    torch.testing.assert_close(output + bias, whole(x))


def test_rows_of_a_sparse_gradient() -> None:
    dense = torch.zeros(10, 3)
    dense[[1, 4]] = torch.randn(2, 3)
    rows = SparseTensor(dense.to_sparse(1))
    assert rows.sparse_size() == (8, 30) and rows.indices.tolist() == [1, 4]
    rows.add(rows)
    torch.testing.assert_close(rows.to_coo_tensor().to_dense(), 2 * dense)
    with pytest.raises(OrderError, match="sparse layout"):
        SparseTensor(dense)


def test_sections_are_objects() -> None:
    made = DeepSpeedConfig(
        {"train_batch_size": 1, "comms_logger": {"enabled": True}, "flops_profiler": {"top_modules": 3}}
    )
    assert made.comms_config.comms_logger.enabled and made.comms_config.comms_logger.prof_all
    assert made.flops_profiler_config.top_modules == made.flops_profiler_config["top_modules"] == 3
    assert not DeepSpeedCommsConfig({}).comms_logger_enabled
    assert DeepSpeedFlopsProfilerConfig({"flops_profiler": {"profile_step": 2}}).profile_step == 2
    assert CompileConfig().double_buffer is True
    with pytest.raises(ValueError, match="unknown"):
        CompileConfig(unknown=1)


def test_files_of_torch_by_an_engine_of_checkpoints(tmp_path: Path) -> None:
    files = TorchCheckpointEngine()
    files.makedirs(str(tmp_path / "step"))
    files.save({"weight": torch.ones(2)}, str(tmp_path / "step" / "w.pt"))
    assert torch.equal(files.load(str(tmp_path / "step" / "w.pt"))["weight"], torch.ones(2))
    assert files.commit(CheckpointCommitInfo("step", str(tmp_path), True))
    torch.save(Path("x"), tmp_path / "pickled.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        files.load(str(tmp_path / "pickled.pt"))


def test_gradients_that_are_not_finite_and_those_that_a_backward_makes() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    counts: list[int] = []
    used.register_hook(lambda grad: counts.append(utils.count_used_parameters_in_backward([used, unused])))
    used.sum().backward()
    assert counts == [1]
    with pytest.raises(RuntimeError, match="during backward"):
        utils.count_used_parameters_in_backward([used])
    checker = utils.CheckOverflow([[used], [unused]])
    assert not checker.check()
    unused.grad = torch.tensor([1.0, float("nan")])
    assert checker.check() and not checker.check([[used]])
    utils.mask_nan_or_inf_with_val_inplace(unused.grad, val=2.0)
    assert unused.grad.tolist() == [1.0, 2.0]


def test_how_many_ranks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (known_world_size(2), known_world_size(-1)) == (2, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (known_world_size(2), known_world_size(-1)) == (2, 4)


def test_a_report_names_what_does_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    env_report.main()
    told = capsys.readouterr().out
    assert "deepspeed.ops.adam.FusedAdam" in told and "0.19.8, by Polyreme" in told
    assert env_report.human_readable_size(3 << 20) == "3.00 MB"


@pytest.mark.parametrize(
    "name",
    [
        "DeepSpeedHybridEngine",
        "InferenceEngine",
        "linear.init_lora",
        "module_inject.auto_tp.AutoTP",
        "moe.sharded_moe.top1gating",
        "pipe.DualPipeVModule",
        "runtime.checkpoint_engine.FastCheckpointEngine",
        "runtime.pipe.schedule.DualPipeVSchedule",
        "runtime.state_dict_factory.SDLoaderFactory",
        "runtime.torch_autocast.init_autocast_params",
        "sequence.layer.DistributedAttention",
    ],
)
def test_what_is_not_there_is_refused_when_it_is_used(name: str) -> None:
    where, _, short = f"polyreme.compat.deepspeed.{name}".rpartition(".")
    found = getattr(importlib.import_module(where), short)
    assert not isinstance(nn.Linear(1, 1), found)
    with pytest.raises(UnsupportedError, match=r"(?s)is not available: .*fix: "):
        found(1, key=2)


def test_a_linear_layer_is_torchs_unless_it_is_asked_for_more() -> None:
    assert isinstance(OptimizedLinear(2, 3, dtype=torch.float32), nn.Linear)
    with pytest.raises(UnsupportedError, match="peft"):
        OptimizedLinear(2, 3, lora_config=LoRAConfig())


def test_messages_between_stages_want_a_grid() -> None:
    with pytest.raises(OrderError, match="init_process_groups"):
        p2p.send(torch.ones(1), 1)
