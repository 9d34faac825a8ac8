"""Where a run begins, found before any rank starts: from which checkpoint, what has changed since, and
whether anything is left to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import save as save_tensors

from polyreme.checkpoint import manifest
from polyreme.checkpoint.manifest import File, Resume
from polyreme.checkpoint.run_directory import RunDirectory
from polyreme.config import Config
from polyreme.errors import ConfigError
from polyreme.job.resume import find_beginning
from polyreme.planner.meta_model import meta_model

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config(run: Path, **sections: Any) -> Config:
    """Of 20 steps, on two ranks."""
    given: dict[str, Any] = {
        "model": {"config": MODEL},
        "data": {"path": "text.txt"},
        "train": {"length": 20},
        "checkpoint": {},
    }
    tree = {name: {**given.get(name, {}), **sections.get(name, {})} for name in {**given, **sections}}
    tree["checkpoint"] = {"folder": str(run), **tree["checkpoint"]}
    return Config.load(tree).resolve(2)


def save(path: Path, step: int, written_by: Config, **extra: Any) -> Path:
    """A checkpoint as small as one can be; what is tied is in it once."""
    path.mkdir(parents=True)
    tensors = {
        name: torch.zeros(tensor.shape)
        for name, tensor in meta_model(written_by.model).state_dict().items()
        if name != "lm_head.weight"
    }
    weights = save_tensors(tensors)
    (path / "model.safetensors").write_bytes(weights)
    manifest.write(path, Resume(files={"model.safetensors": File(len(weights), crc32(weights))}, extra=extra,
                              state={"step": step, "samples": 8 * step, "tokens": 1000 * step},
                              config=written_by.model_dump(mode="json")))  # fmt: skip
    return path


def refused(asked: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        find_beginning(asked)
    return str(caught.value)


def test_a_run_without_checkpoints_begins_anew(run: Path) -> None:
    assert find_beginning(config(run)).checkpoints == []
    run.mkdir()
    (run / "step-3.tmp").mkdir()
    assert find_beginning(config(run)).checkpoints == []


def test_the_newest_that_can_be_opened_is_gone_on_from(run: Path) -> None:
    mine = config(run)
    paths = [save(run / f"step-{step}", step, mine, loss=0.5) for step in (5, 9, 12, 15)]
    assert find_beginning(mine).checkpoints == [str(path) for path in reversed(paths)]
    (paths[3] / "model.safetensors").write_bytes(b"")
    (paths[2] / "resume.json").write_text("{}")
    found = find_beginning(mine)
    assert found.checkpoints == [str(paths[1]), str(paths[0])] and list(found.damaged) == [
        str(paths[3]),
        str(paths[2]),
    ]
    assert (found.steps, found.tokens, found.extra, found.changes, found.finished) == (
        9,
        9000,
        {"loss": 0.5},
        [],
        False,
    )
    assert "model.safetensors" in found.damaged[str(paths[3])]
    shutil.rmtree(paths[0]), (paths[1] / "model.safetensors").unlink()
    said = refused(mine)
    assert all(f"step-{step}" in said for step in (9, 12, 15)) and "--no-resume" in said
    assert find_beginning(config(run, checkpoint={"resume": "never"})).checkpoints == []


def test_weights_alone_are_no_run(run: Path) -> None:
    (save(run / "step-5", 5, config(run)) / "resume.json").unlink()
    assert "no resume.json" in refused(config(run))
    assert "set model.path" in refused(config(run / "other", checkpoint={"resume": str(run / "step-5")}))
    assert "no resume.json" not in refused(config(run / "other", checkpoint={"resume": str(run / "step-6")}))


def test_a_checkpoint_that_is_named_goes_before_the_runs_own_until_those_have_begun_from_it(
    run: Path,
) -> None:
    mine = config(run)
    other, older, newer = (
        save(run.parent / name, 7, mine) for name in ("other/step-7", "run/step-3", "run/step-9")
    )
    for named, expected in (
        (other, [other]),
        (other.parent, [other]),
        (older, [older]),
        (run, [newer, older]),
    ):
        asked = config(run, checkpoint={"resume": str(named)})
        assert find_beginning(asked).checkpoints == [str(path) for path in expected]
    asked = config(run, checkpoint={"resume": str(other)})
    own = save(run / "step-11", 11, asked, origin=str(other.resolve()))
    assert find_beginning(asked).checkpoints == [str(own), str(newer), str(older)]
    shutil.rmtree(other.parent)
    assert find_beginning(asked).checkpoints[0] == str(own)


def test_a_run_that_was_to_replace_them_and_saved_nothing_lets_the_old_ones_count(run: Path) -> None:
    mine = config(run)
    save(run / "step-5", 5, mine), save(run / "step-10", 10, mine)
    RunDirectory(run).set_aside()
    assert find_beginning(mine).checkpoints == [str(run / "step-10.earlier"), str(run / "step-5.earlier")]


def test_a_run_that_has_ended(run: Path) -> None:
    save(run / "step-20", 20, config(run))
    assert (
        find_beginning(config(run)).finished
        and find_beginning(config(run, train={"length": "20000 tokens"})).finished
    )
    assert not find_beginning(config(run, train={"length": 21})).finished


def test_what_has_changed_is_listed(run: Path) -> None:
    save(run / "step-5", 5, config(run))
    monitor = {"checkpoint": {"every": 3}, "monitor": {"wandb": True}, "data": {"cache": "elsewhere"}}
    assert find_beginning(config(run, **monitor)).changes == []
    found = find_beginning(
        config(run, batch={"size": 16}, optimizer={"lr": 1e-5}, lr_schedule={"name": "cosine"})
    )
    assert found.changes == [
        "batch.micro = 8, and was 4",
        "optimizer.lr = 1e-05, and was 0.0003",
        'lr_schedule.name = "cosine", and was "constant": the '
        "learning rate follows the new schedule from here on",
    ]
    assert found.same_data
    found = find_beginning(config(run, data={"path": "other.txt"}))
    assert (
        found.changes == ['data.path = "other.txt", and was "text.txt": the training data begins anew']
        and not found.same_data
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, "9 not in the checkpoint: model.layers.2."),
        ({"num_hidden_layers": 1}, "9 in the checkpoint, not in the model: model.layers.1."),
        ({"intermediate_size": 32}, "mlp.gate_proj.weight 16x16, in the model 32x16"),
        ({"tie_word_embeddings": False}, "1 not in the checkpoint: lm_head.weight"),
        ({"model_type": "gpt2"}, "not in the model: "),
    ],
)
def test_another_model_is_refused(run: Path, changes: dict[str, Any], said: str) -> None:
    save(run / "step-5", 5, config(run))
    problem = refused(config(run, model={"config": {**MODEL, **changes}}))
    assert f"{run / 'step-5'} is of another model" in problem and said in problem


def test_a_model_of_the_same_shapes_may_be_set_otherwise(run: Path) -> None:
    save(run / "step-5", 5, config(run))
    found = find_beginning(config(run, model={"config": {**MODEL, "attention_dropout": 0.5}}))
    assert found.changes == ['model.config.attention_dropout = 0.5, and was "none"']


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_that_has_the_name_of_a_checkpoint(run: Path, resume: str) -> None:
    mine = config(run, checkpoint={"resume": resume})
    save(run / "step-5", 5, mine)
    (run / "step-3").mkdir()
    assert find_beginning(mine).checkpoints == (
        [str(run / "step-5"), str(run / "step-3")] if resume == "auto" else []
    ), "an empty one is no loss"
    (run / "step-7").mkdir()
    (run / "step-7" / "thesis.txt").write_text("four years")
    said = refused(mine)
    assert "step-7 in it would be replaced" in said and "thesis.txt" in said and "move that away" in said
    (run / "step-7").rename(run / "step-4")
    assert "step-4 in it" in refused(mine) if resume == "never" else find_beginning(mine).steps == 5, (
        "it is in the way of no step to come"
    )
