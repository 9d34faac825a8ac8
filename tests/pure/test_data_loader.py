"""The loader: global batches do not depend on the number of ranks, and resuming is exact to the sample."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from examples import examples
from polyreme.data import Loader
from polyreme.data.loader import permutation
from polyreme.errors import BatchError, DataError


class Stream(IterableDataset):
    def __init__(self, size: int | None) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size)) if self.size is not None else itertools.count()


class EpochStream(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.size))


def make(dataset, *, batch_size: int, rank: int = 0, world: int = 1, seed: int = 0, **options) -> Loader:
    return Loader(dataset, batch_size=batch_size, rank=rank, world=world, seed=seed, **options)


def global_batches(
    dataset, world: int, count: int, state: dict | None = None, **options
) -> tuple[list, dict]:
    """The next `count` global batches (the ranks' shares one after the other) and the state after them."""
    loaders = [make(dataset, rank=rank, world=world, **options) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    shares = [[batch.tolist() for batch in itertools.islice(loader, count)] for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return [list(chain.from_iterable(step)) for step in zip(*shares, strict=True)], states[0]


WORLDS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@examples(60)
@given(
    data=st.data(),
    world=st.integers(1, 16),
    per_rank=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    stream=st.booleans(),
)
def test_global_batches_are_those_of_one_rank(
    data: st.DataObject, world: int, per_rank: int, seed: int, shuffle: bool, stream: bool
) -> None:
    batch_size = world * per_rank
    size = data.draw(st.integers(batch_size, 4 * batch_size))
    dataset = Stream(size) if stream else list(range(size))
    options = {
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "prefetch": data.draw(st.integers(0, 3)),
    }
    count = 2 * (size // batch_size) + 1
    one, state_of_one = global_batches(dataset, 1, count, **options)
    many, state_of_many = global_batches(dataset, world, count, **options)
    assert many == one
    assert state_of_many == state_of_one
    epoch = list(chain.from_iterable(one[: size // batch_size]))
    assert len(set(epoch)) == len(epoch) == size // batch_size * batch_size  # each sample once


@examples(60)
@given(
    data=st.data(),
    worlds=st.tuples(WORLDS, WORLDS),
    before=st.integers(0, 7),
    after=st.integers(1, 7),
    stream=st.booleans(),
)
def test_resumed_at_another_world_size_is_never_stopped(
    data: st.DataObject, worlds: tuple[int, int], before: int, after: int, stream: bool
) -> None:
    size = data.draw(st.integers(48, 200))
    dataset = Stream(size) if stream else list(range(size))
    options = {
        "batch_size": 48,
        "seed": 5,
        "prefetch": data.draw(st.integers(0, 3)),
        "workers": data.draw(st.integers(0, 3)),
    }
    whole, end = global_batches(dataset, 1, before + after, **options)
    first, state = global_batches(dataset, worlds[0], before, **options)
    second, last = global_batches(dataset, worlds[1], after, state, **options)
    assert first + second == whole
    assert last == end


def test_resumed_with_another_batch_size_goes_on_at_the_same_sample() -> None:
    dataset = list(range(24))
    first, state = global_batches(dataset, 2, 1, batch_size=8)
    second, _ = global_batches(dataset, 4, 4, state, batch_size=4)
    order = permutation(24, 0, 0).tolist()
    assert list(chain.from_iterable(first + second)) == order


def test_the_order_is_pinned() -> None:
    """A checkpoint of today must resume with any later version: changing this breaks runs."""
    assert permutation(10, 0, 0).tolist() == PINNED
    assert permutation(10, 0, 1).tolist() != PINNED
    assert permutation(10, 1, 0).tolist() != PINNED


PINNED = [1, 0, 5, 2, 8, 3, 9, 4, 7, 6]


def test_unshuffled_order_and_epochs() -> None:
    loader = make(list(range(7)), batch_size=2, shuffle=False, epochs=2)
    assert len(loader) == 3
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]] * 2
    assert loader.state_dict() == {"epoch": 2, "sample": 0, "seed": 0, "size": 7}
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]] * 2  # a new loop is two epochs more
    assert loader.epoch == 4


def test_epochs_are_shuffled_anew_and_a_left_loop_goes_on() -> None:
    loader = make(list(range(8)), batch_size=2, epochs=1)
    first = [b.tolist() for b in loader]
    second = [next(iter(loader)).tolist()]
    second += [b.tolist() for b in loader]
    assert loader.epoch == 2
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(8))


@pytest.mark.parametrize("stream", [True, False])
def test_finite_epochs_resume_to_their_end(stream: bool) -> None:
    dataset = Stream(6) if stream else list(range(6))
    loader = make(dataset, batch_size=2, epochs=2)
    whole = [b.tolist() for b in loader]
    assert len(whole) == 6
    for stop in range(6):
        part = make(dataset, batch_size=2, epochs=2)
        before = [b.tolist() for b in itertools.islice(part, stop)]
        resumed = make(dataset, batch_size=2, epochs=2)
        resumed.load_state_dict(part.state_dict())
        assert before + [b.tolist() for b in resumed] == whole
        assert resumed.state_dict() == loader.state_dict()


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("stream", [True, False])
def test_state_counts_only_what_was_handed_out(prefetch: int, stream: bool) -> None:
    loader = make(Stream(100) if stream else list(range(100)), batch_size=10, prefetch=prefetch)
    batches = iter(loader)
    assert loader.state_dict()["sample"] == 0
    for taken in range(1, 4):
        next(batches)
        assert loader.state_dict() == {
            "epoch": 0,
            "sample": 10 * taken,
            "seed": 0,
            "size": None if stream else 100,
        }
    batches.close()


@pytest.mark.parametrize("stream", [True, False])
def test_last_batch_is_kept_if_asked(stream: bool) -> None:
    dataset = Stream(11) if stream else list(range(11))
    shares = [
        [
            b.tolist()
            for b in make(dataset, batch_size=4, rank=r, world=2, shuffle=False, drop_last=False, epochs=1)
        ]
        for r in range(2)
    ]
    assert shares == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9, 10]]]
    if not stream:
        assert len(make(dataset, batch_size=4, drop_last=False)) == 3


