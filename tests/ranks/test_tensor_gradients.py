"""Tensor parallelism of models in which learned numbers meet divided activations: what one process computes,
in float64 to 1e-10, or an error that names the parameter; and replicas that are compared."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme
import threads
from examples import ALL, whole
from polyreme.errors import ModelError
from polyreme.tensor import ops, vocab_parallel_loss
from pool import RanksFailed

VOCABULARY, WIDTH, HEADS, SAMPLES, STEPS = 23, 8, 4, 4, 2
PLAN = {
    **dict.fromkeys(("blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v"), "colwise"),
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """What is done `between` its divided layers uses its `own` number."""

    def __init__(self, between: str | None, outside: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.between = nn.LayerNorm(WIDTH), Attention(), between
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if between == "norm":
            self.inner = nn.LayerNorm(2 * WIDTH)
        elif between is not None:
            self.own = nn.Parameter(torch.tensor([0.3] if between == "prelu" else 0.3))
        if outside:
            self.scale = nn.Parameter(torch.tensor(0.7))
        self.outside = outside
        self.hidden = False  # in a checkpoint of which the graph shows nothing
        self.used = True  # `own`

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x_in = x * self.scale if self.outside else x
        y = checkpoint(self.inside, x_in, use_reentrant=True) if self.hidden else self.inside(x_in)
        return x + (y * self.scale.tanh() if self.outside else y)

    def inside(self, x: Tensor) -> Tensor:
        if self.between == "both":
            x = x * self.own
        y = self.up(x)
        changed: dict[str | None, Callable[[], Tensor]] = {
            None: y.relu,
            "prelu": lambda: F.prelu(y, self.own),
            "swish": lambda: y * (self.own * y).sigmoid(),
            "both": lambda: y * (self.own * y).sigmoid(),
            "norm": lambda: self.inner(y),
            "softmax": lambda: (y * 2).softmax(-1),
            "rms": lambda: y * self.own * y.pow(2).mean(-1, keepdim=True).rsqrt(),
            "over positions": lambda: y * y.softmax(1) + self.own,
            "gate": lambda: y * (x.sum(-1, keepdim=True) * self.own).sigmoid(),  # of whole activations
        }
        return self.down(changed[self.between if self.used else None]())  # type: ignore[no-any-return]


class Last(nn.Module):
    """What is done with hidden states, the head and its logits; `number` is its own."""

    def __init__(self, what: str | None) -> None:
        super().__init__()
        self.what = what
        shape = {"vocabulary bias": (VOCABULARY,), "one scale": (1,)}.get(what or "", ())
        if what is not None:
            self.number = nn.Parameter(torch.full(shape, 1.3))

    def forward(self, x: Tensor, head: nn.Module) -> Tensor:
        if self.what == "hidden":
            return x * self.number
        logits = head(x)
        changed: dict[str | None, Callable[[], Tensor]] = {
            None: lambda: logits,
            "scale": lambda: logits * self.number,
            "one scale": lambda: logits * self.number,
            "temperature": lambda: logits / self.number.exp(),
            "cap": lambda: torch.tanh(logits / self.number) * self.number,
            "bias": lambda: logits + self.number,
            "vocabulary bias": lambda: logits + self.number,
            "from hidden": lambda: logits * (x.mean() * self.number).exp(),
        }
        return changed[self.what]()


class Tiny(nn.Module):
    def __init__(
        self, between: str | None = None, outside: bool = False, last: str | None = None, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(between, outside) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.last = Last(last)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.last(x, self.head)  # type: ignore[no-any-return]


def mean(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def penalised(model: Tiny, logits: Tensor, ids: Tensor) -> Tensor:
    return mean(logits, ids) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def penalised_scales(model: Tiny, logits: Tensor, ids: Tensor) -> Tensor:
    scales = [p for name, p in model.named_parameters() if name.endswith("scale")]
    return mean(logits, ids) + 0.01 * torch.stack(scales).square().sum()


def penalised_number(model: Tiny, logits: Tensor, ids: Tensor) -> Tensor:
    return mean(logits, ids) + 0.01 * model.last.number.pow(2).sum()


def chunked(model: Tiny, hidden: Tensor, ids: Tensor) -> Tensor:
    """The cross entropy of hidden states, in two pieces, by the head's weight itself."""
    pieces = zip(hidden[:, :-1].flatten(0, 1).chunk(2), ids[:, 1:].flatten().chunk(2), strict=True)
    losses = [F.cross_entropy(x @ model.head.weight.t(), y, reduction="sum") for x, y in pieces]
    return torch.stack(losses).sum() / ids[:, 1:].numel()


