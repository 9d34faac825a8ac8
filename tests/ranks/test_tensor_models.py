"""Tensor parallelism of whole models equals the undivided model: loss and every gradient, joined, in
float64."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import threads
from examples import ALL
from models import VOCABULARY, Wide
from polyreme.deferred_init.replay import record
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.layout.bucket_layout import Cut
from polyreme.models.huggingface import find_blocks
from polyreme.models.patches import Patches
from polyreme.step.memory.recomputation import wrap_blocks
from polyreme.tensor.gradient_states import GradientStates
from polyreme.tensor.parallelize import parallelize
from polyreme.tensor.plan import plan
from polyreme.zero.parameter import Restriction
from pool import Ranks, RanksFailed

TOLERANCE = 1e-10


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}


def causal(config: str, **values: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config, **values))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=2,
            num_labels=5,
        )
    )


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            dropout=0.0,
            max_position_embeddings=64,
        )
    )


def lora(base: nn.Module, *targets: str, **options: Any) -> nn.Module:
    torch.manual_seed(4)
    return peft.get_peft_model(
        base, peft.LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False, **options)
    )


def dropping() -> nn.Module:
    return lora(causal("llama", **GROUPED), "q_proj", "k_proj", "down_proj", lora_dropout=0.5)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: causal("llama", **GROUPED),
    "llama-kv1": lambda: causal(
        "llama", **{**SMALL, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
    ),
    "qwen2": lambda: causal("qwen2", **GROUPED),
    "qwen3": lambda: causal("qwen3", **GROUPED, head_dim=8),
    "mistral": lambda: causal("mistral", **GROUPED, sliding_window=5),
    "gemma2": lambda: causal("gemma2", **GROUPED, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: causal(
        "gemma3_text",
        **GROUPED,
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": lambda: causal("phi3", **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "phi3-kv1": lambda: causal(
        "phi3", **{**SMALL, "num_key_value_heads": 1}, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "phi": lambda: causal("phi", **GROUPED, qk_layernorm=True),
    "olmo2": lambda: causal("olmo2", **GROUPED),
    "cohere": lambda: causal("cohere", **GROUPED),
    "starcoder2": lambda: causal("starcoder2", **GROUPED, residual_dropout=0.0, embedding_dropout=0.0),
    "gpt2": lambda: causal(
        "gpt2", vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT
    ),
    "opt": lambda: causal(
        "opt",
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        word_embed_proj_dim=32,
    ),
    "gpt_neox": lambda: causal("gpt_neox", **SMALL),
    "gptj": lambda: causal(
        "gptj",
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        **NO_DROPOUT,
    ),
    "gpt_neo": lambda: causal(
        "gpt_neo",
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        embed_dropout=0.0,
        attention_dropout=0.0,
        resid_dropout=0.0,
    ),
    "bloom": lambda: causal("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: causal(
        "falcon",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "falcon-alibi": lambda: causal(
        "falcon",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=False,
        alibi=True,
        bias=True,
    ),
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "bart": bart,
    "llama-lora": lambda: lora(
        causal("llama", **GROUPED), "q_proj", "v_proj", "o_proj", "up_proj", "down_proj", use_rslora=True
    ),
    "phi3-lora": lambda: lora(
        causal("phi3", **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2), "qkv_proj", "gate_up_proj"
    ),
    "gpt2-lora": lambda: lora(
        MODELS["gpt2"](), "c_attn", "c_proj", "c_fc", lora_bias=True, fan_in_fan_out=True
    ),
    "llama-lora-head": lambda: lora(
        causal("llama", **GROUPED), "embed_tokens", "lm_head", "q_proj", modules_to_save=["norm"]
    ),
    "llama-lora-table": lambda: lora(
        causal("llama", **GROUPED, tie_word_embeddings=True), "embed_tokens", "k_proj"
    ),
    "llama-lora-tied": lambda: lora(
        causal("llama", **GROUPED, tie_word_embeddings=True), "q_proj", trainable_token_indices=[3, 7]
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]().double().train()
    with torch.no_grad():  # biases of zero and norms of one would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(name: str, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        return {
            "pixel_values": torch.randn(3, 3, 8, 8, generator=generator).double(),
            "labels": torch.tensor([0, 4, 2]),
        }
    ids = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    labels = ids.clone()
    labels[:, 2:4] = -100
    mask = torch.ones_like(ids)
    if name != "bloom":  # which counts positions from the mask
        mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gather(axis: Axis, cut: Cut, local: Tensor) -> Tensor:
    full = local.new_empty(axis.size * local.numel())
    axis.all_gather(full, local.contiguous().view(-1)).wait()
    return cut.join([each.view(cut.local) for each in full.chunk(axis.size)])


def loss_of(name: str, model: nn.Module, states: GradientStates | None = None) -> Tensor:
    """Its loss, after the backward, which `states` followed."""
    extra = {"use_cache": False} if name != "vit" and hasattr(model.config, "use_cache") else {}
    with Wide():
        with nullcontext() if states is None else states.watching():
            loss: Tensor = model(**batch_of(name), **extra).loss
        if states is not None:
            states.follow([loss])
        loss.backward()
    return loss.detach()


@functools.cache
def undivided(name: str) -> tuple[nn.Module, Tensor]:
    """The model with its gradients, and the loss."""
    model = build(name)
    return model, loss_of(name, model)


def compare(rank: int, world: int, names: Sequence[str], sequence: bool) -> dict[str, str]:
    """By model, what was different or went wrong."""
    axis = Mesh.open({"tp": world}).tp
    found = {}
    for name in names:
        whole, expected = undivided(name)
        divided = build(name)
        cuts = parallelize(divided, axis, plan(divided, world, sequence_parallel=sequence), sequence)
        states = GradientStates(
            axis, {p: (path, cuts[path]) for path, p in divided.named_parameters()}, Restriction
        )
        loss = loss_of(name, divided, states)
        assert not states.summed, "its own plan sums all that there is to sum"
        states.close()
        wrong = [] if abs(float(loss - expected)) < TOLERANCE else [f"loss {loss} for {expected}"]
        assert [n for n, _ in divided.named_parameters()] == [n for n, _ in whole.named_parameters()]
        for (path, mine), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
            cut = cuts[path]
            assert cut.local == tuple(mine.shape) and cut.shape == tuple(theirs.shape)
            if not torch.equal(gather(axis, cut, mine.detach()), theirs.detach()):
                wrong.append(f"{path} joined")
            if (mine.grad is None) != (theirs.grad is None):
                wrong.append(f"{path} has a gradient: {mine.grad is not None}")
            elif mine.grad is not None:
                own = cut.put(mine.grad, rank, theirs.grad.clone())
                # several ranks may hold the same numbers
                for what, each in (("joined", gather(axis, cut, mine.grad)), ("here", own)):
                    if (difference := float((each - theirs.grad).abs().max())) > TOLERANCE:
                        wrong.append(
                            f"gradient of {path} {what} by {difference:g}, "
                            f"of {float(theirs.grad.abs().max()):g}"
                        )
                if (
                    mine.dim()
                    and mine.grad.narrow(cut.dim, cut.used(rank), cut.length - cut.used(rank)).any()
                ):
                    wrong.append(f"gradient of {path} in the padding")
        if wrong:
            found[name] = f"rank {rank}: " + "; ".join(wrong)
    return found


# of what peft does
told = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")


def check(ranks: Ranks, world: int, names: Sequence[str], sequence: bool) -> None:
    """On ranks that are threads, unless all cases are to be run."""
    run = ranks if ALL in os.environ else threads.run
    assert [found for found in run(world, compare, names, sequence) if found] == []


@told
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_one_does(ranks: Ranks, name: str, sequence: bool) -> None:
    if name == "vit" and sequence:  # 16 patches and a class token
        with pytest.raises(RanksFailed) as failed:
            check(ranks, 2, [name], sequence)
        assert "17 positions cannot be divided over 2" in str(failed.value.exceptions[0])
        return
    check(ranks, 2, [name], sequence)


@told
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
def test_four_ranks_share_two_key_value_heads(ranks: Ranks, sequence: bool) -> None:
    check(ranks, 4, ["llama", "phi3", "qwen3", "llama-lora"], sequence)


def divide(model: nn.Module, axis: Axis, sequence: bool = False) -> dict[str, Cut]:
    return parallelize(model, axis, plan(model, axis.size, sequence_parallel=sequence), sequence)


def gradients(model: nn.Module, batch: dict[str, Tensor], seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def recompute(rank: int, world: int, sequence: bool) -> None:
    """Dropout everywhere, blocks recomputed in backward: not a bit changes."""
    axis = Mesh.open({"tp": world}).tp
    torch.manual_seed(3)
    bloom = causal(
        "bloom",
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.2,
        attention_dropout=0.2,
    )
    for model in [bloom.double()] if sequence else [bloom.double(), dropping().double()]:
        divide(model, axis, sequence)
        kept = gradients(model, batch_of("bloom"))
        assert kept[0] != gradients(model, batch_of("bloom"), seed=1)[0]
        wrap_blocks(model, find_blocks(model), True, 1, (), False, None, Patches())
        again = gradients(model, batch_of("bloom"))
        assert again[0] == kept[0]
        assert all(torch.equal(again[1][name], grad) for name, grad in kept[1].items())


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputed_blocks_draw_the_same(ranks: Ranks, sequence: bool) -> None:
    ranks(2, recompute, sequence)


def dropped(
    rank: int, world: int, name: str, ends: str, sequence: bool
) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """What the dropouts whose names end like that let through, the loss, and the gradients of what is whole
    on every rank."""
    axis = Mesh.open({"tp": world}).tp
    torch.manual_seed(3)
    model = {
        "bloom": lambda: causal(
            "bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, attention_dropout=0.5
        ),
        "gpt2": lambda: causal("gpt2", vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4),
        "lora": dropping,
    }[name]().double()
    cuts = divide(model, axis, sequence)
    masks: list[Tensor] = []
    for path, module in model.named_modules():
        if path.endswith(ends):
            module.register_forward_hook(lambda _m, _i, out: masks.append(out.detach() == 0))
    loss, grads = gradients(model, batch_of("bloom"))
    after = torch.rand(1)
    assert len(set(axis.gather_objects(float(after)))) == 1  # whatever was drawn inside, ranks agree again
    return masks, loss, {n: g for n, g in grads.items() if cuts[n].is_whole}


@pytest.mark.parametrize(
    ("name", "ends", "sequence", "same"),
    [
        ("bloom", "attention_dropout", False, False),
        ("bloom", "attention_dropout", True, False),
        ("lora", "k_proj.lora_dropout.default", False, True),
        ("lora", "down_proj.lora_dropout.default", False, False),
        ("gpt2", "resid_dropout", False, True),
        ("gpt2", "resid_dropout", True, False),
        ("gpt2", "drop", True, True),
    ],
)
def test_dropout_is_the_same_where_replicated_and_different_where_split(
    ranks: Ranks, name: str, ends: str, sequence: bool, same: bool
) -> None:
    (one, loss, grads), (other, other_loss, other_grads) = ranks(2, dropped, name, ends, sequence)
    assert len(one) == len(other) >= (1 if ends == "drop" else 2)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.any() and not mine.all()
        assert torch.equal(mine, theirs) == same
    assert not torch.equal(one[0], one[-1]) or len(one) == 1  # nor are blocks' masks the same
    assert loss == other_loss
    assert grads.keys() == other_grads.keys() and all(
        torch.equal(grad, other_grads[n]) for n, grad in grads.items()
    )


def counted(
    rank: int, world: int, sequence: bool
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    axis = Mesh.open({"tp": world}).tp
    model = build("llama")
    divide(model, axis, sequence)
    before = {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
    with Wide():
        loss = model(**batch_of("llama"), use_cache=False).loss
        forward = {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}
        loss.backward()
    assert not before
    return forward, {operation: (count.calls, count.bytes) for operation, count in axis.counts.items()}


def test_traffic_is_what_the_papers_say(ranks: Ranks) -> None:
    tokens, width, number, blocks = 3 * 12, 32, 8, 2
    hidden = tokens * width * number
    # two ranks: an all-reduce sends as much as its tensor has
    for forward, total in ranks(2, counted, False):
        # the embedding's, and two a block
        assert forward["all_reduce"] == (1 + 2 * blocks, (1 + 2 * blocks) * hidden)
        assert forward["all_gather"] == (1, 2 * tokens * number)  # the loss
        # and two a block, and the head's
        assert total["all_reduce"] == (2 + 4 * blocks, (2 + 4 * blocks) * hidden)
        assert total["all_gather"] == forward["all_gather"] and total.keys() == {"all_reduce", "all_gather"}
    for forward, total in ranks(2, counted, True):
        assert forward["reduce_scatter"] == (2 * blocks, 2 * blocks * hidden // 2)
        # one behind the last block
        assert forward["all_gather"] == (2 * blocks + 2, (2 * blocks + 1) * hidden // 2 + 2 * tokens * number)
        assert forward["all_reduce"] == (1, hidden)
        assert total["reduce_scatter"] == (4 * blocks, 4 * blocks * hidden // 2)
        # in backward, each row layer gathers its gradient, each column layer its input again, and the
        # embedding gets its gradient
        assert total["all_gather"] == (6 * blocks + 3, (6 * blocks + 2) * hidden // 2 + 2 * tokens * number)
        norms = blocks * 2 * width * number
        assert total["all_reduce"] == (2 + blocks, 2 * hidden + norms)


def user_loops(rank: int, world: int) -> None:
    axis = Mesh.open({"tp": world}).tp
    for name in ("llama", "gpt2", "t5"):
        whole = build(name).eval()
        divided = copy.deepcopy(whole)
        divide(divided, axis)
        ids = batch_of(name)["input_ids"]
        with torch.no_grad(), Wide():
            options = {"max_new_tokens": 5, "do_sample": False}
            assert torch.equal(divided.generate(ids, **options), whole.generate(ids, **options))
            extra = {"decoder_input_ids": ids} if name == "t5" else {}
            mine, theirs = divided(ids, **extra).logits, whole(ids, **extra).logits
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1), rtol=0, atol=TOLERANCE)
            assert torch.equal(mine.argmax(-1), theirs.argmax(-1))


def test_generation_and_logits_are_those_of_the_whole_model(ranks: Ranks) -> None:
    ranks(2, user_loops)


def own_loss(rank: int, world: int) -> None:
    """A user's loss of the logits, in the ways that people write it; those that need the whole vocabulary get
    it."""
    axis = Mesh.open({"tp": world}).tp
    whole = build("gemma2")
    divided = copy.deepcopy(whole)
    divide(divided, axis)
    batch = batch_of("gemma2")
    ids, labels = batch["input_ids"], batch["labels"]
    losses: list[tuple[bool, Callable[[Tensor], Tensor]]] = [
        (
            True,
            lambda logits: F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)),
        ),
        (
            True,
            lambda logits: (
                F.cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                / 7
            ),
        ),
        (
            True,
            lambda logits: nn.CrossEntropyLoss(reduction="none")(
                logits.view(-1, logits.size(-1)).float() / 2, ids.view(-1)
            ).mean(),
        ),
        (False, lambda logits: F.cross_entropy(logits.transpose(1, 2), ids)),
        (
            False,
            lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1), label_smoothing=0.1),
        ),
        (False, lambda logits: -logits.log_softmax(-1).gather(-1, ids[..., None]).mean()),
        (
            False,
            lambda logits: (logits * torch.arange(VOCABULARY)).sum() + torch.logsumexp(2 * logits, -1).mean(),
        ),
        (False, lambda logits: logits[..., :50].pow(2).mean() + logits[0, 0, 3]),
    ]
    for local, loss_of in losses:
        results = []
        for model in (whole, divided):
            model.zero_grad()
            with Wide():
                logits = model(ids, use_cache=False).logits
                calls = axis.counts["all_gather"].bytes
                loss = loss_of(logits)
                gathered = axis.counts["all_gather"].bytes - calls
                loss.backward()
            results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
        assert local == (gathered <= 2 * ids.numel() * 8), gathered
        (expected, theirs), (got, mine) = results
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
        cuts = list(parallelize(copy.deepcopy(whole), Axis("tp", world, rank), plan(whole, world)).values())
        unique = [
            cut
            for (name, _), cut in zip(whole.named_parameters(remove_duplicate=False), cuts, strict=True)
            if name in dict(whole.named_parameters())
        ]
        for cut, one, other in zip(unique, mine, theirs, strict=True):
            torch.testing.assert_close(
                one, cut.split(other, rank), rtol=TOLERANCE, atol=1e-8 * float(other.abs().max() + 1)
            )


def test_a_users_loss_on_split_logits(ranks: Ranks) -> None:
    ranks(2, own_loss)


class OwnAttention(nn.Module):
    """With a projection of another input than the others' (`gate`), and everything under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = 4, 16
        self.query, self.both, self.gate, self.out = (nn.Linear(16, size) for size in (16, 32, 16, 16))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        key, value = (
            each.unflatten(-1, (self.num_heads, 4)).transpose(1, 2) for each in self.both(x).chunk(2, -1)
        )
        query = self.norm(self.query(x).unflatten(-1, (self.num_heads, 4))).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(mixed * self.gate(residual.tanh()).sigmoid())


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(16)
        self.attention = OwnAttention()
        self.mlp_in = nn.Linear(16, 24)
        self.mlp_out = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), x)
        return x + self.mlp_out(self.mlp_in(x).relu())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def a_users_model(rank: int, world: int, recomputed: bool) -> None:
    axis = Mesh.open({"tp": world}).tp
    torch.manual_seed(0)
    whole = Own().double()
    divided = copy.deepcopy(whole)
    mapping = {
        "embed": "vocabulary",
        "head": "vocabulary",
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.gate": "colwise",
        "blocks.*.attention.both": "packed_colwise",
        "blocks.*.attention.norm": "replicated_with_grad_allreduce",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp_in": "colwise",
        "blocks.*.mlp_out": "rowwise",
    }
    cuts = parallelize(divided, axis, plan(divided, world, mapping))
    assert divided.blocks[0].attention.both.weight.shape == (32 // world, 16)
    if recomputed:
        wrap_blocks(divided, find_blocks(divided), True, 1, (), False, None, Patches())
    for step in range(3):
        ids = torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(step))
        for model in (whole, divided):
            model.zero_grad()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for (path, mine), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad,
                cuts[path].split(theirs.grad, rank),
                rtol=0,
                atol=TOLERANCE,
                msg=lambda t, p=path: f"{p}: {t}",
            )
    # the gate has another input: once that is known, no layer is computed in vain
    assert axis.counts["all_reduce"].calls > 0
    before = axis.counts["all_reduce"].calls
    F.cross_entropy(divided(ids).flatten(0, 1), ids.flatten()).backward()
    reduced = axis.counts["all_reduce"].calls - before
    # rows; three columns each for itself; MLP; the norm
    assert reduced == 2 + len(divided.blocks) * (2 + 3 + 1 + 1 + 2 * recomputed)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_users_model_by_a_mapping(ranks: Ranks, recomputed: bool) -> None:
    ranks(2, a_users_model, recomputed)


