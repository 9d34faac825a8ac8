"""Attention of blocks by the fused kernel against attention by tiles of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from polyreme.sequence import fused
from polyreme.sequence.block import Incoming, Merged, attend, differentiate
from polyreme.sequence.parts import Balance, Work, cut
from polyreme.sequence.visible import Mask, Pairs, Rule, Tokens

RULE = Rule(0.4)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
RULES = st.builds(Rule, st.just(0.4), st.booleans(), st.sampled_from([None, 1, 5, 30]))


def tokens_of(
    rows: Sequence[Sequence[int]], ranks: int, balance: Balance, tile: int, padding: int
) -> list[Tokens]:
    """Of each rank, for samples of documents of these lengths, the last of which goes up to the longest's
    end. padding: tokens there that are no keys."""
    length = -(-max(sum(row) for row in rows) // (2 * ranks)) * 2 * ranks
    documents = torch.stack(
        [torch.repeat_interleave(torch.tensor([*row[:-1], length - sum(row[:-1])])) for row in rows]
    )
    keys = documents.clone()
    keys[:, length - padding :] = -1
    parts = cut(documents, ranks, balance, Work())
    return [
        Tokens(parts.order[:, at], parts.mine(documents, at), parts.mine(keys, at), tile)
        for at in range(ranks)
    ]


def inputs_of(blocks: Sequence[Tokens], heads: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Queries and the gradient of their output, and keys and values of each block, with heads last but one in
    memory, as a model has them."""
    generator = torch.Generator().manual_seed(0)

    def numbers(count: int) -> Tensor:
        shape = *blocks[0].place.shape, count, 8
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)

    return [numbers(heads[0]), numbers(heads[0]), [(numbers(heads[1]), numbers(heads[1])) for _ in blocks]]


def computed(blocks: Sequence[Tokens], at: int, rule: Rule, inputs: list[Any]) -> list[Tensor]:
    """The output and log-sum-exps of the queries of block `at` over all blocks, and all gradients."""
    query, grad, keys = inputs
    merged = Merged.empty(query, 8)
    for block, (key, value) in zip(blocks, keys, strict=True):
        attend(merged, query, key, value, blocks[at], block, rule)
    incoming = Incoming.of(query, grad, merged.output.to(query.dtype), merged.lse)
    of_keys = [
        differentiate(incoming, key, value, blocks[at], block, rule)
        for block, (key, value) in zip(blocks, keys, strict=True)
    ]
    return [merged.output, merged.lse, incoming.query_grad, *(each for both in of_keys for each in both)]


def both_ways(blocks: Sequence[Tokens], at: int, rule: Rule, inputs: list[Any]) -> list[list[Tensor]]:
    """What the kernel computes, and what tiles of scores do."""
    with patch.object(fused, "takes", return_value=True):
        found = computed(blocks, at, rule, inputs)
    with patch.object(fused, "takes", return_value=False):
        return [found, computed(blocks, at, rule, inputs)]


