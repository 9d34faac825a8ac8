"""Small models of many families, whole and in float64, that tests cut into pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import models

V = models.VOCABULARY
TEXT = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"vocab_size": V, "n_positions": 32, "n_embd": 16, "n_layer": 5, "n_head": 4}
OPT = {
    "vocab_size": V,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 8,
    "dropout": 0.0,
}
UNTIED, STILL = {"tie_word_embeddings": False}, {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ALTERNATING = {
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
}
ENCODER = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, **UNTIED}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 3}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 4}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 4},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**TEXT, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt2-dropout": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.3, "attn_pdrop": 0.0},
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**OPT, **UNTIED}),
    "opt-tied": ("OPTForCausalLM", "OPTConfig", OPT),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **STILL}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": V, "hidden_size": 16, "n_layer": 5, "n_head": 4, **STILL},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**TEXT, **STILL, "alibi": False}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {**ENCODER, "num_labels": 2}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}


def family(name: str) -> nn.Module:
    architecture, config, settings = FAMILIES[name]
    settings = {
        key: value
        for key, value in settings.items()
        if name != "vit" or key not in ("vocab_size", "pad_token_id")
    }
    torch.manual_seed(0)
    return getattr(transformers, architecture)(getattr(transformers, config)(**settings)).double().train()


def batch_for(name: str, padded: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {
            "pixel_values": torch.randn(3, 3, 8, 8, generator=generator).double(),
            "labels": torch.tensor([0, 2, 1]),
        }
    ids = torch.randint(4, V, (3, 8), generator=generator)
    labels = torch.tensor([0, 1, 1]) if name == "bert-classes" else ids.clone()
    batch = {"input_ids": ids, "labels": labels, "use_cache": False}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 6:] = 0  # less than the sliding window, which must not see padding alone
    return batch


class Plain(nn.Module):
    """Registered in the order of use."""

    def __init__(self, **switches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 9)
        self.on = switches

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        outputs = []
        for i, block in enumerate(reversed(self.blocks) if self.on.get("backwards") else self.blocks):
            if self.on.get("drops") and i == 2:
                continue
            x = block(outputs[0] + x if self.on.get("skips") and i == 3 else x)
            outputs.append(x)
        return self.head(x + first if self.on.get("adds") else x).square().mean()
