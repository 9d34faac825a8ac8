"""DeepSpeed's JSON as a config of ours: every key has an outcome, real configs resolve, the batch is counted
as DeepSpeed does, and what cannot be is refused with a way out."""

from __future__ import annotations

import base64
import copy
import dataclasses
import importlib.util
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from polyreme.cli import main
from polyreme.cli.translated import as_toml
from polyreme.compat.deepspeed import config_keys
from polyreme.compat.deepspeed.config_auto import TRAINER
from polyreme.compat.deepspeed.config_keys import KEYS, SECTIONS, TABLES, find, with_table
from polyreme.compat.deepspeed.config_values import DeepSpeedConfigError
from polyreme.compat.deepspeed.json_config import MEAN, Note, Translation, is_deepspeed, translate
from polyreme.config import Config
from polyreme.config.schema import LEAVES
from polyreme.errors import ConfigError, Problem
from polyreme.step.precision import loss_scale

PAGE = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
FILLED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE_2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686,
    "stage3_param_persistence_threshold": 640,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
NVME = {
    "stage": 3,
    "offload_optimizer": {
        "device": "nvme",
        "nvme_path": "/local_nvme",
        "buffer_count": 4,
        "fast_init": False,
    },
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "max_in_cpu": 1e9, "buffer_size": 1e8},
}
REAL: dict[str, dict[str, Any]] = {
    "plain": {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}},
    "zero 1, bf16": {
        **FILLED,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    },
    "trainer, zero 2": {
        **FILLED,
        "fp16": FP16,
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": STAGE_2,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "trainer, zero 3": {
        **FILLED,
        "fp16": FP16,
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": STAGE_3,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "nvme": {
        **FILLED,
        "bf16": {"enabled": True},
        "zero_optimization": NVME,
        "optimizer": ADAMW,
        "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    },
    "a share on the host": {
        **FILLED,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    },
    "static loss scale": {**FILLED, "fp16": {"enabled": True, "loss_scale": 128.0}},
    "autocast": {
        **FILLED,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "gradient_clipping": 0.0,
    },
    "accelerate": {
        **FILLED,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    },
    "lightning": {
        **FILLED,
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
    },
    "tensor parallel": {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
        "optimizer": ADAMW,
    },
}
"""Configs as people have them, after "auto" was filled in for two ranks."""


def refused(config: Any, world_size: int = 1, **more: Any) -> dict[str, Problem]:
    with pytest.raises(DeepSpeedConfigError) as caught:
        translate(config, world_size, **more)
    assert all(problem.reason and problem.fix for problem in caught.value.problems)
    return {problem.key: problem for problem in caught.value.problems}


def notes(config: dict[str, Any], world_size: int = 1) -> dict[str, Note]:
    return {note.key: note for note in translate({"train_batch_size": 4, **config}, world_size).notes}


def ours(config: dict[str, Any], world_size: int = 1) -> Config:
    return Config.load(translate({"train_batch_size": 4, **config}, world_size).config)


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    """The section of ours that an optimizer becomes."""
    made = translate({"train_batch_size": 4, "optimizer": {"type": name, "params": params}}).config[
        "optimizer"
    ]
    assert Config.load({"optimizer": made}).problems(1) == []
    return {key: value for key, value in made.items() if key not in ("no_decay", "clip", "unused")}


