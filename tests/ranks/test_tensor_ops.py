"""The autograd pairs, the linear layers and the divided cross-entropy against plain torch, in float64; what
they keep and overlap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import BatchError, ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.tensor import ops
from polyreme.tensor.rng import Fork
from polyreme.tensor.vocab_parallel_loss import VocabParallelLogits, cross_entropy
from pool import Ranks

EXACT = {"rtol": 0, "atol": 1e-12}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pairs(rank: int, world: int) -> None:
    axis = Mesh.open({"tp": world}).tp
    for shape, dim in (((2, 3 * world, 5), 1), ((2 * world, 5), 0), ((2, 3, 4 * world), -1)):
        whole, weight = numbers(*shape), numbers(*shape, seed=1)
        part = whole.chunk(world, dim)[rank].clone().requires_grad_()
        full = ops.gather(axis, part, dim)
        assert torch.equal(full, whole)
        (full * weight).sum().backward()
        assert torch.equal(part.grad, weight.chunk(world, dim)[rank])

        source = whole.clone().requires_grad_()
        mine = ops.split(axis, source, dim)
        assert torch.equal(mine, whole.chunk(world, dim)[rank])
        (mine * weight.chunk(world, dim)[rank]).sum().backward()
        assert torch.equal(source.grad, weight)
    partial = numbers(3, 4, seed=rank).t().requires_grad_()
    total = ops.reduce(axis, partial)
    torch.testing.assert_close(total, sum(numbers(3, 4, seed=r).t() for r in range(world)), **EXACT)
    (total * 3).sum().backward()
    assert torch.equal(partial.grad, torch.full((4, 3), 3.0, dtype=torch.float64))

    one, other, unused = (
        torch.ones(3, dtype=dtype, requires_grad=True)
        for dtype in (torch.float64, torch.float32, torch.float64)
    )
    cut = Cut.packed((2,), 0, world, [(2, 1)]) if world > 1 else Cut.whole((2,), 1)
    shared = torch.ones(2, dtype=torch.float64, requires_grad=True)
    summed = [ops.Summed(each) for each in [Cut.whole((3,), world)] * 3 + [cut]]
    used = ops.sum_gradients(axis, [one, other, unused, shared], summed)
    ((used[0] * rank).sum() + used[1].sum() + (used[3] * (rank + 1)).sum()).backward()
    assert one.grad.tolist() == [sum(range(world))] * 3 and other.grad.tolist() == [world] * 3
    assert shared.grad.tolist() == [sum(range(world + 1))] * 2 and unused.grad is None


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pairs(ranks: Ranks, world: int) -> None:
    ranks(world, pairs)


class Recorded(Axis):
    """Notes when an operation begins and when it is waited for."""

    def __init__(self, axis: Axis, events: list[str]) -> None:
        self.__dict__.update(axis.__dict__)
        self._events = events

    def _noted(self, name: str, work: object) -> object:
        self._events.append(name)
        wait = getattr(work, "wait", lambda: None)

        class Noted:
            def wait(_) -> None:
                self._events.append(f"{name} done")
                wait()

        return Noted()

    def all_reduce(self, tensor: Tensor) -> object:
        return self._noted("all-reduce", super().all_reduce(tensor))

    def reduce_scatter(self, out: Tensor, full: Tensor, accumulate: bool = False) -> object:
        return self._noted("reduce-scatter", super().reduce_scatter(out, full, accumulate))

    def all_gather(self, full: Tensor, shard: Tensor) -> object:
        return self._noted("all-gather", super().all_gather(full, shard))


class Noting(ops.Shape):
    events: list[str]

    def weight_grad(self, *args: Tensor | None) -> Tensor:  # type: ignore[override]
        self.events.append("weight gradient")
        return super().weight_grad(*args)  # type: ignore[arg-type]


def linears(rank: int, world: int, sequence: bool, transposed: bool, flat: bool) -> None:
    events: list[str] = []
    axis = Recorded(Mesh.open({"tp": world}).tp, events)
    batch, length, inner, outer = 2, 2 * world, 5, 3 * world
    x = numbers(batch, length, inner).flatten(0, int(flat)).requires_grad_()
    weights = [numbers(outer, inner, seed=i).requires_grad_() for i in (1, 2)]
    bias = numbers(outer, seed=3).requires_grad_()
    last, last_bias = numbers(inner, outer, seed=4).requires_grad_(), numbers(inner, seed=5).requires_grad_()
    out = F.linear(F.linear(x, weights[0], bias).tanh() * F.linear(x, weights[1]), last, last_bias)
    scale = numbers(*out.shape, seed=6)
    (out * scale).sum().backward()

    def local(tensor: Tensor, dim: int) -> Tensor:
        part = tensor.detach().chunk(world, dim)[rank]
        return (part.t() if transposed and tensor.dim() == 2 else part).contiguous().requires_grad_()

    dim = ops.sequence_dim(x)
    shape = Noting(transposed)
    object.__setattr__(shape, "events", events)
    mine = (
        x.detach().chunk(world, dim)[rank].contiguous().requires_grad_()
        if sequence
        else x.detach().clone().requires_grad_()
    )
    parts, part_bias = [local(w, 0) for w in weights], local(bias, 0)
    one, other = ops.columns(axis, mine, parts, [part_bias, None], [shape, shape], sequence)
    part_last, whole_bias = local(last, 1), last_bias.detach().clone().requires_grad_()
    got = ops.row(axis, one.tanh() * other, part_last, whole_bias, ops.Shape(transposed), sequence)

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(world, dim)[rank] if sequence else tensor

    torch.testing.assert_close(got, own(out), **EXACT)
    events.clear()
    (got * own(scale)).sum().backward()
    torch.testing.assert_close(mine.grad, own(x.grad), **EXACT)
    for each, whole in zip(parts, weights, strict=True):
        torch.testing.assert_close(
            each.grad.t() if transposed else each.grad, whole.grad.chunk(world, 0)[rank], **EXACT
        )
    torch.testing.assert_close(part_bias.grad, bias.grad.chunk(world)[rank], **EXACT)
    torch.testing.assert_close(
        part_last.grad.t() if transposed else part_last.grad, last.grad.chunk(world, 1)[rank], **EXACT
    )
    bias_grad = whole_bias.grad.clone()
    if sequence:
        axis.all_reduce(bias_grad).wait()  # of this rank's part of the sequence alone
    torch.testing.assert_close(bias_grad, last_bias.grad, **EXACT)

    products = ["weight gradient"] * 2
    # the row's gradient; then the column's input again and the sum of its gradient, both under a product
    if sequence:
        gather, gathered = "all-gather", "all-gather done"
        assert events[:8] == [
            gather,
            gathered,
            gather,
            "reduce-scatter",
            gathered,
            *products,
            "reduce-scatter done",
        ]
    else:
        assert events == ["all-reduce", *products, "all-reduce done"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_column_and_row_and_the_sum_under_the_weight_gradients(
    ranks: Ranks, world: int, sequence: bool, transposed: bool, flat: bool
) -> None:
    ranks(world, linears, sequence, transposed, flat)


def kept(rank: int, world: int) -> None:
    """The whole sequence is not kept for backward, and frozen layers cost no communication."""
    events: list[str] = []
    axis = Recorded(Mesh.open({"tp": world}).tp, events)
    part, weight = numbers(1, 4, 5).requires_grad_(), numbers(3, 5).requires_grad_()
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        ops.columns(axis, part, [weight], [None], [ops.PLAIN], sequence=True)
    assert saved == [(1, 4, 5), (3, 5)]
    events.clear()
    (frozen,) = ops.columns(
        axis, part.detach(), [weight.detach()], [numbers(3).requires_grad_()], [ops.PLAIN]
    )
    frozen.sum().backward()
    assert events == []


def test_what_a_column_keeps(ranks: Ranks) -> None:
    ranks(2, kept)


def losses(rank: int, world: int) -> None:
    axis = Mesh.open({"tp": world}).tp
    for vocabulary in (5, 97):
        cut = Cut.padded((vocabulary, 1), 0, world)
        logits = (numbers(11, vocabulary) * 30).requires_grad_()
        labels = torch.randint(0, vocabulary, (11,), generator=torch.Generator().manual_seed(2))
        labels[3], labels[4], labels[5] = -100, 0, vocabulary - 1
        (start, stop) = cut.pieces[rank][0]
        for reduction in ("mean", "sum", "none"):
            mine = logits.detach()[:, start:stop].clone().requires_grad_()
            got = cross_entropy(mine, labels, axis, cut, reduction=reduction)
            expected = F.cross_entropy(logits, labels, reduction=reduction)
            torch.testing.assert_close(got, expected, **EXACT)
            weight = numbers(11, seed=4) if reduction == "none" else torch.tensor(1.7)
            logits.grad = None
            (expected * weight).sum().backward()
            (got * weight).sum().backward()
            torch.testing.assert_close(mine.grad, logits.grad[:, start:stop], **EXACT)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            low = logits.detach().to(dtype)
            mine = low[:, start:stop].clone().requires_grad_()
            wide = low.float().requires_grad_()
            got, expected = cross_entropy(mine, labels, axis, cut), F.cross_entropy(wide, labels)
            got.backward(), expected.backward()
            assert got.dtype == mine.grad.dtype == dtype  # computed in float32, rounded at the end
            torch.testing.assert_close(
                got, expected.to(dtype), rtol=1e-6 if dtype is torch.float32 else 0, atol=0
            )
            torch.testing.assert_close(
                mine.grad,
                wide.grad[:, start:stop].to(dtype),
                rtol=1e-5 if dtype is torch.float32 else 8e-3,
                atol=1e-7,
            )
        nothing = cross_entropy(logits.detach()[:, start:stop], torch.full((11,), -100), axis, cut)
        assert nothing.isnan()  # as torch has it
        for wrong in (vocabulary, -1):
            with pytest.raises(
                BatchError, match=f"label {wrong} is outside of the vocabulary of {vocabulary}"
            ):
                cross_entropy(logits.detach()[:, start:stop], torch.full((11,), wrong), axis, cut)


def test_on_a_gpu_the_device_refuses_what_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, str]] = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: told.append((bool(holds), message)))
    monkeypatch.setattr(ops, "WAITING", ())
    for wrong in (3, -1, 7):
        ops.refuse_outside(torch.tensor([0, wrong, 6]), 7, "token {} is outside")
    assert [holds for holds, _ in told] == [True, False, False]
    assert told[0][1] == "token of a batch is outside"
    torch._assert_async(torch.tensor(True), "")  # torch has it, with a message


@pytest.mark.parametrize("world", [1, 2, 4])
def test_cross_entropy(ranks: Ranks, world: int) -> None:
    ranks(world, losses)


def as_whole(rank: int, world: int) -> None:
    """VocabParallelLogits against the whole logits, operation by operation: equal, or an error."""
    axis = Mesh.open({"tp": world}).tp
    vocabulary = 7
    cut = Cut.padded((vocabulary, 1), 0, world)
    start, stop = cut.pieces[rank][0]
    whole = numbers(2, 3, vocabulary)
    split = VocabParallelLogits.of(whole[..., start:stop].clone(), axis, cut)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    operations = [
        lambda t: t.shape,
        lambda t: t.size(),
        lambda t: t.size(-1),
        lambda t: t.size(0),
        lambda t: t.numel(),
        lambda t: len(t),
        lambda t: t.ndim,
        lambda t: t.dtype,
        lambda t: t.device,
        lambda t: t.is_floating_point(),
        lambda t: t.type(),
        lambda t: t[0],
        lambda t: t[:, 1:],
        lambda t: t[..., :-1, :],
        lambda t: t[:, -1, :],
        lambda t: t[:, -1],
        lambda t: t[..., 2],
        lambda t: t[..., 2:5],
        lambda t: t[:, :, 1:3],
        lambda t: t[0, 1, 6],
        lambda t: t[None],
        lambda t: t[..., None],
        lambda t: t[mask],
        lambda t: t[:, None],
        lambda t: t[:, :, ...],
        lambda t: t[torch.tensor([1, 0])],
        lambda t: t[:, 0, None],
        lambda t: t.view(-1, 7),
        lambda t: t.view(6, -1),
        lambda t: t.reshape(2, 21),
        lambda t: t.reshape((3, 2, 7)),
        lambda t: t.view(-1),
        lambda t: t.flatten(0, 1),
        lambda t: t.flatten(),
        lambda t: t.transpose(1, 2),
        lambda t: t.float(),
        lambda t: t.to(torch.float16),
        lambda t: t.contiguous() * 2,
        lambda t: 2 * t,
        lambda t: t / 30,
        lambda t: torch.tanh(t / 3) * 3,
        lambda t: t * torch.arange(7),
        lambda t: t / torch.tensor(3.0),
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t.argmax(-1),
        lambda t: t.softmax(-1),
        lambda t: torch.topk(t, 2).values,
        lambda t: t.tolist(),
        lambda t: str(t),
        lambda t: t.detach().numpy().tolist(),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: torch.cat([t, t], -1),
        lambda t: torch.stack([t[0], t[1]]),
        lambda t: t.mul(t),
        lambda t: F.cross_entropy(t.view(-1, 7), torch.arange(6)),
        lambda t: F.log_softmax(t, -1),
        lambda t: t.max(),
        lambda t: t == t,
        lambda t: t.unflatten(-1, (7, 1)),
        lambda t: t.masked_fill(mask[..., None], 0),
        lambda t: t.T if t.dim() == 2 else t.mT,
        lambda t: t.data,
        lambda t: t.new_zeros(2),
        lambda t: torch.zeros_like(t),
        lambda t: t.to(torch.zeros(1)),
        lambda t: t.item,
    ]
    for number, operation in enumerate(operations):
        expected, got = operation(whole), operation(split)
        if isinstance(got, VocabParallelLogits):
            assert got.shape == expected.shape, number
            got = got.whole()
        if isinstance(expected, Tensor):
            torch.testing.assert_close(
                got, expected, **EXACT, msg=lambda text, number=number: f"{number}: {text}"
            )
        elif not callable(expected):
            assert got == expected, number
    for write in (
        lambda t: t.mul_(2),
        lambda t: t.__setitem__(0, 1),
        lambda t: t.clamp_(0),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch.relu_(t),
    ):
        with pytest.raises(ModelError, match="writes into logits whose vocabulary is divided"):
            write(split)
    assert torch.equal(split.shard, whole[..., start:stop])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_logits_pass_for_whole_ones(ranks: Ranks, world: int) -> None:
    ranks(world, as_whole)


def forks(rank: int, world: int) -> list[list[float]]:
    fork = Fork(Mesh.open({"tp": world}).tp)
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):  # the second time as a recomputation does it
        torch.set_rng_state(state)
        drawn = [float(torch.rand(()))]
        fork.enter(cpu)
        drawn.append(float(torch.rand(())))
        fork.enter(cpu)
        drawn.append(float(torch.rand(())))
        fork.leave()
        fork.leave()
        drawn.append(float(torch.rand(())))
        with pytest.raises(ZeroDivisionError), fork.inside(cpu):
            drawn.append(float(torch.rand(())) / 0)
        with fork.inside(cpu):
            drawn.append(float(torch.rand(())))
        drawn.append(float(torch.rand(())))
        first = drawn if not _ else first  # noqa: F821
    return [first, drawn]


def test_forks(ranks: Ranks) -> None:
    results = ranks(4, forks)
    assert all(first == again for first, again in results)
    draws = list(zip(*(first for first, _ in results), strict=True))
    assert [len(set(each)) for each in draws] == [1, 4, 4, 1, 4, 1]
    assert len({number for each in draws for number in each}) == 3 + 12  # and no two places alike
