"""Models that are built unlike a plain stack of blocks train as they do in plain PyTorch, at every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import models
import polyreme
import threads
import training
from polyreme.errors import ConfigError
from pool import Ranks

WIDTH, STEPS = 9, 3
LAYOUTS: list[dict[str, Any]] = [
    {"zero": {"stage": 0, "min_bucket": 0}},
    {"zero": {"stage": 2, "min_bucket": 0, "bucket_size": 700}, "memory": {"states": "host"}},
    {"zero": {"stage": 3, "min_bucket": 0, "reduce_every": "step"}},
    {"zero": {"stage": 3, "min_bucket": 0, "release": "always", "prefetch": 2}},
    {
        "zero": {"stage": 3, "min_bucket": 0, "prefetch": 0, "persistence_threshold": WIDTH},
        "memory": {"activations": "recompute"},
    },
]


class Block(nn.Module):
    """A residual MLP with odd sizes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 4), nn.Linear(width + 4, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Four blocks between an input and an output layer; the cases below change one thing of it each."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Adapter(Block):
    """A frozen base with a trainable low-rank correction (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class Adapted(Stack):
    """Everything but the adapters is frozen, so that the first block's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__(Adapter)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)


class Quantized(Block):
    """A frozen int8 matrix and its frozen scale beside trainable half-precision ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up.half()
        self.down.bfloat16()
        self.matrix = nn.Parameter(
            torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(torch.rand(WIDTH) / 100, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.matrix.to(x.dtype) * self.scale[:, None])


class Optional(Block):
    """Parameters that only some inputs use: those whose `column` starts with a positive number (in `inputs`,
    by step and rank)."""

    def __init__(self, column: int = 0) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(WIDTH))
        self.after = nn.Parameter(torch.rand(3, WIDTH))
        self.column = column

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        x = super().forward(x) + self.after.sum(0)
        return x * self.extra if flags[0, self.column] > 0 else x


class Conditional(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional(i) for i in range(4))
        self.never = nn.Parameter(torch.ones(70))

    def forward(self, x: Tensor) -> Tensor:
        flags, x = x, self.first(x)
        for block in self.blocks:
            x = block(x, flags)
        return self.last(x)


class Repeated(Stack):
    """Blocks called twice, in another order than registered, in forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at in (1, 0, 1, 3, 2, 2, 0):
            x = self.blocks[at](x)
        return self.last(x)


class Buffered(Stack):
    """Buffers of every kind, and a batch norm that only reads its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64).eval()
        self.norm.running_mean.uniform_()
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.rand(WIDTH)), persistent=False)
        self.register_buffer("row", torch.rand(1, dtype=torch.float64).expand(WIDTH))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) * self.mask + self.phase.real.to(x.dtype) * self.row)


class Odd(Stack):
    """Parameters of size zero (used and unused), scalars, and a zero-sized one that lies where the next one
    begins."""

    def __init__(self) -> None:
        super().__init__()
        self.empty_unused = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(5, 0))
        for block in self.blocks:
            block.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scalar + self.empty.sum()


class OnlyEmptyOutside(nn.Module):
    """Outside the blocks there is nothing but a parameter of size zero."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.nothing.sum()


class Outside(Stack):
    """Weights of blocks that are used outside their forward: before it, right after it, and at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) @ self.blocks[2].up.weight[:WIDTH]
        x = self.blocks[0](x)
        x = torch.tanh(x @ self.blocks[0].up.weight[:WIDTH])
        for block in self.blocks[1:]:
            x = block(x)
        x = torch.tanh(x @ self.blocks[3].up.weight[:WIDTH])
        return self.last(x) @ self.blocks[1].up.weight[:WIDTH]


class OutsideLater(Stack):
    """Weights of blocks that are used behind their forward, in the second step alone."""

    def forward(self, x: Tensor) -> Tensor:
        uses = bool(x[0, 2] > 0)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if uses:
                x = torch.tanh(F.linear(x, block.up.weight)) @ block.up.weight
        return self.last(x)


@dataclass
class Out:
    hidden: Tensor
    more: dict[str, Tensor]


class InDataclass(Block):
    def forward(self, x: Tensor) -> Out:
        return Out(super().forward(x), {"used": self.up.bias})


class InTuple(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None, [self.down.weight.sum()]


class Structured(Stack):
    """Blocks that return a dataclass, a tuple, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InDataclass(), InTuple(), InDataclass(), InTuple()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            out = block(x)
            x, more = (out.hidden, out.more["used"].sum()) if isinstance(out, Out) else (out[0], out[2][0])
            x = x + more
        return self.last(x)


class InOut(Stack):
    """The model's own output is a dataclass."""

    def forward(self, x: Tensor) -> Out:  # type: ignore[override]
        return Out(super().forward(x), {})


class Passing(Block):
    """Hands on a tensor that the first block made, as T5 does with its position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = torch.tanh(self.bias(x)) @ self.down.weight @ self.up.weight if bias is None else bias
        return super().forward(x) * bias, bias


class Passed(Stack):
    def __init__(self) -> None:
        super().__init__(Passing)
        for block in self.blocks[1:]:
            del block.bias

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return self.last(x)


class InPlace(Stack):
    """Activations that are changed in place between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).add_(1.0).mul_(0.9)
        return self.last(x.relu_())


