"""The config: what it reads, what it refuses and how it says so, what it derives, and that its page is in
step."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from examples import examples
from polyreme.cli.inspect import config_as_json, render, with_reference
from polyreme.config import Config, Duration, Progress
from polyreme.config.describe import default, expects, toml
from polyreme.config.schema import LEAVES, SECTIONS
from polyreme.errors import ConfigError, Problem

TOML = """
seed = 3
[model]
config = {model_type = "llama", hidden_size = 64}
[data]
pattern = ["*.md"]
[zero]
stage = 3
bucket_size = "64 MiB"
[optimizer]
lr = 3e-4
betas = [0.9, 0.99]
clip = "none"
[train]
length = "1e6 tokens"
"""


def refused(source: Any, overrides: tuple[str, ...] = ()) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        Config.load(source, overrides)
    return {p.key: p for p in caught.value.problems}


def conflicts(source: dict[str, Any], world_size: int = 2) -> dict[str, Problem]:
    config = Config.load(source)
    found = config.problems(world_size)
    assert all(p.reason and p.fix for p in found)
    if found:
        with pytest.raises(ConfigError) as caught:
            config.resolve(world_size)
        assert caught.value.problems == found
        assert all(p.key in str(caught.value) and p.fix in str(caught.value) for p in found)
    return {p.key: p for p in found}


# ---- sources
# --------------------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_config(tmp_path: Path) -> None:
    import tomllib

    tree = tomllib.loads(TOML)
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "run.json").write_text(json.dumps(tree))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    expected = Config.load(tree)
    assert expected.optimizer.clip is None
    assert expected.zero.bucket_size == 64 * 2**20
    assert expected.train.length == Duration(amount=1e6, unit="tokens")
    for name in ("run.toml", "run.json", "run.yaml"):
        loaded = Config.load(tmp_path / name)
        assert loaded == expected
        assert loaded.origins == expected.origins
    assert Config.load(str(tmp_path / "run.toml")) == expected
    assert Config.load(expected) is expected


def test_yaml_writes_numbers_and_empty_sections_its_own_way(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("optimizer:\n  lr: 1e-3\n  clip: null\ntrain:\n")
    config = Config.load(path, ["train.sample_tokens=8"])
    assert yaml.safe_load(path.read_text())["optimizer"]["lr"] == "1e-3"  # so it is text that we must read
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.clip is None
    assert config.train.sample_tokens == 8
    path.write_text("")
    assert Config.load(path) == Config()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.toml", None, "no such file"),
        ("none", None, "no such file"),
        ("run.ini", b"a = 1", "suffix"),
        ("run.toml", b"a = = 1", "not valid TOML"),
        ("run.json", b"{", "not valid JSON"),
        ("run.yaml", b"a: [", "not valid YAML"),
        ("run.yaml", b"a: &x {b: *x}", "not valid YAML"),
        ("run.yaml", b"!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("run.json", b"[1]", "not a table of keys"),
        ("run.toml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    problem = refused(path)["config"]
    assert problem.value == str(path)
    assert reason in problem.reason


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").mkdir()
    assert "cannot be read" in refused(tmp_path / "run.toml")["config"].reason


def test_errors_name_their_file_and_survive_pickling(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("sed = 1")
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        Config.load(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert caught.value.exit_status == 2


# ---- overrides
# ------------------------------------------------------------------------------------------------------


def test_overrides() -> None:
    source = {"optimizer": {"lr": 0.5, "options": {"amsgrad": False}}, "seed": 1}
    overrides = [
        "optimizer.lr=1e-3",
        "optimizer.name=adam",
        "optimizer.options.amsgrad = true",
        "train.length=100 samples",
        "checkpoint.folder=2024-01-31",
        'data.pattern=["*.a", "*.b"]',
        "data.path=a=b",
        "monitor.project=1\nseed = 5",
        "model.config.model_type=llama",
        "optimizer.clip=none",
        "seed=2",
    ]
    config = Config.load(source, overrides)
    assert (config.seed, config.optimizer.lr, config.optimizer.name) == (2, 1e-3, "adam")
    assert config.optimizer.options == {"amsgrad": True}
    assert config.train.length == Duration(amount=100, unit="samples")
    assert config.checkpoint.folder == "2024-01-31"
    assert config.data.pattern == ("*.a", "*.b")
    assert config.data.path == "a=b"
    assert config.monitor.project == "1\nseed = 5"
    assert config.model.config == {"model_type": "llama"}
    assert config.optimizer.clip is None
    # the caller's is untouched
    assert source == {"optimizer": {"lr": 0.5, "options": {"amsgrad": False}}, "seed": 1}
    assert config.origins["optimizer.lr"] == "user"


def test_overrides_that_cannot_be() -> None:
    problems = refused({}, ("optimizer.lr", "=3", "seed=1", "seed.x=1", "zero.stge=2"))
    assert set(problems) == {"override", "seed", "zero.stge"}
    assert 'did you mean "zero.stage"' in problems["zero.stge"].fix


def test_overrides_of_a_resolved_config_start_from_what_the_user_wrote() -> None:
    resolved = Config.load({"batch": {"size": 8}}).resolve(2)
    assert (resolved.mesh.dp, resolved.batch.micro) == (2, 4)
    changed = Config.load(resolved, ["batch.size=16"])
    assert (changed.mesh.dp, changed.batch.micro, changed.batch.size) == ("auto", "auto", 16)
    assert [changed.origins[key] for key in ("mesh.dp", "batch.micro", "batch.size")] == [
        "default",
        "default",
        "user",
    ]


# ---- unknown keys and wrong types
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "meant"),
    [
        ({"zero": {"stge": 2}}, "zero.stge", "zero.stage"),
        ({"optimiser": {"lr": 1}}, "optimiser", "optimizer"),
        ({"batch_size": 4}, "batch_size", "batch.size"),
        ({"lr": 1.0}, "lr", "optimizer.lr"),
        ({"train": {"lr": 1.0}}, "train.lr", "optimizer.lr"),
        ({"data": {"sequence_length": 8}}, "data.sequence_length", "data.sequence"),
        ({"Seed": 1}, "Seed", "seed"),
        ({"optimizer": {"type": "adamw"}}, "optimizer.type", "optimizer.name"),
        ({"scheduler": {"name": "cosine"}}, "scheduler", "lr_schedule"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler", "lr_schedule"),
        ({"train": {"steps": 3}}, "train.steps", "train.length"),
        ({"optimizer": {"weight_decy": 0}}, "optimizer.weight_decy", "optimizer.weight_decay"),
        ({"mesh": {"pipeline": 2}}, "mesh.pipeline", "mesh.pp"),
        ({"mesh": {"tensor_parallel": 2}}, "mesh.tensor_parallel", "mesh.tp"),
        ({"memory": {"gradient_checkpointing": True}}, "memory.gradient_checkpointing", "memory.activations"),
        ({"checkpoint": {"path": "run"}}, "checkpoint.path", "checkpoint.folder"),
    ],
)
def test_an_unknown_key_names_the_nearest(source: dict[str, Any], key: str, meant: str) -> None:
    problems = refused(source)
    assert list(problems) == [key]
    assert problems[key].fix == f'did you mean "{meant}"?'


@pytest.mark.parametrize(
    "source", [{"train": {"epochs": 3}}, {"epochs": 3}, {"train": {"num_train_epochs": 3}}]
)
def test_epochs_are_told_of_as_a_length(source: dict[str, Any]) -> None:
    (problem,) = refused(source).values()
    assert problem.fix.startswith('write train.length = "N samples", N being the number of epochs times')


@pytest.mark.parametrize(
    "source", [{"batch": {"accumulation": 4}}, {"batch": {"accum": 4}}, {"gradient_accumulation_steps": 4}]
)
def test_accumulation_is_told_of_as_a_size(source: dict[str, Any]) -> None:
    (problem,) = refused(source).values()
    assert problem.fix.startswith("write batch.micro = batch.size / (dp x N)")


def test_a_config_of_deepspeeds_is_told_where_to_go(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    [problem] = caught.value.problems
    assert "polyreme inspect" in problem.fix and str(path) in problem.fix and "--deepspeed" in problem.fix


def test_an_unknown_key_like_no_other_lists_those_there_are() -> None:
    assert "zero.stage" in refused({"zero": {"qqqq": 1}})["zero.qqqq"].fix
    assert all(name in refused({"qqqq": 1})["qqqq"].fix for name in SECTIONS)
    assert "no such key" in refused({1: 2})["1"].reason


WRONG: dict[str, list[Any]] = {
    "seed": [-1, "x", 1.5, True],
    "compile": [1, "yes", None],
    "model.path": [3],
    "model.config": ["llama"],
    "data.pattern": [3, [3]],
    "data.sequence": [1, "512", 2.0],
    "data.vocab_size": [256],
    "data.validation": [1, -0.1, None],
    "data.workers": [-1],
    "mesh.dp": [0, "all", 1.5, True],
    "mesh.tp": [0],
    "mesh.order": [["dp"], ["dp", "dp", "tp", "pp", "cp"], "dp"],
    "zero.stage": [4, "3", True],
    "zero.reduce_every": ["never"],
    "zero.bucket_size": [0, -1, "big", True, None],
    "zero.min_bucket": [-1],
    "zero.prefetch": [-1, 5],
    "zero.release": [False],
    "memory.recompute_every": [0],
    "precision.compute": ["fp8"],
    "precision.loss_scale": [0, -1.0, "static"],
    "precision.growth": [0.5],
    "precision.backoff": [1.0, 0],
    "precision.on_nonfinite": ["ignore"],
    "batch.size": [0, 1.5, None],
    "batch.micro": [0, "half"],
    "pipeline.schedule": ["dualpipe"],
    "pipeline.blocks": ["times", [0], [1.5], 3, None],
    "optimizer.lr": ["fast", 0, -1, float("nan"), float("inf"), True, None, [1.0]],
    "optimizer.betas": [[0.9], [0.9, 1.0], 0.9, ["a", "b"]],
    "optimizer.momentum": [1.0],
    "optimizer.no_decay": [3],
    "optimizer.clip": [0, "no"],
    "lr_schedule.name": ["poly"],
    "lr_schedule.warmup": [-1, "10 hours", "steps", True, None],
    "lr_schedule.total": [0, "long"],
    "lr_schedule.final": [1.1],
    "train.length": [0, "0 tokens", "inf steps", None],
    "checkpoint.keep": [0],
    "checkpoint.every": ["sometimes"],
    "monitor.every": [0],
    "launch.ranks": [0],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_says_what_is_expected(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    problems = refused({section: {name: value}} if section else {name: value})
    assert list(problems) == [key]
    problem = problems[key]
    assert problem.value is value
    assert problem.reason.startswith("must ")
    # The example in the fix is one that the config takes.
    written = re.fullmatch(rf"write ({re.escape(key)} = .*)", problem.fix)
    assert written
    Config.load({}, [written[1].replace(" = ", "=", 1)])


MEANT: dict[str, list[tuple[Any, Any]]] = {
    "optimizer.lr": [
        ("5e-4x", 5e-4),
        ("0,01", 0.01),
        ("1e-3 # warm", 1e-3),
        ([1e-3], 1e-3),
        ("'2e-4'", 2e-4),
    ],
    "compile": [("true ", True), ("False", False), (1, True), ("yes", True)],
    "batch.size": [
        ("1,000", 1000),
        ("1 000", 1000),
        ("8 samples", 8),
        (8.0, 8),
        (1.5, 2),
        ("2k", 2000),
        (0, 1),
    ],
    "data.sequence": [("512", 512), (1, 2)],
    "data.vocab_size": [(10**8, 1_000_000), ("32k", 32_000)],
    "data.validation": [(5, 0.05)],
    "lr_schedule.final": [("10%", 0.1), (1.1, 1.0), (10, 0.1)],
    "lr_schedule.warmup": [("100 stps", "100 steps"), ("10 %", "0 steps"), ("1,000 tokns", "1000 tokens")],
    "train.length": [("1,000", "1000 steps"), ("100steps", "100 steps"), ("10 hours", "1000 steps")],
    "checkpoint.every": [("1e-320 steps", "500 steps"), ("100 step.", "100 steps")],
    "checkpoint.file_size": [("5 GIB!", "5 GiB"), ("1,000 MiBs", "1000 MiB")],
    "zero.stage": [("3", 3), ("stage 2", 2), ("AUTO", "auto")],
    "precision.compute": [
        ("BF16", "bf16"),
        ("bf-16", "bf16"),
        ("float64", "fp64"),
        ("double", "fp64"),
        ("float32", "fp32"),
        ("torch.bfloat16", "bf16"),
        ("Float16", "fp16"),
        ("half", "fp16"),
        (torch.float64, "fp64"),
    ],
    "optimizer.states": [("float32", "fp32"), ("bfloat16", "bf16"), ("int8", "8bit")],
    "lr_schedule.name": [("Cosine", "cosine"), ("linaer", "linear")],
    "model.path": [(3, "3")],
    "seed": [(-1, 0), ("7", 7)],
}


@pytest.mark.parametrize(
    ("key", "value", "meant"), [(key, *each) for key, values in MEANT.items() for each in values]
)
def test_the_fix_is_the_value_that_was_meant(key: str, value: Any, meant: Any) -> None:
    section, _, name = key.rpartition(".")
    (problem,) = refused({section: {name: value}} if section else {name: value}).values()
    found = Config.load({}, [problem.fix.removeprefix("write ").replace(" = ", "=", 1)])
    expected = Config.load({section: {name: meant}} if section else {name: meant})
    assert found.value(key) == expected.value(key), problem.fix


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
    st.lists(st.integers(), max_size=3),
    st.from_regex(r"[-+]?[0-9]{1,9}([.,][0-9]{1,4})?(e-?[0-9]{1,3})?[ ]?(steps?|tokn|%|GiB|k|x|MB)?", fullmatch=True),  # noqa: E501
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@examples(300)
@given(st.sampled_from(list(LEAVES)), JUNK)
def test_every_fix_is_taken(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    try:
        Config.load({section: {name: value}} if section else {name: value})
    except ConfigError as error:
        for problem in error.problems:
            if problem.key == key and problem.fix.startswith("write ") and " = " in problem.fix:
                Config.load({}, [problem.fix.removeprefix("write ").replace(" = ", "=", 1)])


def test_keys_without_end_are_refused_at_once() -> None:
    began = time.perf_counter()
    problems = refused({"x" * 1_000_000: 1, "optimizer": {"y" * 1_000_000: 1}})
    assert all(problem.fix.startswith("use one of ") for problem in problems.values())
    assert len(refused({"optimizer": {f"lr{i}": i for i in range(2000)}})) == 2000
    refused({"lr_schedule": {"name": "c" * 1_000_000}, "precision": {"compute": "9" * 1_000_000}})
    assert time.perf_counter() - began < 5


def test_every_mistake_is_listed_at_once() -> None:
    problems = refused({"zero": 3, "seed": -1, "mesh": {"dp": 0, "dq": 1}, "optimizer": {"lr": "fast"}})
    assert set(problems) == {"zero", "seed", "mesh.dp", "mesh.dq", "optimizer.lr"}
    assert "table" in problems["zero"].reason


def test_every_key_is_documented_and_takes_its_own_default() -> None:
    for key, field in LEAVES.items():
        assert field.description, key
        assert expects(field), key
        assert Config.load({}, [f"{key}={toml(default(field))}"]).value(key) == default(field)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@examples(150)
@given(st.dictionaries(st.sampled_from([*LEAVES, *SECTIONS, "x", "zero.x"]), JUNK, max_size=5))
@example({"memory.states": {}})
@example({"memory.params": {}})
def test_any_mapping_is_read_or_refused_with_a_config_error(junk: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for key, value in junk.items():
        section, _, name = key.rpartition(".")
        owner = tree.setdefault(section, {}) if section else tree
        if isinstance(owner, dict):
            owner[name] = value
    try:
        config = Config.load(tree)
    except ConfigError as error:
        assert error.problems
    else:
        config.problems(2)


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ConfigError, match="size = 3: a config does not change"):
        config.batch.size = 3
    with pytest.raises(ConfigError):
        config.seed = 3


# ---- conflicts
# ------------------------------------------------------------------------------------------------------


def test_the_defaults_run_on_any_rank_count_that_divides_the_batch() -> None:
    for world_size in (1, 2, 4, 8):
        resolved = Config().resolve(world_size)
        assert not [
            key
            for key in LEAVES
            if resolved.value(key) == "auto"
            and key not in ("zero.release", "checkpoint.resume", "mesh.backend")
            and not key.startswith("context.")
        ]
        assert resolved.mesh.dp == world_size


def test_a_word_that_is_none_of_those_is_told_the_nearest() -> None:
    problems = refused(
        {
            "pipeline": {"schedule": "interleave"},
            "lr_schedule": {"name": "cosinus"},
            "precision": {"compute": "int4"},
        }
    )
    assert [problem.fix for problem in problems.values()] == [
        *(
            'write precision.compute = "fp32"',
            'write pipeline.schedule = "interleaved"',
            'write lr_schedule.name = "cosine"',
        )
    ]


CONFLICTS: list[tuple[dict[str, Any], str, str]] = [
    ({"mesh": {"dp": 4}}, "mesh.dp", "mesh.dp = 2"),
    ({"mesh": {"tp": 3}}, "mesh.tp", "mesh.tp = 2, or start 3 ranks"),
    ({"mesh": {"pp": 4}}, "mesh.pp", "mesh.pp = 2, or start 4 ranks"),
    ({"mesh": {"tp": 3, "pp": 3}}, "mesh.tp", "write mesh.tp = 1 and mesh.pp = 1, or start 9 ranks"),
    (
        {"mesh": {"tp": 3, "pp": 3, "dp": 2}},
        "mesh.tp",
        "write mesh.tp = 1 and mesh.pp = 1, or start 18 ranks",
    ),
    ({"mesh": {"tp": 2, "dp": 3}}, "mesh.dp", 'mesh.dp = 1 or mesh.dp = "auto", or start 6 ranks'),
    ({"mesh": {"tp": 2}, "optimizer": {"name": "muon"}}, "optimizer.name", "mesh.tp = 1"),
    (
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-v"}, "compile": True},
        "pipeline.schedule",
        "compile = false",
    ),
    ({"mesh": {"pp": 2}, "pipeline": {"blocks": [3]}}, "pipeline.blocks", "give 2 numbers"),
    (
        {"mesh": {"pp": 2}, "pipeline": {"blocks": [3, 2], "schedule": "zb-v"}},
        "pipeline.blocks",
        "give 4 numbers",
    ),
    (
        {"mesh": {"pp": 2}, "pipeline": {"virtual": 4}},
        "pipeline.virtual",
        'pipeline.schedule = "interleaved"',
    ),
    ({"mesh": {"pp": 2}, "batch": {"size": 6, "micro": 4}}, "batch.micro", "2 or 3"),
    ({"mesh": {"cp": 2}, "compile": True}, "compile", "compile = false, or mesh.cp = 1"),
    ({"mesh": {"cp": 2}, "batch": {"mean": "ranks"}}, "batch.mean", 'batch.mean = "labels"'),
    (
        {"mesh": {"cp": 2}, "context": {"method": "ulysses", "balance": "zigzag"}},
        "context.balance",
        'context.method = "ring"',
    ),
    (
        {"mesh": {"cp": 2}, "context": {"method": {"ulysses": 2, "ring": 2}}},
        "context.method",
        "write mesh.cp = 4, or numbers whose product is 2",
    ),
    ({"context": {"method": {"ulysses": 2}}}, "context.method", "mesh.cp = 2"),
    ({"mesh": {"ep": 2}}, "mesh.ep", "mesh.ep = 1"),
    ({"mesh": {"sequence_parallel": True}}, "mesh.sequence_parallel", "= false"),
    (
        {"mesh": {"tp": 2, "sequence_parallel": True}, "data": {"path": "text", "sequence": 127}},
        "data.sequence",
        "data.sequence = 126 or 128, or mesh.sequence_parallel = false",
    ),
    ({"model": {"path": "a", "config": {"model_type": "llama"}}}, "model.path", "remove model.path"),
    ({"model": {"config": {"hidden_size": 3}}}, "model.config", "model_type"),
    ({"zero": {"bucket_size": "1 KiB"}}, "zero.min_bucket", '"1 KiB" or less'),
    ({"memory": {"states": "hots"}}, "memory.states", "a folder such as"),
    ({"memory": {"states": ["host", "./a"]}}, "memory.states", "a list of folders"),
    ({"memory": {"states": []}}, "memory.states", "a list of folders"),
    ({"memory": {"states": {"host": 0.5, "device": 0.2}}}, "memory.states", "{host = 0.7, device = 0.3}"),
    ({"memory": {"params": "host"}}, "memory.params", "zero.stage = 3"),
    (
        {"memory": {"params": {"host": 0.5, "device": 0.5}}, "zero": {"stage": 3}},
        "memory.params",
        "a folder or several",
    ),
    ({"optimizer": {"name": "muon", "states": "8bit"}}, "optimizer.states", '"fp32"'),
    ({"optimizer": {"name": "sgd", "states": "bf16"}}, "optimizer.states", '"fp32"'),
    ({"optimizer": {"states": "bf16"}, "precision": {"compute": "fp64"}}, "optimizer.states", '"fp32"'),
    ({"memory": {"params": {"host": 0.7, "device": 0.3}}}, "memory.params", '"device"'),
    ({"memory": {"gradients": "./here"}}, "memory.gradients", 'memory.states = "host"'),
    ({"memory": {"gradients": "device", "states": "host"}}, "memory.gradients", "remove it"),
    ({"memory": {"gradients": "here", "states": "host"}}, "memory.gradients", "a folder such as"),
    (
        {
            "memory": {"gradients": "./here", "states": "host"},
            "zero": {"reduce_every": "step"},
            "batch": {"size": 8, "micro": 2},
        },
        "zero.reduce_every",
        'zero.reduce_every = "microbatch"',
    ),
    (
        {"memory": {"activations": "recompte"}},
        "memory.activations",
        'memory.activations = "recompute", or a folder with a slash',
    ),
    (
        {"memory": {"activations": "nvme"}},
        "memory.activations",
        '"keep" or "recompute" or "host", or a folder',
    ),
    ({"memory": {"recompute_every": 2}}, "memory.recompute_every", '"recompute"'),
    ({"memory": {"recompute_save": ["mm"]}}, "memory.recompute_save", '"recompute"'),
    ({"precision": {"compute": "fp64", "reduce": "fp32"}}, "precision.reduce", '"fp64"'),
    ({"precision": {"compute": "fp32", "reduce": "bf16"}}, "precision.reduce", '"fp32"'),
    ({"precision": {"compute": "bf16", "reduce": "fp16"}}, "precision.reduce", '"bf16"'),
    ({"precision": {"compute": "fp16", "loss_scale": "none"}}, "precision.loss_scale", '"dynamic"'),
    ({"precision": {"initial_scale": 0.5}}, "precision.initial_scale", "1.0 or more"),
    ({"batch": {"size": 7}}, "batch.size", "6 or 8"),
    ({"batch": {"size": 1}}, "batch.size", "= 2"),
    ({"batch": {"size": 12, "micro": 4}}, "batch.micro", "1 or 2 or 3 or 6, or batch.size = 8 or 16"),
    ({"optimizer": {"name": "adamm"}}, "optimizer.name", '"adam"'),
    ({"optimizer": {"name": "RMSProb"}}, "optimizer.name", '"RMSprop"'),
    ({"optimizer": {"name": "Optimizer"}}, "optimizer.name", "ours are"),
    ({"optimizer": {"name": "LBFGS"}}, "optimizer.name", '"adamw"'),
    ({"optimizer": {"name": "SparseAdam"}}, "optimizer.name", '"adamw"'),
    ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "remove"),
    ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "optimizer.betas", "remove"),
    ({"optimizer": {"name": "sgd", "nesterov": True}}, "optimizer.nesterov", "momentum = 0.9"),
    ({"optimizer": {"name": "NAdam", "momentum": 0.9}}, "optimizer.momentum", "remove"),
    ({"optimizer": {"options": {"lr": 1.0}}}, "optimizer.options", "optimizer.lr = 1.0"),
    ({"optimizer": {"options": {"amsgrd": True}}}, "optimizer.options", "amsgrad = true"),
    ({"optimizer": {"name": "lion", "options": {"x": 1}}}, "optimizer.options", "remove x"),
    ({"lr_schedule": {"decay": 10}}, "lr_schedule.decay", '"wsd"'),
    ({"lr_schedule": {"name": "cosine", "warmup": 1000}}, "lr_schedule.warmup", '"100 steps"'),
    ({"lr_schedule": {"name": "linear", "warmup": "8000 samples"}}, "lr_schedule.warmup", '"100 steps"'),
    (
        {"lr_schedule": {"name": "cosine", "warmup": "4096000 tokens"}, "data": {"path": "corpus"}},
        "lr_schedule.warmup",
        '"100 steps"',
    ),
    ({"lr_schedule": {"name": "one-cycle", "warmup": 10, "total": 10}}, "lr_schedule.warmup", '"1 step"'),
    (
        {"lr_schedule": {"name": "cosine", "warmup": 10}, "train": {"length": 2}},
        "lr_schedule.warmup",
        '"0 steps", or a longer train.length',
    ),
    (
        {"lr_schedule": {"name": "cosine", "warmup": "9 tokens", "total": "9 tokens"}},
        "lr_schedule.warmup",
        "tokens",
    ),
    ({"lr_schedule": {"name": "wsd", "warmup": 500, "decay": 501}}, "lr_schedule.decay", '"250 steps"'),
    ({"checkpoint": {"keep": "none", "keep_every": 5}}, "checkpoint.keep_every", "checkpoint.keep = 3"),
]


@pytest.mark.parametrize(("source", "key", "fix"), CONFLICTS)
def test_a_conflict_is_found_alone_and_says_what_to_write(source: dict[str, Any], key: str, fix: str) -> None:
    problems = conflicts(source)
    assert list(problems) == [key]
    assert fix in problems[key].fix


NO_CONFLICTS: list[dict[str, Any]] = [
    {"mesh": {"dp": 2}},
    {"checkpoint": {"keep": 1, "keep_every": "1e6 tokens", "resume": "other/step-3"}},
    {"memory": {"activations": "recompute", "recompute_every": 2, "recompute_save": "mm"}},
    {"memory": {"activations": "host", "recompute_every": 2}},
    {"memory": {"activations": "./here", "recompute_save": "mm"}},
    {
        "memory": {"states": {"./here": 0.5, "device": 0.5}, "gradients": ["./here", "./there"]},
        "zero": {"stage": 0},
    },
    {"memory": {"states": "host", "gradients": "./here"}, "zero": {"reduce_every": "step"}},
    {"precision": {"compute": "fp16", "reduce": "fp16"}},
    {"precision": {"compute": "bf16", "reduce": "fp64"}},
    {"precision": {"compute": "fp16", "loss_scale": 1}},
    {"zero": {"stage": 1, "release": "always", "min_bucket": 0}},
    {"optimizer": {"name": "AdamW", "options": {"amsgrad": True}}},
    {"optimizer": {"name": "NAdam", "options": {"momentum_decay": 0.1}}},
    {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
    {"optimizer": {"name": "muon", "matrix_lr": 0.1, "options": {"ns_steps": 3}}},
    {"optimizer": {"no_decay": ["*.bias", "embed*"]}},
    {"lr_schedule": {"name": "wsd", "warmup": 500, "decay": 500}},
    {"lr_schedule": {"name": "constant", "warmup": 5000}},
    {"lr_schedule": {"name": "cosine", "warmup": "7999 samples"}},
    {"lr_schedule": {"name": "cosine", "warmup": "4096000 tokens"}},  # samples of the user's own: any length
    {"lr_schedule": {"name": "cosine", "warmup": "4095999 tokens"}, "data": {"path": "corpus"}},
]


@pytest.mark.parametrize("source", NO_CONFLICTS)
def test_what_is_no_conflict(source: dict[str, Any]) -> None:
    assert conflicts(source) == {}


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_ranks_are_divided_among_the_axes(world: int, tp: int, pp: int, samples: int) -> None:
    config = Config.load({"mesh": {"tp": tp, "pp": pp}, "batch": {"size": 64 * samples}})
    if world % (tp * pp):
        keys = {problem.key for problem in config.problems(world)}
        assert keys == {"mesh.tp" if tp > 1 else "mesh.pp"}
    elif not (problems := config.problems(world)):
        resolved = config.resolve(world)
        assert resolved.mesh.dp == world // (tp * pp)
        assert resolved.accumulation * resolved.batch.micro * resolved.mesh.dp == resolved.batch.size
        assert pp == 1 or resolved.accumulation >= 4 * pp or resolved.batch.micro == 1
    else:
        assert {problem.key for problem in problems} == {"batch.size"}


@pytest.mark.parametrize(
    ("states", "params", "reduce_every", "expected"),
    [
        ("device", "device", "auto", "device"),
        ("device", "host", "auto", "device"),
        ("host", "device", "auto", "host"),
        ("./a", "host", "auto", "host"),
        ("host", "./a", "auto", "host"),
        ("./a", "./b", "auto", ["./a"]),
        (["./a", "./b"], "./c", "auto", ["./a", "./b"]),
        ({"./a": 0.5, "device": 0.5}, "./b", "auto", ["./a"]),
        ("./a", "./b", "step", "host"),
    ],
)
def test_where_gradients_are(states: Any, params: str, reduce_every: str, expected: Any) -> None:
    """Left to us, in files where all else is."""
    zero = {"stage": 3, "reduce_every": reduce_every}
    source = {"memory": {"states": states, "params": params}, "zero": zero, "batch": {"size": 8, "micro": 2}}
    assert Config.load(source).resolve(2).memory.gradients == expected


def test_gradients_in_files_are_reduced_each_time() -> None:
    source = {
        "memory": {"states": "host", "gradients": "./a"},
        "zero": {"stage": 1},
        "batch": {"size": 8, "micro": 2},
    }
    assert Config.load(source).resolve(2).zero.reduce_every == "microbatch"


def test_every_conflict_is_listed_at_once() -> None:
    source: dict[str, Any] = {
        "mesh": {"ep": 2, "dp": 3, "sequence_parallel": True},
        "memory": {"states": "hots", "activations": "hots"},
        "precision": {"compute": "fp16", "loss_scale": "none", "reduce": "bf16"},
        "batch": {"size": 7, "micro": 2},
        "optimizer": {"name": "adamm"},
        "lr_schedule": {"name": "cosine", "warmup": "2000 steps"},
    }
    assert set(conflicts(source)) == {
        *(
            "mesh.ep",
            "mesh.dp",
            "mesh.sequence_parallel",
            "memory.states",
            "memory.activations",
            "precision.reduce",
        ),
        *("precision.loss_scale", "batch.micro", "optimizer.name", "lr_schedule.warmup"),
    }


@pytest.mark.parametrize("world_size", [0, -1, 1.0, "2", True])
def test_a_world_size_that_is_none(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world size"):
        Config().resolve(world_size)


@examples(300)
@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 32) | st.just("auto"))
def test_a_batch_is_divided_exactly_or_the_error_names_batches_that_are(
    world: int, size: int, micro: Any
) -> None:
    config = Config.load({"batch": {"size": size, "micro": micro}})
    try:
        resolved = config.resolve(world)
    except ConfigError as error:
        (problem,) = error.problems
        options = [("size", int(n)) for n in re.findall(r"\d+", problem.fix.split("batch.size = ")[1])]
        if problem.key == "batch.micro":
            micros = problem.fix.split("batch.micro = ")[1].split(",")[0]
            options += [("micro", int(n)) for n in re.findall(r"\d+", micros)]
        assert options
        for key, value in options:
            fixed = Config.load(config, [f"batch.{key}={value}"]).resolve(world)
            assert fixed.accumulation * fixed.batch.micro * world == fixed.batch.size
        unit = world * (1 if micro == "auto" else micro)
        sizes = {value for key, value in options if key == "size"}
        assert sizes == {n for n in range(1, size + unit + 1) if n % unit == 0 and abs(n - size) < unit}
    else:
        assert resolved.accumulation * resolved.batch.micro * world == size
        assert resolved.mesh.dp == world


# ---- what is derived
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ({}, "mesh.dp", 4),
        ({}, "batch.micro", 2),
        ({"zero": {"stage": 0}}, "zero.reduce_every", "step"),
        ({"zero": {"stage": 1}}, "zero.reduce_every", "step"),
        ({"zero": {"stage": 2}}, "zero.reduce_every", "microbatch"),
        ({"zero": {"stage": 3}}, "zero.reduce_every", "microbatch"),
        ({"zero": {"stage": "auto"}}, "zero.stage", 2),
        ({"precision": {"compute": "fp32"}}, "precision.reduce", "fp32"),
        ({"precision": {"compute": "fp64"}}, "precision.reduce", "fp64"),
        ({"precision": {"compute": "bf16"}}, "precision.reduce", "fp32"),
        ({"precision": {"compute": "fp16"}}, "precision.reduce", "fp32"),
        ({"train": {"length": "9 tokens"}}, "lr_schedule.total", Duration(amount=9, unit="tokens")),
        ({"lr_schedule": {"name": "wsd", "total": 50}}, "lr_schedule.decay", Duration(amount=5)),
        ({"lr_schedule": {"name": "one-cycle", "total": 50}}, "lr_schedule.warmup", Duration(amount=15)),
    ],
)
def test_derived_values(source: dict[str, Any], key: str, value: Any) -> None:
    config = Config.load(source)
    resolved = config.resolve(4)
    assert resolved.value(key) == value
    assert resolved.origins[key] == "derived"
    assert config.origins[key] in ("default", "user")  # resolve changes a copy


def test_origins_survive_resolving_copying_and_pickling() -> None:
    config = Config.load({"batch": {"size": 12, "micro": "auto"}, "mesh": {"dp": 2}, "seed": 0})
    resolved = config.resolve(2)
    expected = {
        "batch.size": "user",
        "batch.micro": "derived",
        "mesh.dp": "user",
        "mesh.tp": "default",
        "seed": "user",
    }
    expected |= {"zero.stage": "default", "zero.reduce_every": "derived"}
    for same in (resolved, resolved.resolve(2), pickle.loads(pickle.dumps(resolved)), resolved.model_copy()):
        assert same == resolved
        assert {key: same.origins[key] for key in expected} == expected
        assert set(same.origins) == set(LEAVES)
    assert config.origins["batch.micro"] == "user"


def test_a_resolved_config_resolves_for_another_world_size_and_keeps_later_changes() -> None:
    resolved = Config.load({"batch": {"size": 12}}).resolve(2)
    assert (resolved.resolve(3).mesh.dp, resolved.resolve(3).batch.micro) == (3, 4)
    changed = resolved.model_copy(update={"batch": resolved.batch.model_copy(update={"micro": 1})})
    assert changed.resolve(2).accumulation == 6
    assert changed.origins["batch.micro"] == "user"


def test_a_written_config_loads_as_the_same() -> None:
    resolved = Config.load({"lr_schedule": {"name": "wsd"}, "zero": {"bucket_size": "3 MiB"}}).resolve(2)
    written = json.loads(json.dumps(resolved.model_dump(mode="json")))
    assert Config.load(written).resolve(2).model_dump() == resolved.model_dump()


def test_accumulation_needs_a_world_size() -> None:
    with pytest.raises(ConfigError, match="resolve"):
        _ = Config().accumulation
    assert Config.load({"batch": {"size": 24, "micro": 2}}).resolve(4).accumulation == 3


# ---- spans
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amount", "unit", "written"),
    [
        (100, 100, "steps", "100 steps"),
        ("100", 100, "steps", "100 steps"),
        ("1 step", 1, "steps", "1 step"),
        ("1_000 samples", 1000, "samples", "1000 samples"),
        ("1e6 tokens", 1e6, "tokens", "1000000 tokens"),
        ("  2.5   tokens ", 2.5, "tokens", "2.5 tokens"),
    ],
)
def test_spans(text: Any, amount: float, unit: str, written: str) -> None:
    span = Duration.model_validate(text)
    assert (span.amount, span.unit, str(span)) == (amount, unit, written)
    assert Duration.model_validate(str(span)) == span


def test_a_span_counts_in_its_unit() -> None:
    progress = Progress(steps=3, samples=30, tokens=300)
    for unit, count in zip(("steps", "samples", "tokens"), progress, strict=True):
        assert Duration.model_validate(f"{count} {unit}").reached(progress)
        assert not Duration.model_validate(f"{count + 1} {unit}").reached(progress)


@given(st.integers(1, 20), st.lists(st.integers(0, 50), min_size=1, max_size=10))
def test_a_span_is_due_whenever_a_multiple_was_passed(every: int, moves: list[int]) -> None:
    span, samples = Duration(amount=every, unit="samples"), 0
    for move in moves:
        passed = any(n % every == 0 for n in range(samples + 1, samples + move + 1))
        assert span.due(Progress(samples=samples), Progress(samples=samples + move)) == passed
        samples += move


def test_spans_in_steps() -> None:
    config = Config.load({"batch": {"size": 10}, "data": {"sequence": 8}})
    lengths = {"7 steps": 7, "70 samples": 7, "71 samples": 8, "560 tokens": 7, "561 tokens": 8}
    assert {text: config.steps(Duration.model_validate(text)) for text in lengths} == lengths


# ---- rendering
# ------------------------------------------------------------------------------------------------------


def rendered(config: Config, *options: bool, width: int = 80) -> list[str]:
    """What `polyreme inspect` shows on a terminal."""
    out = io.StringIO()
    Console(file=out, width=width).print(render(config, 2, *options))
    return out.getvalue().splitlines()


def test_render_shows_what_differs_from_the_defaults_or_every_key() -> None:
    config = Config.load({"monitor": {"project": "[bold]x"}, "batch": {"size": 12, "micro": 2}})
    every, some = rendered(config, True), rendered(config)
    for key, origin in config.resolve(2).origins.items():
        assert any(line.split()[:1] == [key] and line.split()[-1] == origin for line in every), key
        assert any(line.split()[:1] == [key] for line in some) == (origin != "default"), key
    assert "--all" in some[-1] and "--all" not in every[-1]
    for lines in (every, some):
        assert any("monitor.project" in line and '"[bold]x"' in line for line in lines)
        assert any("(accumulation)" in line and " 3 " in line for line in lines)
        assert max(map(len, lines)) <= 80
    assert "Samples of one optimizer step" in " ".join(
        rendered(config, False, True)
    ) and "Samples of" not in " ".join(every)
    with pytest.raises(ConfigError):
        render(config, 5)


def test_as_json_loads_as_the_resolved_config() -> None:
    config = Config.load({"batch": {"size": 12, "micro": 2}})
    told = json.loads(config_as_json(config, 2))
    assert Config.load(told["config"]).model_dump() == config.resolve(2).model_dump()
    assert (told["world_size"], told["accumulation"]) == (2, 3)
    assert told["origins"] == config.resolve(2).origins


def test_the_page_is_in_step_with_the_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == with_reference(page), "run: python -m polyreme.cli.inspect docs/config.md"


def test_the_page_is_an_example_that_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    assert Config.load(tmp_path / "run.toml").resolve(4).batch.size == 64


def test_neither_a_config_nor_a_launcher_of_other_hosts_imports_torch() -> None:
    launchers = ("batch_job", "kubernetes", "mpirun", "on_host", "ray_cluster", "several")
    imports = "; ".join(f"import polyreme.launch.{each}" for each in launchers)
    code = (
        f"import sys; from polyreme.config import Config; {imports}; "
        "Config().resolve(2); sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({}, "1f1b-w"),
        ({"compile": True}, "1f1b"),
        ({"context": {"loss_chunk": 64}}, "1f1b"),
        ({"context": {"mlp_tile": 64}}, "1f1b"),
    ],
)
def test_the_schedule_of_auto_is_one_that_can_be_written(given: dict[str, Any], schedule: str) -> None:
    config = Config.load({"mesh": {"pp": 2}, **given}).resolve(2)
    assert config.pipeline.schedule == config.schedule == schedule
    assert not Config.load(config, [f"pipeline.schedule={schedule}"]).problems(2)
