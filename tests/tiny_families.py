"""Tiny models of the families of transformers, by `model_type`, and batches for them: what is tried of each
family, in tests and in bench/families.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import nn

from models import VOCABULARY
from polyreme.models.huggingface import ForwardSignature, training_arguments
from polyreme.tensor.families import FAMILIES

LARGEST = 4_000_000
"""Parameters of a model that is computed with."""

SIZES: dict[str, int] = {
    name: size
    for size, names in {
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        64: "intermediate_size n_inner ffn_dim d_ff shared_intermediate_size "
            "shared_expert_intermediate_size encoder_ffn_dim "
            "decoder_ffn_dim max_position_embeddings n_positions mlp_dim",
        32: "hidden_size n_embd d_model embed_dim text_hidden_size "
            "out_hidden_size projection_dim word_embed_proj_dim "
            "expert_ffn_hidden_size dense_intermediate_size original_max_position_embeddings",
        16: "moe_intermediate_size q_lora_rank kv_lora_rank",
        8: "head_dim swa_head_dim global_head_dim qk_nope_head_dim "
           "qk_rope_head_dim v_head_dim index_head_dim query_pre_attn_scalar "
           "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim "
           "linear_head_dim d_kv image_size attention_chunk_size",
        5: "sliding_window window_size sliding_window_size",
        4: "num_attention_heads n_head num_heads encoder_attention_heads "
           "decoder_attention_heads swa_num_attention_heads rotary_dim "
           "linear_num_value_heads linear_num_heads index_n_heads "
           "index_topk num_experts n_routed_experts num_local_experts "
           "moe_num_experts",
        2: "num_key_value_heads num_kv_heads swa_num_key_value_heads "
           "global_num_key_value_heads linear_num_key_heads num_experts_per_tok "
           "moe_topk moe_k top_k_experts patch_size num_experts_per_token",
        1: "n_group topk_group n_shared_experts num_shared_experts "
           "first_k_dense_replace max_window_layers bos_token_id",
        0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers num_mtp_layers",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Of a tiny model, by the names that configs have for them."""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
    "n_layers",
)

OWN: dict[str, dict[str, Any]] = {
    **{
        f"{kind}_text": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
        for kind in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_image", "glm_ocr", "cosmos3_edge")
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        "shared_experts_intermediate_size": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma4_text": {"global_head_dim": 16},
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{
        kind: {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1e3, "factor": 1.0, "rope_theta": 1e4},
        }
        for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    },
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "ministral": {"head_dim": 8},
    **{
        kind: {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, **more}
        for kind, more in (
            ("bamba", {}),
            ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}),
        )
    },
    "phi": {"qk_layernorm": True},
}  # fmt: skip
"""By model_type, what a family needs besides."""

UNPADDED = ("bloom",)  # counts positions from the mask

AUTOS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "MultimodalLM", "ImageClassification", "")
"""Which of a family's architectures is tried: the first of these that it has; "" is the one without a
head."""


def declared() -> list[str]:
    """Every model_type whose config, or a part of it, declares a plan, and those of our own table."""
    found = []
    for kind in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[kind]
        if kind in FAMILIES or any(each.base_model_tp_plan for each in (config, *_parts(config).values())):
            found.append(kind)
    return sorted(found)


def _parts(config: type) -> dict[str, type]:
    """The classes of a composite config's parts, as far as transformers registers them."""
    found = {}
    for key, spec in config.sub_configs_defaults.items():  # type: ignore[attr-defined]
        if issubclass(spec.config_class, transformers.PreTrainedConfig):
            found[key] = spec.config_class
        elif spec.model_type in transformers.CONFIG_MAPPING:
            found[key] = transformers.CONFIG_MAPPING[spec.model_type]
    return found


def tiny(config: type, **values: Any) -> Any:
    """A small config of a class: sizes by their names, two layers or one of each kind, no dropout; its parts
    likewise."""
    default, values = vars(config()), OWN.get(config.model_type, {}) | values  # type: ignore[attr-defined]
    names = {field.name for field in fields(config)}
    if "kv_lora_rank" in names:  # latent attention has keys and values for each query head
        values.setdefault("num_key_value_heads", SIZES["num_attention_heads"])
    given = {field.name for field in fields(config) if field.default is not None}
    values |= {key: tiny(part) for key, part in _parts(config).items() if default.get(key) is not None}
    depth = next((default[name] for name in LAYERS if isinstance(default.get(name), int)), None)
    by_layer = {
        name: value
        for name, value in default.items()
        if name in names and isinstance(value, list) and len(value) == depth
    }
    layers = max(
        [2, *(len(set(map(repr, value))) for value in by_layer.values() if isinstance(value[0], str))]
    )
    for name, value in by_layer.items():
        kinds = list({repr(each): each for each in value}.values())
        values.setdefault(name, [SIZES[name]] * layers if name in SIZES else (kinds * layers)[:layers])
    for name in names - by_layer.keys():
        if name in LAYERS:
            values.setdefault(name, layers)
        elif (
            name in SIZES
            and (name in given or name == "num_key_value_heads")
            and isinstance(default.get(name), int | float | None)
        ):
            values.setdefault(name, SIZES[name])
        elif "drop" in name and isinstance(default.get(name), float):
            values.setdefault(name, 0.0)
    return config(**values)


def architecture(config: Any) -> Callable[[Any], nn.Module]:
    """How to make a model of `config`, newly initialised."""
    for name in AUTOS:
        auto = getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise LookupError("no Auto class builds it by itself")


def skeleton(config: Any) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return architecture(config)(config)


def build(config: Any) -> nn.Module:
    torch.manual_seed(3)
    model = architecture(config)(config).double().train()
    with torch.no_grad():  # biases of zero and norms of one would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_for(model: nn.Module, kind: str) -> dict[str, Any]:
    takes = ForwardSignature.of(model).names
    generator = torch.Generator().manual_seed(5)
    if "input_ids" not in takes:
        if model.main_input_name != "pixel_values":
            raise LookupError(f"takes {model.main_input_name}, neither texts nor images")
        images = torch.randn(3, 3, model.config.image_size, model.config.image_size, generator=generator)
        return {"pixel_values": images.double(), "labels": torch.tensor([0, 1, 1])}
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, 2:4] = -100
    mask[1, -2:] = 0 if kind not in UNPADDED else 1
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": ids.flip(0)}
    return {name: tensor for name, tensor in given.items() if name in takes} | training_arguments(model)
