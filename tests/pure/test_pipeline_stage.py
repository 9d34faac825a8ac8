"""Pipeline stages, run one after the other in this process, compute what the whole model computes: the loss
and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
from cuttable import FAMILIES, Plain, V, batch_for, family
from examples import always
from polyreme.errors import ModelError
from polyreme.pipeline import partition
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten
from polyreme.pipeline.partition import PipelinePartition, keep_stages, partition_model
from polyreme.pipeline.stage import Stage

Run = tuple[float, dict[str, Tensor]]


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def whole(model: nn.Module, call: Callable[[nn.Module], Any]) -> Run:
    """The loss, and all gradients by first name."""
    torch.manual_seed(5)
    loss = loss_of(call(model))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def staged(
    model: nn.Module,
    split: PipelinePartition,
    call: Callable[[nn.Module], Any],
    ranks: Sequence[Sequence[int]] = (),
) -> Run:
    """The same, by stages: each on a copy of the model of which only its part is left, or those of each rank
    on one such copy."""
    ranks = ranks or [[stage] for stage in range(split.stages)]
    parts = [copy.deepcopy(model) for _ in ranks]
    for part, mine in zip(parts, ranks, strict=True):
        keep_stages(part, split, mine)
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
            form, tensors = flatten(output)
            sent.append(tensors)
            arrived = buffers(form, torch.device("cpu"))
            for here, there in zip(arrived, tensors, strict=True):
                assert (here.shape, here.dtype) == (there.shape, there.dtype)
                here.copy_(there.detach())
            value = unflatten(form, arrived)
    gradients: list[Tensor | None] = [torch.ones_like(loss)]
    for i in reversed(range(split.stages)):
        pairs = [(t, g) for t, g in zip(sent[i], gradients, strict=True) if t.requires_grad and g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        gradients = [t.grad for t in flatten(received[i])[1]]
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
        torch.testing.assert_close(
            gradient, other[1][name], rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "name", always(FAMILIES, "llama-tied", "gemma2", "gpt2-dropout", "opt", "mixtral", "bert", "vit")
)
def test_stages_equal_the_whole(name: str) -> None:
    model = family(name)
    for padded in (True, False)[: 1 if name == "vit" else 2]:
        batch = batch_for(name, padded)
        expected = whole(copy.deepcopy(model), lambda m, batch=batch: m(**batch))
        for stages in (2, 3, 4):
            assert_same(
                staged(model, partition_model(model, stages), lambda m, batch=batch: m(**batch)), expected
            )


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[0, 3], [1, 2]]], ids=["interleaved", "v"])
def test_several_stages_on_a_rank(name: str, ranks: list[list[int]]) -> None:
    model, batch = family(name), batch_for(name)
    expected = whole(copy.deepcopy(model), lambda m: m(**batch))
    assert_same(staged(model, partition_model(model, 4), lambda m: m(**batch), ranks), expected)


def test_a_stage_can_be_run_again_and_without_gradients() -> None:
    model, batch = family("llama"), batch_for("llama")
    split = partition_model(model, 2)
    expected = model(**batch).loss.item()
    names = [name for name, _ in model.named_modules()]
    stages = [Stage(model, split, i) for i in range(2)]
    for mode in (torch.no_grad(), torch.enable_grad(), torch.no_grad()):
        with mode:
            value = stages[0](lambda: model(**batch))
            form, tensors = flatten(value)
            assert form["grad"] == torch.is_grad_enabled()
            assert stages[1](lambda: model(**batch), unflatten(form, tensors)).loss.item() == pytest.approx(
                expected, rel=1e-12
            )
    assert [name for name, _ in model.named_modules()] == names
    assert model(**batch).loss.item() == expected


def test_hooks_of_other_stages_do_not_run() -> None:
    model, batch = family("llama"), batch_for("llama")
    split = partition_model(model, 3, counts=[2, 2, 1])
    called: list[str] = []
    for name in split.blocks:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    model.register_forward_hook(lambda module, args, output: called.append(type(output).__name__))
    first = Stage(model, split, 0)(lambda: model(**batch))
    Stage(model, split, 1)(lambda: model(**batch), first)
    assert called == [
        "model.layers.0",
        "model.layers.1",
        "Tensor",
        "model.layers.2",
        "model.layers.3",
        "Tensor",
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_a_stage_computes_in_the_dtype_that_it_is_given(name: str) -> None:
    """Rotary embeddings and masks take their dtype from hidden states that come from hollow parameters."""
    model, batch = family(name), batch_for(name)
    split = partition_model(model, 2)
    expected = copy.deepcopy(model).to(torch.bfloat16)(**batch).loss
    value = None
    for i in range(2):
        part = copy.deepcopy(model)
        keep_stages(part, split, [i], dtype=torch.bfloat16)
        part.to(torch.bfloat16)
        value = Stage(part, split, i)(lambda part=part: part(**batch), value)
    assert value.loss.item() == expected.item()


def test_one_stage_is_the_whole_model() -> None:
    model, images = models.ConvNet(), torch.randn(2, 3, 8, 8)
    split = partition_model(model, 1)
    assert keep_stages(model, split, [0]) == {name for name, _ in model.named_parameters()}
    assert torch.equal(Stage(model, split, 0)(lambda: model(images)), model(images))


# ---- models that are lists


class Pair(nn.Module):
    """Takes and returns a tuple: what is computed, an integer tensor, and a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor, dict[str, Any]]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        hidden, kinds, rest = pair
        other = rest["other"] if rest["other"] is not None else hidden * 2
        return (
            torch.tanh(self.linear(hidden)) + kinds[:, None] + other,
            kinds + 1,
            {"times": rest["times"] + 1, "other": other.sin()},
        )


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
    split = partition_model(model, len(counts), counts=counts)
    assert split.blocks == tuple("012345")
    assert_same(staged(model, split, lambda m: m(x)), whole(copy.deepcopy(model), lambda m: m(x)))


