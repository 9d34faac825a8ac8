"""Checkpoints of one process: names and files as transformers has them, and what is left when it ends in the
middle."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import cuttable
import models
import polyreme
from polyreme.checkpoint import manifest, run_directory
from polyreme.checkpoint.collective_errors import collectively
from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.writer import Writer
from polyreme.distributed.mesh import Axis
from polyreme.distributed.watch import BACKGROUND
from polyreme.distributed.world import current
from polyreme.engine import Engine
from polyreme.errors import CheckpointError
from polyreme.step.precision import DTYPES

V = models.VOCABULARY


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=V, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=V,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
        )
    )


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=V,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


ALIKE = ("gpt2-dropout", "mistral", "gemma3", "bert-classes", "roberta")
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda name=name: cuttable.family(name).float()
        for name in cuttable.FAMILIES
        if name not in ALIKE
    },
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
}


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def engine_of(model: nn.Module, **sections: Any) -> Engine:
    settings = {
        "batch": {"size": 2},
        "precision": {"compute": "fp32"},
        "optimizer": {"name": "adamw", "lr": 1e-2},
        **sections,
    }
    return polyreme.initialize(model, settings, loss_fn=lambda output, batch: output.sum())


def names_in(folder: Path) -> dict[str, list[int]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(tmp_path: Path, name: str) -> None:
    model = built(name, 1)
    model.save_pretrained(tmp_path / "theirs")
    expected = weights(model)
    ours = engine_of(model).save(tmp_path / "ours")
    # transformers divides the experts of each layer when it saves, and joins them when it loads
    if name != "mixtral":
        assert names_in(ours) == names_in(tmp_path / "theirs")
    opened = type(model).from_pretrained(ours)
    torch.testing.assert_close(weights(opened), expected, rtol=0, atol=0)
    other = engine_of(built(name, 2))
    other.load(tmp_path / "theirs" if name != "mixtral" else ours)
    torch.testing.assert_close(other.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_config_of_the_users_model_stays_as_it_is(tmp_path: Path, compute: str) -> None:
    """What is saved tells the dtype that the weights have in the file."""
    model = models.llama().to(torch.bfloat16)
    before = dict(vars(model.config))
    config = {"precision": {"compute": compute}, "batch": {"size": 1}}
    with polyreme.initialize(model, config) as engine:
        assert vars(model.config) == before
        engine.save(tmp_path / "saved")
        assert vars(model.config) == before
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        written = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert written == {saved.dtype} == {saved.config.dtype} == {DTYPES[compute]}
    assert saved.config.architectures == ["LlamaForCausalLM"]


def test_a_model_without_a_head(tmp_path: Path) -> None:
    model = built("gpt2", 1)
    model.half().transformer.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    engine = engine_of(built("gpt2", 2))
    assert not engine.load(tmp_path).state
    torch.testing.assert_close(engine.state_dict(), weights(model.float()), rtol=0, atol=0)

    llama = built("llama", 1)
    llama.model.save_pretrained(tmp_path / "llama")
    engine = engine_of(built("llama", 2))
    before = engine.state_dict()
    with pytest.raises(CheckpointError, match=r"1 not in the checkpoint: lm_head\.weight"):
        engine.load(tmp_path / "llama")
    assert engine.load(tmp_path / "llama", strict=False).notes == ["1 not in the checkpoint: lm_head.weight"]
    torch.testing.assert_close(
        engine.state_dict(), {**weights(llama), "lm_head.weight": before["lm_head.weight"]}, rtol=0, atol=0
    )


class Ended(BaseException):
    """The process, as it were."""


@contextmanager
def ending(after: int) -> Iterator[list[str]]:
    """What changes files works `after` times, and then no more. Yields what was done."""
    done: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= after:
                raise Ended
            done.append(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, names in (
            (os, ("pwrite", "pwritev", "posix_fallocate", "fsync", "rename", "unlink", "rmdir", "mkdir")),
            (Path, ("write_bytes",)),
        ):
            for name in names:
                stack.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        stack.enter_context(
            patch("polyreme.checkpoint.save.exchange", counted("exchange", run_directory.exchange))
        )
        yield done


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.safetensors")}


@pytest.mark.parametrize("replaces", [True, False])
def test_whenever_it_ends(tmp_path: Path, replaces: bool) -> None:
    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    path = tmp_path / "step-1"
    old = contents(engine.save(path))
    engine.train_step(torch.randn(2, 3))
    new = contents(engine.save(tmp_path / "new"))
    seen = set()
    for after in range(1000):
        if not replaces:
            shutil.rmtree(path, ignore_errors=True)
        try:
            with ending(after) as done:
                engine.save(path)
        except Ended:
            if path.exists() or replaces:
                assert Directory(path).resume is not None
                found = contents(path)
                assert found in (old, new)
                seen.add(found == new)
            else:
                seen.add(None)
        else:
            break
    assert contents(path) == new and [each.name for each in sorted(tmp_path.iterdir())] == ["new", "step-1"]
    assert seen == ({False, True} if replaces else {None, True}) and len(done) > 10


@pytest.mark.parametrize("wait", [True, False])
def test_another_file_cannot_be_written(tmp_path: Path, wait: bool) -> None:
    """Those beside the tensors are written while these are: nothing of either is left, and what was there
    before stays."""
    engine = engine_of(models.llama())
    engine.save(tmp_path / "step")
    before = contents(tmp_path / "step")

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    with pytest.raises(CheckpointError, match=r"rank 0: .*Permission denied"):
        engine.save(tmp_path / "step", Tokenizer(), wait=wait)
        engine.wait()
    assert contents(tmp_path / "step") == before
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_world_that_is_closed_leaves_no_save_behind(tmp_path: Path) -> None:
    """Which would go on writing what the next world saves under the same name."""
    engines, written = [engine_of(models.llama()) for _ in range(2)], Writer._put_segment

    def held_up(*args: Any) -> None:
        time.sleep(0.5)
        written(*args)

    with patch.object(Writer, "_put_segment", held_up):
        path = engines[0].save(tmp_path / "checkpoint", wait=False)
        current().close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith(BACKGROUND)]
    assert contents(path) == contents(engines[0].save(tmp_path / "again"))
    engines[1].save(path)


def test_nothing_is_left_where_not_a_byte_is_free(tmp_path: Path) -> None:
    engine = engine_of(nn.Linear(3, 5))
    with (
        patch(
            "polyreme.files.folder_lock.os.pwrite",
            side_effect=OSError(errno.ENOSPC, "No space left on device"),
        ),
        pytest.raises(CheckpointError, match=r"step-1 was not written, rank 0: .*No space left on device"),
    ):
        engine.save(tmp_path / "step-1")
    assert not any(tmp_path.iterdir())
    engine.save(tmp_path / "step-1")


def test_a_state_without_what_is_needed_is_named(tmp_path: Path) -> None:
    engine = engine_of(nn.Linear(3, 5))
    folder = engine.save(tmp_path / "step-1")
    found = manifest.read(folder)
    assert found is not None
    before = engine.state_dict()
    for state in ({}, {key: value for key, value in found.state.items() if key != "hint"}):
        manifest.write(folder, replace(found, state=state))
        with pytest.raises(CheckpointError, match=r"resume\.json is damaged: its 'state' has no .*'hint'"):
            engine.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
    assert engine.load(folder, weights_only=True).path == folder


def test_a_failure_that_cannot_be_explained_is_told_to_all_ranks() -> None:
    def fail(*_: object) -> str:
        raise ValueError("no reason")

    with pytest.raises(CheckpointError, match="ValueError: no reason"):
        collectively(Axis("dp"), fail, fail)
