"""Batches whose tensors have no common first dimension: texts with images (Qwen2-VL), images of several
sizes, targets of detection.

Each trains as in plain torch, as a list of micro-batches, in the loop and, where it can be cut, as a whole;
or says what is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyreme
import threads
import training
from models import Wide
from polyreme.errors import BatchError
from polyreme.step.batch.batches import leading_sizes, split

STAGES = (0, 2, 3)
IMAGE, BEGIN, END = 40, 42, 43


def qwen() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"type": "mrope", "mrope_section": [2, 2, 2], "rope_type": "default"}
    text = {
        "vocab_size": 48,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": rope,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 24,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": 41,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    torch.manual_seed(0)
    return (
        Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
        .double()
        .train()
    )


GRIDS = [(4, 4), (2, 4), (2, 2), (4, 6), (2, 2), (2, 6), (4, 2), (4, 4)]  # patches of each sample's image


def texts(samples: slice) -> dict[str, Tensor]:
    """Texts with an image each, padded; the patches of all images one after the other."""
    rows, patches = [], []
    for i, (height, width) in [*enumerate(GRIDS)][samples]:
        draw = torch.Generator().manual_seed(i)
        words = torch.randint(2, 39, (5 + i,), generator=draw)
        image = torch.tensor([BEGIN, *[IMAGE] * (height * width // 4), END])
        rows.append(torch.cat([words[:2], image, words[2:]]))
        patches.append(torch.randn(height * width, 48, dtype=torch.float64, generator=draw))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (ids != 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((ids == 0) | (ids >= IMAGE), -100),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in GRIDS[samples]]),
    }


class Detector(nn.Module):
    """As torchvision's: images of several sizes and what is in each of them, to a dictionary of losses, each
    a mean over the images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.box, self.kind = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        seen = torch.stack([self.look(image).tanh().mean((1, 2)) for image in images])
        boxes = torch.stack(
            [
                F.mse_loss(box.expand_as(t["boxes"]), t["boxes"])
                for box, t in zip(self.box(seen), targets, strict=True)
            ]
        )
        kinds = [
            F.cross_entropy(k.expand(len(t["labels"]), 5), t["labels"])
            for k, t in zip(self.kind(seen), targets, strict=True)
        ]
        return {"loss_box": boxes.mean(), "loss_kind": torch.stack(kinds).mean()}


def images(samples: slice, things: int | None = None) -> dict[str, list[Any]]:
    """With so many things in each image, or another number in each."""
    found: dict[str, list[Any]] = {"images": [], "targets": []}
    for i in range(training.SAMPLES)[samples]:
        torch.manual_seed(i)
        count = things or 1 + i % 4
        found["images"].append(torch.randn(3, 5 + i, 9 - i % 3, dtype=torch.float64))
        found["targets"].append(
            {"boxes": torch.rand(count, 4, dtype=torch.float64), "labels": torch.randint(5, (count,))}
        )
    return found


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.head(torch.stack([self.look(image).tanh().mean((1, 2)) for image in images]))


def classes(samples: slice) -> tuple[list[Tensor], Tensor]:
    found = images(samples)
    return found["images"], torch.stack([target["labels"][0] for target in found["targets"]])


def added(losses: dict[str, Tensor], _: Any) -> Tensor:
    return torch.stack([*losses.values()]).sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[slice], Any], Any]] = {
    "qwen": (qwen, texts, None),
    "detector": (lambda: Detector().double(), images, added),
    "one thing": (lambda: Detector().double(), lambda rows: images(rows, 1), added),
    "three things": (lambda: Detector().double(), lambda rows: images(rows, 3), added),  # as many as channels
    "classifier": (lambda: Classifier().double(), classes, F.cross_entropy),
}


def loss_of(case: str, model: Any, batch: Any) -> Tensor:
    """The mean loss, as a script computes it."""
    if case == "qwen":
        with Wide():
            return model(**batch).loss
    return F.cross_entropy(model(batch[0]), batch[1]) if case == "classifier" else added(model(**batch), None)


