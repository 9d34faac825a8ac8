"""Attention over a sequence whose tokens are divided over the ranks of an axis, in ways that give the same
numbers.

`ring`: blocks of keys and values go round, one step at a time, each up to the last rank that needs some of
it; while one is computed with, the next is under way. In the backward each block's gradient begins at the
next rank, and goes home from the last one. `gather`: every rank has all keys and values that its queries may
see for a while. `ulysses`: each rank gets all tokens of some of the heads. `mix`: neighbours do so with their
own tokens, and over groups of them keys and values of these heads go round.

Communication, per rank, with b the elements of its keys (and of its values): `ring` 2(n-1) b forward and
4(n-1) b backward, or 2h b and 4h b for a block that goes on to h ranks; `gather` as much at most, in one
collective each way: keys and values that another rank's queries may see, and the gradients of those that its
own may see; `ulysses` 2(t+g)(n-1)/n b each way, for g heads of queries for one of keys, which are repeated t
times; `mix` that of ulysses among its neighbours, and t times that of a ring of groups. A recomputation sends
nothing (`kept`). All ranks must call the same operations in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from polyreme.distributed.mesh import Axis
from polyreme.distributed.work import DONE, Work
from polyreme.sequence.block import Incoming, Merged, attend, differentiate
from polyreme.sequence.kept import once
from polyreme.sequence.visible import Rule, Tokens, reached

Method = Literal["ring", "ulysses", "gather", "mix"]
"""mix: ulysses among neighbours, and a ring over groups of them."""


@dataclass(frozen=True)
class Across:
    """The ranks that share a sequence, and the rule. axis: over it keys and values meet queries; tokens: of
    each rank of it. heads: ranks that together have the tokens of one place on `axis`, and each some heads
    meanwhile. gathers: keys and values of `axis` are gathered."""

    axis: Axis
    tokens: Sequence[Tokens]
    rule: Rule
    heads: Axis = field(default_factory=lambda: Axis("cp"))
    gathers: bool = False

    @property
    def mine(self) -> Tokens:
        """The tokens of this rank's place on the axis."""
        return self.tokens[self.axis.rank]

    @cached_property
    def needed(self) -> list[Tensor]:
        """Of each rank's tokens, which this rank's queries may see."""
        return [reached(self.mine, each, self.rule) for each in self.tokens]

    @cached_property
    def wanted(self) -> list[Tensor]:
        """For each rank, which of this rank's tokens its queries may see."""
        return [reached(each, self.mine, self.rule) for each in self.tokens]

    @cached_property
    def hops(self) -> list[int]:
        """Of each rank's tokens, how many ranks on the last one is whose queries may see some."""
        size = self.axis.size

        def needed(of: int, hops: int) -> bool:
            return len(reached(self.tokens[(of + hops) % size], self.tokens[of], self.rule)) > 0

        return [next((n for n in range(size - 1, 0, -1) if needed(of, n)), 0) for of in range(size)]

    def comes(self, rank: int, step: int) -> bool:
        """Return whether the keys of the rank so many steps before a rank come to it in a ring."""
        return self.hops[(rank - step) % self.axis.size] >= step

    @cached_property
    def reached(self) -> list[Tokens]:
        """The tokens that are `needed`."""
        return [each.at(place) for each, place in zip(self.tokens, self.needed, strict=True)]


def attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, across: Across) -> Tensor:
    """Return the attention of this rank's queries over the keys of all ranks, (samples, heads, tokens, width)
    as the queries are. sinks: a score for each head that takes a share of the attention."""
    on, dtype = query.device.type, query.dtype
    if torch.amp.is_autocast_available(on) and torch.is_autocast_enabled(on):
        dtype = torch.get_autocast_dtype(on)
    query, key, value = (each.to(dtype) for each in (query, key, value))
    kind, axis = _Gather if across.gathers else _Ring, across.heads
    if axis.size == 1:
        return kind.apply(query, key, value, sinks, across)
    heads, times = query.shape[1], repeats(query.shape[1], key.shape[1], axis.size)
    if times > 1:
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    query, key, value = (_Swap.apply(each, axis, True) for each in (query, key, value))
    if sinks is not None:
        each = heads // axis.size
        sinks = sinks[axis.rank * each : (axis.rank + 1) * each]
    return _Swap.apply(kind.apply(query, key, value, sinks, across), axis, False)


def repeats(heads: int, shared: int, ranks: int) -> int:
    """Return how often key heads are repeated, so that each rank has those of its heads."""
    if shared % ranks == 0:
        return 1
    return ranks // shared if ranks % shared == 0 else heads // shared