def test_last_batch_smaller_than_the_ranks() -> None:
    for dataset in (list(range(9)), Stream(9)):  # nothing is left for the first rank
        last = [
            [*make(dataset, batch_size=4, rank=r, world=2, shuffle=False, drop_last=False, epochs=1)][-1]
            for r in range(2)
        ]
        assert [batch.tolist() for batch in last] == [[], [8]] and last[0].dtype == last[1].dtype


def test_stream_is_told_its_epoch() -> None:
    assert [b.tolist() for b in make(EpochStream(4), batch_size=2, epochs=2)] == [
        [0, 1],
        [2, 3],
        [100, 101],
        [102, 103],
    ]


def test_infinite_stream_resumes() -> None:
    loader = make(Stream(None), batch_size=4, rank=1, world=2)
    assert [b.tolist() for b in itertools.islice(loader, 2)] == [[2, 3], [6, 7]]
    resumed = make(Stream(None), batch_size=4, rank=0, world=4)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).tolist() == [8]
    with pytest.raises(TypeError, match="not known"):
        len(loader)


# -- what samples may be --


def test_collates_tensors_tuples_and_dicts() -> None:
    x, y = next(
        iter(make(TensorDataset(torch.arange(12.0).view(4, 3), torch.arange(4)), batch_size=4, shuffle=False))
    )
    assert x.shape == (4, 3)
    assert y.tolist() == [0, 1, 2, 3]
    point = namedtuple("Point", "a b")
    batch = next(iter(make([point(np.ones(2, np.float32), [1, 2])] * 2, batch_size=2)))
    assert type(batch) is point
    assert batch.a.shape == (2, 2)
    assert batch.b.tolist() == [[1, 2], [1, 2]]
    batch = next(iter(make([{"ids": [1, 2, 3], "name": "n", "score": 0.5}] * 2, batch_size=2)))
    assert batch["ids"].tolist() == [[1, 2, 3]] * 2
    assert batch["ids"].dtype == torch.int64
    assert batch["name"] == ["n", "n"]
    assert batch["score"].tolist() == [0.5, 0.5]
    assert next(iter(make([[1, 2], [3, 4]], batch_size=2, shuffle=False))).tolist() == [[1, 2], [3, 4]]
    pair = next(iter(make([[torch.tensor(1.0), 5]] * 3, batch_size=3)))
    # a list of other things, as torch does it
    assert [part.tolist() for part in pair] == [[1.0] * 3, [5] * 3]


def test_hugging_face_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [[i, i + 1] for i in range(8)], "label": list(range(8))})
    for source in (table, table.with_format("torch"), table.to_iterable_dataset()):
        batch = next(iter(make(source, batch_size=4, rank=1, world=2, shuffle=False)))
        assert batch["input_ids"].tolist() == [[2, 3], [3, 4]]
        assert batch["label"].tolist() == [2, 3]


def test_own_collate() -> None:
    batch = next(iter(make(list("abcd"), batch_size=4, rank=1, world=2, shuffle=False, collate="".join)))
    assert batch == "cd"