def reading(model: Tiny, hidden: Tensor, ids: Tensor) -> Tensor:
    return (hidden @ model.head.weight.t()).pow(2).mean()


def by_head(model: Tiny, hidden: Tensor, ids: Tensor) -> Tensor:
    """As `chunked`, by the layer."""
    pieces = zip(hidden[:, :-1].flatten(0, 1).chunk(2), ids[:, 1:].flatten().chunk(2), strict=True)
    losses = [F.cross_entropy(model.head(x), y, reduction="sum") for x, y in pieces]
    return torch.stack(losses).sum() / ids[:, 1:].numel()


Loss = Callable[..., Tensor]
CASES: dict[str, tuple[dict[str, Any], Loss | None, dict[str, str]]] = {
    "plain": ({}, None, {}),
    "tied": ({"tied": True}, None, {}),
    "scale before and after": ({"outside": True}, None, {}),
    "prelu": ({"between": "prelu"}, None, {}),
    "swish": ({"between": "swish"}, None, {}),
    "both": ({"between": "both"}, None, {}),
    "scale": ({"last": "scale"}, None, {}),
    "scale of shape (1,)": ({"last": "one scale"}, None, {}),
    "temperature": ({"last": "temperature"}, None, {}),
    "soft cap": ({"last": "cap", "tied": True}, None, {}),
    "bias": ({"last": "bias"}, None, {}),
    "bias of the vocabulary": ({"last": "vocabulary bias"}, None, {}),
    "scale from hidden states": ({"last": "from hidden"}, None, {}),
    "style of a sum that is none": (
        {"outside": True}, None, {"blocks.*.norm": "replicated_with_grad_allreduce"}),
    "norm between": ({"between": "norm"}, None, {}),
    "softmax between": ({"between": "softmax"}, None, {}),
    "norm by hand between": ({"between": "rms"}, None, {}),
    "softmax over positions between": ({"between": "over positions"}, None, {}),
    "gate of whole activations": ({"between": "gate"}, None, {}),
    "chunked": ({"last": "hidden"}, chunked, {}),
    "chunked, head replicated": (
        {"last": "hidden"}, chunked, {"head": "replicate", "embed": "replicate"}),
    "reading the head": ({"last": "hidden"}, reading, {}),
    "by the head": ({"last": "hidden"}, by_head, {}),
    "penalty": ({}, penalised, {}),
    "penalty of the blocks' numbers": ({"outside": True}, penalised_scales, {}),
    "penalty of a number": ({"last": "scale"}, penalised_number, {}),
}  # fmt: skip
"""Options of the model, its loss where that is not the mean, and more of the plan."""
TP = {
    "both": "blocks.0.own",
    "norm between": "blocks.0.inner.weight cannot be used",
    "gate of whole activations": "embed.weight",
    "softmax between": "softmax goes along",
    "norm by hand between": "mean goes along",
    "chunked": "head.weight is read in a loss",
    "reading the head": "head.weight is read in a loss",
    "penalty": "is read in a loss",
}
_MIXES = "may not work on each position by itself"
BETWEEN = ("softmax between", "norm by hand between", "softmax over positions between")
BY_POSITION = (
    "scale before and after",
    "prelu",
    "swish",
    "both",
    "style of a sum that is none",
    "penalty of the blocks' numbers",
)
REFUSED: dict[str, dict[str, str]] = {
    "tp": TP,
    "sequence": {**TP, "gate of whole activations": _MIXES, **dict.fromkeys(BY_POSITION + BETWEEN, _MIXES)},
    "pp": {"penalty": "A penalty over weights", "penalty of the blocks' numbers": "blocks.0.scale"},
}
"""What is refused, and what the error says."""


