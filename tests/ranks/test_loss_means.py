"""Losses that are no mean over labels: what they are the mean of is found, said, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
import polyreme
import threads
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
    "scaled, by hand": lambda o, t: 0.3 * F.cross_entropy(o, t),
    "smoothed, by hand": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
}


def target_of(name: str) -> Tensor:
    y = data()[1]
    return y.clamp(min=0) if name == "ignored" else y


def reference(model: nn.Module, loss: Tensor) -> Record:
    norm = (
        torch.stack([g.square().sum() for g in torch.autograd.grad(loss, [*model.parameters()])]).sum().sqrt()
    )
    return loss.item(), norm.item()


def plain() -> dict[str, Record]:
    found = {}
    for name, loss_fn in LOSSES.items():
        model = net()
        found[name] = reference(model, loss_fn(model(data()[0]), target_of(name)))
    return found


def weighed(rank: int, world: int) -> dict[str, list[Record]]:
    """All loops, at several stages."""
    found: dict[str, list[Record]] = {name: [] for name in LOSSES}
    for name, loss_fn in LOSSES.items():
        x, y = (t.chunk(world)[rank] for t in (data()[0], target_of(name)))
        for stage in (0, 2, 3):
            settings = training.config(
                world, 4 // world, zero={"stage": stage}, precision={"compute": "fp64"}
            )
            results = []
            if "by hand" not in name:
                results.append(polyreme.initialize(net(), settings, loss_fn=loss_fn).train_step((x, y)))
            for own in (False, True):
                engine = polyreme.initialize(net(), settings)
                for a, b in zip(x.split(2), y.split(2), strict=True):
                    loss = loss_fn(engine(a), b)
                    loss.backward() if own else engine.backward(loss)
                results.append(engine.step())
            found[name] += [(r.loss, r.grad_norm) for r in results]
    return found


def test_cross_entropy_is_weighted_by_its_targets() -> None:
    expected = plain()
    for world in (1, 2):
        for found in threads.run(world, weighed):
            for name, records in found.items():
                torch.testing.assert_close(
                    records,
                    [expected[name]] * len(records),
                    rtol=1e-10,
                    atol=0,
                    msg=lambda m, n=name: f"{n}: {m}",
                )


def ragged_tokens() -> dict[str, Tensor]:
    batch = models.tokens(8)
    for i, labels in enumerate(batch["labels"]):
        labels[: i + 1] = -100
    return batch


def questions() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
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
            assert any("num_items_in_batch is not passed" in str(w.message) for w in said) == (
                items is not None and rank == 0
            )
            found += [("tokens", (r.loss, r.grad_norm)) for r in results]
        result = polyreme.initialize(questions(), settings).train_step(models.share(answers(), rank, world))
        found.append(("questions", (result.loss, result.grad_norm)))
    return found


def test_num_items_and_answers(ranks: Ranks) -> None:
    llama, model = models.build("llama"), questions()
    total, weight = models.causal_loss(llama(input_ids=ragged_tokens()["input_ids"]), ragged_tokens())
    expected = {
        "tokens": (reference(llama, total / weight), 1e-5),
        "questions": (reference(model, model(**answers()).loss), 1e-10),
    }
    for world in (1, 2):  # transformers computes the loss of tokens in float32
        for found in ranks(world, heads):
            for name, record in found:
                torch.testing.assert_close(
                    record,
                    expected[name][0],
                    rtol=expected[name][1],
                    atol=0,
                    msg=lambda m, n=name: f"{n}: {m}",
                )


BERT = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MIXTRAL = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "output_router_logits": True,
    "experts_implementation": "eager",
}
T5 = {
    "vocab_size": 97,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SPEECH = {
    "vocab_size": 9,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8,),
    "conv_stride": (4,),
    "conv_kernel": (8,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "feat_extract_norm": "layer",
    "final_dropout": 0.0,
    "activation_dropout": 0.0,
}


def text(**others: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"input_ids": torch.randint(0, 97, (8, 6)), **others}


def ragged(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels of every position but some."""
    labels = batch["input_ids"].clone()
    for i, row in enumerate(labels):
        row[: i % 5 + 1] = -100
    return {**batch, "labels": labels}


def classes(count: int) -> Tensor:
    torch.manual_seed(3)
    return torch.randint(0, count, (8,))


def bert(kind: Any, **options: Any) -> nn.Module:
    return kind(transformers.BertConfig(**BERT, **options))