class Single(nn.Module):
    """One attention, not in a list, with one key-value head for all, and a norm of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = OwnAttention()
        self.attention.both = nn.Linear(16, 8)
        self.attention.num_key_value_heads = 1

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention
        key, value = (
            each.unflatten(-1, (1, 4)).transpose(1, 2).expand(-1, a.num_heads, -1, -1)
            for each in a.both(x).chunk(2, -1)
        )
        query = a.norm(a.query(x).unflatten(-1, (a.num_heads, 4))).transpose(1, 2)
        return a.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2) * a.gate(x))


def outside_of_blocks(rank: int, world: int) -> None:
    axis = Mesh.open({"tp": world}).tp
    torch.manual_seed(0)
    whole = Single().double()
    whole.attention.gate.requires_grad_(False)
    divided = copy.deepcopy(whole)
    mapping = {
        "attention.query": "colwise",
        "attention.gate": "colwise",
        "attention.both": "packed_colwise",
        "attention.out": "rowwise",
        "attention.norm": "replicated_with_grad_allreduce",
    }
    cuts = parallelize(divided, axis, plan(divided, world, mapping))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for model in (whole, divided):
        model(x).pow(2).sum().backward()
    for (path, mine), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None) == path.startswith("attention.gate")
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, cuts[path].split(theirs.grad, rank), rtol=0, atol=TOLERANCE)


def test_gradients_are_summed_outside_of_blocks_too(ranks: Ranks) -> None:
    ranks(2, outside_of_blocks)


def from_recording(rank: int, world: int) -> None:
    """Initialised from the whole tensors of a recorded build: bit for bit the part of what the undivided
    model starts with."""
    axis = Mesh.open({"tp": world}).tp
    for name in ("llama", "gpt2", "phi3"):
        recording = record(MODELS[name], seed=11)
        cuts = divide(recording.module, axis)
        made: dict[str, Tensor] = {}

        def write(
            path: str, tensor: Tensor, cuts: dict[str, Cut] = cuts, made: dict[str, Tensor] = made
        ) -> None:
            made[path] = cuts[path].split(tensor, axis.rank).clone() if path in cuts else tensor.clone()

        recording.replay(write)
        torch.manual_seed(11)
        real = MODELS[name]()
        assert divide(real, axis) == cuts
        for path, parameter in real.named_parameters():
            meta = recording.module.get_parameter(path)
            assert meta.is_meta and meta.shape == parameter.shape
            assert torch.equal(made[path], parameter.detach())


def test_initial_weights_are_those_of_the_whole_model(ranks: Ranks) -> None:
    ranks(2, from_recording)
