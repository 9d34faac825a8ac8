"""Checkpoints of tensors that two axes divide, as experts are by their own and by the one of tensor
parallelism: whole in the file, and read by ranks that are divided in another way."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import threads
from polyreme.checkpoint.copy_on_write import BackgroundAccess
from polyreme.checkpoint.load import fill
from polyreme.checkpoint.manifest import Resume
from polyreme.checkpoint.open import open_source
from polyreme.checkpoint.save import Payload, write
from polyreme.distributed.mesh import Mesh
from polyreme.layout.bucket_layout import Cut
from polyreme.layout.region import MASTER, MODEL, Region

EXPERTS = torch.arange(4 * 6 * 10, dtype=torch.float32).view(4, 6, 10)
LAYOUTS = {
    "whole": Cut.whole((4, 6, 10), 1),
    "experts": Cut.even((4, 6, 10), 0, 4),
    "experts, then rows": Cut.even((4, 6, 10), 0, 2).then(Cut.even((2, 6, 10), 1, 2)),
    "columns, then experts": Cut.padded((4, 6, 10), 2, 4).then(Cut.even((4, 6, 3), 0, 2)),
    "rows that both copies of experts have": Cut.whole((4, 6, 10), 2).then(Cut.even((4, 6, 10), 1, 2)),
}
"""How ranks divide them, two axes at most."""


def regions(cut: Cut, place: int, shard: int, values: Tensor, shards: int = 2) -> list[Region]:
    """What shard `shard` of the part at `place` of a cut has, of weights and of masters, which ZeRO divides
    in another place."""
    local = cut.split(values, place).reshape(-1)
    edges = [i * local.numel() // shards for i in range(shards + 1)]
    start, stop = [*itertools.pairwise(edges)][shard]
    both = ((MODEL, local[start:stop].bfloat16()), (MASTER, local[start:stop].clone()))
    return [Region(kind, ["experts"], cut, place, start, data) for kind, data in both]


def saved(rank: int, size: int, layout: str, path: Path) -> None:
    cut, axis = LAYOUTS[layout], Mesh.open({"dp": size, "tp": 1, "pp": 1}, ("dp", "tp", "pp")).world
    payload = Payload(
        regions(cut, rank // 2, rank % 2, EXPERTS), [], lambda names: names[0], lambda _: None, Resume(),
        {}, 1 << 30, shared_files=True, weights="model",
    )  # fmt: skip
    write(path, payload, axis, BackgroundAccess())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_divides_them_then_and_now(layout: str, tmp_path: Path) -> None:
    threads.run(2 * LAYOUTS[layout].ways, saved, layout, path := tmp_path / "step-1")
    assert torch.equal(load_file(path / "model.safetensors")["experts"], EXPERTS.bfloat16())
    source = open_source(path)
    for other in LAYOUTS.values():
        for place, shard in itertools.product(range(other.ways), range(3)):
            wanted = regions(other, place, shard, EXPERTS, 3)
            empty = regions(other, place, shard, torch.zeros_like(EXPERTS), 3)
            fill(source, [(region.kind, "experts", region) for region in empty])
            for found, right in zip(empty, wanted, strict=True):
                assert isinstance(found.data, Tensor) and isinstance(right.data, Tensor)
                assert torch.equal(found.data, right.data)
