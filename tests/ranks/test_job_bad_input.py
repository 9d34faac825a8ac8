"""Whatever is wrong with a config, a text, a model or a batch: one message that says what to change, early,
on every rank alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import polyreme as library
from command import RANK_VARIABLES, TINY, polyreme, write_text
from polyreme.cli import main
from polyreme.config import Config
from polyreme.data import train_tokenizer
from polyreme.errors import BatchError, ConfigError, DataError, ModelError, PolyremeError
from polyreme.job import run
from polyreme.launch import torchrun
from pool import Ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config that would train, and some things that are not what they should be."""
    write_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY + "[launch]\nranks = 2\n")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "one-line.txt").write_text("There is but one line here, and it is a short one.")
    (tmp_path / "nothing").mkdir()
    return tmp_path


# Words of the command, its exit status, and what the message says: found before any rank starts.
BEFORE_RANKS: dict[str, tuple[list[str], int, list[str]]] = {
    "no config": (["none.toml"], 2, ["'none.toml'", "there is no such file"]),
    "unknown key, wrong type, unknown optimizer": (
        ["tiny.toml", "--set", "optimizer.lr=fast", "--set", "batch.sise=3", "--set", "zero.stage=4"],
        2,
        [
            "3 problems",
            "optimizer.lr = 'fast': must be a number above 0",
            'did you mean "batch.size"?',
            "zero.stage = 4",
        ],
    ),
    "unknown optimizer": (
        ["tiny.toml", "--set", "optimizer.name=adamv"],
        2,
        ["neither one of ours", 'write optimizer.name = "adam'],
    ),
    "ranks that do not divide": (
        ["tiny.toml", "-n", "3"],
        2,
        ["batch.size = 4", "write batch.size = 3 or 6"],
    ),
    "no model directory, no tokenizer directory, no folder": (
        [
            "tiny.toml",
            "--set",
            "model.path=nothing",
            "--set",
            "model.config=none",
            "--set",
            "data.tokenizer=text.txt",
            "--set",
            "checkpoint.folder=text.txt/run",
        ],
        2,
        [
            "3 problems",
            "model.path = 'nothing'",
            "no config.json in it",
            "data.tokenizer",
            "checkpoint.folder",
            "cannot be written",
        ],
    ),
    "heads that cannot be divided, on three ranks": (
        ["tiny.toml", "-n", "3", "--set", "mesh.tp=3"],
        1,
        [
            "cannot be divided over mesh.tp = 3 ranks",
            "its 2 attention heads cannot be divided over 3 ranks",
            "fix: mesh.tp = 1 or 2",
        ],
    ),
    "no text": (
        ["tiny.toml", "--set", "data.path=missing.txt"],
        1,
        ["data.path = 'missing.txt': there is no such file", "python-stdlib"],
    ),
    "no validation text": (
        ["tiny.toml", "--set", "data.validation=missing/"],
        1,
        ["'missing/'", "there is no such file"],
    ),
}