def within(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


# The table.


def test_every_key_has_an_outcome_and_leads_to_keys_that_exist() -> None:
    for key in KEYS.values():
        assert key.says or key.to, key.path
        assert key.outcome != "refused" or key.fix, key.path
        assert (key.outcome == "translated") == bool(key.to), key.path
        assert [name for name in key.to if name not in LEAVES] == [], key.path


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_table(page), "write it again: python -m polyreme.compat.deepspeed.config_keys PAGE"
    assert [path for path in KEYS if f"`{path}`" not in page] == []


REMOVED = (
    "amp",
    "nebula",
    "compression_training",
    "sparse_attention",
    "elasticity",
    "sparse_gradients",
    "quantize_training",
    "eigenvalue",
    "graph_harvesting",
    "curriculum_learning",
    "progressive_layer_drop",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zeropp_loco_param",
    "zero_optimization.mics_hierarchical_params_gather",
    "compile.backend",
    "compile.disable",
)
EXAMPLES = {
    "bool": True,
    "integer": 3,
    "positive integer": 1,
    "count": 0,
    "number": 0.5,
    "number >= 0": 1.0,
    "fraction": 1.0,
    "text": "Warn",
    "list": [],
    "anything": 1,
}


def test_every_key_gives_a_note_or_is_refused() -> None:
    """With a value that the key takes."""
    for path, key in KEYS.items():
        if path.startswith(("optimizer.", "scheduler.")):
            continue
        value = key.takes[-1] if isinstance(key.takes, tuple) else EXAMPLES[key.takes]
        path = path.replace("*", "something")
        config = {"train_batch_size": 4, **within(path, value)}
        if path.endswith("device"):
            config["zero_optimization"][path.split(".")[1]]["nvme_path"] = "/nvme"
        if path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config[path] = value = 4
        try:
            found = {note.key: note for note in translate(config).notes}
        except DeepSpeedConfigError as error:
            assert {problem.key for problem in error.problems} == {path}
        else:
            assert found[path].text and found[path].value == value, path


def test_defaults_are_no_reason_to_warn() -> None:
    for path, key in KEYS.items():
        if (
            key.outcome in ("warned", "refused")
            and key.but
            and key.default is not None
            and path != "fp16.hysteresis"
        ):
            assert notes(within(path, key.default))[path].outcome == "nothing to do", path


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")
def test_deepspeed_has_no_other_keys() -> None:
    """In a process of its own: the real one must not be imported beside this door."""
    code = """
import typing
from pydantic import BaseModel
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.config import HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from polyreme.compat.deepspeed.config_keys import find

def models(kind):
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [found for part in typing.get_args(kind) for found in models(part)]

def check(cls, path):
    for name, field in cls.model_fields.items():
        within = models(field.annotation)
        for each in {name, field.alias or name} - ({"tensor_parallel"} if within else set()):
            if within:
                check(within[0], f"{path}{each}.")
                continue
            key = find(path + each)
            assert key is not None, path + each
            assert key.takes == "anything" or key.default == field.default, path + each

for section, cls in {"zero_optimization.": DeepSpeedZeroConfig, "bf16.": DeepSpeedBF16Config,
                     "fp16.": DeepSpeedFP16Config, "tensor_parallel.": TPTrainingConfig,
                     "": DeepSpeedMonitorConfig, "comms_logger.": CommsLoggerConfig,
                     "compile.": CompileConfig, "hybrid_engine.": HybridEngineConfig}.items():
    check(cls, section)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Configs as they are.


@pytest.mark.parametrize("name", REAL)
def test_real_configs_resolve(name: str) -> None:
    before = copy.deepcopy(REAL[name])
    made = translate(REAL[name], 2)
    assert REAL[name] == before == made.source
    resolved = Config.load(made.config).resolve(2)
    assert resolved.optimizer.no_decay == "none"
    assert resolved.zero.stage == REAL[name].get("zero_optimization", {}).get("stage", 0) == made.stage
    if "train_batch_size" in REAL[name]:
        assert resolved.batch.size == REAL[name]["train_batch_size"] == made.batch.size
        assert resolved.accumulation == made.batch.accumulation
    assert Config.load(made.standalone()).resolve(2).optimizer == resolved.optimizer


def test_what_real_configs_become() -> None:
    two, three = (ours(REAL[f"trainer, zero {stage}"], 2) for stage in (2, 3))
    assert (two.memory.states, two.memory.params) == ("host", "device")
    assert (three.memory.states, three.memory.params) == ("host", "host")
    assert (two.optimizer.name, two.optimizer.lr, two.optimizer.betas) == ("adamw", 3e-5, (0.8, 0.999))
    assert (two.precision.compute, two.precision.growth_interval) == ("fp16", 1000)
    assert two.precision.initial_scale == 2.0**16
    disk = ours(REAL["nvme"], 2)
    assert disk.memory.states == disk.memory.params == "/local_nvme"
    assert disk.precision.on_nonfinite == "skip"
    assert ours(REAL["a share on the host"], 2).memory.states == {"host": 0.3, "device": 0.7}
    static = translate(REAL["static loss scale"], 2)
    assert (
        static.config["precision"] == {"compute": "fp16", "on_nonfinite": "skip", "loss_scale": 128.0}
        and static.loss_scale == 128.0
    )
    autocast = ours(REAL["autocast"], 2)
    assert (autocast.precision.compute, autocast.optimizer.clip) == ("autocast-bf16", None)
    half = {**FILLED, "torch_autocast": {"enabled": True, "dtype": "torch.float16"}}
    scaled = ours(half, 2).precision
    assert (scaled.compute, scaled.loss_scale, scaled.initial_scale) == ("autocast-fp16", "dynamic", 2.0**16)
    assert scaled.growth_interval == 2000, "as torch's GradScaler"
    half["torch_autocast"]["dtype"] = "float32"
    assert "torch_autocast.dtype" in refused(half)
    divided = translate(REAL["tensor parallel"], 2)
    assert divided.config["mesh"] == {"tp": 2}
    assert divided.batch.size == 8 and divided.config["batch"]["size"] == 4, "DeepSpeed counts all ranks"


def test_gradients_are_the_mean_over_ranks_where_the_schema_has_it() -> None:
    batch = translate(FILLED, 2).config["batch"]
    known = {key: value for key, value in MEAN.items() if key in LEAVES}
    assert batch == {"size": 16, "micro": 4, **{key.partition(".")[2]: value for key, value in known.items()}}


def test_the_facade_gets_every_value() -> None:
    made = translate(
        {
            "train_batch_size": 4,
            "flops_profiler": {"enabled": True},
            "fp16": {"enabled": True},
            "optimizer": {"type": "ADAM"},
            "scheduler": WARMUP,
        }
    )
    assert made.section("flops_profiler") == {
        "enabled": True,
        "recompute_fwd_factor": 0.0,
        "profile_step": 1,
        "step": None,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    }
    assert made.optimizer is not None and made.optimizer.name == "adam" and made.optimizer.params == {}
    assert made.scheduler is not None and made.scheduler.params == WARMUP["params"]
    assert made.loss_scale == {
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    assert made.values["gradient_clipping"] == 1.0 and made.values["steps_per_print"] is None
    assert {path for path in KEYS if not path.endswith("*")} <= made.values.keys()


def test_sources(tmp_path: Path) -> None:
    text = """{
      // the batch
      "train_batch_size": 4, # of all
      /* zero */ "zero_optimization": {"stage": 1,},
    }"""
    path = tmp_path / "ds_config"
    path.write_text(text)
    for source in (path, str(path), base64.urlsafe_b64encode(text.encode()).decode()):
        assert (
            translate(source).config == translate({"train_batch_size": 4, "zero_optimization": True}).config
        )
    path.write_text('{"train_batch_size": 4, "wandb": {"project": "a // b, }"}}')
    assert translate(path).values["wandb.project"] == "a // b, }"
    path.write_text('{"train_batch_size": 4, "train_batch_size": 8}')
    assert "twice" in refused(path)["config"].reason
    for nothing in ("no/such/file.json", "[]", 3, base64.b64encode(b"[1]").decode()):
        assert set(refused(nothing)) == {"config"}
    assert refused("no/such/file.json")["config"].reason == "there is no such file"
    path.write_text('{"train_batch_size": 4, ')
    assert "cannot be read" in refused(path)["config"].reason


def test_arguments_of_a_schedule() -> None:
    def schedule(name: str, **params: Any) -> dict[str, Any]:
        return {"train_batch_size": 4, "scheduler": {"type": name, "params": params}}

    found = refused(schedule("WarmupLR", warmup_steps=3))
    assert "warmup_num_steps" in found["scheduler.params.warmup_steps"].fix
    assert set(refused(schedule("WarmupDecayLR"))) == {"scheduler.params.total_num_steps"}
    assert set(refused(schedule("StepLR", stepsize=2))) == {
        "scheduler.params.stepsize", "scheduler.params.step_size"
    }  # fmt: skip
    translate(schedule("StepLR", step_size=2))


# The batch.


@given(
    st.integers(1, 64) | st.none(),
    st.integers(1, 8) | st.none(),
    st.integers(1, 8) | st.none(),
    st.integers(1, 4),
)
def test_the_batch_is_divided_as_deepspeed_does(
    size: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    """Against the rules as they are stated: two give the third; one is with no accumulation."""
    config = {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    if size is None and micro is None:
        assert "neither" in refused(config, ranks)["train_batch_size"].reason
        return
    steps = accumulation or (size // micro // ranks if size and micro else 1)
    each = micro or size // ranks // steps  # type: ignore[operator]
    whole = size or each * steps * ranks
    if whole != each * steps * ranks:
        problem = refused(config, ranks)["train_batch_size"]
        assert f"{each} x {steps} x {ranks}" in problem.reason and "write" in problem.fix
        return
    made = translate(config, ranks)
    assert (made.batch.size, made.batch.micro, made.batch.accumulation) == (whole, each, steps)
    resolved = Config.load(made.config).resolve(ranks)
    assert (resolved.batch.size, resolved.batch.micro, resolved.accumulation) == (whole, each, steps)


def test_a_pipeline_and_an_mpu_divide_the_ranks() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert translate(config, 4, pp=2).batch.size == 16
    assert translate(config, 4, pp=2).config["mesh"] == {"pp": 2}
    made = translate(config, 4, tp=2)
    assert made.batch.size == 16 == made.config["batch"]["size"] and made.config["mesh"] == {"tp": 2}
    assert Config.load(made.config).resolve(4).mesh.dp == 2
    assert translate({**config, "data_parallel_size": 4}, 4).config["mesh"] == {"dp": 4}


@pytest.mark.parametrize("value", [0, -4, 1.5, "many", True, []])
def test_a_batch_is_a_positive_integer(value: Any) -> None:
    assert "positive integer" in refused({"train_batch_size": value})["train_batch_size"].reason


# What is refused.


@pytest.mark.parametrize("path", REMOVED)
def test_what_deepspeed_removed_is_refused(path: str) -> None:
    for value in (False, None, {}):
        assert "removed" in refused({"train_batch_size": 4, **within(path, value)})[path].reason


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("train_batchsize", "train_batch_size"),
        ("zero_optimization.overlap_com", "zero_optimization.overlap_comm"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("fp16.loss_scal", "fp16.loss_scale"),
        ("max_grad_norm", "gradient_clipping"),
        ("fp32_allreduce", "communication_data_type"),
        (
            "stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(wrong: str, nearest: str) -> None:
    assert nearest in refused({"train_batch_size": 4, **within(wrong, 1)})[wrong].fix


def test_what_published_configs_have_beside_deepspeeds_keys() -> None:
    """LLaMA-Factory's, which DeepSpeed does not read."""
    found = notes(
        {"_comment": "for two ranks", "comms_config": {"verbose": False}, "monitor_config": {"enabled": True}}
    )
    assert found["_comment"].outcome == "nothing to do"
    assert "comms_logger" in found["comms_config"].text and found["comms_config"].outcome == "warned"
    assert "csv_monitor" in found["monitor_config"].text and found["monitor_config"].outcome == "warned"


REFUSED: list[tuple[str, Any]] = [
    ("gradient_allreduce_op", "sum"),
    ("sequence_parallel_size", 2),
    ("autotuning.enabled", True),
    ("hybrid_engine.enabled", True),
    ("expert_parallel.enabled", True),
    ("comet.enabled", True),
    ("data_efficiency.enabled", True),
    ("data_efficiency.data_sampling.enabled", True),
    ("zero_optimization.zenflow.topk_ratio", 0.1),
    ("msamp", {"enabled": True}),
    ("tensor_parallel.partition_config", {"layer_specs": []}),
    ("datastates_ckpt", {}),
    ("zero_optimization.stage", 4),
    ("zero_optimization.stage", True),
    ("communication_data_type", "int8"),
    ("zero_optimization.reduce_bucket_size", -1),
    ("zero_optimization.offload_optimizer.ratio", 1.5),
    ("zero_optimization.offload_param.device", "disk"),
    ("gradient_clipping", -1),
    ("gradient_clipping", "auto"),
    ("fp16.loss_scale", True),
    ("fp16.enabled", "yes"),
    ("zero_optimization.overlap_comm", 2),
    ("wandb.project", 3),
    ("gradient_clipping", None),
    ("aio", 3),
    ("optimizer.params", [1]),
    ("data_types.grad_accum_dtype", "fp8"),
]


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_what_is_refused(path: str, value: Any) -> None:
    assert set(refused({"train_batch_size": 4, **within(path, value)})) == {path}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat16"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, "tensor_parallel.tp.tp_size"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.nvme_path",
        ),
        (
            {
                "zero_optimization": {
                    "cpu_offload": True,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},
                }
            },
            "zero_optimization.cpu_offload",
        ),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.params"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 0.9}}}, "optimizer.params.beta"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "moment": 0.9}}}, "optimizer.params.moment"),
        ({"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "MuAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "FusedAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "sgd"}}, "optimizer.type"),
        ({"optimizer": {"type": "Optimizer"}}, "optimizer.type"),
        ({"scheduler": {"type": "WarmupLinear"}}, "scheduler.type"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            "scheduler.params.warmup_num_steps",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], key: str) -> None:
    assert set(refused({"train_batch_size": 4, **config})) == {key}


def test_all_problems_are_listed_and_caught_as_deepspeeds() -> None:
    config = {"train_batch_size": 3, "fp16": {"enabld": True}, "optimizer": {"type": "MuSGD"}}
    assert set(refused(config, 2)) == {"train_batch_size", "fp16.enabld", "optimizer.type"}
    with pytest.raises(AssertionError) as caught:
        translate(config, 2)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ConfigError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is DeepSpeedConfigError and str(again) == str(caught.value)


def test_near_names_of_optimizers() -> None:
    for wrong, right in {
        "FusedAdam": "Adam",
        "sgd": "SGD",
        "DeepSpeedCPUAdam": "Adam",
        "nadam": "NAdam",
    }.items():
        config = {"train_batch_size": 4, "optimizer": {"type": wrong}}
        assert f'"{right}"' in refused(config)["optimizer.type"].fix


# What keys become.


def test_auto_stands_for_the_default_where_deepspeed_takes_it_so() -> None:
    config = {
        "zero_optimization": {"stage": "auto", "overlap_comm": "auto", "reduce_bucket_size": "auto"},
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto", "check_grad_overflow": "auto"},
    }
    made = translate({"train_batch_size": 4, **config})
    assert made.stage == 0 and made.config["precision"] == {"compute": "fp32", "on_nonfinite": "apply"}
    assert set(refused({"train_batch_size": "auto"})) == {"train_batch_size"}


def test_clipping() -> None:
    assert ours({}).optimizer.clip == 1.0, "as DeepSpeed 0.19.8 has it"
    assert ours({"gradient_clipping": 0.5}).optimizer.clip == 0.5
    assert ours({"gradient_clipping": 0}).optimizer.clip is None


def test_older_names() -> None:
    zero = {
        "stage": 3,
        "cpu_offload": True,
        "cpu_offload_param": True,
        "stage3_gather_fp16_weights_on_model_save": True,
    }
    made = translate(
        {
            "train_batch_size": 4,
            "zero_optimization": zero,
            "bfloat16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 1, "tensor_parallel": {"tp_size": 1}},
        }
    )
    assert made.config["memory"] == {"states": "host", "params": "host"}
    assert made.config["precision"]["compute"] == "bf16"
    assert made.values["zero_optimization.stage3_gather_16bit_weights_on_model_save"] is True


def test_homes() -> None:
    def memory(stage: int = 3, **sections: Any) -> dict[str, Any]:
        config = {"train_batch_size": 4, "zero_optimization": {"stage": stage, **sections}}
        return translate(config).config.get("memory", {})

    assert memory(offload_optimizer={"device": "cpu", "ratio": 0.0}) == {}
    assert memory(offload_optimizer={"device": "nvme", "nvme_path": "nvme", "ratio": 0.25}) == {
        "states": {"./nvme": 0.25, "device": 0.75}
    }
    assert memory(offload_param={"device": "cpu"}) == {"params": "host"}
    assert memory(stage=2, offload_param={"device": "cpu"}) == {}
    found = notes({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "nvme_path": "/n"}}})
    assert found["zero_optimization.offload_param.device"].outcome == "warned"
    assert found["zero_optimization.offload_param.nvme_path"].outcome == "nothing to do"


