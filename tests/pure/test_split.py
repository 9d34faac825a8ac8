"""Pipeline stages, run one after the other in this process, compute what the whole model computes: the loss and every gradient."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
from polyreme.errors import ModelError
from polyreme.pipeline.split import Split, Stage, buffers, keep, layers, measure, plan, put_together, take_apart
from polyreme.zero.deferred import record

V = models.VOCABULARY
TEXT = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
        "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"vocab_size": V, "n_positions": 32, "n_embd": 16, "n_layer": 5, "n_head": 4}
OPT = {"vocab_size": V, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 32,
       "word_embed_proj_dim": 8, "dropout": 0.0}  # fmt: skip
UNTIED, STILL = {"tie_word_embeddings": False}, {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ALTERNATING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
ENCODER = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, **UNTIED}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 3}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 4}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**TEXT, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2-dropout": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.3, "attn_pdrop": 0.0}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**OPT, **UNTIED}),
    "opt-tied": ("OPTForCausalLM", "OPTConfig", OPT),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **STILL}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": V, "hidden_size": 16, "n_layer": 5, "n_head": 4, **STILL}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**TEXT, **STILL, "alibi": False}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {**ENCODER, "num_labels": 2}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "vit": ("ViTForImageClassification", "ViTConfig", {**ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip


def family(name: str) -> nn.Module:
    architecture, config, settings = FAMILIES[name]
    settings = {key: value for key, value in settings.items() if name != "vit" or key not in ("vocab_size", "pad_token_id")}
    torch.manual_seed(0)
    return getattr(transformers, architecture)(getattr(transformers, config)(**settings)).double().train()


def batch_for(name: str, padded: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator).double(), "labels": torch.tensor([0, 2, 1])}
    ids = torch.randint(4, V, (3, 8), generator=generator)
    labels = torch.tensor([0, 1, 1]) if name == "bert-classes" else ids.clone()
    batch = {"input_ids": ids, "labels": labels, "use_cache": False}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 6:] = 0  # less than the sliding window, which must not see padding alone
    return batch


Run = tuple[float, dict[str, Tensor]]


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def whole(model: nn.Module, call: Callable[[nn.Module], Any]) -> Run:
    """The loss, and all gradients by first name."""
    torch.manual_seed(5)
    loss = loss_of(call(model))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def staged(model: nn.Module, split: Split, call: Callable[[nn.Module], Any], ranks: Sequence[Sequence[int]] = ()) -> Run:
    """The same, by stages: each on a copy of the model of which only its part is left, or those of each rank on one such copy."""
    ranks = ranks or [[stage] for stage in range(split.stages)]
    parts = [copy.deepcopy(model) for _ in ranks]
    for part, mine in zip(parts, ranks, strict=True):
        keep(part, split, mine)
    part_of = {stage: part for part, mine in zip(parts, ranks, strict=True) for stage in mine}
    stages = [Stage(part_of[i], split, i) for i in range(split.stages)]
    received: list[Any] = []
    sent: list[list[Tensor]] = []
    value = None
    for i, stage in enumerate(stages):
        torch.manual_seed(5)
        received.append(value)
        output = stage(lambda i=i: call(part_of[i]), value)
        if stage.is_last:
            loss = loss_of(output)
            sent.append([loss])
        else:
            form, tensors = take_apart(output)
            sent.append(tensors)
            arrived = buffers(form, torch.device("cpu"))
            for here, there in zip(arrived, tensors, strict=True):
                assert (here.shape, here.dtype) == (there.shape, there.dtype)
                here.copy_(there.detach())
            value = put_together(form, arrived)
    gradients: list[Tensor | None] = [torch.ones_like(loss)]
    for i in reversed(range(split.stages)):
        pairs = [(t, g) for t, g in zip(sent[i], gradients, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        gradients = [t.grad for t in take_apart(received[i])[1]]
    found: dict[str, Tensor] = {}
    for part in parts:
        by_first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        first_of = {name: by_first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        for name, p in part.named_parameters():
            first = first_of[name]
            assert (first in found) <= (first in split.tied), f"{first} is on several stages"
            if p.grad is not None:
                found[first] = found.get(first, 0) + p.grad
    return loss.item(), found


def assert_same(one: Run, other: Run) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_equal_the_whole(name: str) -> None:
    model = family(name)
    for padded in (True, False)[: 1 if name == "vit" else 2]:
        batch = batch_for(name, padded)
        expected = whole(copy.deepcopy(model), lambda m, batch=batch: m(**batch))
        for stages in (2, 3, 4):
            assert_same(staged(model, plan(model, stages), lambda m, batch=batch: m(**batch)), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=["interleaved", "v"])
def test_several_stages_on_a_rank(name: str, ranks: list[list[int]]) -> None:
    model, batch = family(name), batch_for(name)
    expected = whole(copy.deepcopy(model), lambda m: m(**batch))
    assert_same(staged(model, plan(model, 4), lambda m: m(**batch), ranks), expected)


def test_tied_weights_are_on_both_stages() -> None:
    model = family("gpt2")
    split = plan(model, 3)
    both = ["transformer.wte.weight", "lm_head.weight"]
    assert split.tied == {both[0]: (0, 2)}
    for stage in range(3):
        part = copy.deepcopy(model)
        left = keep(part, split, [stage])
        named = dict(part.named_parameters(remove_duplicate=False))
        assert [name in named for name in both] == [stage != 1] * 2 == [name in left for name in both]
        assert stage == 1 or named[both[0]] is named[both[1]]


def test_a_stage_can_be_run_again_and_without_gradients() -> None:
    model, batch = family("llama"), batch_for("llama")
    split = plan(model, 2)
    expected = model(**batch).loss.item()
    names = [name for name, _ in model.named_modules()]
    stages = [Stage(model, split, i) for i in range(2)]
    for mode in (torch.no_grad(), torch.enable_grad(), torch.no_grad()):
        with mode:
            value = stages[0](lambda: model(**batch))
            form, tensors = take_apart(value)
            assert form["grad"] == torch.is_grad_enabled()
            assert stages[1](lambda: model(**batch), put_together(form, tensors)).loss.item() == pytest.approx(expected, rel=1e-12)
    assert [name for name, _ in model.named_modules()] == names
    assert model(**batch).loss.item() == expected


def test_hooks_of_other_stages_do_not_run() -> None:
    model, batch = family("llama"), batch_for("llama")
    split = plan(model, 3, counts=[2, 2, 1])
    called: list[str] = []
    for name in split.blocks:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    model.register_forward_hook(lambda module, args, output: called.append(type(output).__name__))
    first = Stage(model, split, 0)(lambda: model(**batch))
    Stage(model, split, 1)(lambda: model(**batch), first)
    assert called == ["model.layers.0", "model.layers.1", "Tensor", "model.layers.2", "model.layers.3", "Tensor"]


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
    split = plan(model, 3)
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    present = [n for n in names if 1 in split.stages_of[n]]
    gone = [weakref.ref(p) for n, p in model.named_parameters() if 1 not in split.stages_of[n]]
    left = keep(model, split, [1])
    gc.collect()
    assert gone and all(ref() is None for ref in gone)
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == present == [n for n in names if n in left]
    assert all(any(n.startswith(block + ".") for block in split.blocks_of(model, [1])) for n in present)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert storages(model) <= held + 8 * len(names)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_a_model_on_the_meta_device_is_cut_alike_and_filled_in_part() -> None:
    real = family("gpt2")
    recording = record(lambda: family("gpt2"), 0)
    split = plan(recording.module, 3)
    assert (split.bounds, dict(split.stages_of), split.tied) == (plan(real, 3).bounds, plan(real, 3).stages_of, plan(real, 3).tied)
    left = keep(recording.module, split, [2], torch.device("cpu"), torch.float64)
    assert all(t.is_meta for t in (*recording.module.parameters(), *recording.module.buffers()))
    made: dict[str, Tensor] = {}
    recording.replay(lambda name, tensor: made.update({name: tensor.clone()}) if name in left else None)
    expected = real.state_dict()
    assert {n for n, _ in recording.module.named_parameters()} == set(made)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_a_stage_computes_in_the_dtype_that_it_is_given(name: str) -> None:
    """Rotary embeddings and masks take their dtype from hidden states that come from hollow parameters."""
    model, batch = family(name), batch_for(name)
    split = plan(model, 2)
    expected = copy.deepcopy(model).to(torch.bfloat16)(**batch).loss
    value = None
    for i in range(2):
        part = copy.deepcopy(model)
        keep(part, split, [i], dtype=torch.bfloat16)
        part.to(torch.bfloat16)
        value = Stage(part, split, i)(lambda part=part: part(**batch), value)
    assert value.loss.item() == expected.item()


# ---- models that are lists


class Pair(nn.Module):
    """Takes and returns a tuple: what is computed, an integer tensor, and a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor, dict[str, Any]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        hidden, kinds, rest = pair
        other = rest["other"] if rest["other"] is not None else hidden * 2
        return torch.tanh(self.linear(hidden)) + kinds[:, None] + other, kinds + 1, {"times": rest["times"] + 1, "other": other.sin()}