@pytest.mark.parametrize("case", BEFORE_RANKS)
def test_found_before_any_rank_starts(folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    words, expected, said = BEFORE_RANKS[case]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torchrun, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    result = CliRunner().invoke(main.app, ["train", *words], env=dict.fromkeys(RANK_VARIABLES))
    refused(result.exit_code, result.stdout, result.stderr, expected)
    for words_of_it in said:
        assert words_of_it in result.stderr


def test_the_command_itself_refuses_alike(folder: Path) -> None:
    words, expected, said = BEFORE_RANKS["no text"]
    status, output, errors = polyreme(folder, "train", *words)
    refused(status, output, errors, expected)
    assert said[0] in errors


def refused(status: int, output: str, errors: str, expected: int) -> None:
    assert (status, output) == (expected, ""), errors
    errors = after_what_is_done(errors)
    assert errors.startswith("error: ") and errors.count("error: ") == 1
    assert "Traceback" not in errors and " rank " not in errors


def after_what_is_done(errors: str) -> str:
    """The rest of what a command says, whose first line is what it does, unless the config says no."""
    first, _, rest = errors.partition("\n")
    return rest if first.startswith("training as tiny.toml says, on ") else errors


def test_what_all_ranks_find_is_said_once(folder: Path) -> None:
    status, output, errors = polyreme(folder, "train", "tiny.toml", "--set", "model.config.vocab_size=200")
    assert (status, output) == (2, "")
    errors = after_what_is_done(errors)
    assert errors.count("error: ") == errors.count("the tokenizer has 300 tokens") == 1
    assert "Traceback" not in errors and "rank" not in errors, "a config is the same on every rank"


# Changes to the config, the error, and what it says: found by the ranks, each before the model is built.
IN_RANKS: dict[str, tuple[list[str], type[PolyremeError], list[str]]] = {
    "empty corpus": (["data.path=blank.txt"], DataError, ["no text in it"]),
    "sequence longer than the text": (
        ["data.sequence=50000", "model.config.max_position_embeddings=60000"],
        DataError,
        ["= 50000: the training text", "less than one"],
    ),
    "text shorter than a batch": (
        ["batch.size=4000"],
        DataError,
        ["the training text has", "fewer than batch.size = 4000"],
    ),
    "validation shorter than a sequence": (
        ["data.validation=one-line.txt", "data.sequence=64"],
        DataError,
        ["the validation text has", "less than one sequence"],
    ),
    "validation shorter than the ranks": (
        ["data.validation=one-line.txt"],
        DataError,
        ["the validation text has 1 sequences", "fewer than 2 data-parallel ranks"],
    ),
    "unknown architecture": (
        ["model.config.model_type=lama"],
        ConfigError,
        ["'lama'", 'write model_type = "llama"'],
    ),
    "value of a wrong type": (
        ["model.config.hidden_size=wide"],
        ConfigError,
        ["cannot build it", "hidden_size", "expected int"],
    ),
    "values that do not fit": (
        ["model.config.num_attention_heads=3"],
        ConfigError,
        ["not a multiple of the number of attention"],
    ),
    "no heads": (["model.config.num_attention_heads=0"], ConfigError, ["ZeroDivisionError"]),
    "a vocabulary that no model has": (
        ["model.config.vocab_size=1000000000000"],
        ConfigError,
        ["no model can be so large", "write a vocab_size of at most"],
    ),
    "padding that is no token": (
        ["model.config.pad_token_id=99999"],
        ConfigError,
        ["model.config.pad_token_id = 99999: the model has ", "write one below "],
    ),
    "unknown activation": (["model.config.hidden_act=swich"], ConfigError, ["KeyError: 'swich'"]),
    "shared heads that do not divide": (
        ["model.config.num_attention_heads=4", "model.config.num_key_value_heads=3"],
        ConfigError,
        ["num_key_value_heads", "1 or 2 or 4"],
    ),
    "misspelt key": (
        ["model.config.hidden_sice=64"],
        ConfigError,
        ['did you mean "model.config.hidden_size"?'],
    ),
    "no language model": (["model.config.model_type=vit"], ConfigError, ["cannot build it", "ViTConfig"]),
    "tokens out of range": (
        ["model.config.vocab_size=299"],
        ConfigError,
        ["the tokenizer has 300 tokens", "write 300 or more"],
    ),
    "sequence longer than the positions": (
        ["data.sequence=65"],
        ConfigError,
        ["at most 64 tokens", "write data.sequence = 64 or less", "max_position_embeddings = 65"],
    ),
    "no tokenizer in the directory": (["data.tokenizer=nothing"], DataError, ["no tokenizer can be loaded"]),
    "a model without its weights": (
        ["model.config=none", "model.path=weightless"],
        ConfigError,
        ["its weights cannot be loaded"],
    ),
    "another model's tokenizer": (
        ["model.config=none", "model.path=weightless", "data.tokenizer=larger"],
        ConfigError,
        ["model.path.vocab_size = 257", "set data.tokenizer"],
    ),
    "cache that cannot be written": (
        ["data.cache=text.txt/cache"],
        DataError,
        ["cannot write the data cache", "Set data.cache"],
    ),
}


def refusals(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    """By case, the error's class and message, or what happened instead."""
    found = {}
    for case, (changes, _, _) in IN_RANKS.items():
        paths = [f"checkpoint.folder={folder}/run", f"data.cache={folder}/cache"]
        changes = [*paths, *(c.replace("=text.txt/", f"={folder}/text.txt/") for c in changes)]
        config = Config.load(f"{folder}/tiny.toml", changes)
        tree = config.model_dump(exclude_unset=True)
        for section, key in (
            ("data", "path"),
            ("data", "validation"),
            ("data", "tokenizer"),
            ("model", "path"),
        ):
            if isinstance(tree[section].get(key), str):
                tree[section][key] = str(Path(folder, tree[section][key]))
        try:
            run.run(Config.load(tree))
            found[case] = ("none", "it trained")
        except PolyremeError as error:
            found[case] = (type(error).__name__, str(error))
        except Exception as error:
            found[case] = (type(error).__name__, f"not one of ours: {error}")
    return found


SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 257,
}


def test_found_by_every_rank_alike(ranks: Ranks, folder: Path) -> None:
    transformers.LlamaConfig(**SMALL).save_pretrained(folder / "weightless")
    train_tokenizer(["a text"], 257).save_pretrained(folder / "weightless")
    train_tokenizer(["the cat and the hat, and the bat"], 262).save_pretrained(folder / "larger")
    first, second = ranks(2, refusals, str(folder))
    for case, (_, expected, said) in IN_RANKS.items():
        assert first[case] == second[case], case
        kind, message = first[case]
        assert kind == expected.__name__, (case, message)
        for words in said:
            assert words in message, (case, message)


def resized(rank: int, world_size: int, folder: str) -> None:
    """Do what the message for a larger tokenizer offers, and train."""
    changes = [f"data.{key}={folder}/{name}" for key, name in PLACES.items()]
    changes += [f"checkpoint.folder={folder}/run", "model.config=none", "train.length=1", "launch.ranks=none"]
    with pytest.raises(ConfigError, match=r"= 257: the tokenizer has 262 tokens") as caught:
        run.run(Config.load(f"{folder}/tiny.toml", [*changes, f"model.path={folder}/small"]))
    offered = re.search(r"once: (.*), and set model.path to that", str(caught.value))
    assert offered is not None, caught.value
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "DIRECTORY": f"{folder}/resized"}
    exec(offered[1], names)
    run.run(Config.load(f"{folder}/tiny.toml", [*changes, f"model.path={folder}/resized"]))