def test_sums_of_gradients() -> None:
    def reduce(compute: str | None, **keys: Any) -> str:
        config = {compute: {"enabled": True}} if compute else {}
        made = ours({**config, **keys})
        made.resolve(1)
        return made.precision.reduce

    assert reduce("bf16") == "auto"
    assert reduce("bf16", communication_data_type="bf16") == "bf16"
    assert reduce("bf16", communication_data_type="FP32") == "fp32"
    assert reduce("bf16", communication_data_type="bf16", data_types={"grad_accum_dtype": "fp32"}) == "fp32"
    assert reduce("fp16", communication_data_type="bf16") == "auto"
    assert reduce(None, communication_data_type="fp16") == "auto"
    assert notes({"communication_data_type": "fp16"})["communication_data_type"].outcome == "warned"


def test_optimizers() -> None:
    adam = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert optimizer("Adam") == optimizer("adamw") == {"name": "adamw", **adam}
    assert optimizer("AdamW", adam_w_mode=False) == {"name": "adamw", **adam}
    assert optimizer("Adam", adam_w_mode=False, weight_decay=0.1) == {
        "name": "adam",
        **adam,
        "weight_decay": 0.1,
    }
    assert optimizer("AdamW", bias_correction=True, set_grad_none=False) == {"name": "adamw", **adam}
    assert optimizer("Adam", torch_adam=True) == {"name": "adamw", **adam, "weight_decay": 0.01}
    assert optimizer("Adam", torch_adam=True, adam_w_mode=False, amsgrad=True) == {
        "name": "adam",
        **adam,
        "options": {"amsgrad": True},
    }
    assert optimizer("Lion", lr=1e-4) == {
        "name": "lion",
        "lr": 1e-4,
        "betas": [0.9, 0.999],
        "weight_decay": 0.0,
    }
    assert optimizer("Lamb", max_coeff=2.0) == {"name": "lamb", **adam, "options": {"max_coeff": 2.0}}
    assert optimizer("Adagrad", lr_decay=0.1) == {
        "name": "adagrad",
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "options": {"lr_decay": 0.1},
    }
    assert optimizer("SGD", momentum=0.9, dampening=0.1) == {
        "name": "sgd",
        "lr": 1e-3,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "options": {"dampening": 0.1},
    }
    assert optimizer("NAdam", betas=[0.8, 0.9])["betas"] == [0.8, 0.9]
    assert optimizer("Adafactor", eps=[None, 1e-3])["options"] == {"eps": [None, 1e-3]}
    assert optimizer("Rprop")["lr"] == 0.01