def tiny(case: str) -> tuple[Tiny, Callable[[Any, Any], Tensor]]:
    options, loss, _ = CASES[case]
    torch.manual_seed(0)
    model = Tiny(**options).double()
    return model, mean if loss is None else functools.partial(loss, model)


def batch_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))


def settings(case: str, mesh: dict[str, Any], stage: int) -> dict[str, Any]:
    divided = mesh.get("tp", 1) > 1
    return {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": 2 // mesh.get("dp", 1)},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "clip": 0.5},
        "zero": {"min_bucket": 0, "stage": stage},
        "mesh": {**mesh, "tp_plan": {**PLAN, **CASES[case][2]} if divided else {}},
    }


def use(model: nn.Module, step: int, late: bool) -> None:
    """Have its blocks use their own numbers from the second step on."""
    for block in model.modules():
        if isinstance(block, Block):
            block.used = not late or step > 0


@functools.cache
def expected(case: str, late: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process."""
    model, loss_of = tiny(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        use(model, step, late)
        each = [loss_of(model(ids), ids) for ids in batch_of(step).split(2)]
        loss = torch.stack(each).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def run(
    rank: int, world: int, case: str, mesh: dict[str, Any], loop: str, stage: int = 2, late: bool = False,
    **sections: Any,
) -> None:  # fmt: skip
    """`loop`: the engine's, or one of the user's own that calls "engine.backward" or "loss.backward"."""
    model, loss_of = tiny(case)
    config = {**settings(case, mesh, stage), **sections}
    engine = polyreme.initialize(model, config, loss_fn=loss_of)
    losses = []
    for step in range(STEPS):
        use(engine.module, step, late)
        if loop == "refreshed":
            engine.refresh()
        ids = batch_of(step).chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]
        if loop in ("engine", "refreshed"):
            losses.append(engine.train_step((ids, ids)).loss)
            continue
        for each in ids.split(2):
            loss = loss_of(engine(each), each)
            engine.backward(loss) if loop == "engine.backward" else loss.backward()
        losses.append(engine.step().loss)
    weights = engine.state_dict()
    theirs = expected(case, late)
    torch.testing.assert_close(losses, theirs[0], rtol=1e-10, atol=1e-10)
    for name, tensor in theirs[1].items():
        torch.testing.assert_close(
            weights[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


MESHES = {"tp": {"tp": 2}, "sequence": {"tp": 2, "sequence_parallel": True}, "pp": {"pp": 2}}


def check(case: str, mesh: str, loop: str = "engine") -> None:
    refused = REFUSED[mesh].get(case)
    if refused is None:
        threads.run(2, run, case, MESHES[mesh], loop)
        return
    with pytest.raises(RanksFailed) as failed:
        threads.run(2, run, case, MESHES[mesh], loop)
    errors = [error for error in failed.value.exceptions.values() if isinstance(error, ModelError)]
    assert len(errors) == (1 if mesh == "pp" else 2), failed.value
    assert all(refused in str(error) for error in errors), errors


RARE = {"scale of shape (1,)", "bias", "chunked, head replicated", "softmax over positions between"}
PENALTIES = {"penalty", "penalty of the blocks' numbers", "penalty of a number"}
USUAL = {
    "tp": {*CASES} - RARE,
    "sequence": {"tied", "soft cap", "scale from hidden states", "norm between"},
    "pp": {"soft cap", "reading the head"} | PENALTIES,
}
"""What is tried without --all-cases."""
EACH = [
    pytest.param(case, mesh, marks=() if case in USUAL[mesh] else whole)  # type: ignore[arg-type]
    for mesh in MESHES for case in CASES
]  # fmt: skip


@pytest.mark.parametrize(("case", "mesh"), EACH)
def test_a_model_trains_as_on_one_process_or_is_refused(case: str, mesh: str) -> None:
    check(case, mesh)


@pytest.mark.parametrize(
    ("case", "loop"),
    [("prelu", "loss.backward"), ("both", "engine.backward"), ("reading the head", "loss.backward"),
     ("penalty", "engine.backward"), ("soft cap", "engine.backward"), ("chunked", "engine.backward"),
     ("by the head", "loss.backward")],
)  # fmt: skip
def test_a_loop_of_the_users_own_does_the_same(case: str, loop: str) -> None:
    check(case, "tp", loop)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=whole), 2, 3])
def test_a_penalty_over_weights_is_right_over_dp(stage: int) -> None:
    if stage < 3:
        threads.run(2, run, "penalty", {"dp": 2}, "engine", stage)
        return
    with pytest.raises(RanksFailed, match="whose numbers are not in memory"):
        threads.run(2, run, "penalty", {"dp": 2}, "engine", stage)


class Middle(nn.Module):
    """Does `between` to the outputs of its column layer, from `late` forwards on."""

    def __init__(self, between: Callable[[Tensor], Tensor], late: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between, self.late, self.number = between, late, nn.Parameter(torch.tensor(0.7))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        hidden = self.up(x)
        hidden = self.between(hidden) if self.forwards >= self.late else hidden.tanh()
        return self.down(hidden)  # type: ignore[no-any-return]


def heads(hidden: Tensor) -> Tensor:
    """An attention of heads of 2, of which no plan knows, and which has a matrix for each."""
    q = hidden.unflatten(-1, (-1, 2)).transpose(0, 1)
    turned = torch.cat([-q[..., 1:], q[..., :1]], -1)
    scores = torch.einsum("hqd,hkd->hqk", q + turned, q).softmax(-1)
    return (scores @ q).transpose(0, 1).reshape(len(hidden), -1)


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg_norm": lambda h: h / torch.linalg.norm(h, dim=-1, keepdim=True),
    "einsum": lambda h: h / torch.einsum("bi,bi->b", h, h)[:, None],
    "matmul": lambda h: h / (h @ h.mT).diagonal()[:, None],
    "matmul ": lambda h: h * (h @ torch.ones(h.shape[-1], 1, dtype=h.dtype)),
    "cdist": lambda h: (-torch.cdist(h, h)).exp() @ h,
    "cosine_similarity": lambda h: h * F.cosine_similarity(h, torch.ones_like(h), dim=-1)[:, None],
    "flip": lambda h: h.tanh() * h.flip(-1),
    "roll": lambda h: h.roll(1, -1),
    "sort": lambda h: h.sort(-1).values,
    "__getitem__": lambda h: torch.cat([h[..., :1].tanh(), h[..., 1:]], -1),
    "median": lambda h: h * (h > h.median(-1, keepdim=True).values),
    "max_pool1d": lambda h: F.max_pool1d(h[:, None], 3, 1, 1)[:, 0],
    "group_norm": lambda h: F.group_norm(h, 2),
    "chunk": lambda h: torch.cat([h.chunk(2, -1)[0].sigmoid(), h.chunk(2, -1)[1]], -1),
    "cat": lambda h: torch.cat([h.relu(), (-h).relu()], -1)[..., ::2],
    "softmax": lambda h: h.mT.softmax(0).mT,
    "softmax ": lambda h: h.unflatten(-1, (-1, 2)).softmax(1).flatten(1),
    "view": lambda h: h.view(len(h), 4, -1).softmax(-1).flatten(1),
    "unflatten": lambda h: h.unflatten(-1, (4, -1)).softmax(-1).flatten(1),
}
FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(len(h), 4, 2).softmax(-1).flatten(1),
    "topk": lambda h: h * (h >= h.topk(6, -1).values[..., -1:]),
    "add": lambda h: h + torch.ones(8),
    "assert": lambda h: h if h.shape[-1] == 8 else torch.broadcast_to(h, (len(h), 8)),
}
"""What fails where there are fewer numbers than the model was written for."""
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": heads,
    "over samples": lambda h: h.softmax(0) * h.mean(0) + h.flip(0) + h.mT.softmax(-1).mT,
    "elementwise": lambda h: (
        torch.where(h > 0, h, 0.1 * h).clamp(max=6) * F.silu(h) / (1 + h.abs()) + h.exp()
    ),
    "of a detached one": lambda h: h - h.detach() * 0.5 if torch.isfinite(h).all() else h,
}


MIDDLE = {"up": "colwise", "down": "rowwise"}


def samples(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


def middle(
    rank: int,
    world: int,
    model: Callable[[], nn.Module],
    loss: Loss,
    steps: int = 1,
    first: str = "",
    styles: Mapping[str, str] = MIDDLE,
) -> list[float]:
    """Losses of steps, or of evaluations that come `first`."""
    torch.manual_seed(0)
    made = model().double()
    config = {
        "precision": {"compute": "fp64"},
        "batch": {"size": 4},
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": "none"},
        "mesh": {"tp": world, "tp_plan": styles if world > 1 else {}},
    }
    engine = polyreme.initialize(made, config, loss_fn=functools.partial(loss, made))
    if first:
        return [engine.eval_step(samples(0)).loss]
    return [engine.train_step(samples(step)).loss for step in range(steps)]


def plainly(model: nn.Module, output: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(output, wanted)


def each_refused(expected: str, *args: Any) -> None:
    with pytest.raises(RanksFailed) as failed:
        threads.run(2, middle, *args)
    errors = failed.value.exceptions.values()
    assert len(errors) == 2 and all(isinstance(error, ModelError) for error in errors), failed.value
    assert all(expected in str(error) for error in errors), failed.value


@pytest.mark.parametrize("name", ALONG)
def test_what_goes_along_the_divided_dimension_is_refused(name: str) -> None:
    each_refused(f"{name.strip()} goes along", lambda: Middle(ALONG[name]), plainly)


class Fixed(nn.Module):
    """A block that does `between`, and one that any plan divides."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fixed, self.other = Middle(between), Middle(torch.tanh)
        del self.fixed.number, self.other.number

    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.pad(self.fixed(x), (0, 2)))  # type: ignore[no-any-return]