Head = tuple[nn.Module, dict[str, Tensor]]
NUMBERS = torch.linspace(-1, 2, 24, dtype=torch.float64).view(8, 3)
HEADS: dict[str, tuple[Callable[[], Head], str | None]] = {
    "classification": (
        lambda: (bert(transformers.BertForSequenceClassification, num_labels=3), text(labels=classes(3))),
        None,
    ),
    "regression": (
        lambda: (bert(transformers.BertForSequenceClassification, num_labels=1), text(labels=NUMBERS[:, 0])),
        None,
    ),
    "several": (
        lambda: (
            bert(transformers.BertForSequenceClassification, num_labels=3),
            text(labels=(NUMBERS > 0).double()),
        ),
        None,
    ),
    "choice": (
        lambda: (
            bert(transformers.BertForMultipleChoice),
            {"input_ids": text()["input_ids"].view(8, 2, 3), "labels": classes(2)},
        ),
        None,
    ),
    "tokens": (lambda: (bert(transformers.BertForTokenClassification, num_labels=97), ragged(text())), None),
    "masked": (lambda: (bert(transformers.BertForMaskedLM), ragged(text())), None),
    "two heads": (
        lambda: (
            bert(transformers.BertForPreTraining),
            {**ragged(text()), "next_sentence_label": classes(2)},
        ),
        "NllLoss (a mean over",
    ),
    "experts": (
        lambda: (transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)), ragged(text())),
        "Sum (no mean)",
    ),
    "sequences": (
        lambda: (transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), ragged(text())),
        None,
    ),
    "images": (
        lambda: (
            transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3)),
            {"pixel_values": torch.randn(8, 3, 8, 8, dtype=torch.float64), "labels": classes(3)},
        ),
        None,
    ),
    "speech": (
        lambda: (
            transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH)),
            {
                "input_values": torch.randn(8, 64, dtype=torch.float64),
                "labels": 1 + classes(8)[:, None].repeat(1, 3),
            },
        ),
        "Sum (no mean)",
    ),
}
"""A model and its batch of 8; and what its loss is said to be made of, where that is no mean over labels or
samples."""


def head(name: str) -> Head:
    torch.manual_seed(0)
    model, batch = HEADS[name][0]()
    return model.double(), batch


