"""Tables of transformers' names: layers that tensor parallelism divides, by model family, and attributes that
count heads and widths."""

from __future__ import annotations

_BERT = {
    "self.query": "colwise", "self.key": "colwise", "self.value": "colwise",
    "intermediate.dense": "colwise", "output.dense": "rowwise",
}  # fmt: skip
_T5 = {
    **{
        f"{attention}.{name}": "colwise"
        for attention in ("SelfAttention", "EncDecAttention")
        for name in "qkv"
    },
    "SelfAttention.o": "rowwise",
    "EncDecAttention.o": "rowwise",
    "relative_attention_bias": "embedding_colwise",
    "wi": "colwise",
    "wi_0": "colwise",
    "wi_1": "colwise",
    "wo": "rowwise",
}
_BART = {
    **{
        f"{attention}.{name}_proj": "colwise" for attention in ("self_attn", "encoder_attn") for name in "qkv"
    },
    "out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
_NEOX = {
    "query_key_value": "colwise",
    "self_attention.dense": "rowwise",
    "mlp.dense_h_to_4h": "colwise",
    "mlp.dense_4h_to_h": "rowwise",
}
_VIT = {
    **{f"attention.{name}_proj": "colwise" for name in "qkv"},
    "attention.o_proj": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise",
}  # fmt: skip
_BART_LIKE = (
    "opt", "bart", "mbart", "pegasus", "marian", "whisper", "blenderbot", "blenderbot-small", "mvp",
    "plbart", "biogpt",
)  # fmt: skip
_BERT_LIKE = (
    "bert", "roberta", "electra", "camembert", "xlm-roberta", "xlm-roberta-xl", "ernie", "data2vec-text",
    "megatron-bert", "bert-generation",
)  # fmt: skip

FAMILIES: dict[str, dict[str, str]] = {
    "gpt2": {
        "attn.c_attn": "fused_qkv",
        "attn.c_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    **dict.fromkeys(_BART_LIKE, _BART),
    **dict.fromkeys(_BERT_LIKE, _BERT),
    **dict.fromkeys(("t5", "mt5"), _T5),
    "vit": _VIT,
    **dict.fromkeys(("bloom", "falcon"), _NEOX),
    "gptj": {
        **{f"attn.{name}_proj": "colwise" for name in "qkv"},
        "attn.out_proj": "rowwise",
        "mlp.fc_in": "colwise",
        "mlp.fc_out": "rowwise",
    },
    "gpt_neo": {
        **{f"attention.{name}_proj": "colwise" for name in "qkv"},
        "attention.out_proj": "rowwise",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    # some of them threshold by the mean and the deviation of the whole width
    "gemma3n": {"mlp": "replicate"},
    "gemma3n_text": {"mlp": "replicate"},
    "phi": {"q_layernorm": "replicated_with_grad_allreduce", "k_layernorm": "replicated_with_grad_allreduce"},
    "phi3": {
        "qkv_proj": "fused_qkv",
        "o_proj": "rowwise",
        "gate_up_proj": "packed_colwise",
        "down_proj": "rowwise",
    },
}
"""Styles by the ends of paths inside the blocks, for each `model_type` that declares no plan, or (Phi) a plan
that misses a case, or (Phi-3) one that gathers where dividing by heads need not."""

BY_HEAD: dict[str, tuple[str, ...]] = {"bloom": ("alibi",), "falcon": ("alibi", "attention_mask")}
"""Arguments of the attention, by `model_type`, that have numbers for all heads: (batch * heads, ...) or
(batch, heads, ...)."""

LINEAR = ("FalconLinear",)
"""Subclasses of nn.Linear with a forward of their own that computes the same."""

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
SHARED_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
WIDTHS = ("split_size", "embed_dim", "all_head_size", "inner_dim", "hidden_size")
