"""Which module gets which style, and what is said where one gets none or cannot be divided. Models are on the
meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.tensor.families import FAMILIES
from polyreme.tensor.layers import Column, EmbeddingColumns, Replicate, Row, Vocabulary
from polyreme.tensor.parallelize import parallelize
from polyreme.tensor.plan import STYLES, TensorPlan, plan

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def causal(config: str, **values: Any) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config, **{**SMALL, **values})
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(2), nn.Linear(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.mix = nn.Conv1d(8, 8, 3)


class Own(nn.Module):
    """A user's model, of which nobody knows anything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)


MAPPING = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "blocks.*.attention.qkv": "fused_qkv",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ModelError) as caught:
        plan(*args, **kwargs)
    return str(caught.value)


def test_the_models_own_plan() -> None:
    found = plan(causal("qwen3", num_key_value_heads=2, head_dim=8), 2)
    block = {
        name.removeprefix("model.layers.1."): style
        for name, style in found.styles.items()
        if name.startswith("model.layers.1.")
    }
    assert block == {
        "self_attn.q_proj": Column(((32, 4),)),
        "self_attn.k_proj": Column(((16, 2),)),
        "self_attn.v_proj": Column(((16, 2),)),
        "self_attn.o_proj": Row(),
        "self_attn.q_norm": Replicate(True),
        "self_attn.k_norm": Replicate(True),
        "mlp.gate_proj": Column(),
        "mlp.up_proj": Column(),
        "mlp.down_proj": Row(),
    }
    assert found.styles["model.embed_tokens"] == found.styles["lm_head"] == Vocabulary()
    assert found.siblings["model.layers.0.self_attn"] == [
        f"model.layers.0.self_attn.{name}_proj" for name in "qkv"
    ]


def test_the_table_for_families_without_a_plan() -> None:
    found = plan(causal("gpt2", n_embd=32, n_head=4, n_layer=2), 2)
    assert found.styles["transformer.h.0.attn.c_attn"] == Column(((32, 4),) * 3)
    assert found.styles["transformer.h.1.mlp.c_proj"] == Row()
    with torch.device("meta"):
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
        )
    styles = plan(t5, 2).styles
    assert styles["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] == EmbeddingColumns()
    assert {
        styles[name] for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    } == {Vocabulary()}


def test_the_table_is_about_words_and_families_that_exist() -> None:
    assert {word for family in FAMILIES.values() for word in family.values()} <= STYLES.keys()
    assert FAMILIES.keys() <= set(transformers.CONFIG_MAPPING)


def test_a_users_mapping_comes_first() -> None:
    model = causal("llama")
    styles = plan(
        model,
        2,
        {
            "model.layers.*.mlp.gate_proj": "colwise_gather_output",
            "model.layers.1.self_attn": "replicate",
            "lm_head": "replicate",
        },
    ).styles
    assert (
        styles["model.layers.0.mlp.gate_proj"] == Column(gathered=True) and styles["lm_head"] == Replicate()
    )
    assert [style for name, style in styles.items() if name.startswith("model.layers.1.self_attn")] == [
        Replicate()
    ]
    assert styles["model.layers.0.self_attn.q_proj"] == Column(((32, 4),))


def test_a_mapping_for_a_module_covers_what_is_in_it() -> None:
    model = causal("mixtral", num_key_value_heads=2)
    styles = plan(model, 2, {"model.layers.*.mlp": "replicate"}).styles
    assert styles["model.layers.0.mlp"] == Replicate() and styles[
        "model.layers.0.self_attn.q_proj"
    ] == Column(((32, 4),))


def test_an_unknown_model_is_told_what_to_add() -> None:
    with torch.device("meta"):
        model = Own()
    text = message(model, 2)
    for path in ("attention.qkv", "attention.out", "up", "down"):
        assert text.count(f"blocks.*.{path}: Linear without a style") == 1, text  # once for all blocks
    assert 'styles by path in mesh.tp_plan ("blocks.*.up" = "colwise")' in text
    assert "Own cannot be divided over mesh.tp = 2 ranks" in text and "or set mesh.tp = 1" in text
    attention = plan(model, 2, MAPPING)
    assert attention.styles["blocks.0.attention.qkv"] == Column(((8, 4),) * 3)
    without = {path: word for path, word in MAPPING.items() if not path.endswith("norm")}
    assert '"blocks.*.attention.norm" = "replicated_with_grad_allreduce"' in message(model, 2, without)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"nothing.at.all": "colwise"},
            "nothing.at.all: mesh.tp_plan names it, but the model has no such module\n  this in the config",
        ),
        (
            {"blocks.*.atention.qkv": "fusedqkv"},
            'has no such module\n    fix: mesh.tp_plan."blocks.*.attention.qkv" = "fused_qkv"',
        ),
        ({"blocks.*.up": "columns"}, "blocks.*.up: there is no style 'columns'; there are colwise,"),
        ({"blocks.*.up": "colwize"}, 'fix: mesh.tp_plan."blocks.*.up" = "colwise"'),
        ({"blocks.*.mix": "colwise"}, "blocks.*.mix: is Conv1d, no linear layer"),
        (
            {"blocks": "replicate", "embed": "replicate", "head": "replicate"},
            "Own: nothing of it would be divided",
        ),
        ({"blocks.*.attention.qkv": "packed_colwise", "blocks.*.attention": "replicate"}, "no error"),
        ({"blocks.*.up": "packed_colwise"}, "no error"),
    ],
)
def test_mistakes_in_a_mapping(mapping: dict[str, str], expected: str) -> None:
    with torch.device("meta"):
        model = Own()
    if expected == "no error":
        plan(model, 2, {**MAPPING, **mapping})
    else:
        assert expected in message(model, 2, {**MAPPING, **mapping})