class Begin(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, (x.sum(1) > 0).long(), {"times": 0, "other": None}


class End(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return (pair[0] ** 2).mean() * pair[2]["times"] + pair[2]["other"].mean()


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Begin(), Pair(6), Pair(6), Pair(6), End()).double()


@pytest.mark.parametrize("counts", [[3, 3], [1, 4, 1], [2, 1, 1, 2], [1] * 6])
def test_sequential_with_several_tensors_between_layers(counts: list[int]) -> None:
    model, x = sequential(), torch.randn(4, 6, dtype=torch.float64)
    split = plan(model, len(counts), counts=counts)
    assert split.blocks == tuple("012345")
    assert_same(staged(model, split, lambda m: m(x)), whole(copy.deepcopy(model), lambda m: m(x)))


def test_a_cut_before_a_layer_that_writes_to_its_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = whole(copy.deepcopy(model), lambda m: m(x).mean())
    for counts in ([1, 4], [3, 2], [1, 2, 2], [1, 1, 1, 1, 1]):

        def call(m: nn.Module) -> Tensor:
            output = m(x)
            return output if output.shape != (4, 1) else output.mean()

        assert_same(staged(model, plan(model, len(counts), counts=counts), call), expected)


def test_embedding_and_head_of_a_sequential_may_be_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 9, bias=False)).double()
    model[3].weight = model[0].weight
    ids = torch.randint(0, 9, (3, 4))
    split = plan(model, 2, counts=[2, 2])
    assert split.tied == {"0.weight": (0, 1)}

    def call(m: nn.Module) -> Tensor:
        output = m(ids)
        return F.cross_entropy(output.flatten(0, 1), ids.flatten()) if output.shape[-1] == 9 else output

    assert_same(staged(model, split, call), whole(copy.deepcopy(model), call))


