"""`polyreme train` from its config to a checkpoint that Hugging Face opens, and datasets of other kinds in a
loop of one's own."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

import polyreme as library
from command import TINY, polyreme, write_text
from examples import whole
from polyreme.config import Config
from polyreme.data import open_text
from polyreme.job import run as train_module
from pool import Ranks

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SMALL = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_attention_heads": 2,
    "data.path": "text.txt",
    "data.sequence": 32,
    "data.vocab_size": 300,
    "lr_schedule.warmup": 4,
    "optimizer.lr": 1e-2,
    "train.length": 30,
    "train.validate_every": 10,
    "train.validate_batches": 2,
    "train.sample_tokens": 5,
    "checkpoint.folder": "run",
    "checkpoint.every": 8,
    "checkpoint.keep": 2,
}


def sets(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def train(folder: Path, *words: str) -> dict[str, Any]:
    """The summary that a run prints as JSON, which must be all that it prints."""
    status, output, errors = polyreme(folder, "train", *words, "--json")
    assert (status, output.count("\n")) == (0, 1), errors
    assert "Writing model shards" not in errors and "Traceback" not in errors
    summary = json.loads(output)
    assert isinstance(summary, dict)
    return summary


def log(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def validation_loss(
    folder: Path, config: Config, checkpoint: str, dtype: torch.dtype, path: str = "text.txt"
) -> float:
    """The loss of a checkpoint as transformers opens it, on the batches that the run validates with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / checkpoint, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / checkpoint)
    section = config.data.model_copy(
        update={"path": str(folder / path), "cache": str(folder / ".polyreme-cache")}
    )
    text = open_text(section, config.seed)
    assert text.validation is not None and tokenizer.get_vocab() == text.tokenizer.get_vocab()
    batches = min(config.train.validate_batches, len(text.validation) // config.batch.size)
    samples = [text.validation[i] for i in range(batches * config.batch.size)]
    with torch.no_grad():
        out = model(**{k: torch.stack([each[k] for each in samples]) for k in samples[0]}, use_cache=False)
    assert torch.isfinite(out.logits).all()
    return float(out.loss)


def test_a_text_of_fewer_tokens_says_how_many() -> None:
    config = Config.load(DEMO, ["data.vocab_size=100000"])
    [said] = train_module._fewer_tokens(config, 9338)
    assert said.startswith("the tokenizer has 9,338 tokens, and not data.vocab_size = 100,000: ")


def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    write_text(tmp_path)
    status, output, errors = polyreme(tmp_path, "train", str(DEMO), *sets(SMALL))
    assert status == 0 and "Writing model shards" not in errors and "Traceback" not in errors
    assert "2 ranks, ZeRO stage 2, fp32, 30 steps" in output
    assert "not data.vocab_size" not in output and "before training: " in output
    assert (
        output.count("trained 30 steps") == 1
        and 'AutoModelForCausalLM.from_pretrained("run/step-30")' in output
    )
    assert output.rstrip().endswith('AutoTokenizer.from_pretrained("run/step-30")'), (
        "nothing repeats the summary"
    )
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        "latest-checkpoint",
        "log.jsonl",
        "loss.png",
        "step-24",
        "step-30",
    ]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = log(run)
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["samples"] == 240 and steps[-1]["tokens"] == 240 * 32
    for step in steps:
        assert step["loss"] > 0 and step["grad_norm"] > 0 and step["tokens_per_second"] > 0
    assert 0 < steps[-1]["lr"] < max(step["lr"] for step in steps) <= 1e-2
    assert steps[-1]["memory_bytes"]["parameters"] > 0 and steps[-1]["traffic"]["dp"]["reduce_scatter"][1] > 0
    losses = [step["validation_loss"] for step in steps if step["validation_loss"] is not None]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    config = Config.load(DEMO, [f"{key}={value}" for key, value in SMALL.items()])
    assert validation_loss(tmp_path, config, "run/step-30", torch.float32) == pytest.approx(
        losses[-1], rel=1e-5
    )


@whole
def test_a_run_on_whole_documents(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i}.txt").write_text("one two three four five. " * (1 + i % 9))
    (tmp_path / "tiny.toml").write_text(TINY)
    keys = {"data.path": "texts", "data.pack": "true", "data.validation": 0.2, "train.length": "4 steps"}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    summary = train(tmp_path, "tiny.toml", "-n", "1", *words)
    config = Config.load(tmp_path / "tiny.toml", [f"{key}={value}" for key, value in keys.items()])
    found = validation_loss(tmp_path, config, summary["checkpoint"], torch.float32, "texts")
    assert summary["validation_loss"] == pytest.approx(found, rel=1e-5)