def own_losses(rank: int, world: int) -> dict[str, tuple[list[Record], list[str]]]:
    """Both loops, over ranks and micro-batches, and what was warned of."""
    found = {}
    for name in HEADS:
        settings = training.config(world, 4 // world, zero={"stage": 3}, precision={"compute": "fp64"})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model, batch = head(name)
            results = [polyreme.initialize(model, settings).train_step(models.share(batch, rank, world))]
            engine = polyreme.initialize(head(name)[0], settings)
            for part in range(4 // world):
                loss = engine(**models.share(models.share(batch, rank, world), part, 4 // world)).loss
                engine.backward(loss) if part else loss.backward()
            results.append(engine.step())
        warned = [str(warning.message) for warning in said if "is made of" in str(warning.message)]
        # of `loss.backward()` no engine knows the loss
        found[name] = ([(results[0].loss, r.grad_norm) for r in results], warned)
    return found


def test_losses_of_heads_are_means_or_warned_of(ranks: Ranks) -> None:
    expected = {}
    for name, (_, seen) in HEADS.items():
        model, batch = head(name)
        expected[name] = reference(model.train(), model(**batch).loss) if seen is None else seen
    for world in (1, 2):
        for rank, found in enumerate(ranks(world, own_losses)):
            for name, (records, warned) in found.items():
                known = expected[name]
                if isinstance(known, str):
                    told = 2 if rank == 0 else 0  # one for all
                    assert len(warned) == told and all(known in text for text in warned), (name, warned)
                    continue
                assert not warned, (name, warned)
                rtol = 1e-6 if name == "sequences" else 1e-10  # T5 computes its norms in float32
                torch.testing.assert_close(
                    records, [known] * 2, rtol=rtol, atol=0, msg=lambda m, n=name: f"{n}: {m}"
                )


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
        with pytest.raises(BatchError) as caught:
            make(engine(x[:2]), y[:2]).backward()
        assert str(caught.value) == found[-1]
    for make in (
        lambda o, t: (o - t).square().sum() / 4,
        lambda o, t: F.mse_loss(o, t) / 3,
        lambda o, t: F.mse_loss(o, t) + o.mean(),
    ):
        engine = polyreme.initialize(net(), {**settings, "precision": {"compute": "fp64"}})
        engine.backward(make(engine(x[:2]), y[:2]))  # a mean, or meant
        make(engine(x[:2]), y[:2]).backward()
    with pytest.raises(BatchError) as caught:
        polyreme.initialize(net(), settings, loss_fn=nn.MSELoss(reduction="sum"))
    return [*found, str(caught.value)]


def test_a_batch_that_a_model_without_loss_fn_does_not_take_names_loss_fn() -> None:
    x, y = data()
    engine = polyreme.initialize(net(), {"batch": {"size": 8}, "precision": {"compute": "fp64"}})
    with engine, pytest.raises(BatchError, match=r"give loss_fn=\.\.\."):
        engine.train_step((x, y))


def test_losses_that_are_no_mean_are_refused() -> None:
    [found] = threads.run(1, refused)
    for words, message in zip(
        ["was divided by 4"] * 2 + ["weight=n"] * 2 + ['reduction="sum"'], found, strict=True
    ):
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
        engine = polyreme.initialize(
            net(), {**training.config(1, 2), "precision": {"compute": "fp64"}}, loss_fn=loss_fn
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                engine.train_step({"input": x, "goal": goal, "mask": mask})
        found.append([str(w.message) for w in said if "halves" in str(w.message)])
    for kind in (Answer, SimpleNamespace):
        found.append(held(kind, x, goal))
    return found


@dataclass
class Answer:
    """What a model may return; torch's trees do not know it."""

    logits: Tensor


def held(kind: Any, x: Tensor, goal: Tensor) -> list[str]:
    """What is told of a mean loss of a model in bf16 that returns its tensor in a `kind`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Any:
            return kind(logits=self.inner(x))

    dtypes = set()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        dtypes.add(output.logits.dtype)
        return F.mse_loss(output.logits, target)

    config = {**training.config(1, 2), "precision": {"compute": "bf16"}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        polyreme.initialize(Net(), config, loss_fn=loss_fn).train_step((x.float(), goal.float()))
    assert kind is not Answer or dtypes == {torch.float32}  # as the target has
    return [str(w.message) for w in said if "no repeated blocks" not in str(w.message)]


def test_a_loss_that_is_no_mean_over_samples_is_told_once(ranks: Ranks) -> None:
    [[masked, *others]] = ranks(1, compared)
    assert len(masked) == 1 and "(sum of losses, weight)" in masked[0]
    assert others == [[]] * 4


class OwnLoss(nn.Module):
    """Returns its loss alone; without labels that is 0/0, the mean over none, or depends on nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embedding, self.head = kind, nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits, known = self.head(hidden), labels != -100
        if self.kind == "none" and not known.any():
            return torch.zeros((), dtype=torch.float64)
        if self.kind == "chosen":
            return F.cross_entropy(logits[known], labels[known])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Learned(nn.Module):
    """A loss with a temperature of its own, which is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.temperature, target)


def with_a_loss(rank: int, world: int, form: str, mesh: dict[str, int]) -> float:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(), Learned()
    if form == "of the model":
        model.loss = loss
        model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    loss.requires_grad_(form != "frozen")
    config = {"batch": {"size": 8, "micro": 4 // world}, "precision": {"compute": "fp64"}, "mesh": mesh}
    loss_fn = loss if form != "closure" else lambda output, target: loss(output, target)
    x, share = data()[0], slice(4 * rank, 4 * rank + 4) if world > 1 and not mesh else slice(None)
    with polyreme.initialize(model, config, loss_fn=loss_fn) as engine:
        for _ in range(2):
            engine.train_step((x[share], x[share, :3]))
        numbers = engine.state_dict()
    return float(numbers.get("loss.temperature", loss.temperature))


@pytest.mark.parametrize(
    ("form", "world", "mesh"),
    [
        ("module", 1, {}),
        ("module", 2, {}),
        ("module", 2, {"pp": 2}),
        ("closure", 1, {}),
        ("frozen", 2, {}),
        ("of the model", 2, {}),
    ],
)
def test_parameters_of_a_loss_that_nobody_trains_are_told_once(
    form: str, world: int, mesh: dict[str, int]
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = threads.run(world, with_a_loss, form, mesh)
    texts = [str(each.message) for each in told if "none of the model's" in str(each.message)]
    assert len(texts) == (form in ("module", "closure"))
    assert all("of shape ()" in text and "submodule" in text for text in texts)
    assert (found[0] != 0.5) == (form == "of the model")


def without_labels(rank: int, world: int, accumulation: int) -> None:
    """Micro-batches without any label, on one rank alone."""
    ids = torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[8 - 4 // accumulation :] = -100
    for kind in ("mean", "chosen", "none"):
        for stage, own in ((0, False), (2, True), (3, False), (3, True)):
            settings = training.config(
                world, accumulation, zero={"stage": stage}, precision={"compute": "fp64"}
            )
            engine, plain = polyreme.initialize(OwnLoss(kind), settings), OwnLoss(kind)
            mine = {"input_ids": ids.chunk(world)[rank], "labels": labels.chunk(world)[rank]}
            if own:
                for part in zip(*(mine[key].chunk(accumulation) for key in mine), strict=True):
                    engine.backward(engine(**dict(zip(mine, part, strict=True))))
                result = engine.step()
            else:
                result = engine.train_step(mine)
            loss = plain(ids, labels)
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
            assert (result.loss, result.grad_norm) == pytest.approx((loss.item(), norm), rel=1e-10), kind
            engine.close()


@pytest.mark.parametrize(("world", "accumulation"), [(1, 2), (2, 1), (2, 2)])
def test_micro_batches_without_labels_of_a_model_that_returns_its_loss(world: int, accumulation: int) -> None:
    threads.run(world, without_labels, accumulation)