@examples(100, deadline=None)
@given(
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(get_args(Balance)),
    RULES,
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from([4, 9, 64]),
    st.integers(0, 3),
)
def test_the_kernel_computes_what_tiles_do(
    rows: list[list[int]],
    ranks: int,
    balance: Balance,
    rule: Rule,
    heads: tuple[int, int],
    tile: int,
    padding: int,
) -> None:
    blocks = tokens_of(rows, ranks, balance, tile, min(padding, min(row[-1] for row in rows) - 1))
    inputs = inputs_of(blocks, heads, torch.float64)
    for at in range(ranks):
        for found, wanted in zip(*both_ways(blocks, at, rule, inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_as_precise_as_tiles(dtype: torch.dtype) -> None:
    blocks = tokens_of([[40, 60, 28], [128]], 2, "zigzag", 16, 0)
    inputs = inputs_of(blocks, (4, 2), dtype)
    query, grad, keys = inputs
    exact = [query.double(), grad.double(), [(key.double(), value.double()) for key, value in keys]]
    kernel, tiles = both_ways(blocks, 1, RULE, inputs)
    wanted = computed(blocks, 1, RULE, exact)
    for mine, theirs, each in zip(kernel, tiles, wanted, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert (mine - each).norm() <= 2 * (theirs - each).norm()


def test_a_query_that_sees_nothing_has_no_output_and_no_gradient() -> None:
    blocks = tokens_of([[20]], 1, "contiguous", 8, 0)
    sees = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    sees[..., 5, :] = False
    inputs = inputs_of(blocks, (2, 2), torch.float64)
    ways = both_ways(blocks, 0, Rule(0.4, mask=Mask(sees)), inputs)
    for output, lse, query_grad, *_ in ways:
        assert (lse[:, :, 5] == -torch.inf).all() and lse[:, :, :5].isfinite().all()
        assert not output[:, :, 5].any() and not query_grad[:, :, 5].any()
    for found, wanted in zip(*ways, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def parts_computed(blocks: Sequence[Tokens], at: int, rule: Rule) -> list[tuple[int, ...]]:
    """The ends of the queries, and of the keys, of each call of the kernel, and whether it is causal."""
    found = list[tuple[int, ...]]()
    own = fused.attention

    def noted(query: Tensor, key: Tensor, value: Tensor, part: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
        seen = part.queries, part.keys
        assert part.causal or part.sees is True
        found.append((*(end for each in seen for end in (each.start, each.stop)), part.causal))
        return own(query, key, value, part, rule)

    with patch.object(fused, "attention", noted):
        computed(blocks, at, rule, inputs_of(blocks, (2, 2), torch.float64))
    return found


def test_tiles_that_are_seen_wholly_are_one_call_and_no_mask_is_made_for_one_document() -> None:
    blocks = tokens_of([[48], [48]], 2, "zigzag", 6, 0)
    first, last = (parts_computed(blocks, at, RULE) for at in range(2))
    assert first == [
        (0, 6, 0, 6, True), (6, 12, 0, 6, False), (6, 12, 6, 12, True),
        (12, 18, 0, 12, False), (12, 18, 12, 18, True),
        (18, 24, 0, 18, False), (18, 24, 18, 24, True),
        (12, 18, 0, 24, False), (18, 24, 0, 24, False),
    ]  # fmt: skip
    assert last == [
        (0, 6, 0, 12, False), (6, 12, 0, 12, False), (12, 18, 0, 12, False), (18, 24, 0, 12, False),
        (0, 6, 0, 6, True), (6, 12, 0, 6, False), (6, 12, 6, 12, True),
        (12, 18, 0, 12, False), (12, 18, 12, 18, True),
        (18, 24, 0, 18, False), (18, 24, 18, 24, True),
    ]  # fmt: skip


@pytest.mark.parametrize("balance", get_args(Balance))
def test_a_tile_has_one_stretch_of_a_document_and_needs_no_mask(balance: Balance) -> None:
    documents = [32, 128, 64, 32]  # whose parts are no shorter than a quarter of a tile
    blocks = tokens_of([documents], 2, balance, 16, 0)
    pairs = sum(
        (stop - start) * (end - begin) / (1 + causal)
        for at in range(2)
        for start, stop, begin, end, causal in parts_computed(blocks, at, RULE)
    )
    assert pairs == sum(each**2 / 2 for each in documents)


def test_short_documents_share_a_tile() -> None:
    (block,) = tokens_of([[3] * 40 + [50] + [3] * 10], 1, "contiguous", 16, 0)
    sizes = [each.stop - each.start for each in block.tiles]
    assert sizes == [6] * 20 + [16, 16, 16, 2] + [6] * 5


def test_what_the_kernel_does_not_take() -> None:
    shapes = {"query": (1, 4, 6, 8), "key": (1, 2, 6, 8), "value": (1, 2, 6, 8)}

    def taken(rule: Rule = RULE, device: str = "cpu", **changes: tuple[int, ...]) -> bool:
        return fused.takes(*(torch.empty(each, device=device) for each in (shapes | changes).values()), rule)

    assert taken()
    assert not taken(Rule(0.4, softcap=3.0))
    assert not taken(value=(1, 2, 6, 4))
    assert not taken(device="meta")
    query, key, value = (torch.empty(each).mT.contiguous().mT for each in shapes.values())
    assert not fused.takes(query, key, value, RULE)
