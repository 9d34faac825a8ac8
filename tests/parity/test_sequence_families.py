"""Models that need more than parts of their batches, divided over `mesh.cp`: rotary tables that follow the
longest position, images, adapters, attention on both sides. A step by plain gradient descent with a rate of 1
gives the loss and the weights of plain transformers in one process, so that all gradients are compared:
float64, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from test_sequence_parity import SMALL, Wide, model_of, refusal
from test_sequence_parity import check as check_records
from test_sequence_parity import settings as divided_settings
from torch import Tensor, nn

import models
import polyreme
import threads
from examples import whole
from polyreme.errors import ConfigError, ModelError
from polyreme.models.huggingface import training_arguments
from tiny_families import build, tiny

IGNORED, PICTURE, PADDING = -100, 5, 0
Batch = dict[str, Tensor]


def settings(cp: int, **sections: Any) -> dict[str, Any]:
    return {
        "precision": {"compute": "fp64"},
        "batch": {"size": 2},
        "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
        "mesh": {"cp": cp},
        "zero": {"min_bucket": 0},
        **sections,
    }


def divided(
    rank: int, world: int, model: nn.Module, batches: list[Batch], sections: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    with polyreme.initialize(copy.deepcopy(model), settings(world, **sections)) as engine, Wide():
        return [engine.train_step([each]).loss for each in batches], engine.state_dict()


def check(
    ranks: int, model: nn.Module, batches: list[Batch], told: Iterable[list[Batch]] = (), **sections: Any
) -> None:
    """Compare with a plain model that is given `told`: of each batch, what makes a mean over its labels."""
    plain, expected = copy.deepcopy(model), []
    with Wide():
        for parts in told or [[each] for each in batches]:
            plain.zero_grad()
            counts = [int((each["labels"] != IGNORED).sum()) for each in parts]
            losses = [plain(**each, **training_arguments(plain)).loss for each in parts]
            loss = sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
            loss.backward()
            expected.append(loss.item())
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= parameter.grad
    for losses, found in threads.run(ranks, divided, model, batches, sections):
        assert losses == pytest.approx(expected, abs=1e-10, rel=0)
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=1e-10, msg=name)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, models.VOCABULARY, shape, generator=generator)


def rotary(kind: str, **values: Any) -> nn.Module:
    """A model of 16 positions as it was first trained."""
    half = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [1.5 + i for i in range(half)]}
    more = factors if values["rope_type"] == "longrope" else {}
    rope = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8, **more, **values}
    config = transformers.AutoConfig.for_model(
        kind, **{**SMALL, "max_position_embeddings": 8, "pad_token_id": 0}, rope_parameters=rope
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=whole)])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_tables_follow_the_longest_position_of_all_ranks(rope: str, ranks: int) -> None:
    """Through lengths that grow, and fall below those of the first training."""
    batches = [
        {"input_ids": ids, "labels": ids} for ids in (ids_of(2, n, seed=n) for n in (13, 16, 10, 5, 12))
    ]
    check(ranks, rotary("llama", rope_type=rope), batches)


# ---- mixers and other axes


@whole
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_mixers_with_other_axes(family: str) -> None:
    for kind, mesh, zero in (("packed", {"pp": 2}, {}), ("left padded", {"dp": 2}, {"stage": 3})):
        check_records(family, kind, divided_settings({"cp": 2, **mesh}, zero=zero))


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("nemotron_h", marks=whole)])
def test_mixers_that_are_computed_again(family: str) -> None:
    check_records(family, "packed", divided_settings({"cp": 2}, memory={"activations": "recompute"}))


def recomputed(rank: int, world: int, model: nn.Module, batches: list[Batch]) -> list[list[float]]:
    """Losses where blocks are kept, and where they are computed again."""
    found = []
    for activations in ("keep", "recompute"):
        config = settings(world, memory={"activations": activations}, precision={"compute": "fp32"})
        with polyreme.initialize(copy.deepcopy(model).float(), config) as engine:
            found.append([engine.train_step([each]).loss for each in batches])
    return found


@whole
@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3"])
def test_blocks_that_are_computed_again_are_the_same(kind: str) -> None:
    model = model_of(kind) if kind == "qwen3_next" else pictures(kind)
    ids = ids_of(2, 13)
    batches = [{"input_ids": ids, "labels": ids}] if kind == "qwen3_next" else [with_images(15, 0, kind)]
    for kept, again in threads.run(2, recomputed, model, batches * 2):
        assert kept == again
        assert kept[0] != kept[1]


# ---- images


def pictures(kind: str) -> nn.Module:
    """A model that sees images, of 4 tokens each."""
    text = tiny(transformers.CONFIG_MAPPING[f"{kind}_text"], num_hidden_layers=2)
    config = tiny(transformers.CONFIG_MAPPING[kind], image_token_id=PICTURE, text_config=text)
    config.mm_tokens_per_image = 4
    return build(config)


def with_images(length: int, seed: int, kind: str = "") -> Batch:
    """Two samples, the first with two images of 4 tokens, the second with one, and padding after it."""
    ids, generator = ids_of(2, length, seed=seed), torch.Generator().manual_seed(seed)
    for row, begin in ((0, 1), (0, 7), (1, 2)):
        ids[row, begin : begin + 4] = PICTURE
    mask, labels = torch.ones_like(ids), ids.masked_fill(ids == PICTURE, IGNORED)
    mask[1, -3:], labels[1, -3:], ids[1, -3:] = 0, IGNORED, PADDING
    labels[:, 0] = IGNORED  # which a shift drops
    if kind == "gemma3":
        pixels = torch.randn(3, 3, 8, 8, generator=generator).double()
        types = (ids == PICTURE).long()
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "token_type_ids": types,
            "pixel_values": pixels,
        }
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == PICTURE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 3),
        "pixel_values": torch.randn(3 * 16, 3 * 2 * 2 * 2, generator=generator).double(),
    }


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        *((2, kind) for kind in ("qwen2_5_vl", "gemma3")),
        *(pytest.param(4, kind, marks=whole) for kind in ("qwen2_5_vl", "qwen2_vl", "gemma3")),
    ],
)
def test_images_are_merged_before_sequences_are_cut(ranks: int, kind: str) -> None:
    """Lengths that the ranks divide and that they do not. Positions in images are the model's own; so are
    masks by which the tokens of an image see each other."""
    check(ranks, pictures(kind), [with_images(15, 0, kind), with_images(16, 1, kind)])


TOWERS = {"qwen2_5_vl": "model.visual", "gemma3": "model.vision_tower"}
"""Models of images, which every rank computes whole."""


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("gemma3", marks=whole)])
def test_images_with_tensor_parallelism(kind: str) -> None:
    mesh = {"cp": 2, "tp": 2, "tp_plan": {TOWERS[kind]: "replicate"}}
    check(4, pictures(kind), [with_images(15, 0, kind), with_images(16, 1, kind)], mesh=mesh)


def test_images_over_a_pipeline_are_refused_before_any_work() -> None:
    config = settings(2, mesh={"cp": 2, "pp": 2})
    said = refusal(ModelError, partial(pictures, "qwen2_5_vl"), config, ranks=4)
    assert "has several lists of blocks" in said and "set mesh.pp = 1" in said


def test_packed_documents_with_images() -> None:
    """By positions in three directions, which begin anew with each document."""
    model, parts = pictures("qwen2_5_vl"), [_document(0, 9), _document(1, 7)]
    index: Callable[..., Any] = model.model.get_rope_index  # type: ignore[union-attr, assignment]
    both = {
        name: torch.cat([each[name] for each in parts], int(name not in ("pixel_values", "image_grid_thw")))
        for name in parts[0]
    }
    both["position_ids"] = torch.cat([index(**_places(each))[0] for each in parts], 2)
    check(2, model, [both], [parts], batch={"size": 1})


def _document(seed: int, length: int) -> Batch:
    """A sample with one image."""
    ids = ids_of(1, length, seed=seed)
    ids[0, 2:6] = PICTURE
    labels = ids.masked_fill(ids == PICTURE, IGNORED)
    labels[:, 0] = IGNORED
    pixels = torch.randn(16, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(seed)).double()
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": (ids == PICTURE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": pixels,
    }


def _places(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}


# ---- adapters, and attention on both sides


def test_adapters_of_peft() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model: Any = peft.get_peft_model(models.llama(num_hidden_layers=2), config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which is zero at first
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    ids = [ids_of(2, 13, seed=seed) for seed in range(2)]
    check(2, model, [{"input_ids": each, "labels": each} for each in ids])


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=whole)])
def test_attention_on_both_sides(kind: str) -> None:
    """Of models that predict tokens where they are, of which RoBERTa's count positions from 2."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.AutoConfig.for_model(kind, **SMALL, **off)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config).double().train()
    lengths, ids = (5, 8), ids_of(1, 13)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = [{"input_ids": each, "labels": each} for each in ids.split(lengths, 1)]
    check(2, model, [{"input_ids": ids, "labels": ids, "position_ids": places}], [parts], batch={"size": 1})


# ---- what is refused


def test_masks_that_an_attention_makes_are_refused() -> None:
    make = partial(build, tiny(transformers.CONFIG_MAPPING["doge"]))
    assert "a mask of its own" in refusal(ModelError, make, settings(2, batch={"size": 4, "micro": 2}))


def test_a_decoder_that_says_it_is_not_causal_is_refused() -> None:
    make = partial(build, tiny(transformers.CONFIG_MAPPING["bigbird_pegasus"]))
    assert "is_causal = False" in refusal(ModelError, make, settings(2, batch={"size": 4, "micro": 2}))


def test_a_loss_of_whole_sequences_is_refused() -> None:
    make = partial(build, tiny(transformers.CONFIG_MAPPING["qwen2_audio"]))
    config = settings(2, batch={"size": 4, "micro": 2})
    assert "computes its loss by itself" in refusal(ConfigError, make, config)