class Counted(Fixed):
    """An attention without keys, by `count` of its heads, or by a number that nobody changes."""

    def __init__(self, own: bool) -> None:
        super().__init__(
            lambda h: h.view(len(h), self.fixed.num_heads if own else 4, -1).softmax(-1).flatten(1)
        )
        self.fixed.num_heads = 4  # type: ignore[assignment]


EACH_OF_BOTH = {"*.up": "colwise", "*.down": "rowwise"}


@pytest.mark.parametrize("name", FIXED)
def test_a_size_that_a_model_counts_on_is_refused_with_a_way(name: str) -> None:
    model = functools.partial(Fixed, FIXED[name])
    each_refused("fixed cannot be used under tensor parallelism", model, plainly, 1, "", EACH_OF_BOTH)
    each_refused('mesh.tp_plan."fixed" = "replicate"', model, plainly, 1, "", EACH_OF_BOTH)
    args = model, plainly, 3, "", {**EACH_OF_BOTH, "fixed": "replicate"}
    torch.testing.assert_close(threads.run(2, middle, *args)[0], middle(0, 1, *args), rtol=1e-10, atol=1e-10)


def test_heads_are_counted_as_a_rank_has_them() -> None:
    each_refused("view goes along", lambda: Counted(own=False), plainly, 1, "", EACH_OF_BOTH)
    args = (lambda: Counted(own=True), plainly, 3, "", EACH_OF_BOTH)
    torch.testing.assert_close(threads.run(2, middle, *args)[0], middle(0, 1, *args), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", RIGHT)
def test_what_works_on_parts_alone_is_let_be(name: str) -> None:
    args = (lambda: Middle(RIGHT[name]), plainly, 3)
    torch.testing.assert_close(threads.run(2, middle, *args)[0], middle(0, 1, *args), rtol=1e-10, atol=1e-10)


class Later(Middle):
    """Uses its number on whole activations as well, from the third forward on."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh() * self.number)
        self.forwards += 1
        return y * self.number if self.forwards >= 3 else y


class Branch(Middle):
    """Uses its number on whole activations as well, from the sixth forward on."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh() * self.number)
        self.forwards += 1
        return y * self.number if self.forwards >= 6 else y


def test_a_use_that_changes_in_a_later_step_is_found() -> None:
    each_refused("softmax goes along", lambda: Middle(lambda h: h.softmax(-1), late=3), plainly, 3)
    each_refused("number: used on activations", lambda: Later(torch.tanh), plainly, 3)


def counting(rank: int, world: int, model: Callable[[], nn.Module], loss: Loss) -> int:
    """Steps until an error."""
    done = 0

    def counted(*args: Any) -> Tensor:
        nonlocal done
        done += 1
        return loss(*args, done)

    with contextlib.suppress(ModelError):
        middle(rank, world, model, counted, 9)
    return done


def without_step(model: nn.Module, output: Tensor, wanted: Tensor, step: int) -> Tensor:
    return F.mse_loss(output, wanted)


def late_penalty(model: nn.Module, output: Tensor, wanted: Tensor, step: int) -> Tensor:
    loss = F.mse_loss(output, wanted)
    return loss if step < 6 else loss + 0.01 * model.up.weight.detach().pow(2).sum()  # type: ignore[union-attr, operator]


def test_a_use_that_changes_between_two_looks_is_found_at_once() -> None:
    assert threads.run(2, counting, lambda: Branch(torch.tanh), without_step) == [6, 6]
    assert threads.run(2, counting, lambda: Middle(torch.tanh), late_penalty) == [6, 6]
    # the forward itself is watched one step later
    along = lambda: Middle(lambda h: h + h.softmax(-1), late=6)  # noqa: E731
    assert threads.run(2, counting, along, without_step) == [6, 6]


def test_the_first_evaluation_is_watched() -> None:
    each_refused("softmax goes along", lambda: Middle(lambda h: h.softmax(-1)), plainly, 1, "evaluation")


def without_gradients(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.up.weight.norm()  # type: ignore[union-attr, operator, no-any-return]


READS: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda model: sum(p.detach().pow(2).sum() for p in model.parameters()),
    "data": lambda model: sum(p.data.pow(2).sum() for p in model.parameters()),
    "no_grad": without_gradients,
    "state_dict": lambda model: model.state_dict()["up.weight"].norm(),
}


@pytest.mark.parametrize("how", READS)
def test_a_loss_that_reads_a_divided_weight_without_gradients_is_refused(how: str) -> None:
    def loss(model: nn.Module, output: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(output, wanted) + 0.01 * READS[how](model)

    each_refused("up.weight is read in a loss", lambda: Middle(torch.tanh), loss)


def in_own_loop(rank: int, world: int, read: Callable[[Any], Any], stage: int = 2) -> list[float]:
    """Losses of steps whose penalty is what `read` gives of the engine, or of the model of one process."""
    torch.manual_seed(0)
    model = Middle(torch.tanh).double()
    config = {
        "precision": {"compute": "fp64"},
        "batch": {"size": 4},
        "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": "none"},
        "zero": {"stage": stage},
        "mesh": {"tp": world, "tp_plan": {"up": "colwise", "down": "rowwise"} if world > 1 else {}},
    }
    engine = polyreme.initialize(model, config)
    losses = []
    for step in range(6):
        x, wanted = samples(step)
        loss = F.mse_loss(engine(x), wanted)
        if step >= 4:
            loss = loss + 0.01 * read(engine)
        engine.backward(loss)
        engine.module.up.weight.detach().norm()  # this rank's part, to be logged
        losses.append(engine.step().loss)
    return losses


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda x, like: x.to(like),
    "type_as": lambda x, like: x.type_as(like),
    "ones": lambda x, like: x * like.new_ones(1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [2, 3])
def test_dtype_and_device_of_a_divided_weight_are_read_at_any_time(form: str, stage: int) -> None:
    def read(engine: Any) -> Tensor:
        made = FORMS[form](torch.ones(2), engine.module.up.weight)
        assert made.dtype == torch.float64
        return made.sum()

    alone = in_own_loop(0, 1, read)
    torch.testing.assert_close(threads.run(2, in_own_loop, read, stage)[0], alone, rtol=1e-10, atol=1e-10)

    def early() -> nn.Module:
        model = Middle(lambda h: FORMS[form](h.tanh(), model.up.weight))
        return model

    expected = middle(0, 1, early, plainly, 2)
    torch.testing.assert_close(threads.run(2, middle, early, plainly, 2)[0], expected, rtol=1e-10, atol=1e-10)


def looked_at(engine: Any) -> float:
    """What needs no numbers of a divided weight goes on between a forward and its backward; what does, once a
    call without gradients has come."""
    weight = engine.module.up.weight
    place = weight.data_ptr(), weight.untyped_storage().data_ptr(), weight.type()
    assert place[0] == place[1] and place[2] == "torch.DoubleTensor" and "grad" in dir(weight)
    for read in repr, lambda weight: weight.type(torch.float32), lambda _: engine.module.state_dict():
        with pytest.raises(ModelError, match=r"up\.weight is read in a loss, or between a forward and its"):
            read(weight)
    with torch.no_grad():
        engine(samples(0)[0])
    assert "tensor(" in repr(weight)
    return weight.norm().item()


def left_without_backward(rank: int, world: int) -> float:
    torch.manual_seed(0)
    mesh = {"tp": world, "tp_plan": {"up": "colwise", "down": "rowwise"}}
    engine = polyreme.initialize(
        Middle(torch.tanh).double(), {"mesh": mesh, "precision": {"compute": "fp64"}}
    )
    engine(samples(0)[0])
    return looked_at(engine)


def test_what_needs_no_numbers_of_a_divided_weight_is_let_through() -> None:
    assert all(threads.run(2, left_without_backward))


def of_whole(engine: Any) -> Any:
    return sum(weight.pow(2).sum() for weight in engine.state_dict().values())


@pytest.mark.parametrize("how", READS)
def test_a_penalty_in_a_loop_of_the_users_own_is_refused_without_gradients(how: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        threads.run(2, in_own_loop, lambda engine: READS[how](engine.module))
    errors = failed.value.exceptions.values()
    assert len(errors) == 2 and all("up.weight is read in a loss" in str(error) for error in errors), (
        failed.value
    )


def test_a_penalty_of_whole_copies_has_the_value_of_one_process() -> None:
    alone = in_own_loop(0, 1, of_whole)
    torch.testing.assert_close(threads.run(2, in_own_loop, of_whole)[0], alone, rtol=1e-10, atol=1e-10)


def drift(rank: int, world: int, mesh: dict[str, Any], stage: int, name: str, how: str) -> int:
    """Steps until the error of copies that differ; 0 for none."""
    model, loss_of = tiny("tied")
    engine = polyreme.initialize(model, settings("tied", mesh, stage), loss_fn=loss_of)
    parameter = dict(engine.module.named_parameters()).get(name)
    if parameter is not None and how == "hook":
        parameter.register_hook(lambda grad: grad * (1 + engine.mesh.rank % 2))
    for step in range(3):
        ids = batch_of(step).chunk(engine.mesh.dp.size)[engine.mesh.dp.rank]
        try:
            engine.train_step((ids, ids))
        except ModelError as error:
            assert name in str(error) and "has not the same numbers any more" in str(error)
            return step + 1
        if parameter is not None and how == "write" and engine.mesh.rank % 2:
            parameter.data.mul_(1.01)
        elif parameter is not None and how == "rounding" and engine.mesh.rank % 2:
            parameter.data.mul_(1 + 1e-12)
    return 0


@pytest.mark.parametrize(
    ("mesh", "stage", "name", "how", "found"),
    [
        ({"tp": 2}, 2, "blocks.1.norm.weight", "hook", 2),
        pytest.param({"tp": 2}, 2, "blocks.1.norm.weight", "write", 2, marks=whole),
        ({"tp": 2}, 2, "blocks.1.norm.weight", "rounding", 0),
        ({"tp": 2, "dp": 2}, 3, "blocks.0.down.bias", "hook", 2),
        ({"pp": 2}, 2, "embed.weight", "write", 2),
    ],
)
def test_copies_that_drift_apart_are_named(
    mesh: dict[str, Any], stage: int, name: str, how: str, found: int
) -> None:
    world = mesh.get("dp", 1) * 2
    assert threads.run(world, drift, mesh, stage, name, how) == [found] * world


def unlike(rank: int, world: int, case: str, each: list[dict[str, Any]]) -> None:
    for options in each:
        run(rank, world, case, **options)


def test_the_gradients_of_a_number_are_whole_on_every_layout() -> None:
    tp: dict[str, Any] = {"mesh": {"tp": 2}}
    two = [
        {**tp, "loop": "refreshed", "late": True},
        {**tp, "loop": "engine", "memory": {"activations": "recompute"}},
        {**tp, "loop": "engine.backward", "late": True},
        {**tp, "loop": "refreshed"},
    ]
    threads.run(2, unlike, "prelu", two if ALL in os.environ else two[:2])
    schedule = {"pipeline": {"schedule": "zb-h1"}}
    four = [
        {"mesh": {"tp": 2, "dp": 2}, "loop": "engine", "stage": 3, "late": True},
        {"mesh": {"tp": 2, "pp": 2}, "loop": "engine", "late": True, **schedule},
        {"mesh": {"tp": 2, "pp": 2}, "loop": "engine", **schedule},
        {"mesh": {"tp": 2, "dp": 2}, "loop": "engine", "stage": 0},
    ]
    threads.run(4, unlike, "swish", four if ALL in os.environ else four[:2])
    if ALL in os.environ:
        threads.run(4, unlike, "soft cap", four[2:])


def hidden(rank: int, world: int, loop: str) -> None:
    model, loss_of = tiny("prelu")
    for block in model.blocks:
        block.hidden = True
    engine = polyreme.initialize(model, settings("prelu", {"tp": 2}, 0), loss_fn=loss_of)
    ids = batch_of(0)
    if loop == "engine":
        engine.train_step((ids, ids))
    else:
        loss_of(engine(ids[:2]), ids[:2]).backward()


@pytest.mark.parametrize("loop", ["engine", "loss.backward"])
def test_what_the_graph_does_not_show_is_refused(loop: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        threads.run(2, hidden, loop)
    errors = failed.value.exceptions.values()
    assert len(errors) == 2 and all("use_reentrant" in str(error) for error in errors), failed.value


def test_every_function_that_communicates_says_what_it_makes_of_gradients() -> None:
    functions = [
        each for module in (ops, vocab_parallel_loss) for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Function) and each.__module__ == module.__name__
    ]  # fmt: skip
    assert len(functions) == 7 and all(hasattr(each, "passes") for each in functions)


class Logits(LlamaForCausalLM):
    """A language model that returns its logits alone."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
        super().__init__(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).logits  # type: ignore[no-any-return]


def hooked(rank: int, world: int, where: str, hook: str) -> list[Any]:
    """Losses, and the gradients that a user's hook sees of logits."""
    model, seen = Logits().double(), []
    config = {"mesh": {"tp": world}, "precision": {"compute": "fp64"}, "batch": {"size": SAMPLES}}
    engine = polyreme.initialize(
        model, config, loss_fn=lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    )
    register = getattr(model.get_submodule(where), hook)
    register(lambda *arguments: seen.append(arguments[-1][0].clone()))
    ids = torch.arange(SAMPLES * 5).view(SAMPLES, 5) % VOCABULARY
    losses = [engine.train_step((ids, ids)).loss for _ in range(STEPS)]
    assert len(seen) == STEPS
    return [*losses, *seen]


@pytest.mark.parametrize("where", ["lm_head", ""])
@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_sees_whole_gradients_of_divided_logits(where: str, hook: str) -> None:
    alone = hooked(0, 1, where, hook)
    for divided in threads.run(2, hooked, where, hook):
        torch.testing.assert_close(divided, alone, rtol=1e-10, atol=1e-10)