class Lookup(nn.Module):
    """An embedding, with sparse gradients where asked."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(21, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x[:, :3] * 5).long().clamp(-10, 10) + 10).sum(1)
        for block in self.blocks:
            x = block(x)
        return x


class TiedToBlock(Stack):
    """A weight that a block shares with the model's outside, and one that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH + 4, bias=False)
        self.head.weight = self.blocks[0].up.weight
        self.blocks[3].down.weight = self.blocks[1].down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))[:, :WIDTH]


CASES: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "adapted": Adapted,
    "quantized": lambda: Stack(Quantized),
    "conditional": Conditional,
    "repeated": Repeated,
    "buffered": Buffered,
    "odd": Odd,
    "only-empty-outside": OnlyEmptyOutside,
    "outside": Outside,
    "outside-later": OutsideLater,
    "structured": Structured,
    "in-out": InOut,
    "passed": Passed,
    "in-place": InPlace,
    "dense-lookup": lambda: Lookup(False),
    "tied-to-block": TiedToBlock,
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name]()


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.hidden if isinstance(output, Out) else output, target)


def inputs(step: int, world: int) -> tuple[Tensor, Tensor]:
    """A global batch. The sign of the first row of each rank's micro-batches in columns 0 to 3 says what
    `Conditional` uses: never, always, in the second step only, on the last rank only (in the block whose
    gradients come first, so that ranks differ in when they reduce it)."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(training.SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    for rank, part in enumerate(x.chunk(world)):
        part[:, :4] = part[:, :4].abs() * torch.tensor(
            [-1, 1, 1 if step == 1 else -1, 1 if rank == world - 1 else -1]
        )
    return x, y


def reference(model: nn.Module, world: int) -> training.Run:
    """Plain PyTorch on the same micro-batches; parameters that none of them uses have no gradient."""
    model = model.double()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2]},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [t.chunk(world) for t in inputs(step, world)]
        losses = [loss_fn(model(x), y) / world for x, y in zip(*parts, strict=True)]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        records.append((sum(losses).item(), norm.item()))
    return records, model.state_dict()


def train(rank: int, world: int, name: str, layouts: list[dict[str, Any]]) -> list[training.Run]:
    runs = []
    for layout in layouts:
        config = training.config(world, **layout, precision={"compute": "fp64"})
        engine = polyreme.initialize(build(name, seed=100 * rank), config, loss_fn=loss_fn)
        records = []
        for step in range(STEPS):
            result = engine.train_step(models.share(inputs(step, world), rank, world))
            records.append((result.loss, result.grad_norm))
            before = engine.state_dict() if step == STEPS - 1 else {}
            engine.eval_step(models.share(inputs(step + 10, world), rank, world))
        after = engine.state_dict()
        assert all(torch.equal(t, before[key]) for key, t in after.items())
        runs.append((records, after))
    return runs


def assert_equals(run: training.Run, expected: training.Run, what: object) -> None:
    torch.testing.assert_close(run[0], expected[0], rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")
    assert run[1].keys() == expected[1].keys(), what
    for name, tensor in expected[1].items():
        torch.testing.assert_close(run[1][name], tensor, rtol=1e-10, atol=1e-10, check_dtype=False,
                                   msg=lambda m, n=name: f"{what}, {n}: {m}")  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_trains_as_in_plain_pytorch(ranks: Ranks, name: str) -> None:
    """On ranks that begin with different weights: rank 0's count, everywhere and for buffers too. One layout
    of each model runs on processes, the others on threads."""
    at = list(CASES).index(name) % len(LAYOUTS)
    on_processes, others = [LAYOUTS[at]], LAYOUTS[:at] + LAYOUTS[at + 1 :]
    by_rank = zip(ranks(2, train, name, on_processes), threads.run(2, train, name, others), strict=True)
    expected = reference(build(name), 2)
    for rank, runs in enumerate(by_rank):
        for layout, run in zip(on_processes + others, chain(*runs), strict=True):
            assert_equals(run, expected, (rank, layout))


def sparse(rank: int, world: int) -> list[training.Run]:
    runs = []
    for is_sparse in (False, True):
        for layout in (LAYOUTS[1], LAYOUTS[3]):
            torch.manual_seed(0)
            config = training.config(world, 2, **layout, precision={"compute": "fp64"})
            engine = polyreme.initialize(Lookup(is_sparse), config, loss_fn=loss_fn)
            results = [engine.train_step(models.share(inputs(step, world), rank, world)) for step in range(2)]
            runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))
    return runs


def test_sparse_gradients() -> None:
    """Of an embedding, over several micro-batches, equal dense ones."""
    for runs in threads.run(2, sparse):
        for run in runs[1:]:
            assert_equals(run, runs[0], "sparse")


def own_recomputation(rank: int, world: int) -> list[training.Run]:
    runs = []
    for checkpointed in (False, True):
        for stage in (0, 3):
            model = models.build("llama", torch.float32)
            if checkpointed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            config = training.config(world, 2, zero={"stage": stage, "reduce_every": "step"})
            engine = polyreme.initialize(model, config, loss_fn=models.causal_loss)
            batches = [models.batch_of("llama", training.SAMPLES, step) for step in range(2)]
            results = [engine.train_step(models.share(batch, rank, world)) for batch in batches]
            runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))
    return runs


def test_the_models_own_recomputation() -> None:
    """Hugging Face's gradient checkpointing, whose recomputation calls whole blocks with their hooks, changes
    no bit."""
    for runs in threads.run(2, own_recomputation):
        assert not [d for run in runs[1:] for d in training.differences(runs[0], run)]


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        )
        return func(*args, **(kwargs or {}))


def recomputation(rank: int, world: int) -> tuple[list[training.Run], list[tuple[int, int]]]:
    """Runs with nothing, everything, every second and (of three blocks) only the first block recomputed, then
    with kept operators; and how often each ran its MLPs' forward and its matrix products in a step."""
    runs, counts = [], []
    recompute = {"activations": "recompute"}
    for memory in (
        {},
        recompute,
        {**recompute, "recompute_every": 2},
        {**recompute, "recompute_every": 3},
        {**recompute, "recompute_save": ["mm"]},
        {**recompute, "recompute_save": ["attention", "aten.silu"]},
    ):
        config = training.config(world, zero={"stage": 3}, memory=memory)
        engine = polyreme.initialize(models.build("llama", torch.float32), config, loss_fn=models.causal_loss)
        calls = [0]
        for block in engine.module.model.layers:
            block.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        share = models.share(models.batch_of("llama", training.SAMPLES), rank, world)
        results = [engine.train_step(share)]
        with Counting() as products:
            results.append(engine.train_step(share))
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))
        counts.append((calls[0] // 2, products.count))
    return runs, counts


def test_recomputation_changes_no_bit(ranks: Ranks) -> None:
    for runs, counts in ranks(2, recomputation):
        assert not [d for run in runs[1:] for d in training.differences(runs[0], run)]
        assert [forwards for forwards, _ in counts] == [3, 6, 5, 4, 6, 6]
        plain, everything, half, _, kept, _ = (products for _, products in counts)
        assert plain == kept < half < everything, counts


def unknown_operator(rank: int, world: int) -> str:
    memory = {"activations": "recompute", "recompute_save": ["no_such_operator"]}
    with pytest.raises(ConfigError) as caught:
        polyreme.initialize(models.build("dag"), training.config(world, memory=memory))
    return str(caught.value)


def test_what_cannot_be_recomputed_is_refused(ranks: Ranks) -> None:
    message = ranks(1, unknown_operator)[0]
    assert "no_such_operator" in message and "memory.recompute_save" in message


def compiled(rank: int, world: int) -> list[training.Run]:
    runs = []
    monkeypatch = pytest.MonkeyPatch()
    # all but the C++ compiler
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for compile in (False, True):
        torch.manual_seed(0)
        config = {
            **training.config(world, zero={"stage": 3}, precision={"compute": "fp64"}),
            "compile": compile,
        }
        engine = polyreme.initialize(Stack(), config, loss_fn=loss_fn)
        results = [engine.train_step(models.share(inputs(step, world), rank, world)) for step in range(2)]
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))
    monkeypatch.undo()
    return runs


def test_compiled_blocks(ranks: Ranks) -> None:
    for plain, made in ranks(2, compiled):
        assert_equals(made, plain, "compiled")


def forwards_before_backward(rank: int, world: int) -> list[float]:
    """Two forwards of the engine for one backward, after one whose backward never comes."""
    norms = []
    for stage in (0, 3):
        torch.manual_seed(0)
        engine = polyreme.initialize(
            Stack(), training.config(world, zero={"stage": stage}, precision={"compute": "fp64"})
        )
        for step in range(2):
            x, y = models.share(inputs(step, world), rank, world)
            engine(y)
            engine.backward(loss_fn(engine(x) - engine(x.flip(0)), y))
            norms.append(engine.step().grad_norm)
    return norms


def test_several_forwards_for_one_backward() -> None:
    for norms in threads.run(2, forwards_before_backward):
        assert norms[:2] == norms[2:]
