"""Attention of blocks by fused kernels against attention by tiles of scores. Those of CUDA devices are played
by plain operators that take what they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from examples import examples
from polyreme.sequence import fused, visible
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


class Played:
    """The kernels of CUDA devices. called: by name, how often."""

    def __init__(self) -> None:
        self.called = dict.fromkeys(("flash", "efficient"), 0)

    @staticmethod
    def _weights(
        query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = query @ key.transpose(-1, -2) * scale
        if bias is not None:
            assert bias.shape == scores.shape and bias.dtype == query.dtype and bias.isfinite().all()
            assert all(
                size == 1 or stride % 16 == 0
                for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True)
            )
            scores = scores + bias
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
        return scores, scores.logsumexp(-1)

    def _forward(self, name: str, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Any:
        self.called[name] += 1
        scores, lse = self._weights(query, key, *given)
        return (scores - lse[..., None]).exp() @ value, lse

    def _backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *given: Any
    ) -> Any:
        assert out.dtype == grad.dtype == query.dtype and lse.isfinite().all()
        weights = (self._weights(query, key, *given)[0] - lse[..., None]).exp()
        inner = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * given[-1]
        return inner @ key, inner.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad

    @staticmethod
    def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> list[Tensor]:
        assert query.dtype in fused.HALVES and query.shape[-1] == value.shape[-1] <= 256
        assert not causal or query.shape[2] == key.shape[2]
        assert query.shape[-1] % 8 == 0 and all(each.stride(-1) == 1 for each in (query, key, value))
        return [each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value)]

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        wide = self._flash(query, key, value, causal)
        return *self._forward("flash", query, *wide, None, causal, scale), None, None, 0, 0, None, None, None

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, of_q: None,
        of_k: None, most_q: int, most_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *,
        scale: float,
    ) -> Any:  # fmt: skip
        assert (most_q, most_k) == (query.shape[2], key.shape[2]) and lse.is_contiguous()
        wide = self._flash(query, key, value, causal)
        of_query, *rest = self._backward(grad, query, *wide, out, lse, None, causal, scale)
        return of_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in rest)

    def _scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, keeps: bool, dropout: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert keeps and query.shape[1] == key.shape[1] == value.shape[1]
        output, lse = self._forward("efficient", query, key, value, bias, causal, scale)
        return output, pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
        lse: Tensor, seed: Tensor, offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *,
        scale: float,
    ) -> Any:  # fmt: skip
        length = query.shape[2]
        assert wanted == [True, True, True, False] and query.shape[1] == key.shape[1]
        assert lse.shape[-1] % 32 == 0 and lse.is_contiguous() and (lse[..., length:] == torch.inf).all()
        return *self._backward(grad, query, key, value, out, lse[..., :length], bias, causal, scale), None


KERNELS = ("cpu", "flash", "efficient")


@contextmanager
def kernels(which: str, dtype: torch.dtype = torch.float64) -> Iterator[Played]:
    """Have fused kernels compute: that of CPUs, flash attention where it can, or efficient attention alone;
    those of CUDA devices in this dtype, too."""
    played = Played()
    with ExitStack() as stack:
        if which != "cpu":
            stack.enter_context(patch.object(fused, "computes_on", lambda _: "cuda"))
            stack.enter_context(patch.object(fused, "aten", played))
            stack.enter_context(patch.object(fused, "ON_CUDA", (dtype,)))
            stack.enter_context(patch.object(fused, "HALVES", (dtype,) if which == "flash" else ()))
        yield played


def both_ways(
    blocks: Sequence[Tokens], at: int, rule: Rule, inputs: list[Any], which: str = "cpu"
) -> list[list[Tensor]]:
    """What kernels compute, and what tiles of scores do."""
    with kernels(which), patch.object(fused, "takes", return_value=True):
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
    st.sampled_from(KERNELS),
)
def test_kernels_compute_what_tiles_do(
    rows: list[list[int]],
    ranks: int,
    balance: Balance,
    rule: Rule,
    heads: tuple[int, int],
    tile: int,
    padding: int,
    which: str,
) -> None:
    blocks = tokens_of(rows, ranks, balance, tile, min(padding, min(row[-1] for row in rows) - 1))
    inputs = inputs_of(blocks, heads, torch.float64)
    for at in range(ranks):
        for found, wanted in zip(*both_ways(blocks, at, rule, inputs, which), strict=True):
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


@pytest.mark.parametrize("which", KERNELS)
def test_a_query_that_sees_nothing_has_no_output_and_no_gradient(which: str) -> None:
    blocks = tokens_of([[20]], 1, "contiguous", 8, 0)
    sees = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    sees[..., 5, :] = False
    inputs = inputs_of(blocks, (2, 2), torch.float64)
    ways = both_ways(blocks, 0, Rule(0.4, mask=Mask(sees)), inputs, which)
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


def test_what_is_seen_in_the_same_way_is_one_call_and_no_mask_is_made_for_one_document() -> None:
    blocks = tokens_of([[48], [48]], 2, "zigzag", 6, 0)
    first, last = (parts_computed(blocks, at, RULE) for at in range(2))
    own = [(0, 12, 0, 12, True), (12, 24, 0, 12, False), (12, 24, 12, 24, True)]
    assert first == [*own, (12, 24, 0, 24, False)]
    assert last == [(0, 24, 0, 12, False), (0, 24, 0, 24, True)]  # its two stretches are one
    with patch.object(visible, "LONG", 1):
        assert parts_computed(tokens_of([[18]], 1, "contiguous", 6, 0), 0, RULE) == [
            (0, 6, 0, 6, True), (6, 12, 0, 6, False), (6, 12, 6, 12, True),
            (12, 18, 0, 12, False), (12, 18, 12, 18, True),
        ]  # fmt: skip


def test_tiles_end_where_long_stretches_do_and_short_ones_share_one() -> None:
    def ends(*rows: list[int]) -> tuple[list[int], list[int]]:
        (tokens,) = tokens_of(rows, 1, "contiguous", 24, 0)
        short, long = ([each.stop for each in one.tiles] for one in (tokens, tokens.in_stretches))
        return short, long

    row = [20, 3, 2, 1, 4, 3, 33]
    assert ends(row) == ends(row, row) == ([20, 26, 33, 57, 66], [20, 26, 33, 66])
    unlike = [20, 26, 33, 57, 66]  # the last stretch is of the seventh document here and of the second there
    assert ends(row, [30, 36]) == (unlike, unlike)


@pytest.mark.parametrize(
    ("dtype", "width", "of_values", "sees", "called"),
    [
        (torch.bfloat16, 128, 128, True, "flash"),
        (torch.float16, 256, 256, True, "flash"),
        (torch.bfloat16, 200, 200, True, "efficient"),
        (torch.bfloat16, 192, 128, True, "efficient"),
        (torch.bfloat16, 128, 128, torch.ones(1, 6, 6, dtype=torch.bool), "efficient"),
        (torch.float32, 128, 128, True, "efficient"),
        (torch.float64, 128, 128, True, None),
        (torch.bfloat16, 36, 36, True, None),
    ],
)
def test_which_kernel_a_cuda_device_calls(
    dtype: torch.dtype, width: int, of_values: int, sees: Tensor | bool, called: str | None
) -> None:
    """On tensors without numbers, through torch's own shapes of results."""
    query, grad, output = (
        torch.empty(1, 4, 6, each, dtype=dtype, device="meta") for each in (width, of_values, of_values)
    )
    key, value = (torch.empty(1, 2, 6, each, dtype=dtype, device="meta") for each in (width, of_values))
    part = Pairs(slice(0, 6), slice(0, 6), sees.to("meta") if isinstance(sees, Tensor) else sees)
    with patch.object(fused, "computes_on", lambda _: "cuda"):
        assert fused.takes(query, key, value, RULE) == (called is not None)
        if called is None:
            return
        assert fused.kernel(query, value, part) == called
        found, lse = fused.attention(query, key, value, part, RULE)
        assert (found.shape, lse.shape, lse.dtype) == (output.shape, output.shape[:3], torch.float32)
        grads = fused.gradients((query, grad, output, lse), key, value, part, RULE)
    for each, of in zip(grads, (query, key, value), strict=True):
        assert (each.shape, each.dtype) == (of.shape, dtype)


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
