"""Losses that are no mean over labels: what they are the mean of is found, said, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
import polyreme
import training
from polyreme.errors import BatchError
from pool import Ranks

CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
Record = tuple[float, float]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 0, 2, 1, -100, 1, 2, -100])
    return x, y


LOSSES: dict[str, Callable[..., Any]] = {
    "classes": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "function": F.cross_entropy,
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "by hand": lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS),  # in the loop alone
}


def target_of(name: str) -> Tensor:
    y = data()[1]
    return y.clamp(min=0) if name == "ignored" else y


def reference(model: nn.Module, loss: Tensor) -> Record:
    norm = torch.stack([g.square().sum() for g in torch.autograd.grad(loss, [*model.parameters()])]).sum().sqrt()
    return loss.item(), norm.item()


def plain() -> dict[str, Record]:
    found = {}
    for name, loss_fn in LOSSES.items():
        model = net()
        found[name] = reference(model, loss_fn(model(data()[0]), target_of(name)))
    return found


def weighed(rank: int, world: int) -> dict[str, list[Record]]:
    """Both loops, at several stages."""
    found: dict[str, list[Record]] = {name: [] for name in LOSSES}
    for name, loss_fn in LOSSES.items():
        x, y = (t.chunk(world)[rank] for t in (data()[0], target_of(name)))
        for stage in (0, 2, 3):
            settings = training.config(world, 4 // world, zero={"stage": stage}, precision={"compute": "fp64"})
            results = []
            if name != "by hand":
                results.append(polyreme.initialize(net(), settings, loss_fn=loss_fn).train_step((x, y)))
            engine = polyreme.initialize(net(), settings)
            for a, b in zip(x.split(2), y.split(2), strict=True):
                engine.backward(loss_fn(engine(a), b))
            found[name] += [(r.loss, r.grad_norm) for r in [*results, engine.step()]]
    return found


def test_cross_entropy_is_weighted_by_its_targets(ranks: Ranks) -> None:
    expected = plain()
    for world in (1, 2):
        for found in ranks(world, weighed):
            for name, records in found.items():
                torch.testing.assert_close(records, [expected[name]] * len(records), rtol=1e-10, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def ragged_tokens() -> dict[str, Tensor]:
    batch = models.tokens(8)
    for i, labels in enumerate(batch["labels"]):
        labels[: i + 1] = -100
    return batch


def questions() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=models.VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return transformers.BertForQuestionAnswering(config).double()


def answers() -> dict[str, Tensor]:
    ids = models.tokens(8)["input_ids"]
    begin = torch.tensor([0, 3, 12, 5, 40, 2, 12, 1])  # 12 and more: after the end of the text
    return {"input_ids": ids, "start_positions": begin, "end_positions": begin + 0}


def heads(rank: int, world: int) -> list[tuple[str, Record]]:
    found = []
    for stage in (0, 3):
        settings = training.config(world, 4 // world, zero={"stage": stage}, precision={"compute": "fp64"})
        mine = models.share(ragged_tokens(), rank, world)
        global_items = int((ragged_tokens()["labels"][:, 1:] != -100).sum())
        own_items = int((mine["labels"][:, 1:] != -100).sum())
        for items in (None, own_items, global_items, torch.tensor(global_items)):
            given: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                results = [polyreme.initialize(models.build("llama"), settings).train_step({**mine, **given})]
                engine = polyreme.initialize(models.build("llama"), settings)
                for part in range(4 // world):
                    engine.backward(engine(**models.share(mine, part, 4 // world), **given).loss)
                results.append(engine.step())
            assert any("num_items_in_batch is not passed" in str(w.message) for w in said) == (items is not None)
            found += [("tokens", (r.loss, r.grad_norm)) for r in results]
        result = polyreme.initialize(questions(), settings).train_step(models.share(answers(), rank, world))
        found.append(("questions", (result.loss, result.grad_norm)))
    return found


def test_num_items_and_answers(ranks: Ranks) -> None:
    llama, model = models.build("llama"), questions()
    total, weight = models.causal_loss(llama(input_ids=ragged_tokens()["input_ids"]), ragged_tokens())
    expected = {"tokens": (reference(llama, total / weight), 1e-5), "questions": (reference(model, model(**answers()).loss), 1e-10)}
    for world in (1, 2):  # transformers computes the loss of tokens in float32
        for found in ranks(world, heads):
            for name, record in found:
                torch.testing.assert_close(record, expected[name][0], rtol=expected[name][1], atol=0, msg=lambda m, n=name: f"{n}: {m}")


def refused(rank: int, world: int) -> list[str]:
    x, y = data()
    y = F.one_hot(y.clamp(min=0), 3).double()
    settings = training.config(1, 4)
    found = []
    for make in (
        lambda o, t: F.mse_loss(o, t) / 4,
        lambda o, t: F.mse_loss(o, t) * 0.25,
        lambda o, t: F.mse_loss(o, t, reduction="sum"),
        lambda o, t: (o - t).square().sum(),
    ):
        engine = polyreme.initialize(net(), {**settings, "precision": {"compute": "fp64"}})
        with pytest.raises(BatchError) as caught:
            engine.backward(make(engine(x[:2]), y[:2]))
        found.append(str(caught.value))
        engine.backward(make(engine(x[:2]), y[:2]), weight=2)  # said, it is taken
    for make in (lambda o, t: (o - t).square().sum() / 4, lambda o, t: F.mse_loss(o, t) / 3, lambda o, t: F.mse_loss(o, t) + o.mean()):
        engine = polyreme.initialize(net(), {**settings, "precision": {"compute": "fp64"}})
        engine.backward(make(engine(x[:2]), y[:2]))  # a mean, or meant
    with pytest.raises(BatchError) as caught:
        polyreme.initialize(net(), settings, loss_fn=nn.MSELoss(reduction="sum"))
    return [*found, str(caught.value)]


def test_losses_that_are_no_mean_are_refused(ranks: Ranks) -> None:
    [found] = ranks(1, refused)
    for words, message in zip(["was divided by 4"] * 2 + ["weight=n"] * 2 + ['reduction="sum"'], found, strict=True):
        assert words in message


def compared(rank: int, world: int) -> list[list[str]]:
    x, _ = data()
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1])
    goal = x.sum(1, keepdim=True).expand(8, 3)

    def masked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return ((output - batch["goal"]).square().mean(1) * batch["mask"]).sum() / batch["mask"].sum()

    def said_masked(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return ((output - batch["goal"]).square().mean(1) * batch["mask"]).sum(), batch["mask"].sum()

    found = []
    for loss_fn in (masked, said_masked, lambda output, batch: F.mse_loss(output, batch["goal"])):
        engine = polyreme.initialize(net(), {**training.config(1, 2), "precision": {"compute": "fp64"}}, loss_fn=loss_fn)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                engine.train_step({"input": x, "goal": goal, "mask": mask})
        found.append([str(w.message) for w in said if "halves" in str(w.message)])
    return found


def test_a_loss_that_is_no_mean_over_samples_is_told_once(ranks: Ranks) -> None:
    [[masked, *others]] = ranks(1, compared)
    assert len(masked) == 1 and "(sum of losses, weight)" in masked[0]
    assert others == [[], []]
