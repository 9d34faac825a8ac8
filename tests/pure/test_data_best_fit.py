"""Whole documents in sequences: each token once, none cut that fits, and first fit takes no fewer."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from polyreme.data import DocumentDataset, Loader, Subset, pack_texts, train_tokenizer
from polyreme.data.best_fit import best_fit, first_fit, pack
from polyreme.errors import DataError

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "naïve café ☕\n" * 5, "short", "x " * 30] * 3
LENGTHS = st.integers(1, 24).flatmap(
    lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), min_size=1, max_size=40))
)


def by_definition(lengths: list[int], room: int, best: bool) -> list[int]:
    """What is left of each sequence by best fit, or by first fit."""
    left: list[int] = []
    for length in lengths:
        fitting = [i for i, has in enumerate(left) if has >= length]
        if not fitting:
            fitting = [len(left)]
            left.append(room)
        left[min(fitting, key=lambda i: left[i]) if best else fitting[0]] -= length
    return sorted(left)


@examples(500)
@given(LENGTHS)
def test_each_item_is_in_one_sequence_and_first_fit_takes_no_fewer(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    packed = pack(lengths, room)
    assert sorted(item for each in packed for item in each) == [*range(len(lengths))]
    assert max(sum(lengths[item] for item in each) for each in packed) <= room
    for order in (lengths, sorted(lengths, reverse=True)):
        assert len(packed) <= len(by_definition(order, room, best=False))
    assert packed == sorted(packed)
    assert all(each == sorted(each) for each in packed)


@examples(200)
@given(LENGTHS)
def test_best_and_first_fit_are_what_their_names_say(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    for best, packed in enumerate((first_fit, best_fit)):
        left = [room - sum(lengths[i] for i in each) for each in packed(lengths, range(len(lengths)), room)]
        assert sorted(left) == by_definition(lengths, room, bool(best))


def test_first_fit_is_taken_where_it_needs_fewer() -> None:
    lengths = [4, 3, 3, 4, 3, 3]
    assert len(best_fit(lengths, [0, 3, 1, 2, 4, 5], 10)) == 3
    assert pack(lengths, 10) == [[0, 1, 2], [3, 4, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return pack_texts(Subset(TEXTS, "d"), train_tokenizer(TEXTS, 300), tmp_path_factory.mktemp("cache"))


def of(folder: Path) -> list[list[int]]:
    """The tokens of each document."""
    tokens = DocumentDataset(folder, 1).tokens
    ends = np.fromfile(folder / "ends.bin", dtype="<i8")
    return [each.tolist() for each in np.split(tokens, ends)[:-1]]


def pieces(sample: dict[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each document of a sample, by its positions, without padding."""
    begins = [*(sample["position_ids"] == 0).nonzero().flatten().tolist(), len(sample["input_ids"])]
    found = []
    for begin, end in itertools.pairwise(begins):
        ids, labels = sample["input_ids"][begin:end].tolist(), sample["labels"][begin:end].tolist()
        assert sample["position_ids"][begin:end].tolist() == [*range(end - begin)]
        assert labels[0] == -100
        if len(labels) > 1 and labels[1] == -100:  # padding
            assert {*labels} == {-100}
            assert end == len(sample["input_ids"])
        else:
            assert labels[1:] == ids[1:]
            found.append(ids)
    return found


@pytest.mark.parametrize("sequence", [16, 48, 500])
def test_samples_have_each_token_once_and_whole_documents(folder: Path, sequence: int) -> None:
    data, whole = DocumentDataset(folder, sequence), of(folder)
    expected = [
        document[begin : begin + sequence]
        for document in whole
        for begin in range(0, len(document), sequence)
    ]
    assert {len(document) > sequence for document in whole} == ({True, False} if sequence < 300 else {False})
    samples = [data[i] for i in range(len(data))]
    assert all(value.shape == (sequence,) for sample in samples for value in sample.values())
    # a piece of one token at the end cannot be told from padding of one
    found = sorted(piece for sample in samples for piece in pieces(sample))
    assert [each for each in found if len(each) > 1] == sorted(each for each in expected if len(each) > 1)
    assert data.bytes == sum(len(text.encode()) for text in TEXTS)
    assert torch.equal(data[-1]["labels"], samples[-1]["labels"])
    for i in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[i]


def test_what_is_packed_is_kept_and_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DocumentDataset(folder, 40)
    monkeypatch.setattr("polyreme.data.best_fit.pack", lambda *_: pytest.fail("packed again"))
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000
    assert all(torch.equal(value, again[3][name]) for name, value in data[3].items())


def test_ranks_and_a_resumed_run_get_the_same_samples(folder: Path) -> None:
    data = DocumentDataset(folder, 64)

    def batches(world: int, count: int, skip: int = 0) -> list[torch.Tensor]:
        loaders = [Loader(data, batch_size=4, rank=r, world=world, seed=3) for r in range(world)]
        if skip:
            first = iter(loaders[0])
            for _ in range(skip):
                next(first)
            state = loaders[0].state_dict()
            first.close()
            for loader in loaders:
                loader.load_state_dict(state)
        steps = zip(*(iter(loader) for loader in loaders), strict=False)
        return [torch.cat([batch["input_ids"] for batch in next(steps)]) for _ in range(count)]

    one = batches(1, 5)
    assert all(map(torch.equal, one, batches(2, 5)))
    assert all(map(torch.equal, one[2:], batches(4, 3, skip=2)))


def test_damage_is_named(folder: Path) -> None:
    DocumentDataset(folder, 33)
    fitted = max(folder.parent.glob("fitted-*"), key=lambda each: each.stat().st_mtime_ns)
    (fitted / "first.npy").write_bytes(b"no numbers")
    with pytest.raises(DataError, match=rf"{fitted.name}.*delete this folder"):
        DocumentDataset(folder, 33)
    header = json.loads((folder / "header.json").read_text())
    with pytest.raises(DataError, match=r"data.sequence = \d+: the text has"):
        DocumentDataset(folder, header["tokens"] + 1)
