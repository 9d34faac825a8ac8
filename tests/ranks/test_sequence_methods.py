"""Attention over divided sequences, in each way, against one softmax over the whole: forward and backward, in
float64, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import threads
from examples import examples, whole
from polyreme.config.schema import ContextSection
from polyreme.distributed.mesh import Mesh
from polyreme.layout.mesh_axes import AXES
from polyreme.models.attention import AttentionFacts
from polyreme.sequence.choice import Choice, choose, neighbours, times_sent
from polyreme.sequence.methods import Across, Method, attention
from polyreme.sequence.parts import Balance, Parts, Work, cut
from polyreme.sequence.visible import Rule, Tokens

RULE = Rule(0.4)
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Case:
    """A whole attention. lengths: of the documents of each sample; padding: tokens at its end that are
    none."""

    ranks: int
    lengths: tuple[tuple[int, ...], ...]
    rule: Rule = RULE
    balance: Balance = "contiguous"
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (3, 3)
    sinks: bool = False
    padding: int = 0
    tile: int = 9

    def documents(self) -> Tensor:
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.lengths]
        return torch.stack(rows)

    def keys(self) -> Tensor:
        keys = self.documents()
        if self.padding:
            keys[:, -self.padding :] = -1
        return keys

    def tensors(self) -> list[Tensor | None]:
        torch.manual_seed(0)
        samples, length = self.documents().shape
        (heads, shared), (width, of_values) = self.heads, self.widths
        shapes = [(heads, width), (shared, width), (shared, of_values), (heads, of_values)]
        found: list[Tensor | None] = [
            torch.randn(samples, length, *shape, dtype=torch.float64).transpose(1, 2) for shape in shapes
        ]
        return [*found, torch.randn(heads, dtype=torch.float64) if self.sinks else None]


def visible(case: Case) -> Tensor:
    place = torch.arange(case.documents().shape[1])
    behind = place[:, None] - place
    sees = case.documents()[:, :, None] == case.keys()[:, None]
    window = case.rule.window
    if case.rule.causal:
        return sees & (behind >= 0) & (behind < (window or len(place)))
    return sees if window is None else sees & (behind.abs() <= window)


def dense(case: Case) -> list[Tensor]:
    """The output and all gradients, by one softmax."""
    query, key, value, grad, sinks = case.tensors()
    assert query is not None and key is not None and value is not None and grad is not None
    inputs = [each.requires_grad_() for each in (query, key, value, sinks) if each is not None]
    groups = case.heads[0] // case.heads[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * case.rule.scale
    if case.rule.softcap is not None:
        scores = case.rule.softcap * torch.tanh(scores / case.rule.softcap)
    sees = visible(case)
    scores = scores.masked_fill(~sees[:, None], -1e30)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : sees.shape[-1]] * sees[:, None]
    output = weights @ value.repeat_interleave(groups, 1)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def ulysses_of(method: Method, ranks: int) -> int:
    """How many neighbours swap heads."""
    return {"ulysses": ranks, "mix": 2}.get(method, 1)


def parts_of(case: Case, method: Method) -> Parts:
    ulysses = ulysses_of(method, case.ranks)
    return cut(case.documents(), case.ranks // ulysses, case.balance, Work()).split(ulysses)


def across_of(mesh: Mesh, case: Case, method: Method) -> Across:
    ulysses = ulysses_of(method, case.ranks)
    heads, ring = mesh.split("cp", ulysses, ("cp_ulysses", "cp_ring"))
    parts = cut(case.documents(), ring.size, case.balance, Work())
    documents, keys = case.documents(), case.keys()
    tokens = [
        Tokens(parts.order[:, at], parts.mine(documents, at), parts.mine(keys, at), case.tile)
        for at in range(ring.size)
    ]
    return Across(ring, tokens, case.rule, heads, method == "gather")


def on_rank(rank: int, size: int, cases: Sequence[tuple[Case, Method]]) -> list[list[Tensor]]:
    mesh = Mesh.open({name: size if name == "cp" else 1 for name in AXES})
    found = []
    for case, method in cases:
        parts = parts_of(case, method)
        *whole, sinks = case.tensors()
        query, key, value, grad = (
            parts.mine(each.transpose(1, 2), rank).transpose(1, 2) for each in whole if each is not None
        )
        inputs = [each.requires_grad_() for each in (query, key, value, sinks) if each is not None]
        output = attention(query, key, value, sinks, across_of(mesh, case, method))
        found.append([output.detach(), *torch.autograd.grad(output, inputs, grad)])
    return found


def check(ranks: int, cases: Sequence[tuple[Case, Method]]) -> None:
    found = threads.run(ranks, on_rank, cases)
    for at, (case, method) in enumerate(cases):
        parts, expected = parts_of(case, method), dense(case)
        for number, wanted in enumerate(expected):
            of_ranks = [each[at][number] for each in found]
            if number == 4:  # of sinks: a sum over the ranks
                joined = torch.stack(of_ranks).sum(0)
            else:
                joined = parts.joined(torch.stack([each.transpose(1, 2) for each in of_ranks], 1)).transpose(
                    1, 2
                )
            torch.testing.assert_close(
                joined, wanted, rtol=0, atol=1e-13, msg=lambda m: f"{case} {method}: {m}"
            )


PLAIN = Case(1, ((48,), (48,)))
PACKED = replace(PLAIN, lengths=((20, 3, 25), (1, 46, 1)), balance="documents")
VARIANTS = {
    "plain": PLAIN,
    "zigzag": replace(PLAIN, balance="zigzag"),
    "packed": PACKED,
    "packed by blocks": replace(PACKED, balance="blocks"),
    "padded": replace(PLAIN, padding=37, balance="zigzag"),
    "window": replace(PACKED, rule=Rule(0.4, window=5)),
    "both sides": replace(PACKED, rule=Rule(0.4, causal=False), balance="contiguous"),
    "window on both sides": replace(PACKED, rule=Rule(0.4, causal=False, window=4)),
    "soft cap and sinks": replace(PACKED, rule=Rule(0.4, softcap=1.5), sinks=True),
    "latent": replace(PLAIN, widths=(5, 3), heads=(4, 4), balance="zigzag"),
    "one key head": replace(PLAIN, heads=(8, 1)),
}


@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(n, marks=whole) for n in (2, 3, 6, 8))])
def test_each_way_equals_one_softmax(ranks: int) -> None:
    cases = [
        (
            replace(case, ranks=ranks, heads=(h * ranks // 2, k) if h * ranks // 2 % k == 0 else case.heads),
            method,
        )
        for case in VARIANTS.values()
        for method in METHODS
        for h, k in [case.heads]
        if method != "ulysses" or (h * ranks // 2 % ranks == 0 and h * ranks // 2 % k == 0)
        if method != "mix" or ranks % 2 == 0
    ]
    assert {method for _, method in cases} == {*METHODS} - ({"mix"} if ranks % 2 else set())
    check(ranks, cases)


@examples(60, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(get_args(Balance)),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(METHODS),
    st.integers(1, 7),
)
def test_any_documents_windows_and_layouts_equal_the_dense_mask(
    ranks: int,
    lengths: list[int],
    balance: Balance,
    causal: bool,
    window: int | None,
    method: Method,
    tile: int,
) -> None:
    if method == "mix":
        ranks += ranks % 2
    last = -sum(lengths) % ranks
    row = (*lengths, *([last] if last else []))
    rule = Rule(0.7, causal=causal, window=window)
    case = Case(ranks, (row,), rule, balance, (2 * ranks, 2), padding=last, tile=tile)
    check(ranks, [(case, method)])


def sent(rank: int, size: int, case: Case, method: Method) -> dict[str, int]:
    """The elements that a rank sends forward and backward."""
    mesh = Mesh.open({name: size if name == "cp" else 1 for name in AXES})
    parts, across = parts_of(case, method), across_of(mesh, case, method)
    inputs: list[Any] = [
        parts.mine(each.transpose(1, 2), rank).transpose(1, 2).requires_grad_()
        for each in case.tensors()[:3]
        if each is not None
    ]
    attention(*inputs, None, across).sum().backward()
    axes = {"heads": across.heads, "ring": across.axis}
    return {name: sum(c.bytes for c in axis.counts.values()) // 8 for name, axis in axes.items()}


def test_traffic_is_that_of_the_formulas() -> None:
    """By element of float64, of which a rank's keys have b; g heads of queries for one of keys, which are
    repeated so many times for the ranks that swap heads."""
    n, u, case = 4, 2, replace(PLAIN, ranks=4, heads=(8, 2), balance="zigzag")
    b, g, times = 2 * (48 // n) * 2 * 3, 4, 2

    expected = {
        "ring": (0, 6 * (n - 1) * b),
        "ulysses": (4 * (times + g) * (n - 1) * b // n, 0),
        "mix": (4 * (1 + g) * (u - 1) * b // u, 6 * (n // u - 1) * b),
    }
    facts = AttentionFacts(*case.heads, 1.0, 0.0, True, None)
    for method, (swapped, round_) in expected.items():
        assert threads.run(n, sent, case, method) == [{"heads": swapped, "ring": round_}] * n
        u = ulysses_of(cast("Method", method), n)
        assert times_sent(*case.heads, u, n // u, n)[1] * b == swapped + round_
    assert choose(ContextSection(), facts, n, 1).method == "ring"


def test_gather_sends_the_keys_of_documents_that_reach_a_rank() -> None:
    """Of 4 x 12 tokens, documents of 20 and 28: 12 keys of the first rank reach the second, 4 of the second
    the third and the fourth, and 12 of the third the fourth; forward and backward, and their gradients come
    back."""
    n, each = 4, 2 * 2 * 3 * 2  # samples, key heads, width; keys and values
    for case, keys in (
        (replace(PLAIN, ranks=n, lengths=((20, 28), (20, 28))), [(12, 0), (8, 12), (12, 4), (0, 16)]),
        (replace(PLAIN, ranks=n, rule=Rule(0.4, window=3)), [(2, 0), (2, 2), (2, 2), (0, 2)]),
    ):
        expected = [(2 * out + back) * each for out, back in keys]
        assert [of["ring"] for of in threads.run(n, sent, case, "gather")] == expected


def test_a_ring_ends_where_no_rank_needs_a_block() -> None:
    """Of 4 x 12 tokens. Documents of 20 and 28: the first rank's block goes on to 1 rank, the second's to 2,
    the third's to 1; its gradients begin there, and go home from the last. A window: each goes on to 1.
    Documents that fill their ranks: nothing is sent."""
    n, block = 4, 2 * 2 * 2 * 12 * 3  # keys and values, samples, key heads, tokens, width
    for case, blocks in (
        (replace(PLAIN, ranks=n, lengths=((20, 28), (20, 28))), [(1, 0), (1, 1), (2, 1), (0, 2)]),
        (replace(PLAIN, ranks=n, rule=Rule(0.4, window=3)), [(1, 0), (1, 1), (1, 1), (0, 1)]),
        (replace(PLAIN, ranks=n, lengths=((12,) * 4,) * 2), [(0, 0)] * 4),
        (replace(PLAIN, ranks=n, lengths=((12,) * 4, (24, 24))), [(1, 0), (0, 1), (1, 0), (0, 1)]),
    ):
        expected = [(2 * out + back) * block for out, back in blocks]
        assert [of["ring"] for of in threads.run(n, sent, case, "ring")] == expected


def chosen(heads: int, shared: int, cp: int, local: int) -> Choice:
    return choose(ContextSection(), AttentionFacts(heads, shared, 1.0, 0.0, True, None), cp, 1, local)


def test_the_way_that_sends_the_least_between_hosts_is_chosen() -> None:
    """Two hosts of four: a ring sends 6 x 7 / 4 keys over the border for each rank, groups of four 6."""
    mixed = chosen(8, 8, 8, 4)
    assert (mixed.method, mixed.ulysses, mixed.ring, str(mixed)) == ("ulysses", 8, 1, "ulysses")
    grouped = chosen(32, 4, 8, 4)
    assert (grouped.method, grouped.ulysses, grouped.ring) == ("mix", 4, 2)
    assert str(grouped) == "4 ulysses x 2 ring" and "6 times a rank's keys between hosts" in grouped.reason
    assert chosen(32, 4, 8, 8).method == "ulysses" and "hosts" not in chosen(32, 4, 8, 8).reason
    assert (chosen(12, 12, 8, 4).method, chosen(9, 9, 8, 4).method) == ("mix", "ring")


def test_neighbours_are_those_of_a_host() -> None:
    two = ["a", "a", "b", "b"]
    assert neighbours(two, [[0, 1, 2, 3]]) == 2
    assert neighbours(two, [[0, 1], [2, 3]]) == 2
    assert neighbours(two, [[0, 2], [1, 3]]) == 1
    assert neighbours(["a", "b", "b", "b"], [[0, 1, 2, 3]]) == 4  # unlike hosts
