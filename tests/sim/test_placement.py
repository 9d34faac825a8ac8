"""Where a model lies, said for any rank of any mesh without memory for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from polyreme.config import Config
from polyreme.distributed.mesh import SimulatedMesh
from polyreme.models import huggingface
from polyreme.optim.groups import Group, Recipe, recipe
from polyreme.placement.buckets import bucket_specs
from polyreme.placement.dividing import cut, divide
from polyreme.step.settings import pipeline_rank, placement_settings
from polyreme.zero.bucket_spec import BucketSpec

META, CPU = torch.device("meta"), torch.device("cpu")
AXES = {"dp": 1, "tp": 1, "pp": 1}
WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def resolved(mesh: Mapping[str, int], **more: Mapping[str, Any]) -> Config:
    sizes: dict[str, Any] = AXES | dict(mesh)
    if sizes["tp"] > 1:
        sizes["tp_plan"] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    given = {"mesh": sizes, "batch": {"size": 4 * sizes["dp"], "micro": 1}, **more}
    given = {"zero": {"stage": 3, "min_bucket": 0}, **given}
    return Config.load(given).resolve(math.prod(AXES[name] * sizes[name] for name in AXES))


def specs_of(model: nn.Module, config: Config, rank: int) -> dict[tuple[str, ...], list[BucketSpec]]:
    """The specs of one rank, of a model whose parameters are divided in place."""
    mesh = SimulatedMesh.of(config.axes, config.mesh.order, rank, CPU)
    pipeline, settings = pipeline_rank(config, mesh), placement_settings(config, mesh.device)
    made = recipe(model, config.optimizer, None)
    blocks: Sequence[str] = list(huggingface.find_blocks(model))
    partition = cut(model, None, len(pipeline.rank_of), settings, mesh)
    division = divide(model, partition, pipeline, settings, mesh)
    if partition is not None:
        blocks = list(partition.blocks_of(model, pipeline.mine))
    return bucket_specs(model, blocks, made, settings, mesh.loss, division)


def meta_model() -> nn.Module:
    with META:
        return Model()


def owned(spec: BucketSpec) -> int:
    """How many of this rank's numbers count in a sum over all ranks of the model."""
    counted = spec.mask(CPU)
    if isinstance(counted, torch.Tensor):
        return int(counted.sum())
    return sum(part.size for part in spec.layout.ranges(spec.axis.rank)) if counted else 0


def test_units_buckets_and_all_names_of_their_parameters() -> None:
    specs = specs_of(meta_model(), resolved({"dp": 2}), 1)
    assert list(specs) == [(), ("blocks.0",), ("blocks.1",), ("blocks.2",)]
    (root,) = specs[()]
    assert [*root.names] == [("table.weight", "head.weight")]
    assert [name for names in specs["blocks.1",][0].names for name in names] == [
        "blocks.1.up.weight",
        "blocks.1.down.weight",
        "blocks.1.up.bias",
        "blocks.1.down.bias",
    ]
    assert [spec.residency.params for each in specs.values() for spec in each] == ["shard"] * 4


def test_a_spec_is_never_changed() -> None:
    (spec,) = specs_of(meta_model(), resolved({"dp": 2}), 0)["blocks.0",]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.at = 1  # type: ignore[misc]


def test_a_thousand_ranks_share_the_same_buckets() -> None:
    """Their shards have every number once."""
    model, config = meta_model(), resolved({"dp": 1024})
    parameters = sum(p.numel() for p in model.parameters())
    held, layouts = 0, set()
    for rank in range(1024):
        specs = [spec for each in specs_of(model, config, rank).values() for spec in each]
        held += sum(owned(spec) for spec in specs)
        layouts.add(tuple(spec.layout for spec in specs))
    assert len(layouts) == 1
    assert held == parameters


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2, "pp": 2}])
def test_over_all_ranks_each_number_counts_once(mesh: dict[str, int]) -> None:
    """Those that tensor parallelism leaves whole, and tied ones of two stages, on one rank alone."""
    config, model = resolved(mesh), meta_model()
    specs = [
        spec
        for rank in range(math.prod(mesh.values()))
        for each in specs_of(meta_model(), config, rank).values()
        for spec in each
    ]
    assert sum(map(owned, specs)) == sum(p.numel() for p in model.parameters())
    assert {spec.tie is not None for spec in specs} == ({True, False} if "pp" in mesh else {False})


@pytest.mark.parametrize(
    ("states", "away"), [("device", 0.0), ("host", 1.0), ({"host": 0.5, "device": 0.5}, 0.5)]
)
def test_which_buckets_have_their_states_in_a_store(states: Any, away: float) -> None:
    config = resolved({"dp": 2}, memory={"states": states})
    specs = [spec for each in specs_of(meta_model(), config, 0).values() for spec in each]
    sizes = [spec.layout.size for spec in specs]
    found = sum(spec.layout.size for spec in specs if "states" in spec.offloaded) / sum(sizes)
    assert abs(found - away) <= max(sizes) / 2 / sum(sizes)


def test_small_parameters_that_stay_whole_are_of_the_root() -> None:
    config = resolved({"dp": 2}, zero={"stage": 3, "min_bucket": 0, "persistence_threshold": 4 * WIDTH})
    whole = [spec for spec in specs_of(meta_model(), config, 0)[()] if spec.residency.params == "full"]
    assert {name for spec in whole for names in spec.names for name in names} == {
        f"blocks.{i}.{each}.bias" for i in range(3) for each in ("up", "down")
    }


def test_a_model_without_an_optimizer_has_its_place() -> None:
    """As for a model that only computes: nothing of it is trained, or has states."""
    model, config = meta_model(), resolved({"dp": 4})
    mesh = SimulatedMesh.of(config.axes, config.mesh.order, 3, CPU)
    names = [name for name, _ in model.named_parameters()]
    alone = Recipe((Group(nn.Identity, "element"),), dict.fromkeys(names, 0), left_out=frozenset(names))
    settings = placement_settings(config, CPU)
    division = divide(model, None, pipeline_rank(config, mesh), settings, mesh)
    specs = bucket_specs(model, ["blocks.0", "blocks.1"], alone, settings, mesh.loss, division)
    assert not any(spec.trainable for each in specs.values() for spec in each)
    assert sum(spec.layout.used for each in specs.values() for spec in each) == sum(
        p.numel() for p in model.parameters()
    )


def test_tensor_parallel_ranks_count_their_parts_and_the_first_what_all_have() -> None:
    first, last = (specs_of(meta_model(), resolved({"tp": 2}), rank)["blocks.0",] for rank in (0, 1))
    assert [spec.counted for spec in first] == [True, True]
    assert [spec.counted for spec in last] == [True, False]