def test_muon() -> None:
    assert optimizer("Muon") == {
        "name": "muon",
        "matrix_lr": 0.02,
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-10,
        "weight_decay": 0.0,
        "matrix_momentum": 0.95,
    }
    made = optimizer("muon", lr=0.1, adam_lr=1e-4, momentum=0.9, ns_method="standard", torch_adam=True)
    assert (made["matrix_lr"], made["lr"], made["matrix_momentum"]) == (0.1, 1e-4, 0.9)
    config = {"train_batch_size": 4, "optimizer": {"type": "Muon", "params": {"per_head_muon": True}}}
    assert set(refused(config)) == {"optimizer.params.per_head_muon"}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_an_optimizers_learning_rate_is_lr(name: str) -> None:
    found = refused({"optimizer": {"type": name, "params": {"learning_rate": 0.1}}})
    assert found["optimizer.params.learning_rate"].fix == "did you mean lr?"


def test_moments_in_bf16() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert ours({"bf16": bf16, "optimizer": ADAMW}).optimizer.states == "bf16"
    found = notes({"bf16": bf16, "optimizer": {"type": "NAdam"}})
    assert found["bf16.bf16_optimizer_states"].outcome == "warned"
    assert found["bf16.bf16_master_weights_and_grads"].outcome == "warned"


