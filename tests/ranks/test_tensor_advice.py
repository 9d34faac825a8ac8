"""A model that cannot be divided over tensor parallelism by default trains as one process does with the plan
that its refusal gives: losses, gradient norms and weights, in float64."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import polyreme
import threads
from examples import ALL, whole
from models import VOCABULARY, Wide
from polyreme.errors import ModelError
from polyreme.tensor.plan import plan
from tiny_families import batch_for, build, skeleton, tiny

STEPS, SAMPLES, IMAGE, TOLERANCE = 3, 3, 5, 1e-10

IMAGES = {"gemma3": 4, "llava": 16, "qwen2_5_vl": 4, "qwen2_vl": 4}
"""Families that are given images, too: how many tokens each has."""
UNDECLARED = ("distilbert", "gpt_bigcode", "modernbert", "mpt", "persimmon")
"""Families that declare no plan."""
BLOCKS = (
    *UNDECLARED, "afmoe", "apertus", "aria_text", "cohere2_moe", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "gemma3", "gemma3n_text", "gemma4_text", "glm4_moe", "granitemoe", "granitemoeshared",
    "hy_v3", "internvl", "jamba", "lfm2", "llama4_text", "llava", "minimax_m2", "mixtral", "nemotron_h",
    "olmo_hybrid", "olmoe", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen3_vl_text", "solar_open", "voxtral", "idefics3", "smolvlm", "paligemma", "gemma4",
    "phimoe",
)  # fmt: skip
"""Families of whose blocks the plan divides something."""
LATENT = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text",
    "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "kimi_linear",
    "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text", "sarvam_mla", "youtu",
)  # fmt: skip
"""Those with multi-head latent attention."""
VOCABULARY_ALONE = ("gpt_oss",)
ATTENTION = "q_proj k_proj v_proj o_proj"
DEFAULT = ("apertus", "gemma4", "lfm2", "modernbert", "qwen2_vl")


def advised(text: str) -> dict[str, str]:
    """The table that a message gives."""
    lines = [line.strip() for line in text.splitlines()]
    table = [line for line in lines[lines.index("[mesh.tp_plan]") :] if line.startswith(("[", '"'))]
    styles: dict[str, str] = tomllib.loads("\n".join(table))["mesh"]["tp_plan"]
    return styles


def small(kind: str) -> Any:
    """Its config, with a picture's token inside of the vocabulary."""
    more = {} if kind not in IMAGES else {"image_token_id": IMAGE, "image_token_index": IMAGE}
    names = transformers.CONFIG_MAPPING[kind]().to_dict() | {"experts_implementation": ""}
    given = {"experts_implementation": "eager", **more}
    config = tiny(transformers.CONFIG_MAPPING[kind], **{k: v for k, v in given.items() if k in names})
    if kind == "gemma3":
        config.mm_tokens_per_image = IMAGES[kind]
    return config


class Packed(nn.Linear):
    """Two numbers of four bits in each byte of its weight, as quantized layers have them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        assert layer.bias is None
        self.register_buffer("scale", layer.weight.detach().abs().max() / 7)
        numbers = (layer.weight.detach() / self.scale).round().to(torch.uint8).add(8).view(-1, 2)
        self.weight = nn.Parameter(numbers[:, :1] * 16 + numbers[:, 1:], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.cat([self.weight // 16, self.weight % 16], 1).view(self.out_features, -1)
        return nn.functional.linear(x, (numbers.to(x.dtype) - 8) * self.scale)


def packed(targets: str) -> nn.Module:
    """A model whose layers that `targets` names are packed and frozen, with trainable layers beside them."""
    model = build(small("llama"))
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and name in targets.split():
                setattr(parent, name, Packed(layer))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets.split()))
    return adapted.double()


def make(kind: str) -> nn.Module:
    """The model of a family, or one of packed layers."""
    return packed(kind) if "_proj" in kind else build(small(kind))


def refusal(kind: str) -> str:
    try:
        model = skeleton(small(kind))
    except Exception:  # its building reads numbers
        model = make(kind)
    with pytest.raises(ModelError) as caught:
        plan(model, 2)
    return str(caught.value)


def batch_of(kind: str, model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inside = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    batch = {name: each for name, each in batch_for(inside, kind).items() if isinstance(each, Tensor)}
    batch["input_ids"] = torch.randint(6, VOCABULARY, batch["input_ids"].shape, generator=generator)
    if kind not in IMAGES:
        return batch
    ids = torch.cat([torch.full((SAMPLES, IMAGES[kind]), IMAGE), batch["input_ids"]], 1)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if "qwen" in kind:
        pixels = torch.randn(SAMPLES * 16, 3 * 2 * 2 * 2, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * SAMPLES)
        batch |= {"image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    else:
        pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        batch |= {"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {}
    return {**batch, "pixel_values": pixels.double()}


def loss_of(output: Any, batch: Any) -> tuple[Tensor, float]:
    """Of a model without a head: a weighted sum of what it returns."""
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output[0].dtype).view(output[0].shape)
    return (output[0] * weights).sum(), 1.0


def train(
    rank: int, world: int, kind: str, layout: dict[str, Any], seeds: Sequence[int] = ()
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses and gradient norms, weights, and the seeds of what forwards drew. seeds: theirs, if not the
    engine's."""
    model, drawn = make(kind), list[int]()

    def seed(*_: object) -> None:
        if seeds:
            torch.manual_seed(seeds[len(drawn)])
        drawn.append(torch.initial_seed())

    model.register_forward_pre_hook(seed)
    settings = {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES * layout["mesh"].get("dp", 1), "micro": SAMPLES},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip": 0.05},
        **layout,
    }
    own = "labels" in batch_of(kind, model, 0)
    engine = polyreme.initialize(model, settings, loss_fn=None if own else loss_of)
    records: list[float] = []
    with Wide():
        for step in range(STEPS):
            result = engine.train_step([batch_of(kind, model, step)])
            records += [result.loss, result.grad_norm]
    weights = engine.state_dict(rank0_only=True)
    engine.close()
    return records, weights, drawn


def check(kind: str, layout: dict[str, Any]) -> None:
    """It trains on two ranks as one process trains."""
    results = threads.run(2, train, kind, layout)
    seeds = results[0][2]  # what is random drawn alike
    ((records, weights, _),) = threads.run(1, train, kind, {"mesh": {}}, seeds)
    for result in results:
        torch.testing.assert_close(result[0], records, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(results[0][1], weights, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*BLOCKS, *LATENT, *VOCABULARY_ALONE] if ALL in os.environ else DEFAULT)
def test_the_plan_of_a_refusal_trains_as_one_process_does(kind: str) -> None:
    text = refusal(kind)
    assert ("the vocabulary alone" in text) == (kind in VOCABULARY_ALONE), text
    check(kind, {"mesh": {"tp": 2, "tp_plan": advised(text)}})


@pytest.mark.parametrize(
    "targets",
    ["gate_proj up_proj down_proj", pytest.param(f"{ATTENTION} gate_proj up_proj down_proj", marks=whole)],
)
def test_the_ways_to_train_packed_layers(targets: str) -> None:
    text = refusal(targets)
    assert "gate_proj.base_layer: Packed packs its numbers into torch.uint8" in text, text
    check(targets, {"mesh": {"tp": 2, "tp_plan": advised(text)}})
    assert "set mesh.tp = 1: zero.stage = 3" in text.replace("Set", "set")
    check(targets, {"mesh": {"dp": 2}, "zero": {"stage": 3}})