PLACES = {"path": "text.txt", "tokenizer": "larger", "cache": "cache"}


def test_the_resize_that_the_message_offers_trains(ranks: Ranks, folder: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(folder / "small")
    train_tokenizer(["the cat and the hat, and the bat"], 262).save_pretrained(folder / "larger")
    ranks(1, resized, str(folder))
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "run/latest-checkpoint")
    assert trained.get_input_embeddings().weight.shape == (262, 32)


class Bare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def each(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean(dim=1)


def train_once(model: Any, config: dict[str, Any], loss_fn: Any, samples: int) -> None:
    engine = library.initialize(model, {"batch": {"size": 4}, **config}, loss_fn=loss_fn)
    engine.train_step((torch.randn(samples, 3), torch.randn(samples, 3)))


def tokenless() -> dict[str, Any]:
    return {"train": {"length": "1000 tokens"}, "lr_schedule": {"name": "cosine"}}


TRAINING: dict[str, tuple[Callable[[], None], type[PolyremeError], str]] = {
    "no model": (
        lambda: train_once(None, {}, mean, 2),
        ModelError,
        "the model is a NoneType: give initialize() a torch.nn.Module",
    ),
    "a model without parameters": (lambda: train_once(Bare(), {}, mean, 2), ModelError, "no parameters"),
    "a batch of the wrong size": (
        lambda: train_once(nn.Linear(3, 3), {}, mean, 3),
        BatchError,
        "has 3 samples, but batch.size = 4",
    ),
    "a loss for each sample": (
        lambda: train_once(nn.Linear(3, 3), {}, each, 2),
        BatchError,
        "but is a tensor of shape (2,)",
    ),
    "a loss that is a number": (
        lambda: train_once(nn.Linear(3, 3), {}, lambda o, t: 0.5, 2),
        BatchError,
        "but is float",
    ),
    "a length in tokens of batches without": (
        lambda: train_once(nn.Linear(3, 3), tokenless(), mean, 2),
        BatchError,
        "carry no tokens",
    ),
}


def failures(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {}
    for case, (attempt, _, _) in TRAINING.items():
        try:
            attempt()
            found[case] = ("none", "it trained")
        except Exception as error:
            found[case] = (type(error).__name__, str(error))
    return found


def test_models_batches_and_losses_of_two_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, failures)
    assert first == second
    for case, (_, expected, said) in TRAINING.items():
        assert first[case][0] == expected.__name__ and said in first[case][1], (case, first[case])


def test_a_wrong_batch_on_one_rank_is_that_ranks_error(folder: Path) -> None:
    (folder / "script.py").write_text("""
import os, torch, polyreme
rank = int(os.environ["RANK"])
def loss_fn(output, target):
    return (output - target).square().mean()
engine = polyreme.initialize(torch.nn.Linear(3, 3), {"batch": {"size": 4}}, loss_fn=loss_fn)
engine.train_step((torch.randn(2 + rank, 3), torch.randn(2 + rank, 3)))
""")
    status, output, errors = polyreme(folder, "launch", "-n", "2", "script.py")
    assert (status, output) == (1, "")
    assert errors.startswith(
        "error: rank 1 of 2 failed first: this rank's share of the batch has 3 samples, but batch.size = 4"
    )
    assert "Traceback" not in errors
