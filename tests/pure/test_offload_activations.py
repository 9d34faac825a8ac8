"""What blocks were given, moved away and brought back: the same bits, the device's memory really freed, space
bounded, faults told."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from polyreme.errors import ModelError, TierError
from polyreme.files.direct_io import ALIGNMENT
from polyreme.models.patches import Patches
from polyreme.offload import host
from polyreme.offload.activations import ActivationOffload
from polyreme.offload.space import Allocation, Space
from polyreme.step.memory.recomputation import measure, wrap_blocks

CPU = torch.device("cpu")
WIDTH, ROWS, BLOCKS = 32, 64, 5
HIDDEN = WIDTH * ROWS * 4  # bytes of what goes from block to block, in fp32


class Block(nn.Module):
    """Dropout, a running mean, a mask and a memory that all blocks are given; notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.given: list[StorageWeakRef] = []

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        self.given.append(StorageWeakRef(x.untyped_storage()))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.dropout(
            torch.tanh(self.linear(x) * extra["mask"] + extra["memory"][0])
        ) * self.mean.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        extra = {"mask": (x > 0).to(x.dtype), "memory": (hidden.tanh(),), "scale": 2.0}
        for block in self.blocks:
            hidden = block(hidden, extra=extra)
        return hidden.square().sum()

    def alive(self) -> list[bool]:
        """Of the last call of each block: whether the storage of its first argument is alive."""
        return [not block.given[-1].expired() for block in self.blocks]  # type: ignore[union-attr, operator]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def wrapped(model: Net, offload: ActivationOffload | None, **options: Any) -> list[nn.Module]:
    blocks = {str(i): block for i, block in enumerate(model.blocks)}
    return wrap_blocks(
        model, blocks, True, options.get("every", 1), options.get("keep", ()), False, offload, Patches()
    )


