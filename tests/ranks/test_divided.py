"""Models that are divided while they are built: the numbers of a plain build, in a part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyreme
from polyreme.errors import ModelError
from polyreme.zero.divided import building, gathered, make_whole, share_of
from pool import Ranks

WIDTH, BLOCKS = 32, 24
BLOCK = 4 * WIDTH * WIDTH


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had together, after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        found = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._seen.items()}
        self._seen = {key: ref for key, ref in self._seen.items() if found[key] is not None}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))


class Parent(nn.Module):
    """Writes to parameters of its children in all the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 5)
        self.own = nn.Parameter(torch.randn(7))
        self.attention = nn.MultiheadAttention(4, 2)  # sets a bias of its child to 0
        nn.init.xavier_uniform_(self.first.weight)
        self.second.weight.data.normal_()
        self.apply(self.reset)
        held = self.first.bias.data
        with torch.no_grad():
            self.own.mul_(2)
            self.second.weight.copy_(self.first.weight.T)
            held.fill_(0.5)
        self.tied = self.first
        self.to(torch.device("cpu"))

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.ones_(module.bias)


def nothing(parameter: nn.Parameter) -> None:
    """What `building` may be given."""


def peaks(rank: int, world: int) -> list[tuple[int, int]]:
    """The most bytes while a model is built, and until it is placed: plain, and divided."""
    config = {"batch": {"size": world}, "zero": {"stage": 3, "min_bucket": 0}, "optimizer": {"name": "sgd"}}
    found, weights = [], []
    for divided in (False, True):
        torch.manual_seed(rank)  # rank 0's numbers count
        with LiveBytes() as meter:
            with building(nothing) if divided else nullcontext():
                model = Stack()
            built = meter.peak
            engine = polyreme.initialize(model, config)
            found.append((built, meter.peak))
        weights.append(engine.state_dict())
        engine.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return found


def test_a_rank_keeps_its_part_alone(ranks: Ranks) -> None:
    for plain, (built, placed) in ranks(2, peaks):
        assert min(plain) >= BLOCKS * BLOCK
        assert built <= (BLOCKS / 2 + 4) * BLOCK  # one whole, its copy on its way, one emptied
        assert placed <= (BLOCKS / 2 + 5) * BLOCK


def same_numbers(rank: int, world: int) -> None:
    torch.manual_seed(3)
    plain, after = Parent(), torch.get_rng_state()
    torch.manual_seed(3 + rank)
    seen: list[nn.Parameter] = []
    with building(seen.append):
        model = Parent()
        assert rank or torch.equal(torch.get_rng_state(), after)
        with building(nothing):  # a part of the outer one
            other = nn.Linear(2, 2)
    assert {*map(id, seen)} == {*map(id, [*model.parameters(), *other.parameters()])}
    assert "__init_subclass__" not in vars(nn.Module) and not hasattr(nn.Linear.__init__, "__wrapped__")
    for (name, divided), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert divided.numel() == 0 and share_of(divided) is not None
        with gathered([divided]):
            assert type(divided) is nn.Parameter and torch.equal(divided, whole), name
    assert model.cpu() is model and {*model.state_dict()} == {*plain.state_dict()}
    own, weight = model.own, model.first.weight
    for touch in (own.sum, model.half, lambda: model.state_dict()["own"] + 1, lambda: model.first(own)):
        with pytest.raises(ModelError):
            touch()
    with gathered([own, weight], source=world - 1), torch.no_grad():
        own.fill_(rank)
    with gathered([own]):
        assert own.eq(world - 1).all()
    with pytest.raises(ModelError, match="in-place modification"), gathered([weight]), torch.no_grad():
        weight.add_(1)
    make_whole(model.parameters())
    assert torch.equal(weight, plain.first.weight) and own.eq(world - 1).all()


@pytest.mark.parametrize("world", [1, 2])
def test_numbers_are_those_of_a_plain_build(ranks: Ranks, world: int) -> None:
    ranks(world, same_numbers)


def fails(rank: int, world: int) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            raise KeyError("broken")

    with pytest.raises(KeyError), building(nothing):
        Broken()
    assert not hasattr(nn.Linear.__init__, "__wrapped__") and type(nn.Linear(2, 2).weight) is nn.Parameter


class Skipping(nn.Module):
    """Leaves numbers of its children as they come, for a checkpoint to set them."""

    def __init__(self) -> None:
        super().__init__()
        self.early = skip_init(nn.Linear, WIDTH, WIDTH)
        self.nested = skip_init(nn.TransformerEncoderLayer, WIDTH, 4)
        self.meta = nn.Linear(WIDTH, WIDTH, device="meta")


def skipping(rank: int, world: int) -> list[int]:
    """Elements of each parameter's part, and of the one behind that had no memory."""
    noted: list[nn.Parameter] = []
    with building(noted.append):
        model, late = Skipping(), skip_init(nn.Linear, WIDTH, 1)
    assert model.meta.weight.is_meta and share_of(model.meta.weight) is None
    parameters = [p for p in (*model.parameters(), *late.parameters()) if not p.is_meta]
    assert {*map(id, parameters)} == {*map(id, noted)} and all(p.numel() == 0 for p in parameters)
    shares = [share_of(parameter) for parameter in parameters]
    assert all(
        share is not None and share.shard.numel() == -(-share.shape.numel() // world) for share in shares
    )
    return [len(shares)]


def test_what_gets_memory_later_is_divided(ranks: Ranks) -> None:
    assert ranks(2, skipping) == [[16]] * 2


def test_a_build_that_fails_leaves_classes_as_they_were(ranks: Ranks) -> None:
    ranks(1, fails)