def plain(case: str) -> list[float]:
    model, batch = CASES[case][0](), CASES[case][1](slice(None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = loss_of(case, model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, world: int, case: str) -> list[tuple[str, list[float]]]:
    """A step as a list, as a whole or in the loop, of micro-batches that differ in size; and a second one."""
    make, batch_of, loss_fn = CASES[case]
    each, found = training.SAMPLES // world, []
    micro = each // 2
    parts = [slice(at, at + micro) for at in range(rank * each, (rank + 1) * each, micro)]
    optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": None}
    for stage in STAGES:
        settings = training.config(
            world, 2, zero={"stage": stage}, precision={"compute": "fp64"}, optimizer=optimizer
        )
        for way in ("list", "whole", "loop"):
            if case == "qwen" and way == "whole":
                continue
            engine = polyreme.initialize(make(), settings, loss_fn=None if way == "loop" else loss_fn)
            losses = []
            for _ in range(2):
                if way == "loop":
                    for part in parts:
                        batch = batch_of(part)
                        loss = loss_of(case, engine, batch)
                        engine.backward(loss)
                    result = engine.step()
                else:
                    whole = batch_of(slice(rank * each, (rank + 1) * each))
                    with Wide():
                        result = engine.train_step(
                            [batch_of(part) for part in parts] if way == "list" else whole
                        )
                losses.append(result.loss)
                assert result.samples == training.SAMPLES, (case, way)
            if case == "qwen":
                assert result.tokens == int(texts(slice(None))["attention_mask"].sum())
                losses.append(engine.eval_step([batch_of(part) for part in parts]).loss)
            found.append((f"{way} at stage {stage}", losses))
        if case == "qwen":
            with pytest.raises(BatchError, match=r"first dimensions \[.*\]\. Give train_step a list"):
                engine.train_step(batch_of(parts[0]))
    return found


@pytest.mark.parametrize("case", CASES)
def test_batches_without_common_rows_are_plain_torch(case: str) -> None:
    expected = plain(case)
    for world in (1, 2):
        for runs in threads.run(world, trained, case):
            for name, losses in runs:
                assert losses[:2] == pytest.approx(expected, rel=1e-10), (world, name)


def test_what_is_known_of_lists() -> None:
    """Of images alone, channels are not taken for samples; of stacks of inputs the rows are."""
    batch = images(slice(0, 3))
    found, three = batch["images"], torch.arange(3)
    assert leading_sizes(batch) == leading_sizes((*batch.values(),)) == leading_sizes((found, three)) == {3}
    assert [[len(each) for each in part.values()] for part in split(batch, 2)] == [[2, 2], [1, 1]]
    assert [[len(each) for each in part] for part in split((found, three), 2)] == [[2, 2], [1, 1]]
    assert leading_sizes(images(slice(0, 5), 3)) == {5}
    assert leading_sizes((found[:2],)) == leading_sizes({"images": found[:2]}) == {2, 3}
    assert leading_sizes([torch.ones(4, 7, 2), torch.ones(4, 7, 1)]) == {4}
    assert leading_sizes(([torch.ones(4, 2), torch.ones(4, 3)], torch.ones(4))) == {4}


def test_images_alone_are_refused_where_their_number_counts() -> None:
    threads.run(1, refused)


def refused(rank: int, world: int) -> None:
    engine = polyreme.initialize(
        Classifier().double(), {"precision": {"compute": "fp64"}, "batch": {"size": 4, "micro": 2}}
    )
    found: Sequence[Tensor] = images(slice(0, 2))["images"]
    with pytest.raises(BatchError, match=r"tensors of \[2, 3\] rows.*weight="):
        engine.backward(engine(found).square().mean())
    engine.backward(engine(found).square().mean(), weight=2)