def inputs(seed: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: buffer.clone() for name, buffer in model.named_buffers()}, **gradients}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def steps(
    offload: ActivationOffload | None,
    dtype: torch.dtype = torch.float32,
    recompute: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    model = net(dtype)
    if recompute:
        wrapped(model, offload, **options)
    for step in range(2):
        model(inputs(step, dtype=dtype)).backward()
    return state(model)


@pytest.fixture(params=["host", "files"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> ActivationOffload:
    return ActivationOffload(CPU, tmp_path / "made" if request.param == "files" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_keeping(offload: ActivationOffload, dtype: torch.dtype) -> None:
    kept = steps(None, dtype, recompute=False)
    assert_same(steps(None, dtype), kept)
    assert_same(steps(offload, dtype), kept)


@pytest.mark.parametrize("options", [{"every": 2}, {"keep": ["mm"]}])
def test_every_second_block_and_kept_operators(offload: ActivationOffload, options: dict[str, Any]) -> None:
    assert_same(steps(offload, **options), steps(None, recompute=False))


def test_memory_is_freed_between_forward_and_backward(offload: ActivationOffload) -> None:
    """Of all blocks' inputs only the last one's is left on the device; the shared ones, which it has too,
    were not moved."""
    plain, model = net(), net()
    with measure(wrapped(plain, None), plain.parameters()) as kept:
        plain(inputs(0))
    recomputed = wrapped(model, offload)
    for step in range(2):
        with measure(recomputed, model.parameters(), offload) as saved:
            loss = model(inputs(step))
        assert model.alive() == [False] * (BLOCKS - 1) + [True]
        assert saved.moved == (BLOCKS - 1) * HIDDEN and saved.bytes == kept.bytes - saved.moved
        assert offload.traffic.written == (step + 1) * saved.moved
        loss.backward()
        # some are read before they are in a file
        assert offload.traffic.read == offload.traffic.written or offload.tier == "files"
    assert offload.disk == (saved.moved if offload.tier == "files" else 0)
    # one to read, two ahead, or two to write; once more
    assert offload.memory <= (4 * HIDDEN if offload.tier == "files" else saved.moved)


def test_interleaved_microbatches_reuse_their_space(offload: ActivationOffload) -> None:
    """In the order of a pipeline: what the next backward begins with stays, what others end with is moved and
    read ahead of its use."""
    order = [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 1), ("B", 2), ("B", 3)]
    coming = [(0, 0), (0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 3), None]
    taken = []
    results = []
    for moved in (None, offload):
        model = net()
        wrapped(model, moved)
        for _ in range(3):
            losses = {}
            for (what, i), following in zip(order, coming, strict=True):
                if moved is not None:
                    moved.at(0, i, following)
                if what == "F":
                    losses[i] = model(inputs(i))
                    if moved is not None:
                        end = moved._end(following)
                        assert end is not None
                        assert [call() is end for call in moved._on_device] == {0: [True], 3: [False]}.get(
                            i, [True, False]
                        )
                        assert all(
                            stored.bytes is not None or stored.opened is not None for stored in end.storages
                        )
                        del end
                else:
                    losses.pop(i).backward()
            if moved is not None:
                taken.append((moved.memory, moved.disk))
        results.append(state(model))
    assert_same(*results)
    assert taken[0][1] == taken[1][1] == taken[2][1]
    if offload.tier == "host":
        assert taken[1][0] == taken[2][0]
    else:  # how many buffers wait to be written depends on the disk
        assert all(memory < disk for memory, disk in taken)
    assert not offload._known


def test_what_blocks_share_goes_out_once_and_back_once(offload: ActivationOffload) -> None:
    model = net()
    wrapped(model, offload)
    offload.at(0, 0)
    first = model(inputs(0))
    offload.at(0, 1)
    # the mask (ROWS x WIDTH) and the memory of the first go out, with its last block's input
    second = model(inputs(1))
    assert offload.traffic.written == (2 * BLOCKS - 1 + 2) * HIDDEN
    second.backward()
    first.backward()
    assert offload.traffic.read <= offload.traffic.written


class Strided(nn.Module):
    """Notes the geometry of what it is given, whatever the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, *tensors: Tensor, same: Tensor, other: float) -> Tensor:
        self.seen.append(
            [(t.stride(), t.storage_offset(), t.dtype, t.requires_grad) for t in tensors]
            + [tensors[0] is same, other]
        )
        return sum((t.float() * self.weight).sin().sum() for t in tensors) + self.weight * 0


def test_views_come_back_as_they_were(offload: ActivationOffload) -> None:
    block = Strided()
    wrap_blocks(block, {"0": block}, True, 1, (), False, offload, Patches())
    base = torch.randn(6, 8, requires_grad=True)
    whole = base * 2
    tensors = [
        whole.t(),
        whole[1:3, ::2],
        whole[:, :1].expand(6, 5),
        torch.arange(6)[2:],
        torch.randn(4, dtype=torch.float64),
        whole,
    ]
    loss = block(*tensors, same=tensors[0], other=1.5)
    expected = (torch.cos(whole.detach()) * 2).mul_(2)  # from the transposed and the whole one
    expected[1:3, ::2] += 2 * torch.cos(whole.detach()[1:3, ::2])
    expected[:, 0] += 2 * 5 * torch.cos(whole.detach()[:, 0])
    del whole, tensors
    offload.at(0, 1)
    offload.keep(())  # another forward begins
    assert offload.traffic.written == sum(map(paged(offload), (6 * 8 * 4, 6 * 8, 4 * 8)))
    loss.backward()
    assert block.seen[0] == block.seen[1] and len(block.seen) == 2
    torch.testing.assert_close(base.grad, expected)


def paged(offload: ActivationOffload) -> Callable[[int], int]:
    """Bytes that move for so many."""
    return lambda nbytes: -(-nbytes // ALIGNMENT) * ALIGNMENT if offload.tier == "files" else nbytes


def test_what_lives_on_anyway_stays() -> None:
    parameter, buffer = nn.Parameter(torch.ones(3)), torch.ones(3)
    offload = ActivationOffload(CPU)
    offload.leave([parameter, buffer])
    conjugate, empty = torch.ones(2, dtype=torch.complex64).conj(), torch.empty(0)
    value = [parameter, buffer[1:], parameter.detach(), conjugate, empty, "text"]
    call = offload.keep(value)
    offload.keep(())
    assert offload.traffic.written == 0
    assert all(a is b for a, b in zip(call.back(), value, strict=True))


def test_a_change_in_place_is_refused(offload: ActivationOffload) -> None:
    x = torch.ones(4)
    call = offload.keep([x])
    x.add_(1)
    with pytest.raises(ModelError, match=r"of shape \(4,\) .* was changed in place"):
        offload.keep(())
    with pytest.raises(ModelError, match="was changed in place"):
        call.back()
    del call
    changed = offload.keep([x])  # is another record
    offload.keep(())
    assert changed.back()[0].tolist() == [2.0] * 4


def test_a_backward_twice_and_none_at_all(offload: ActivationOffload) -> None:
    model, plain = net(), net()
    wrapped(model, offload)
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        each(inputs(5))  # whose backward never comes
        lost = each(inputs(6))
        loss = each(inputs(7))
        del lost
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(state(each))
    assert_same(*results)
    del loss
    gc.collect()
    assert not offload._known


def test_space_is_bounded_when_shapes_change(offload: ActivationOffload) -> None:
    model = net()
    wrapped(model, offload)
    sizes = [*range(40, 240, 20), *range(220, 40, -60)]
    for step, rows in enumerate(sizes):
        model(inputs(0, rows)).backward()
        largest = -(-max(sizes[: step + 1]) * WIDTH * 4 // ALIGNMENT) * ALIGNMENT
        assert max(offload.disk, offload.memory) <= 2 * (BLOCKS - 1) * largest


def test_places_never_overlap() -> None:
    draw = random.Random(0)
    space = Space(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), lambda memory: None)
    places: list[tuple[Allocation, int]] = []

    def memory(place: Allocation) -> Tensor:
        backing: Tensor = place.segment.backing
        return backing[place.start : place.stop]

    for i in range(600):
        if places and draw.random() < (0.35 if i % 200 < 100 else 0.65):
            place, mark = places.pop(draw.randrange(len(places)))
            assert (memory(place) == mark).all()
            space.free(place)
        else:
            place = space.take(draw.randrange(1, 5 * ALIGNMENT))
            memory(place).fill_(i % 251)
            places.append((place, i % 251))
    assert all((memory(place) == mark).all() for place, mark in places)
    for place, _ in places:
        space.free(place)
    total = space.nbytes
    space.take(total + 1)
    assert space.nbytes < 2 * total + 2 * ALIGNMENT and len(space.segments) == 1


# ---- faults


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Makes the calls of os.`name` from the `after`-th on fail."""

    def fail(name: str, after: int) -> None:
        real, calls = getattr(os, name), [0]

        def call(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(errno.ENOSPC if name == "posix_fallocate" else errno.EIO, "made up")
            return real(*args)

        monkeypatch.setattr(os, name, call)

    yield fail


@pytest.mark.parametrize(("name", "after"), [("pwritev", 2), ("preadv", 1), ("posix_fallocate", 2)])
def test_a_failing_disk_is_told(
    tmp_path: Path, failing: Callable[[str, int], None], name: str, after: int
) -> None:
    model, folder = net(), tmp_path / "disk"
    offload = ActivationOffload(CPU, folder)
    wrapped(model, offload)
    failing(name, after)
    with pytest.raises(TierError, match=rf"{folder}: .*{HIDDEN:,} bytes .*made up") as caught:
        for _ in range(2):
            model(inputs(0)).backward()
    assert "free" in str(caught.value)
    assert not list(folder.iterdir())


def test_after_a_failure_the_next_step_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, offload = net(), ActivationOffload(CPU, tmp_path)
    wrapped(model, offload)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "made up")))
        with pytest.raises(TierError):
            model(inputs(0)).backward()
    gc.collect()
    for p in model.parameters():
        p.grad = None
    for block in model.blocks:
        block.mean.zero_()  # type: ignore[union-attr, operator]
    torch.manual_seed(3)
    model(inputs(1)).backward()
    plain = net()
    torch.manual_seed(3)
    plain(inputs(1)).backward()
    assert_same(state(model), state(plain))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=f"{tmp_path}/file/below cannot be used"):
        ActivationOffload(CPU, tmp_path / "file" / "below")


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available", lambda: 100)
    model = net()
    wrapped(model, ActivationOffload(CPU))
    with pytest.raises(TierError, match=rf"host memory: {HIDDEN:,} bytes needed for activations, 100 free"):
        model(inputs(0))
