"""Logits in chunks and MLPs in tiles on a model by itself: what they compute, when they compute all, and what
is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from polyreme.config import Config
from polyreme.errors import ConfigError, ModelError
from polyreme.models.huggingface import find_blocks
from polyreme.models.patches import Patches
from polyreme.sequence.loss_chunks import ChunkedLogits, chunk_loss
from polyreme.sequence.mlp_tiles import tile_mlps


def llama() -> Any:
    torch.manual_seed(0)
    return models.llama(num_hidden_layers=2).double()


def ids() -> Tensor:
    return torch.randint(3, models.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def chunked(tokens: int = 4) -> tuple[Any, Patches]:
    model, patches = llama(), Patches()
    chunk_loss(model, tokens, patches)
    return model, patches


Use = Callable[[Tensor], Tensor]
USES: dict[str, Use] = {
    "mean": lambda logits: F.cross_entropy(logits.view(-1, models.VOCABULARY), ids().flatten()),
    "sum": lambda logits: F.cross_entropy(logits.flatten(0, 1), ids().flatten(), reduction="sum"),
    "none": lambda logits: F.cross_entropy(logits.flatten(0, 1), ids().flatten(), reduction="none"),
    "smooth": lambda logits: F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), ids().flatten(), label_smoothing=0.1
    ),
    "ignored": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), ids().flatten().index_fill(0, torch.arange(7), -1), ignore_index=-1
    ),
    "shifted": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), ids()[:, 1:].flatten()
    ),
    "capped": lambda logits: F.cross_entropy((torch.tanh(logits / 3.0) * 3.0).flatten(0, 1), ids().flatten()),
    "a zero": lambda logits: (torch.nan_to_num(logits) * 0.0).sum().float(),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_done_to_logits_is_done_to_chunks(use: str) -> None:
    found = []
    for model in (llama(), chunked()[0]):
        logits = model(input_ids=ids()).logits
        assert logits.shape == (2, 9, models.VOCABULARY)
        result = USES[use](logits)
        result.sum().backward()
        found.append([result, *(parameter.grad for parameter in model.parameters())])
    assert isinstance(logits, ChunkedLogits)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_the_whole_is_computed_where_no_gradient_is_asked_for() -> None:
    model, patches = chunked()
    with torch.no_grad():
        expected = llama()(input_ids=ids()).logits
        logits = model(input_ids=ids()).logits
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert torch.equal(logits[:, -1, :] + 0, expected[:, -1])
    patches.undo()
    assert torch.equal(model(input_ids=ids()).logits, expected)


def test_what_would_take_all_logits_is_refused_by_name() -> None:
    model, _ = chunked()
    logits = model(input_ids=ids()).logits
    for use in (
        lambda: logits.softmax(-1),
        lambda: F.cross_entropy(logits.mT, ids()),
        lambda: logits + logits,
    ):
        with pytest.raises(ModelError, match=r'of LlamaForCausalLM.*loss_chunk = 4.*loss_chunk = "none"'):
            use()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="backward hook"):
        model(input_ids=ids())
    with pytest.raises(ConfigError, match="Sequential has no linear head"):
        chunk_loss(nn.Sequential(nn.Linear(2, 2)), 4, Patches())


def test_tiles_compute_what_the_whole_does() -> None:
    found = []
    for tile in (None, 1, 3, 8, 100):
        model, patches = llama(), Patches()
        if tile is not None:
            tile_mlps(find_blocks(model), tile, patches)
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids(), labels=ids()).loss, loss.detach())
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-12)


class Block(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class FeedForward(nn.Sequential):
    pass


class Gated(nn.Module):
    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(*args, **kwargs)


class GatedMLP(Gated):
    pass


@pytest.mark.parametrize(
    "block",
    [
        Block(fc1=nn.Linear(2, 2)),
        Block(mlp=FeedForward(nn.Conv1d(2, 2, 3))),
        Block(moe=Block(experts=nn.Linear(2, 2), shared=FeedForward())),
    ],
    ids=["none", "convolution", "experts"],
)
def test_blocks_without_an_mlp_of_tokens_are_refused(block: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"layers\.1 has no MLP of its own.*"):
        tile_mlps({"layers.0": Block(mlp=FeedForward()), "layers.1": block}, 4, Patches())


@pytest.mark.parametrize(
    ("answer", "given", "said"),
    [
        (lambda x, y: x, (torch.ones(1, 2, 3),), "other tensors"),
        (lambda x: (x, x), (), "returns more"),
        (lambda x: x[:, :1], (), r"makes \[1, 3, 3\] of \[1, 5, 3\]"),
    ],
)
def test_mlps_that_are_not_of_tokens_are_refused(
    answer: Callable[..., Any], given: tuple[Tensor, ...], said: str
) -> None:
    mlp = GatedMLP(answer)
    tile_mlps({"layers.0": Block(mlp=mlp)}, 2, Patches())
    with pytest.raises(ModelError, match=f"GatedMLP .*{said}.*mlp_tile"):
        mlp(torch.ones(1, 5, 3), *given)
    hooked = FeedForward()
    hooked.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="would see tiles"):
        tile_mlps({"layers.0": Block(mlp=hooked)}, 2, Patches())


@pytest.mark.parametrize("name", ["loss_chunk", "mlp_tile"])
def test_schedules_that_put_gradients_off_are_refused(name: str) -> None:
    sections = {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}, "batch": {"size": 4}}
    with pytest.raises(ConfigError, match=f'context.{name} = "none"'):
        Config.load({**sections, "context": {name: 4}}).resolve(2)
    with pytest.raises(ConfigError, match=r'compile = false, or context\.mlp_tile = "none"'):
        Config.load({"compile": True, "context": {"mlp_tile": 4}}).resolve(1)
