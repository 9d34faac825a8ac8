"""DeepSpeed's small things: logging, timers, devices, marks on modules, loaders."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.compat.deepspeed import utils
from polyreme.compat.deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    real_accelerator,
    set_accelerator,
)
from polyreme.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from polyreme.compat.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from polyreme.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from polyreme.compat.deepspeed.utils import groups, timer
from polyreme.compat.deepspeed.utils import logging as ds_logging
from polyreme.compat.deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
)
from polyreme.compat.deepspeed.utils.comms_logging import CommsLogger, convert_size
from polyreme.compat.deepspeed.utils.exceptions import DeprecatedException
from polyreme.compat.deepspeed.utils.torch import required_torch_version
from polyreme.errors import PolyremeError


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> DeepSpeedAccelerator:
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return get_accelerator()


def test_the_cpu_is_an_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.device_name() == accelerator.current_device_name() == "cpu"
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.device_count() >= 1 and accelerator.current_device() == 0
    assert accelerator.is_synchronized_device() and accelerator.use_host_timers()
    assert {torch.float32, torch.bfloat16} <= set(accelerator.supported_dtypes())
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated()
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    assert accelerator.memory_stats()["allocated_bytes.all.current"] > 0
    assert accelerator.on_accelerator(torch.zeros(1))
    with accelerator.stream(accelerator.default_stream()), accelerator.capture_to_graph(None):
        pass
    assert accelerator.FloatTensor([1.0]).dtype == torch.float32
    assert accelerator.BFloat16Tensor([1.0]).dtype == torch.bfloat16
    environment: dict[str, str] = {}
    accelerator.set_visible_devices_envs(environment, [0, 2])
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_its_random_numbers_are_torchs(accelerator: DeepSpeedAccelerator) -> None:
    accelerator.manual_seed(3)
    state, first = accelerator.get_rng_state(), torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(3)) and accelerator.initial_seed() == 3
    assert accelerator.random() is torch.random


def test_memory_without_a_device_is_not_pinned(accelerator: DeepSpeedAccelerator) -> None:
    tensor = torch.zeros(2, 3)
    assert accelerator.pin_memory(tensor) is tensor and not accelerator.is_pinned(tensor)


def test_both_kinds_answer_all_questions() -> None:
    cpu, cuda = CPU_Accelerator(), CUDA_Accelerator()
    assert {name for name in dir(cuda) if name[0] != "_"} - set(dir(cpu)) == {"communication_backend_version"}
    assert set(dir(cpu)) - set(dir(cuda)) == {"max_mem", "get_rss"}
    assert cuda.device_name(1) == "cuda:1" and cuda.communication_backend_name() == "nccl"
    assert not cuda.use_host_timers() and not cuda.on_accelerator(torch.zeros(1))
    assert cuda.export_envs() == ["NCCL"]


def test_an_accelerator_is_set_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.setenv("DS_ACCELERATOR", "hpu")
    with pytest.raises(ValueError, match=r"DS_ACCELERATOR=hpu: .* name one of these"):
        get_accelerator()
    mine = CUDA_Accelerator()
    set_accelerator(mine)
    assert get_accelerator() is mine
    with pytest.raises(AssertionError, match="derives from DeepSpeedAccelerator"):
        set_accelerator(object())  # type: ignore[arg-type]


def test_a_compile_backend_is_one_that_torch_has(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.get_compile_backend() == "inductor"
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="torch has no such backend"):
        accelerator.set_compile_backend("none")


def test_builders_say_what_works_and_load_nothing(accelerator: DeepSpeedAccelerator) -> None:
    builder = accelerator.create_op_builder("CPUAdamBuilder")
    assert builder.is_compatible() and builder.NAME == "cpu_adam"
    with pytest.raises(PolyremeError, match="DeepSpeedCPUAdam"):
        builder.load()
    assert not accelerator.get_op_builder("AsyncIOBuilder")().is_compatible()
    assert accelerator.create_op_builder("NoSuchBuilder") is None


def test_levels_are_set_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    mine = ds_logging.LoggerFactory.create_logger("mine", logging.WARNING)
    mine.warning("heard")
    mine.info("not heard")
    said = capsys.readouterr().out
    assert "[WARNING] [test_deepspeed_utils.py:" in said and said.endswith("heard\n") and "not" not in said
    utils.log_dist("once", level=logging.ERROR)
    utils.logger.warning_once("twice")
    utils.logger.warning_once("twice")
    said = capsys.readouterr().out
    assert "[Rank -1] once" in said and said.count("twice") == 1
    utils.set_log_level_from_string("ERROR", mine)
    assert mine.level == mine.handlers[0].level == logging.ERROR
    for bad in (lambda: utils.set_log_level_from_string("loud"), ds_logging.LoggerFactory.create_logger):
        with pytest.raises(ValueError):
            bad()


def test_a_single_process_speaks_for_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_logging.get_dist_msg("hello", [5]) == "[Rank -1] hello"
    ds_logging.print_dist("hello", [5])
    assert capsys.readouterr().out == "[Rank -1] hello\n"


class Calls:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timer.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timer.time, "time", lambda: self.now)


def test_a_timer_adds_its_laps(
    monkeypatch: pytest.MonkeyPatch, accelerator: DeepSpeedAccelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, timers = Calls(monkeypatch), timer.SynchronizedWallClockTimer()
    for lap in (1.0, 3.0):
        timers("fwd").start()
        clock.now += lap
        timers("fwd").stop()
    assert timers("fwd").mean() == 2000.0 and timers.get_mean(["fwd", "absent"]) == {"fwd": 2000.0 * 1000.0}
    timers.log(["fwd"], normalizer=2.0)
    assert "time (ms) | fwd: 2000.00" in capsys.readouterr().out
    assert timers("fwd").elapsed() == 0
    with pytest.raises(AssertionError, match="does not run"):
        timers("fwd").stop()
    timers("fwd").start()
    with pytest.raises(AssertionError, match="which runs"):
        timers("fwd").start()
    for lap in (2.0, 1.0):  # of a timer that runs on
        clock.now += lap
        assert timers("fwd").elapsed() == 1000 * lap
    nothing = timer.NoopTimer()
    nothing("fwd").start()
    assert nothing("fwd").elapsed() == 0


def test_a_mean_leaves_the_ends_out() -> None:
    assert timer.trim_mean([100.0, 1.0, 2.0, 3.0, 0.0], 0.2) == 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_leaves_are_marked_by_class_and_by_name() -> None:
    model = nn.ModuleDict({"a": Block(), "b": Block(), "c": nn.Linear(2, 2)})
    assert utils.set_z3_leaf_modules(model, [Block]) == [model["a"], model["b"]]
    assert utils.get_z3_leaf_modules(model) == [model["a"], model["b"]]
    assert utils.z3_leaf_module(model["a"]) and not utils.z3_leaf_module(model["c"])
    assert not utils.z3_leaf_parameter(model["a"].inner.weight)
    utils.unset_z3_leaf_modules(model, ["Block"])
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["c", "x"], raise_if_not_found=False) == (
        [model["c"]],
        ["x"],
    )
    assert len(utils.set_z3_leaf_modules_by_suffix(model, ["inner"])[0]) == 2
    with pytest.raises(ValueError, match=r"leaf modules .*Conv1d"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])
    with pytest.raises(ValueError, match=r"leaf modules .*x"):
        utils.set_z3_leaf_modules_by_name(model, ["x"])


def test_a_module_is_built_on_another_device_in_another_dtype() -> None:
    with utils.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 2), nn.BatchNorm1d(4))
        old, whole = torch.Tensor(2, 3), torch.arange(3)
    for parameter in model.parameters():
        assert parameter.device.type == "meta" and parameter.dtype == torch.bfloat16
    assert old.device.type == "meta" and old.shape == (2, 3) and whole.dtype == torch.int64
    assert torch.Tensor(2, 3).device.type == "cpu" and torch.Tensor([1, 2]).tolist() == [1, 2]
    assert nn.Linear(2, 2).weight.dtype == torch.float32
    with utils.OnDevice(dtype=torch.bfloat16, device="meta", enabled=False):
        assert torch.zeros(1).device.type == "cpu"


def test_attributes_have_dotted_names() -> None:
    model = nn.ModuleDict({"a": Block()})
    assert utils.recursive_getattr(model, "a.inner") is model["a"].inner
    utils.recursive_setattr(model, "a.inner", nn.Identity())
    assert isinstance(model["a"].inner, nn.Identity)


def test_versions_of_torch_compare_as_numbers() -> None:
    assert required_torch_version(min_version=2.2) and not required_torch_version(max_version="2.9")


def test_a_range_of_a_profile_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    mine = SimpleNamespace(range_push=seen.append, range_pop=lambda: seen.append("end"))
    monkeypatch.setattr(real_accelerator, "ds_accelerator", mine)

    @utils.instrument_w_nvtx
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert len(seen) == 2 and seen[1] == "end"


class Unit:
    """A model-parallel unit of Megatron's older names."""

    def get_model_parallel_rank(self) -> int:
        return 3

    def get_model_parallel_world_size(self) -> int:
        return 4

    def get_pipe_parallel_world_size(self) -> int:
        return 2