def test_a_run_over_context_parallel_ranks_says_how_sequences_were_divided(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    changes = {"mesh.cp": 2, "train.length": 2, "train.validate_every": "none", "train.sample": "The"}
    train(tmp_path, "tiny.toml", "-n", "2", *sets(changes))
    for step in log(tmp_path / "run"):
        assert (step["context"]["method"], step["context"]["balance"]) == ("ring", "zigzag")
        assert step["context"]["load"] == pytest.approx(1, abs=0.05)
    messages = [each["text"] for each in log(tmp_path / "run", "message")]
    assert any(text.startswith("no sample before training") for text in messages)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in fp32 on one rank at stage 2."""
    folder = tmp_path_factory.mktemp("fp32")
    write_text(folder)
    (folder / "tiny.toml").write_text(TINY)
    summary = train(folder, "tiny.toml", "-n", "1")
    assert (summary["steps"], summary["checkpoint"]) == (20, "run/step-20")
    return folder


def test_the_checkpoint_has_the_loss_that_the_run_had(fp32: Path) -> None:
    loss = log(fp32 / "run")[-1]["validation_loss"]
    assert validation_loss(
        fp32, Config.load(fp32 / "tiny.toml"), "run/step-20", torch.float32
    ) == pytest.approx(loss, rel=1e-5)


def job(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> None:
    """What `polyreme train` runs on a rank."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patches:
        patches.setattr(train_module, "close", lambda: None)  # the ranks are used again
        train_module.run(Config.load("tiny.toml", [f"{key}={value}" for key, value in changes.items()]))


@pytest.mark.parametrize(("world", "stage"), [(2, 2), (2, 3)])
def test_stages_and_numbers_of_ranks_learn_alike(fp32: Path, ranks: Ranks, world: int, stage: int) -> None:
    name = f"run-{world}-{stage}"
    ranks(world, job, fp32, {"zero.stage": stage, "checkpoint.folder": name})
    for step, same in zip(log(fp32 / "run"), log(fp32 / name), strict=True):
        assert same["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert same["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
        assert same["validation_loss"] == (
            pytest.approx(step["validation_loss"], rel=1e-5) if step["validation_loss"] else None
        )


def test_a_checkpoint_is_a_start(fp32: Path, ranks: Ranks) -> None:
    start = {"model.config": "none", "model.path": "run/step-20", "checkpoint.folder": "tuned"}
    ranks(2, job, fp32, {**start, "train.length": 2, "optimizer.lr": 1e-4})
    first = log(fp32 / "tuned")[0]
    # Validated before the first step, so on the weights of the checkpoint.
    assert first["validation_loss"] == pytest.approx(log(fp32 / "run")[-1]["validation_loss"], rel=1e-5)
    assert log(fp32 / "tuned", "run")[0]["model"] == "run/step-20"


class Squares(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.full((3,), i / 16)
        return {"x": x, "y": x * x}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def learned(rank: int, world: int) -> dict[str, list[float]]:
    """Losses on datasets with the same samples, by the kind of dataset."""
    plain = Squares()
    table = datasets.Dataset.from_dict({k: [plain[i][k].tolist() for i in range(16)] for k in ("x", "y")})
    losses = {}
    for name, dataset in {
        "torch": plain,
        "datasets": table,
        "with_format": table.with_format("torch"),
    }.items():
        torch.manual_seed(0)
        config = {"batch": {"size": 8}, "optimizer": {"lr": 1e-2}}
        engine = library.initialize(
            Model(), config, loss_fn=lambda output, batch: (output - batch["y"]).square().mean()
        )
        losses[name] = [engine.train_step(batch).loss for batch in engine.loader(dataset, epochs=3)]
    return losses


def test_datasets_of_other_kinds(ranks: Ranks) -> None:
    first, second = ranks(2, learned)
    assert first == second and len(first["torch"]) == 6
    assert first["torch"][-1] < first["torch"][0]
    assert first["datasets"] == first["with_format"] == pytest.approx(first["torch"], rel=1e-6)
