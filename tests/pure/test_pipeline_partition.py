"""A plan divides a model's blocks and parameters over stages, and leaves of the model on each what the stage
has."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import models
from cuttable import FAMILIES, GROUPED, Plain, family
from polyreme.deferred_init.replay import record
from polyreme.errors import ModelError
from polyreme.pipeline.partition import keep_stages, layers, partition_model


def test_tied_weights_are_on_both_stages() -> None:
    model = family("gpt2")
    split = partition_model(model, 3)
    both = ["transformer.wte.weight", "lm_head.weight"]
    assert split.tied == {both[0]: (0, 2)}
    for stage in range(3):
        part = copy.deepcopy(model)
        left = keep_stages(part, split, [stage])
        named = dict(part.named_parameters(remove_duplicate=False))
        assert [name in named for name in both] == [stage != 1] * 2 == [name in left for name in both]
        assert stage == 1 or named[both[0]] is named[both[1]]


def storages(model: nn.Module) -> int:
    """Bytes of every tensor that is found anywhere in the modules, each storage once."""
    found = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            if isinstance(value, Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "vit"])
def test_what_others_have_is_not_in_memory(name: str) -> None:
    model = family(name)
    split = partition_model(model, 3)
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    present = [n for n in names if 1 in split.stages_of[n]]
    gone = [weakref.ref(p) for n, p in model.named_parameters() if 1 not in split.stages_of[n]]
    left = keep_stages(model, split, [1])
    gc.collect()
    assert gone and all(ref() is None for ref in gone)
    assert (
        [n for n, _ in model.named_parameters(remove_duplicate=False)]
        == present
        == [n for n in names if n in left]
    )
    assert all(any(n.startswith(block + ".") for block in split.blocks_of(model, [1])) for n in present)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert storages(model) <= held + 8 * len(names)
    with pytest.raises(ModelError, match="another pipeline stage has"):
        copy.deepcopy(model)


def test_a_model_on_the_meta_device_is_cut_alike_and_filled_in_part() -> None:
    real = family("gpt2")
    recording = record(lambda: family("gpt2"), 0)
    split = partition_model(recording.module, 3)
    assert (split.bounds, dict(split.stages_of), split.tied) == (
        partition_model(real, 3).bounds,
        partition_model(real, 3).stages_of,
        partition_model(real, 3).tied,
    )
    left = keep_stages(recording.module, split, [2], torch.device("cpu"), torch.float64)
    assert all(t.is_meta for t in (*recording.module.parameters(), *recording.module.buffers()))
    made: dict[str, Tensor] = {}
    recording.replay(lambda name, tensor: made.update({name: tensor.clone()}) if name in left else None)
    expected = real.state_dict()
    assert {n for n, _ in recording.module.named_parameters()} == set(made)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


# ---- models that are lists


def test_a_list_of_builders_builds_on_a_stage_only_what_it_has() -> None:
    builders = [
        lambda: nn.Embedding(9, 6),
        *[lambda: nn.Linear(6, 6)] * 3,
        nn.ReLU(),
        lambda: nn.Linear(6, 9),
    ]
    build = layers(builders)
    torch.manual_seed(3)
    expected = nn.Sequential(*(b if isinstance(b, nn.Module) else b() for b in builders)).state_dict()
    recording = record(build, 3)
    split = partition_model(recording.module, 2)
    left = keep_stages(recording.module, split, [1])
    made: dict[str, Tensor] = {}
    recording.replay(lambda name, tensor: made.update({name: tensor.clone()}) if name in left else None)
    assert set(made) == set(left) == {name for name in expected if int(name[0]) >= split.bounds[1]}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


def test_a_list_of_layers_is_a_sequential() -> None:
    assert isinstance(layers([nn.Linear(2, 2), nn.ReLU()]), nn.Sequential)
    with pytest.raises(ModelError, match="layer 1 of the list builds a int"):
        layers([nn.ReLU, lambda: 3])()  # type: ignore[operator, list-item]
    with pytest.raises(ModelError, match="layer 1 of the list is a str: give a"):
        layers([nn.ReLU, "nn.Linear"])  # type: ignore[list-item]


# ---- what is refused before anything runs


def mixture() -> nn.Module:
    architecture, config, settings = FAMILIES["mixtral"]
    return getattr(transformers, architecture)(
        getattr(transformers, config)(**settings, output_router_logits=True)
    )


def layer_drop() -> nn.Module:
    _, _, settings = FAMILIES["opt"]
    return transformers.OPTForCausalLM(transformers.OPTConfig(**settings, layerdrop=0.1))


def two_lists() -> nn.Module:
    model = Plain()
    model.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            Plain,
            {"stages": 5},
            r"4 blocks \(blocks\), too few for 5 stages .*: lower mesh\.pp, "
            r"or have fewer stages on each rank \(pipeline",
        ),
        (
            lambda: models.llama(num_hidden_layers=1),
            {"stages": 2},
            r"1 block \(model\.layers\), too few for 2 stages",
        ),
        (Plain, {"stages": 0}, "into 0 stages"),
        (
            Plain,
            {"stages": 2, "counts": [1, 2]},
            r"given as \[1, 2\], but must be 2 numbers of at least 1 with the sum 4",
        ),
        (Plain, {"stages": 2, "counts": [4, 0]}, "at least 1"),
        (Plain, {"stages": 2, "counts": [1, 1, 2]}, "2 numbers"),
        (Plain, {"stages": 2, "costs": [1.0]}, "1 costs for 4 blocks"),
        (lambda: nn.Linear(2, 2), {"stages": 2}, "no repeated blocks"),
        (models.ConvNet, {"stages": 2}, "no repeated blocks"),
        (two_lists, {"stages": 2}, "several lists of blocks, blocks, others"),
        (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2), {"stages": 2}, "0 and 1 are one module"),
        (mixture, {"stages": 2}, "with output_router_logits the model takes something from every block"),
        (
            lambda: models.llama(output_hidden_states=True),
            {"stages": 2},
            "with output_hidden_states the model takes",
        ),
        (
            lambda: models.llama(attn_implementation="eager", output_attentions=True),
            {"stages": 2},
            "with output_attentions the",
        ),
        (layer_drop, {"stages": 2}, r"with layerdrop = 0\.1 the model skips blocks at random"),
    ],
)
def test_what_cannot_be_planned(
    build: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        partition_model(build(), **options)


def test_a_plan_changes_nothing() -> None:
    model = family("gpt2-dropout")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    partition_model(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert list(before) == list(model.state_dict()) and "forward" not in vars(model)


# ---- balance


def test_balance_makes_the_most_expensive_stage_as_cheap_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    for blocks, stages in itertools.product(range(1, 8), range(1, 8)):
        if stages > blocks:
            continue
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(blocks)))
        costs = torch.randint(1, 9, (blocks,), generator=generator).tolist()

        def worth(bounds: Sequence[int], costs: Sequence[int] = costs) -> tuple[int, int]:
            parts = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            return max(parts), sum(part**2 for part in parts)

        possible = [(0, *cuts, blocks) for cuts in itertools.combinations(range(1, blocks), stages - 1)]
        split = partition_model(model, stages, costs=costs)
        if stages > 1:
            assert worth(split.bounds) == min(map(worth, possible))


def test_balance_counts_head_and_for_memory_embedding() -> None:
    small, large = (
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 8, "vocab_size": size})
        )
        for size in (8, 2000)
    )
    assert (
        partition_model(small, 4).bounds == partition_model(small, 4, memory=True).bounds == (0, 2, 4, 6, 8)
    )
    assert partition_model(large, 4).bounds == (0, 2, 4, 7, 8)
    assert partition_model(large, 4, memory=True).bounds == (0, 1, 4, 7, 8)