def test_an_mpu_answers_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bwc_tensor_model_parallel_rank(None) == 0 and bwc_tensor_model_parallel_rank(Unit()) == 3
    assert bwc_pipeline_parallel_world_size(Unit()) == 2 and bwc_pipeline_parallel_world_size(None) == 1
    assert groups.get_model_parallel_world_size() == 1 and groups.get_model_parallel_rank() == 0
    monkeypatch.setattr(groups, "mpu", Unit())
    assert groups.get_model_parallel_world_size() == 4 == groups._get_model_parallel_world_size()


def test_groups_that_are_not_there_are_refused() -> None:
    with pytest.raises(PolyremeError, match="expert"):
        groups._get_expert_parallel_group("ep_size_2")
    with pytest.raises(PolyremeError, match="sequence"):
        groups._get_sequence_parallel_group()
    with pytest.raises(AssertionError, match="pass mpu="):
        groups.get_model_parallel_group()
    with pytest.raises(AssertionError, match="init_distributed"):
        groups._get_data_parallel_world_size()
    with pytest.raises(DeprecatedException):
        groups.initialize()


def test_calls_are_counted_per_operation_and_size() -> None:
    log = CommsLogger()
    for latency in (1.0, 3.0):
        log.append("all_reduce", "mine", latency, 1 << 20)
    log.append("barrier", "barrier", 1.0, 0)
    assert log.get_total_operations() == 3 and log.get_operation_names() == ["mine", "barrier"]
    summary = log.get_operation_summary("mine")
    assert summary is not None
    row = summary[1 << 20]
    assert (row["count"], row["total_latency_ms"], row["avg_latency_ms"]) == (2, 4.0, 2.0)
    assert row["msg_size_str"] == "1.0 MB" and row["busbw_avg_gbps"] == 0  # of one rank
    assert convert_size(0) == "0B"
    raw = log.get_raw_data()
    assert list(raw) == ["mine", "barrier"] and raw["mine"][1 << 20][:2] == [2, [1.0, 3.0]]
    log.reset_data()
    assert not log.has_data() and raw["mine"]