@pytest.mark.parametrize(("config", "values", "ways", "expected"), [
    ("llama", {}, 3, ["model.layers.*.self_attn: its 4 attention "
                      "heads cannot be divided over 3 ranks", "fix: mesh.tp = 1 or 2 or 4",
                      "model.layers.*.mlp.gate_proj: its 40 outputs cannot be divided evenly over 3 ranks"]),
    ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, 2,
     ["its 3 key-value heads can neither be "
      "divided over 2 ranks, nor replicated evenly", "fix: mesh.tp = 1 or 3 or 6"]),
    ("llama", {"intermediate_size": 41}, 2, ["model.layers.*.mlp.up_proj: its 41 outputs "
                                             "cannot be divided evenly over 2 ranks",
                                             "model.layers.*.mlp.down_proj: cannot "
                                             "be divided as 'rowwise': 41 elements"]),
    ("llama", {"vocab_size": 1}, 2, ["lm_head: cannot be divided as 'vocabulary': "
                                     "1 elements cannot be divided by 2"]),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}, 2, ["its 1 key-value heads "
                                                                          "are packed with the others"]),
    ("mixtral", {"num_key_value_heads": 2}, 2, ["asks for the style 'moe_tp_experts', "
                                                "which this version does not have"]),
    ("mamba", {}, 2, ["backbone.layers.*.mixer.in_proj: Linear without a style"]),
])  # fmt: skip
def test_what_cannot_be_divided(config: str, values: dict[str, Any], ways: int, expected: list[str]) -> None:
    text = message(causal(config, **values), ways)
    assert [part for part in expected if part not in text] == [], text