Attend = Callable[[Merged, Tensor, Tensor, Tensor, Across], None]
"""Merges the attention of queries over the keys and values of all ranks."""


# ---- keys and values together, flat, so that one exchange has both


@dataclass(frozen=True)
class _Pack:
    """The shapes of keys and of values."""

    key: torch.Size
    value: torch.Size

    @classmethod
    def of(cls, key: Tensor, value: Tensor, at: Tensor) -> _Pack:
        """Return the shapes of these tokens' keys and values."""
        shapes = [torch.Size((*each.shape[:2], len(at), each.shape[3])) for each in (key, value)]
        return cls(*shapes)

    @property
    def size(self) -> int:
        """The elements of both."""
        return self.key.numel() + self.value.numel()

    def join(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        count = self.key.numel()
        return flat[:count].view(self.key), flat[count:].view(self.value)


def _passed(axis: Axis, sent: Tensor, to: int, sizes: list[int], of: str) -> tuple[tuple[Tensor, ...], Work]:
    """Begin to send to one rank of the axis, and to receive so many elements from each."""
    out = [0] * axis.size
    out[to % axis.size] = sent.numel()
    received = sent.new_empty(sum(sizes))
    return received.split(sizes), axis.all_to_all(received, sent, sizes, out, of)


def _onward(across: Across, here: Tensor, step: int, pack: _Pack) -> tuple[Tensor, Work]:
    """Begin to send the keys and values that this rank has after so many steps to the next one, and to
    receive those that the one before has; none where no rank from there on needs them."""
    axis, rank = across.axis, across.axis.rank
    if step == max(across.hops):
        return here[:0], DONE
    sizes = [0] * axis.size
    sizes[rank - 1] = pack.size * across.comes(rank, step + 1)
    sent = here if across.comes(rank + 1, step + 1) else here[:0]
    received, work = _passed(axis, sent, rank + 1, sizes, " of keys and values")
    return received[rank - 1], work


def _homeward(across: Across, total: Tensor, step: int, pack: _Pack) -> tuple[Tensor, Tensor, Work]:
    """Begin to send the gradients of the keys and values that this rank has after so many steps on with them,
    or home from the last rank that needs them. Return those of the keys that come next, and those that come
    home."""
    axis, rank, hops = across.axis, across.axis.rank, across.hops
    source, last = (rank - step) % axis.size, (rank + step) % axis.size
    sizes = [0] * axis.size
    sizes[rank - 1] = pack.size * across.comes(rank, step + 1)
    if hops[rank] == step:
        sizes[last] = pack.size
    to = source if hops[source] == step else rank + 1
    received, work = _passed(axis, total, to, sizes, " of gradients of keys and values")
    return received[rank - 1], received[last], work


def _forward(ctx: Any, attend: Attend, sinks: Tensor | None, across: Across, *inputs: Tensor) -> Tensor:
    """Return the output over all blocks of keys and values, which `attend` merges, and keep what the backward
    needs."""
    query, key, value = inputs

    def run() -> tuple[Tensor, Tensor]:
        merged = Merged.empty(query, value.shape[-1])
        attend(merged, query, key, value, across)
        if sinks is not None:
            merged.add_sinks(sinks)
        return merged.output.to(query.dtype), merged.lse

    output, lse = run() if across.axis.size == 1 else once(run)
    ctx.save_for_backward(query, key, value, sinks, output, lse)
    ctx.across = across
    return output


def _begin(ctx: Any, grad: Tensor) -> tuple[Incoming, Tensor, Tensor, Tensor | None]:
    query, key, value, sinks, output, lse = ctx.saved_tensors
    incoming = Incoming.of(query, grad, output, lse)
    return incoming, key, value, None if sinks is None else incoming.of_sinks(sinks)


def _ended(incoming: Incoming, key: Tensor, grads: tuple[Tensor, Tensor], sinks: Any) -> tuple[Any, ...]:
    dtype = key.dtype
    return incoming.query_grad.to(dtype), grads[0].to(dtype), grads[1].to(dtype), sinks, None


def _ring(merged: Merged, query: Tensor, key: Tensor, value: Tensor, across: Across) -> None:
    rank, pack, steps = across.axis.rank, _Pack(key.shape, value.shape), max(across.hops)
    here = pack.join(key, value) if steps else key
    for step in range(steps + 1):
        following, coming = _onward(across, here, step, pack)
        if across.comes(rank, step):
            block = pack.split(here) if step else (key, value)
            attend(merged, query, *block, across.mine, across.tokens[rank - step], across.rule)
        coming.settle()
        here = following


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, across: Across
    ) -> Tensor:
        return _forward(ctx, _ring, sinks, across, query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        across: Across = ctx.across
        incoming, key, value, of_sinks = _begin(ctx, grad)
        rank, pack, steps = across.axis.rank, _Pack(key.shape, value.shape), max(across.hops)
        here = pack.join(key, value) if steps else key
        following, coming = _onward(across, here, 0, pack)
        before = back = home = incoming.lse.new_empty(0)
        arriving = DONE
        for step in range(1, steps + 1):
            coming.settle()
            here = following
            following, coming = _onward(across, here, step, pack)
            own: tuple[Tensor, ...] = ()
            if across.comes(rank, step):
                block, tokens = pack.split(here), across.tokens[rank - step]
                own = differentiate(incoming, *block, across.mine, tokens, across.rule)
            arriving.settle()  # until then the total is being sent
            total = pack.join(*own) if own else incoming.lse.new_empty(0)
            if step > 1 and own:
                total += before
            before, back, arriving = _homeward(across, total, step, pack)
            if across.hops[rank] == step:
                home = back
        grads = differentiate(incoming, key, value, across.mine, across.mine, across.rule)
        arriving.settle()
        if across.hops[rank]:
            for each, others in zip(grads, pack.split(home), strict=True):
                each += others
        return _ended(incoming, key, grads, of_sinks)


def _gather(merged: Merged, query: Tensor, key: Tensor, value: Tensor, across: Across) -> None:
    for keys, values, tokens in _gathered(key, value, across):
        attend(merged, query, keys, values, across.mine, tokens, across.rule)


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, across: Across
    ) -> Tensor:
        return _forward(ctx, _gather, sinks, across, query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        across: Across = ctx.across
        incoming, key, value, of_sinks = _begin(ctx, grad)
        found = [
            _Pack(keys.shape, values.shape).join(
                *differentiate(incoming, keys, values, across.mine, tokens, across.rule)
            )
            for keys, values, tokens in _gathered(key, value, across)
        ]
        packs = [_Pack.of(key, value, at) for at in across.wanted]
        parts = _exchanged(across.axis, found, packs, " of gradients of keys and values")
        totals = tuple(torch.zeros_like(each, dtype=found[0].dtype) for each in (key, value))
        for at, part in zip(across.wanted, parts, strict=True):
            for total, each in zip(totals, part, strict=True):
                total.index_add_(2, at.to(key.device), each)
        return _ended(incoming, key, (totals[0], totals[1]), of_sinks)


def _gathered(key: Tensor, value: Tensor, across: Across) -> list[tuple[Tensor, Tensor, Tokens]]:
    """Return the keys and values of each rank that this rank's queries may see."""
    sent = [
        torch.cat([each.index_select(2, at.to(each.device)).reshape(-1) for each in (key, value)])
        for at in across.wanted
    ]
    packs = [_Pack.of(key, value, at) for at in across.needed]
    parts = _exchanged(across.axis, sent, packs, " of keys and values")
    return [(*part, tokens) for part, tokens in zip(parts, across.reached, strict=True)]


def _exchanged(
    axis: Axis, sent: Sequence[Tensor], packs: Sequence[_Pack], of: str
) -> list[tuple[Tensor, Tensor]]:
    """Give each rank its part of keys and values, and return those of all for this one."""
    sizes = [pack.size for pack in packs]
    flat = torch.cat([*sent])
    received = flat.new_empty(sum(sizes))
    axis.all_to_all(received, flat, sizes, [each.numel() for each in sent], of).settle()
    return [pack.split(part) for pack, part in zip(packs, received.split(sizes), strict=True)]


# ---- all tokens of some heads


def _swap(axis: Axis, tensor: Tensor, to_heads: bool) -> Tensor:
    """Give each rank its heads of all tokens, in rank order; or back: its tokens of all heads."""
    dim, into = (1, 2) if to_heads else (2, 1)
    sent = tensor.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
    received = torch.empty_like(sent)
    axis.all_to_all(received.view(-1), sent.view(-1), of=" of heads").settle()
    return received.movedim(0, into).flatten(into, into + 1)


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, to_heads: bool) -> Tensor:
        ctx.axis, ctx.to_heads = axis, to_heads
        return once(lambda: (_swap(axis, tensor, to_heads),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _swap(ctx.axis, grad, not ctx.to_heads), None, None