def test_what_is_recorded_is_chosen_on_the_way() -> None:
    log = CommsLogger()
    log.stop_profiling_comms()
    log.start_profiling_op(["all_reduce", "barrier"])
    log.start_profiling_op(["barrier", "send"])
    log.stop_profiling_op(["all_reduce", "recv"])
    assert (log.prof_all, log.prof_ops) == (False, ["barrier", "send"])
    log.start_profiling_comms()
    assert log.prof_all


def test_a_repeating_loader_begins_again() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_a_repeating_loader_of_deepspeeds_own_goes_on() -> None:
    """That loader begins again when its iterator is asked for."""
    samples = SimpleNamespace(start=lambda: None)
    own = DeepSpeedDataLoader(
        list(range(4)), 2, False, 0, samples, num_local_io_workers=0,
        data_parallel_world_size=1, data_parallel_rank=0,
    )  # fmt: skip
    loader = RepeatingLoader(own)
    first, second, third = (next(loader).tolist() for _ in range(3))
    assert sorted(first + second) == [0, 1, 2, 3] and third == first


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_gives_each_rank_its_share(drop_last: bool, accelerator: DeepSpeedAccelerator) -> None:
    started: list[int] = []
    shares = []
    for rank in range(2):
        loader = DeepSpeedDataLoader(
            list(range(14)), 3, False, 0, SimpleNamespace(start=lambda: started.append(1)),
            num_local_io_workers=0, data_parallel_world_size=2, data_parallel_rank=rank,
            dataloader_drop_last=drop_last,
        )  # fmt: skip
        batches = list(loader)
        assert len(batches) == len(loader) == (2 if drop_last else 3)
        shares.append({int(each) for batch in batches for each in batch})
    assert started and shares[0].isdisjoint(shares[1])
    assert drop_last or shares[0] | shares[1] == set(range(14))
    with pytest.raises(PolyremeError, match="curriculum"):
        DeepSpeedDataLoader([1], 1, False, 0, None, deepspeed_dataloader_config={"curriculum_learning": True})