def test_a_list_of_builders_builds_on_a_stage_only_what_it_has() -> None:
    builders = [lambda: nn.Embedding(9, 6), *[lambda: nn.Linear(6, 6)] * 3, nn.ReLU(), lambda: nn.Linear(6, 9)]
    build = layers(builders)
    torch.manual_seed(3)
    expected = nn.Sequential(*(b if isinstance(b, nn.Module) else b() for b in builders)).state_dict()
    recording = record(build, 3)
    split = plan(recording.module, 2)
    left = keep(recording.module, split, [1])
    made: dict[str, Tensor] = {}
    recording.replay(lambda name, tensor: made.update({name: tensor.clone()}) if name in left else None)
    assert set(made) == set(left) == {name for name in expected if int(name[0]) >= split.bounds[1]}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


def test_a_list_of_layers_is_a_sequential() -> None:
    assert isinstance(layers([nn.Linear(2, 2), nn.ReLU()]), nn.Sequential)
    with pytest.raises(ModelError, match="layer 1 of the list builds a int"):
        layers([nn.ReLU, lambda: 3])()  # type: ignore[operator, list-item]


# ---- models of one's own


class Own(nn.Module):
    """Registered in another order than used, its head the embedding's own parameter, parameters of its own, work between blocks."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.ModuleList(nn.ReLU() if i == 1 else nn.Linear(6, 6) for i in range(blocks))
        self.scales = nn.Parameter(torch.rand(blocks))
        self.embed = nn.Embedding(9, 6)
        self.start = nn.Parameter(torch.randn(6))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.start
        for i, block in enumerate(self.blocks):
            x = block(x * self.scales[i]) + 0.1
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("counts", [[2, 2], [1, 3], [3, 1], [1, 1, 1, 1]])
def test_a_model_of_ones_own(counts: list[int]) -> None:
    model, ids = Own(), torch.randint(0, 9, (3, 4))
    split = plan(model, len(counts), counts=counts, sample=ids[:1])
    ends, everywhere = tuple({0: 0, len(counts) - 1: 0}), tuple(range(len(counts)))
    assert split.tied == {"scales": everywhere, "embed.weight": ends}
    assert (split.stages_of["start"], split.stages_of["norm.weight"]) == ((0,), (len(counts) - 1,))
    assert_same(staged(model, split, lambda m: m(ids)), whole(copy.deepcopy(model), lambda m: m(ids)))


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


def test_without_a_sample_the_order_of_registration_tells() -> None:
    model, ids = Plain(), torch.randint(0, 9, (3, 4))
    split = plan(model, 3)
    assert (split.stages_of["embed.weight"], split.stages_of["head.weight"], split.tied) == ((0,), (2,), {})
    assert_same(staged(model, split, lambda m: m(ids)), whole(copy.deepcopy(model), lambda m: m(ids)))
    wrong = Own()
    with pytest.raises(ModelError, match=r"stage 0 computes with embed\.weight, which stage 1 has"):
        staged(wrong, plan(wrong, 2), lambda m: m(ids))


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("skips", r"stage 1 computes with an output of blocks\.0, which another stage runs: only the blocks' first argument is sent"),
        ("adds", r"stage 1 computes with embed\.weight, which stage 0 has"),
        ("drops", r"stage 0: the model's forward calls blocks\.3 when blocks\.2 is due.*turn layer drop off"),
        ("backwards", r"stage 0: the model's forward calls blocks\.3 when blocks\.0 is due"),
    ],
)
def test_what_cannot_be_cut_is_refused(switch: str, message: str) -> None:
    model, ids = Plain(**{switch: True}), torch.randint(0, 9, (3, 4))
    with pytest.raises(ModelError, match=message):
        staged(model, plan(model, 2), lambda m: m(ids))


@pytest.mark.parametrize(("ids", "error"), [(torch.tensor([[1, 2]]), ModelError), (torch.tensor([[1, 99]]), IndexError)])
def test_an_error_leaves_the_model_as_it_was(ids: Tensor, error: type[Exception]) -> None:
    model = Plain(drops=True)
    modules, good = list(model.modules()), torch.tensor([[3, 4]])
    expected = model(good)
    with pytest.raises(error):
        Stage(model, plan(model, 2), 0)(lambda: model(ids))
    assert "forward" not in vars(model) and list(model.modules()) == modules
    assert torch.equal(model(good), expected)


def test_a_skipped_last_block_is_refused() -> None:
    model = Plain()
    split = plan(model, 2)
    ids = torch.randint(0, 9, (3, 4))
    part = copy.deepcopy(model)

    def forward(ids: Tensor) -> Tensor:
        return part.head(part.blocks[0](part.embed(ids)))

    part.forward = forward
    with pytest.raises(ModelError, match=r"did not call blocks\.1"):
        Stage(part, split, 0)(lambda: part(ids))
    assert part.forward is forward


def test_outputs_of_the_first_block_that_later_ones_need_are_refused() -> None:
    """T5 computes position biases in its first block alone."""
    settings = {"vocab_size": V, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
    model = transformers.T5EncoderModel(transformers.T5Config(**settings)).double()
    ids = torch.randint(3, V, (2, 6))
    split = plan(model, 2)
    value = Stage(model, split, 0)(lambda: model(input_ids=ids))
    with pytest.raises(ModelError, match="stage 1 computes with"):
        Stage(model, split, 1)(lambda: model(input_ids=ids), value)


# ---- what is refused before anything runs


def mixture() -> nn.Module:
    architecture, config, settings = FAMILIES["mixtral"]
    return getattr(transformers, architecture)(getattr(transformers, config)(**settings, output_router_logits=True))


def two_lists() -> nn.Module:
    model = Plain()
    model.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (Plain, {"stages": 5}, "4 blocks, too few for 5 stages"),
        (Plain, {"stages": 0}, "into 0 stages"),
        (Plain, {"stages": 2, "counts": [1, 2]}, r"given as \[1, 2\], but must be 2 numbers of at least 1 with the sum 4"),
        (Plain, {"stages": 2, "counts": [4, 0]}, "at least 1"),
        (Plain, {"stages": 2, "counts": [1, 1, 2]}, "2 numbers"),
        (Plain, {"stages": 2, "costs": [1.0]}, "1 costs for 4 blocks"),
        (Plain, {"stages": 2, "blocks": "heads"}, "no nn.ModuleList or nn.Sequential named 'heads'"),
        (Plain, {"stages": 2, "sample": torch.zeros(1, 2)}, "the sample does not lead to the model's blocks"),
        (lambda: nn.Linear(2, 2), {"stages": 2}, "no repeated blocks"),
        (models.ConvNet, {"stages": 2}, "no repeated blocks"),
        (two_lists, {"stages": 2}, "several lists of blocks, blocks, others"),
        (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2), {"stages": 2}, "0 and 1 are one module"),
        (mixture, {"stages": 2}, "with output_router_logits the loss takes something from every block"),
    ],
)
def test_what_cannot_be_planned(build: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        plan(build(), **options)


def test_one_stage_is_the_whole_model() -> None:
    model, images = models.ConvNet(), torch.randn(2, 3, 8, 8)
    split = plan(model, 1)
    assert keep(model, split, [0]) == {name for name, _ in model.named_parameters()}
    assert torch.equal(Stage(model, split, 0)(lambda: model(images)), model(images))


def test_a_plan_changes_nothing() -> None:
    model = family("gpt2-dropout")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan(model, 2)
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
        split = plan(model, stages, costs=costs)
        if stages > 1:
            assert worth(split.bounds) == min(map(worth, possible))


def test_balance_counts_embedding_and_head() -> None:
    small, large = ({**GROUPED, "num_hidden_layers": 8, "vocab_size": size} for size in (8, 2000))
    even, uneven = (plan(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), 4) for settings in (small, large))
    assert even.bounds == (0, 2, 4, 6, 8)
    assert uneven.bounds == (0, 1, 4, 7, 8)


class Ticks(nn.Module):
    """Takes `seconds` of a clock of its own for forward, and twice that for backward."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.weight, self.seconds, self.clock = nn.Parameter(torch.ones(3)), seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds
        x = x * self.weight
        x.register_hook(lambda _: self.clock.__setitem__(0, self.clock[0] + 2 * self.seconds))
        return x