def test_notes_of_arguments() -> None:
    found = notes(
        {
            "optimizer": {
                "type": "SGD",
                "params": {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.0},
            },
            "scheduler": WARMUP,
        }
    )
    assert found["optimizer.params.lr"].text == "optimizer.lr = 0.1"
    assert found["optimizer.params.dampening"].text == "optimizer.options.dampening = 0.0"
    assert found["scheduler.params.warmup_num_steps"].outcome == "kept"
    assert "constant" in found["scheduler.type"].text


def test_schedules_of_a_config_of_ours() -> None:
    def schedule(name: str, **params: Any) -> Config:
        config = {**FILLED, "optimizer": ADAMW, "scheduler": {"type": name, "params": params}}
        made = Config.load(translate(config, 2).standalone())
        made.resolve(2)
        return made

    decay = schedule("WarmupDecayLR", warmup_num_steps=10, total_num_steps=100, warmup_max_lr=1e-3)
    assert (decay.lr_schedule.name, decay.lr_schedule.final, decay.optimizer.lr) == ("linear", 0.0, 1e-3)
    cosine = schedule("WarmupCosineLR", warmup_num_steps=10, total_num_steps=100)
    assert (cosine.lr_schedule.name, cosine.lr_schedule.final, cosine.optimizer.lr) == ("cosine", 1e-4, 3e-5)
    assert str(cosine.lr_schedule.total) == "100 steps"
    assert schedule("StepLR", step_size=3).lr_schedule.name == "constant"


