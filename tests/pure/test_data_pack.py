"""Packing: the tokens are exactly those of the documents, the cache is built once, and short texts are
refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.data import PackedDataset, Subset, open_text, pack, pack_texts, pieces, train_tokenizer
from polyreme.data.cache import cached
from polyreme.errors import DataError

pytest.importorskip("transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "naïve café ☕\n" * 30, "short", "x " * 200]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@dataclasses.dataclass
class Section:
    path: str
    cache: str
    pattern: tuple[str, ...] = ("*.txt",)
    field: str = "text"
    sequence: int = 16
    pack: bool = False
    tokenizer: str | None = None
    vocab_size: int = 270
    validation: float | str = 0.3


@pytest.fixture
def section(tmp_path: Path) -> Section:
    (tmp_path / "corpus").mkdir()
    for i in range(10):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"document {i} has words. " * (20 + i))
    return Section(str(tmp_path / "corpus"), str(tmp_path / "cache"))


def test_tokens_are_those_of_the_documents(tokenizer, tmp_path: Path) -> None:
    folder = pack_texts(Subset(TEXTS, "d"), tokenizer, tmp_path)
    expected = [token for text in TEXTS for token in (*tokenizer.encode(text), tokenizer.eos_token_id)]
    data = PackedDataset(folder, 16)
    assert data.tokens.tolist() == expected
    assert data.tokens.dtype == np.uint16
    assert len(data) == len(expected) // 16
    for i in (0, 1, len(data) - 1, -1):
        item = data[i]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        assert item["input_ids"].tolist() == expected[i % len(data) * 16 :][:16] == item["labels"].tolist()
    item["labels"][0] = -100  # a caller may mask labels
    assert item["input_ids"][0] != -100
    assert sum(1 for _ in data) == len(data)
    for i in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[i]


def test_bytes(tokenizer, tmp_path: Path) -> None:
    data = PackedDataset(pack_texts(Subset(TEXTS, "d"), tokenizer, tmp_path), 8)
    total = sum(len(text.encode()) for text in TEXTS)
    assert data.bytes_per_token == total / len(data.tokens)
    assert total - 8 * data.bytes_per_token - 1 < data.bytes <= total


@examples(40)
@given(st.lists(st.text(st.sampled_from("ab é☕\n\t<|endoftext|>"), max_size=60), min_size=1, max_size=8))
def test_pieces_and_batches_change_nothing(
    tokenizer, tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    expected: list[int] = []
    for text in texts:
        expected += [*tokenizer(text, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 5)
        patch.setattr(pack, "BATCH", 17)
        data = PackedDataset(pack_texts(Subset(texts, "d"), tokenizer, folder), 1)
    assert data.tokens.tolist() == expected
    # text cannot spell an end of document
    assert data.tokens.tolist().count(tokenizer.eos_token_id) == len(texts)
    assert tokenizer.decode([t for t in expected if t != tokenizer.eos_token_id]) == "".join(texts)


def test_large_vocabulary_takes_four_bytes(tokenizer, tmp_path: Path) -> None:
    large = copy.deepcopy(tokenizer)
    large.add_tokens([f"<extra{i}>" for i in range(1 << 16)])
    data = PackedDataset(pack_texts(Subset(["a <extra65535>"], "d"), large, tmp_path), 1)
    assert data.tokens.dtype == np.uint32
    assert data.tokens[-2] == 300 + 65535


def test_too_short(tokenizer, tmp_path: Path) -> None:
    folder = pack_texts(Subset(["abc"], "d"), tokenizer, tmp_path)
    count = len(tokenizer.encode("abc")) + 1
    with pytest.raises(
        DataError, match=rf"data.sequence = 512: the validation text has {count} tokens \(3 bytes\).*larger"
    ):
        PackedDataset(folder, 512, "validation text")
    assert len(PackedDataset(folder, count)) == 1


def test_damaged_folder(tokenizer, tmp_path: Path) -> None:
    folder = pack_texts(Subset(TEXTS, "d"), tokenizer, tmp_path)
    header = (folder / "header.json").read_text()
    for damage in ("{", "[]", json.dumps({**json.loads(header), "tokens": 10**6}), json.dumps({"tokens": 1})):
        (folder / "header.json").write_text(damage)
        with pytest.raises(DataError, match="delete this folder"):
            PackedDataset(folder, 4)


def test_pickled_dataset_carries_no_tokens(tokenizer, tmp_path: Path) -> None:
    data = PackedDataset(pack_texts(Subset(TEXTS * 50, "d"), tokenizer, tmp_path), 8)
    blob = pickle.dumps(data)
    assert len(blob) < 1000 < data.tokens.nbytes
    assert torch.equal(pickle.loads(blob)[3]["input_ids"], data[3]["input_ids"])


def test_open_text(section: Section) -> None:
    text = open_text(section, seed=0)
    assert len(text.tokenizer) == 270
    assert text.validation is not None
    decoded = [text.tokenizer.decode(data.tokens.tolist()) for data in (text.train, text.validation)]
    assert [d.count("<|endoftext|>") for d in decoded] == [7, 3]
    files = [f.read_text() for f in Path(section.path).iterdir()]
    assert all((f in decoded[0]) != (f in decoded[1]) for f in files)


def test_cache_is_used_and_follows_the_content(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[str] = []
    build_once = cached

    def counted(folder: Path, build) -> Path:
        return build_once(
            folder, lambda unfinished: (builds.append(folder.name.split("-")[0]), build(unfinished))[1]
        )

    monkeypatch.setattr("polyreme.data.pack.cached", counted)
    monkeypatch.setattr("polyreme.data.tokenizer.cached", counted)

    def opened(**changes) -> list[str]:
        builds.clear()
        text = open_text(dataclasses.replace(section, **changes), seed=0)
        assert min(len(text.train), len(text.validation)) > 0
        return sorted(builds)

    assert opened() == ["packed", "packed", "tokenizer"]
    assert opened() == []
    assert opened(sequence=8) == []  # the same tokens, cut otherwise
    assert opened(vocab_size=280) == ["packed", "packed", "tokenizer"]
    (Path(section.path) / "0.txt").write_text("entirely other words here. " * 30)
    assert opened() == ["packed", "packed", "tokenizer"]
    assert opened() == []


def test_validation_of_ones_own_and_none(section: Section, tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held out words. " * 30)
    text = open_text(dataclasses.replace(section, validation=str(tmp_path / "held.txt")), seed=0)
    assert text.validation is not None
    assert text.tokenizer.decode(text.validation.tokens.tolist()) == "held out words. " * 30 + "<|endoftext|>"
    assert text.train.tokens.tolist().count(0) == 10
    text = open_text(dataclasses.replace(section, validation=0.0), seed=0)
    assert text.validation is None
    assert text.train.tokens.tolist().count(0) == 10


def test_short_text_is_reported_where_it_is_used(section: Section) -> None:
    text = open_text(dataclasses.replace(section, sequence=10_000), seed=0)
    with pytest.raises(DataError, match="the training text has"):
        text.train  # noqa: B018
    with pytest.raises(DataError, match="the validation text has"):
        text.validation  # noqa: B018


def test_cache_that_cannot_be_written(section: Section, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the data cache.*data\.cache"):
        open_text(dataclasses.replace(section, cache=str(tmp_path / "file" / "cache")), seed=0)


def test_failed_build_leaves_nothing_finished(tmp_path: Path) -> None:
    def fail(unfinished: Path) -> None:
        (unfinished / "half").write_text("")
        raise DataError("stopped")

    with pytest.raises(DataError, match="stopped"):
        cached(tmp_path / "a", fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a.lock"]
    folder = cached(tmp_path / "a", lambda unfinished: (unfinished / "whole").write_text("") and None)
    assert [file.name for file in folder.iterdir()] == ["whole"]


def test_threads_that_race_build_once(tmp_path: Path) -> None:
    builds, start = [], threading.Barrier(6)

    def build(unfinished: Path) -> None:
        builds.append(unfinished)
        (unfinished / "whole").write_text("")

    def open_it() -> None:
        start.wait()
        assert (cached(tmp_path / "a", build) / "whole").exists()

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def _race(folder: Path, start, builds) -> None:
    def build(unfinished: Path) -> None:
        builds.put(os.getpid())
        (unfinished / "whole").write_text("")

    start.wait()
    os._exit(0 if (cached(folder, build) / "whole").exists() else 1)


def test_processes_that_race_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, builds = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=_race, args=(tmp_path / "a", start, builds)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    builds.get()
    assert builds.empty()


def test_without_a_lock_the_first_to_finish_wins(tmp_path: Path) -> None:
    def build(unfinished: Path) -> None:  # another host finishes in between
        (unfinished / "whole").write_text("mine")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "whole").write_text("theirs")

    assert (cached(tmp_path / "a", build) / "whole").read_text() == "theirs"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "a.lock"]