class Quantized(nn.Linear):
    """As libraries pack the numbers of a layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight = nn.Parameter(torch.empty(inputs * outputs // 2, 1, dtype=torch.uint8), False)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(("kind", "expected"), [
    (Quantized, "gate_proj: Quantized packs its numbers into torch.uint8"),
    (Scaled, "gate_proj: Scaled has a forward of its own"),
])  # fmt: skip
def test_layers_that_only_look_linear(kind: type[nn.Linear], expected: str) -> None:
    model = causal("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = kind(32, 40).to("meta")
    text = message(model, 2)
    assert expected in text and '"model.layers.*.mlp" = "replicate"' in text, text


@pytest.mark.parametrize(("config", "path", "reason", "style"), [
    ("modernbert", "model.layers.*.attn.Wqkv", "has query, key and value in its 96 outputs", "fused_qkv"),
    ("modernbert", "model.layers.*.mlp.Wi", "has two layers in its 80 outputs", "packed_colwise"),
    ("gpt_bigcode", "transformer.h.*.attn.c_attn", "has query, key and value", "fused_qkv"),
    ("persimmon", "model.layers.*.self_attn.query_key_value", "has query", "interleaved_colwise"),
])  # fmt: skip
def test_plain_columns_of_packed_layers(config: str, path: str, reason: str, style: str) -> None:
    more = {"multi_query": False, "n_embd": 32, "n_head": 4, "n_layer": 2} if config == "gpt_bigcode" else {}
    with torch.device("meta"):
        kind = (
            transformers.AutoModelForMaskedLM if config == "modernbert" else transformers.AutoModelForCausalLM
        )
        model = kind.from_config(
            transformers.AutoConfig.for_model(config, **{**SMALL, "pad_token_id": 0, **more})
        )
    end = {"Wqkv": "Wo", "Wi": "Wo", "c_attn": "c_proj", "query_key_value": "dense"}[path.rpartition(".")[2]]
    text = message(model, 2, {path: "colwise", f"{path.rpartition('.')[0]}.{end}": "rowwise"})
    assert f"{path}: {reason}" in text and f'"{path}" = "{style}"' in text, text


def test_the_sequence_is_not_split_where_positions_may_be_mixed() -> None:
    with torch.device("meta"):
        own, plain = Own(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    text = message(own, 2, MAPPING, sequence_parallel=True)
    assert "blocks.*.mix: Conv1d may not work on each position by itself" in text
    llama = causal("llama")
    text = message(llama, 2, {"model.layers.1.self_attn": "replicate"}, sequence_parallel=True)
    assert "model.layers.*.self_attn: is placed whole on every rank, and may not work" in text
    assert (
        "model.layers.*: has no attention in a module of its own" in text
        and "fix: mesh.sequence_parallel = false" in text
    )
    assert "Sequential: has no repeated blocks" in message(
        plain, 2, {"0": "colwise", "1": "rowwise"}, sequence_parallel=True
    )
    plan(causal("olmo2"), 2, sequence_parallel=True)


def test_one_rank_divides_nothing() -> None:
    model = causal("llama")
    shapes = [p.shape for p in model.parameters()]
    cuts = parallelize(model, Axis("tp"), plan(model, 1))
    assert [p.shape for p in model.parameters()] == shapes and all(cut.is_whole for cut in cuts.values())
    assert "forward" not in vars(model.model.layers[0].mlp.up_proj)


def test_tied_parameters_are_cut_alike_or_not_at_all() -> None:
    model = causal("llama", tie_word_embeddings=True)
    cuts = parallelize(model, Axis("tp", 2, 1), plan(model, 2))
    assert cuts["lm_head.weight"] == cuts["model.embed_tokens.weight"] == Cut.padded((97, 32), 0, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape == (49, 32)
    other = causal("llama", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"weight is tied to a parameter that is divided in another way"):
        parallelize(other, Axis("tp", 2, 0), plan(other, 2, {"lm_head": "rowwise"}))
    for one in ("lm_head", "model.embed_tokens"):
        model = causal("llama", tie_word_embeddings=True)
        whole = parallelize(model, Axis("tp", 2, 0), plan(model, 2, {one: "replicate"}))
        assert whole["lm_head.weight"].is_whole and whole["model.embed_tokens.weight"].is_whole


def test_embeddings_that_look_at_other_rows() -> None:
    with torch.device("meta"):
        model = Own()
        model.embed = nn.Embedding(11, 8, max_norm=1.0)
    with pytest.raises(ModelError, match="max_norm"):
        parallelize(model, Axis("tp", 2, 0), plan(model, 2, MAPPING))


def test_head_counts_become_those_of_a_rank() -> None:
    model = causal("phi3", num_key_value_heads=1, pad_token_id=0)
    config = model.config
    found = plan(model, 4)
    parallelize(model, Axis("tp", 4, 2), found)
    attention = model.model.layers[0].self_attn
    assert (
        attention.num_key_value_heads,
        attention.num_key_value_groups,
        attention.config.num_attention_heads,
    ) == (1, 1, 1)
    # other parts' config stays
    assert config.num_attention_heads == 4 and attention.qkv_proj.weight.shape == (8 + 8 + 8, 32)
    assert isinstance(found, TensorPlan) and attention.o_proj.in_features == 8
