"""Where the repeated blocks of a model are."""

from __future__ import annotations

import torch
from torch import nn

import models
from polyreme.model_map import find_blocks


class Lists(nn.Module):
    """A large embedding, and lists of `sizes`."""

    def __init__(self, **sizes: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 10)
        for name, modules in sizes.items():
            self.add_module(name, nn.ModuleList(modules))


def linear(*widths: int) -> list[nn.Module]:
    return [nn.Linear(10, width) for width in widths]


def test_blocks_are_found_however_large_the_vocabulary_is() -> None:
    for vocabulary in (97, 100_000):
        with torch.device("meta"):
            model = models.llama(vocab_size=vocabulary)
        assert list(find_blocks(model)) == [f"model.layers.{i}" for i in range(3)]


def test_lists_that_hold_a_tenth_or_else_the_largest() -> None:
    assert list(find_blocks(Lists(a=linear(300, 300), b=linear(200, 200), c=linear(1, 1)))) == ["a.0", "a.1", "b.0", "b.1"]
    assert list(find_blocks(Lists(a=linear(1, 1), b=linear(2, 2), c=[*linear(3), nn.Bilinear(3, 3, 3)]))) == ["b.0", "b.1"]
    assert list(find_blocks(Lists(a=[nn.ReLU(), nn.ReLU()], b=linear(1)))) == []
    assert list(find_blocks(models.ConvNet())) == []