# The command.


def polyreme(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main.app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def ds(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(REAL["trainer, zero 3"]))
    return path


def test_inspect_shows_what_keys_become(ds: Path) -> None:
    status, output, _ = polyreme("inspect", str(ds), "-n", "2")
    assert status == 0 and "zero.stage = 3" in output and "nothing to do" in output
    assert max(map(len, output.splitlines())) <= 80
    status, output, _ = polyreme("inspect", str(ds), "-n", "2", "--json")
    told = json.loads(output)
    assert told["config"]["zero"]["stage"] == 3
    assert {
        "key": "zero_optimization.stage",
        "value": 3,
        "outcome": "translated",
        "text": "zero.stage = 3",
    } in told["deepspeed"]
    status, _, error = polyreme("inspect", str(ds))
    assert status == 2 and "or start 2" in error


def test_inspect_shows_what_trainer_would_fill_in(ds: Path) -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    ds.write_text(json.dumps(auto))
    status, output, _ = polyreme("inspect", str(ds), "-n", "2", "--json")
    told = json.loads(output)
    notes = {note["key"]: note for note in told["deepspeed"]}
    assert status == 0 and told["config"]["batch"]["size"] == 16
    assert notes["optimizer.params.lr"]["value"] == "auto"
    assert notes["optimizer.params.lr"]["text"] == "optimizer.lr = 5e-05 unless learning_rate is set"
    assert notes["train_batch_size"]["text"].startswith("batch.size = 16 unless per_device_")
    status, _, error = polyreme("inspect", str(ds), "-n", "2", "--write", str(ds.with_suffix(".toml")))
    assert status == 2 and "scheduler.params.warmup_max_lr" in error and not ds.with_suffix(".toml").exists()


def test_trainers_defaults_are_those_that_it_writes() -> None:
    from transformers import TrainingArguments  # only here: it takes seconds

    arguments = {each.name: each.default for each in dataclasses.fields(TrainingArguments)}
    for path, (value, argument) in TRAINER.items():
        if (
            argument in arguments and path != "scheduler.params.warmup_num_steps"
        ):  # of which it writes 1 or more
            assert arguments[argument] == value, path


def test_inspect_writes_a_config_of_ours(ds: Path, tmp_path: Path) -> None:
    written = tmp_path / "run.toml"
    status, _, _ = polyreme("inspect", str(ds), "-n", "2", "--write", str(written), "--set", "seed=3")
    assert status == 0
    expected = Config.load(translate(ds, 2).standalone(), ["seed=3"])
    assert Config.load(written) == expected and expected.seed == 3
    status, _, error = polyreme("inspect", str(ds), "-n", "2", "--write", str(written))
    assert status == 1 and "already" in error
    assert Config.load(written).seed == 3


@pytest.mark.parametrize("name", REAL)
def test_toml_is_the_same_config(name: str, tmp_path: Path) -> None:
    config = Config.load(translate(REAL[name], 2).standalone())
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config))
    assert Config.load(path) == config