def test_balance_by_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    model = nn.Sequential(*(Ticks(seconds, clock) for seconds in (1, 1, 1, 5, 2)))
    x = torch.randn(2, 3)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    state = torch.get_rng_state()
    costs = measure(model, lambda: model(x))
    assert costs == [3, 3, 3, 15, 6]
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)
    assert plan(model, 2, costs=costs).bounds == (0, 3, 5)


def test_a_real_model_is_measured() -> None:
    model, batch = family("gpt2"), batch_for("gpt2")
    costs = measure(model, lambda: model(**batch), repeats=1)
    assert len(costs) == 5 and min(costs) > 0 and all(p.grad is None for p in model.parameters())


# ---- what is sent


def test_a_form_tells_all_but_the_numbers() -> None:
    value = (torch.ones(2, 3, requires_grad=True) * 2, [torch.arange(3), None], {"a": torch.zeros((), dtype=torch.bool), "b": 1.5})
    form, tensors = take_apart(value)
    form = json.loads(json.dumps(form))
    arrived = buffers(form, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in arrived] == [(t.shape, t.dtype) for t in tensors]
    for here, there in zip(arrived, tensors, strict=True):
        here.copy_(there.detach())
    back = put_together(form, arrived)
    assert torch.equal(back[0], value[0]) and back[0].is_leaf and back[0].requires_grad
    assert torch.equal(back[1][0], value[1][0]) and not back[1][0].requires_grad and back[1][1] is None
    assert back[2]["b"] == 1.5 and back[2]["a"].dtype == torch.bool
    assert take_apart(back)[0] == form
    with pytest.raises(ModelError, match="hands a set from block to block"):
        take_apart((tensors[0], {1}))
