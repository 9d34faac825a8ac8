"""Documents of a batch, and how their tokens are divided over ranks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from polyreme.errors import BatchError
from polyreme.sequence.documents import find, places
from polyreme.sequence.parts import Balance, Work, cut, padded_length

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
BALANCES: tuple[Balance, ...] = get_args(Balance)


def numbered(lengths: list[int], total: int) -> Tensor:
    """The document of each token of a row, the last one up to `total`."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.cat([ids, torch.full((total - len(ids),), len(lengths))])


def rows_of(rows: list[list[int]], ranks: int) -> Tensor:
    total = padded_length(max(sum(row) for row in rows), ranks)
    return torch.stack([numbered(row, total) for row in rows])


@examples(100, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 8), st.sampled_from(BALANCES), st.booleans())
def test_each_token_lies_on_one_rank_and_parts_join_to_the_whole(
    rows: list[list[int]], ranks: int, balance: Balance, causal: bool
) -> None:
    documents = rows_of(rows, ranks)
    parts = cut(documents, ranks, balance, Work(causal=causal))
    count, length = documents.shape
    assert parts.order.shape == (count, ranks, length // ranks)
    assert torch.equal(parts.order.flatten(1).sort(1).values, torch.arange(length).expand(count, length))
    assert (parts.order.diff(dim=2) > 0).all()
    whole = torch.randn(count, length, 2)
    mine = torch.stack([parts.mine(whole, rank) for rank in range(ranks)], 1)
    assert torch.equal(parts.joined(mine), whole)


@examples(100, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 8), st.sampled_from([None, 1, 5]))
def test_what_is_chosen_is_never_worse_than_contiguous(
    rows: list[list[int]], ranks: int, window: int | None
) -> None:
    documents = rows_of(rows, ranks)
    work = Work(token=3.0, window=window)
    chosen, plain = (cut(documents, ranks, balance, work) for balance in ("auto", "contiguous"))
    assert chosen.load <= plain.load


@examples(100, deadline=None)
@given(LENGTHS, st.booleans(), st.sampled_from([None, 1, 4]))
def test_work_counts_the_keys_that_a_query_sees(lengths: list[int], causal: bool, window: int | None) -> None:
    documents = numbered(lengths, sum(lengths))
    place = torch.arange(len(documents))
    sees = documents[:, None] == documents
    if causal:
        sees &= place[:, None] >= place
        if window is not None:
            sees &= place[:, None] - place < window
    elif window is not None:
        return
    found = Work(pair=2.0, token=3.0, causal=causal, window=window).of(documents[None])
    assert torch.equal(found[0].double(), 2.0 * sees.sum(1) + 3.0)


def test_a_document_in_zigzag_and_packed_ones_by_document_are_balanced() -> None:
    one = torch.zeros(1, 4096, dtype=torch.long)
    assert cut(one, 8, "contiguous", Work()).load == pytest.approx(15 / 8, abs=1e-3)
    assert cut(one, 8, "zigzag", Work()).load == pytest.approx(1, abs=1e-3)


def packed_documents(seed: int, total: int = 32768, median: int = 600) -> Tensor:
    """A row of documents of lognormal lengths, of whose tokens the last one has what is left."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(torch.randn((), generator=generator).exp() * median) + 1)
    lengths[-1] -= sum(lengths) - total
    return numbered(lengths, total)[None]


@examples(30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]), st.sampled_from([0.0, 1000.0]))
def test_the_fullest_of_ranks_that_share_packed_documents_has_little_over_the_mean(
    seed: int, ranks: int, token: float
) -> None:
    assert cut(packed_documents(seed), ranks, "auto", Work(token=token)).load < 1.05


def test_stretches_of_the_whole_sequence_are_uneven_for_packed_documents() -> None:
    loads = [cut(packed_documents(seed), 8, "zigzag", Work()).load for seed in range(20)]
    assert sum(loads) / len(loads) == pytest.approx(1.8, abs=0.2)


def packed_batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": torch.arange(6)[None], **changes}


POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 0]])


@pytest.mark.parametrize(
    "changes",
    [
        {"position_ids": POSITIONS},
        {"cu_seq_lens_q": torch.tensor([0, 2, 5, 6])},
        {"document_ids": torch.tensor([[7, 7, 3, 3, 3, 7]])},
    ],
)
def test_documents_are_found_by_each_of_three_ways(changes: dict[str, Any]) -> None:
    found = find(packed_batch(**changes), 1, 6)
    assert found.of.tolist() == [[0, 0, 1, 1, 1, 2]]
    assert torch.equal(found.positions, POSITIONS)
    assert found.last.tolist() == [[False, True, False, False, True, True]]
    assert found.several


def test_padding_on_either_side_and_none() -> None:
    left = torch.tensor([[0, 0, 1, 1, 1, 1]])
    found = find(packed_batch(attention_mask=left), 1, 6)
    assert found.of.tolist() == [[0] * 6] and torch.equal(found.seen, left.bool())
    assert found.positions.tolist() == [[0, 1, 2, 3, 4, 5]] and not found.several
    counted = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
    found = find(packed_batch(attention_mask=left, position_ids=counted), 1, 6)
    assert torch.equal(found.positions, counted)


@examples(100, deadline=None)
@given(LENGTHS)
def test_places_in_documents(lengths: list[int]) -> None:
    expected = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(places(numbered(lengths, sum(lengths))[None])[0], expected)


def test_documents_of_images_begin_where_all_positions_are_0() -> None:
    """The second begins with an image of 2 x 2 tokens, of which one alone is at 0 in all directions."""
    time, height, width = [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1]
    found = find({"position_ids": torch.tensor([time, height, width])[:, None]}, 1, 6)
    assert found.of.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert not found.plain


def test_positions_that_begin_later_are_counted_on_from_there() -> None:
    batch = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    found, own = find(batch, 1, 6, first=2), find({"position_ids": batch["position_ids"] + 2}, 1, 6, first=2)
    assert found.positions.tolist() == own.positions.tolist() == [[2, 3, 4, 2, 3, 4]]
    assert found.of.tolist() == own.of.tolist() == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7]])}, "jump from 2 to 5 at token 3 of sample 0"),
        ({"position_ids": torch.zeros(3, 2, 6).long()}, r"position_ids of \[3, 2, 6\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, r"must rise from 0 to the 6 tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 6])}, r"must rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 4, 6])}, r"must rise from 0"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"attention_mask of \[1, 1, 6, 6\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 6]), "document_ids": POSITIONS}, "leave one of them out"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(BatchError, match=match):
        find(packed_batch(**changes), 1, 6)