def test_which_files_are_deepspeeds(tmp_path: Path) -> None:
    def told(text: str, name: str = "some.json") -> bool:
        (tmp_path / name).write_text(text)
        return is_deepspeed(tmp_path / name)

    assert told('{"train_batch_size": 4}') and told('{"optimizer": {"type": "Adam"}}')
    assert told('{"checkpoint": {}, "zero_optimization": {}, // both\n}')
    assert not told('{"optimizer": {"name": "adamw"}}') and not told('{"batch": {"size": 4}}')
    assert not told('{"train_batch_size": 4, "batch": {"size": 4}}')
    assert not told("{") and not told("[]") and not told("train_batch_size = 4", "some.toml")
    assert not is_deepspeed(tmp_path / "none.json")


def test_parts_of_the_table() -> None:
    assert (
        find("zero_optimization.prefetch_bucket_size")
        == KEYS["zero_optimization.stage3_prefetch_bucket_size"]
    )
    assert find("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen") is not None
    assert find("zero_optimization.nothing") is None and "zero_optimization.offload_param" in TABLES
    assert set(SECTIONS) <= TABLES and isinstance(translate(FILLED, 2), Translation)
    assert config_keys.in_words(KEYS["fp16.initial_scale_power"]) == "integer >= 0"


def test_names_with_dots_are_no_sections() -> None:
    """DeepSpeed reads none; TRL writes some, that do nothing anywhere."""
    base = {"train_batch_size": 2}
    found = translate({**base, "zero_optimization.stage3_prefetch_bucket_size": 921.6}, 1)
    assert found.config == translate(base, 1).config
    name = "stage3_param_persistence_threshold"
    three = {**base, "zero_optimization": {"stage": 3, name: 100}}
    assert translate({**three, f"zero_optimization.{name}": 320}, 1).config == translate(three, 1).config
    with pytest.raises(DeepSpeedConfigError):
        translate({**base, "zero_optimization.no_such_key": 1}, 1)


def test_the_loss_scale_takes_deepspeeds_values() -> None:
    """After each step, and up to the overflow that ends training (tests/data/deepspeed)."""
    data = json.loads((Path(__file__).parent.parent / "data/deepspeed/loss_scales.json").read_text())
    for row in data["rows"]:
        fp16 = {
            "enabled": True,
            "initial_scale_power": data["first"],
            "loss_scale_window": row["window"],
            "hysteresis": row["hysteresis"],
            "consecutive_hysteresis": row["consecutive"],
        }
        ds = {"train_batch_size": 1, "fp16": fp16, "zero_optimization": {"stage": row["stage"]}}
        precision = Config.load(translate(ds, world_size=1).config).precision
        scale = loss_scale(precision)
        found: list[float | str] = []
        for step in row["steps"]:
            if step == "x" and precision.on_min_scale == "error" and scale.is_least:
                found.append("raises")
                break
            scale.update(overflow=step == "x")
            found.append(math.log2(scale.value))
        assert found == row["exponents"], row