def test_a_cut_before_a_layer_that_writes_to_its_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 5), nn.ReLU(inplace=True), nn.Linear(5, 1)
    ).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    expected = whole(copy.deepcopy(model), lambda m: m(x).mean())
    for counts in ([1, 4], [3, 2], [1, 2, 2], [1, 1, 1, 1, 1]):

        def call(m: nn.Module) -> Tensor:
            output = m(x)
            return output if output.shape != (4, 1) else output.mean()

        assert_same(staged(model, partition_model(model, len(counts), counts=counts), call), expected)


def test_embedding_and_head_of_a_sequential_may_be_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 9, bias=False)
    ).double()
    model[3].weight = model[0].weight
    ids = torch.randint(0, 9, (3, 4))
    split = partition_model(model, 2, counts=[2, 2])
    assert split.tied == {"0.weight": (0, 1)}

    def call(m: nn.Module) -> Tensor:
        output = m(ids)
        return F.cross_entropy(output.flatten(0, 1), ids.flatten()) if output.shape[-1] == 9 else output

    assert_same(staged(model, split, call), whole(copy.deepcopy(model), call))


# ---- models of one's own


class Own(nn.Module):
    """Registered in another order than used, its head the embedding's own parameter, parameters of its own,
    work between blocks."""

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
def test_a_model_that_can_be_called(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = Own(), torch.randint(0, 9, (3, 4))
    monkeypatch.setattr(partition, "sample_inputs", lambda _: {"ids": ids[:1]})
    split = partition_model(model, len(counts), counts=counts)
    ends, everywhere = tuple({0: 0, len(counts) - 1: 0}), tuple(range(len(counts)))
    assert split.tied == {"scales": everywhere, "embed.weight": ends}
    assert (split.stages_of["start"], split.stages_of["norm.weight"]) == ((0,), (len(counts) - 1,))
    assert_same(staged(model, split, lambda m: m(ids)), whole(copy.deepcopy(model), lambda m: m(ids)))


def test_in_others_the_order_of_registration_tells() -> None:
    model, ids = Plain(), torch.randint(0, 9, (3, 4))
    split = partition_model(model, 3)
    assert (split.stages_of["embed.weight"], split.stages_of["head.weight"], split.tied) == ((0,), (2,), {})
    assert_same(staged(model, split, lambda m: m(ids)), whole(copy.deepcopy(model), lambda m: m(ids)))
    wrong = Own()
    with pytest.raises(ModelError, match=r"stage 0 computes with embed\.weight, which stage 1 has"):
        staged(wrong, partition_model(wrong, 2), lambda m: m(ids))


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        (
            "skips",
            r"stage 1 computes with an output of blocks\.0, which "
            r"another stage runs: only the blocks' first argument is sent",
        ),
        ("adds", r"stage 1 computes with embed\.weight, which stage 0 has"),
        ("drops", r"stage 0: the model's forward calls blocks\.3 when blocks\.2 is due.*turn layer drop off"),
        ("backwards", r"stage 0: the model's forward calls blocks\.3 when blocks\.0 is due"),
    ],
)
def test_what_cannot_be_cut_is_refused(switch: str, message: str) -> None:
    model, ids = Plain(**{switch: True}), torch.randint(0, 9, (3, 4))
    with pytest.raises(ModelError, match=message):
        staged(model, partition_model(model, 2, counts=[2, 2]), lambda m: m(ids))


@pytest.mark.parametrize(
    ("ids", "error"), [(torch.tensor([[1, 2]]), ModelError), (torch.tensor([[1, 99]]), IndexError)]
)
def test_an_error_leaves_the_model_as_it_was(ids: Tensor, error: type[Exception]) -> None:
    model = Plain(drops=True)
    modules, good = list(model.modules()), torch.tensor([[3, 4]])
    expected = model(good)
    with pytest.raises(error):
        Stage(model, partition_model(model, 2), 0)(lambda: model(ids))
    assert "forward" not in vars(model) and list(model.modules()) == modules
    assert torch.equal(model(good), expected)


def test_a_skipped_last_block_is_refused() -> None:
    model = Plain()
    split = partition_model(model, 2)
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
    settings = {
        "vocab_size": V,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 4,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    model = transformers.T5EncoderModel(transformers.T5Config(**settings)).double()
    ids = torch.randint(3, V, (2, 6))
    split = partition_model(model, 2)
    value = Stage(model, split, 0)(lambda: model(input_ids=ids))
    with pytest.raises(ModelError, match="stage 1 computes with"):
        Stage(model, split, 1)(lambda: model(input_ids=ids), value)