@pytest.mark.parametrize(
    "samples",
    [
        [[1, 2], [1, 2, 3]],
        [{"a": 1}, {"b": 1}],
        [torch.ones(2), torch.ones(3)],
        [object(), object()],
        [[[1], [1, 2]]] * 2,
    ],
)
def test_samples_that_do_not_stack(samples: list) -> None:
    with pytest.raises(BatchError, match="collate="):
        next(iter(make(samples, batch_size=2)))


def test_pin_without_a_gpu_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert next(iter(make(list(range(4)), batch_size=2, pin=True))).is_pinned() is False
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = next(iter(make([{"a": 1, "b": (1.0, "name")}] * 2, batch_size=2, pin=True, epochs=1, prefetch=0)))
    assert set(batch) == {"a", "b"}
    assert [t.tolist() for t in pinned] == [[1, 1], [1.0, 1.0]]


# -- the background --


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            raise OSError(f"disk gone at {index}")
        return index


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_errors_surface_where_they_happened(workers: int) -> None:
    loader = make(Broken(), batch_size=2, shuffle=False, prefetch=4, workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="disk gone at 4"):
        next(batches)
    assert loader.state_dict()["sample"] == 4
    with pytest.raises(OSError, match="disk gone at 4"):  # and again, not a silent end
        next(iter(loader))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("polyreme-loader")]


@pytest.mark.parametrize("how", ["exhausted", "closed", "collected", "raised"])
@pytest.mark.parametrize("stream", [True, False])
def test_no_thread_outlives_its_loop(how: str, stream: bool) -> None:
    before = set(loader_threads())
    loader = make(Stream(8) if stream else list(range(8)), batch_size=2, epochs=1)
    batches = iter(loader)
    next(batches)
    threads = [thread for thread in loader_threads() if thread not in before]
    assert threads
    if how == "exhausted":
        assert len(list(batches)) == 3
    elif how == "closed":
        batches.close()
    elif how == "raised":
        with pytest.raises(ValueError, match="stop"):
            batches.throw(ValueError("stop"))
    collected = weakref.ref(loader)
    del batches, loader
    gc.collect()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert collected() is None


def test_prefetch_is_bounded_and_ahead() -> None:
    class Counted(Dataset):
        def __init__(self) -> None:
            self.built = threading.Semaphore(0)
            self.count = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            self.count += 1
            self.built.release()
            return index

    dataset = Counted()
    batches = iter(make(dataset, batch_size=1, prefetch=3))
    next(batches)
    for _ in range(4):
        assert dataset.built.acquire(timeout=20)  # three more were built though only one was asked for
    next(batches)
    assert dataset.built.acquire(timeout=20)
    assert dataset.count == 5
    batches.close()


# -- what is refused --


@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        (8, {"batch_size": 10}, DataError, "has 8 samples, fewer than one global batch of 10"),
        (0, {"batch_size": 1, "drop_last": False}, DataError, "has 0 samples"),
        (8, {"batch_size": 5, "world": 4}, BatchError, "5 cannot be shared equally by 4 ranks: use 4 or 8"),
        (8, {"batch_size": 3, "world": 4}, BatchError, "use 4$"),
        (8, {"batch_size": 0}, BatchError, "use 1"),
        (8, {"batch_size": 4, "rank": 2, "world": 2}, BatchError, "rank 2 of 2"),
        (8, {"batch_size": 4, "world": 0}, BatchError, "of 0 ranks"),
        (8, {"batch_size": 4, "prefetch": -1}, BatchError, "prefetch = -1"),
        (8, {"batch_size": 4, "workers": -1}, BatchError, "workers = -1"),
        (8, {"batch_size": 4, "epochs": 0}, BatchError, "epochs = 0"),
    ],
)
def test_bad_arguments(size: int, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(list(range(size)), **options)


def test_not_a_dataset() -> None:
    with pytest.raises(DataError, match="not a dataset: int"):
        make(3, batch_size=1)


def test_stream_shorter_than_a_batch_ends_in_an_error_not_in_a_loop() -> None:
    with pytest.raises(DataError, match="ended after 3 samples, before one global batch of 4"):
        next(iter(make(Stream(3), batch_size=4)))
    with pytest.raises(DataError, match="ended after 0 samples"):
        next(iter(make(Stream(0), batch_size=4, drop_last=False)))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0, "sample": 0, "seed": 1, "size": 8}, "its seed was 1 and is now 0"),
        ({"epoch": 0, "sample": 0, "seed": 0, "size": 9}, "its size was 9 and is now 8"),
        ({"epoch": 0}, "not the state of a loader"),
        ({"epoch": "0", "sample": 0, "seed": 0, "size": 8}, "not the state of a loader"),
    ],
)
def test_states_that_do_not_fit(state: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(list(range(8)), batch_size=2).load_state_dict(state)
