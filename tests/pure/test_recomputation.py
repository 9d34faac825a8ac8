"""Recomputation outside the engine: which parts of a model are recomputed, and that buffers come out as
without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import models
from polyreme.errors import ConfigError
from polyreme.models.huggingface import find_blocks
from polyreme.models.patches import Patches
from polyreme.step.memory.recomputation import measure, wrap_blocks


class Half(nn.Module):
    """Running means, and a weight whose norm a power iteration follows: buffers that forward changes, one
    that it also reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.norm(self.linear(x))) + self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)  # a new tensor each time
        return out


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": Half(6), "decoder": Half(6)})
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts["decoder"](self.parts["encoder"](x)))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Autoencoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def trained(build: Callable[[], nn.Module], recompute: bool) -> tuple[list[int], dict[str, Tensor]]:
    """Bytes kept by each of three forwards, and everything that training ends with."""
    torch.manual_seed(0)
    model = build()
    recomputed = wrap_blocks(model, find_blocks(model), recompute, 1, (), False, None, Patches())
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        with measure(recomputed, model.parameters()) as saved:
            loss = model(torch.randn(5, 6)).square().mean()
        kept.append(saved.bytes)
        loss.backward()
        optimizer.step()
    return kept, dict(model.state_dict())


@pytest.mark.parametrize("build", [Autoencoder, Wrapper])
def test_buffers_and_weights_are_those_of_a_run_without(build: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (kept, plain), (kept_less, again) = trained(build, False), trained(build, True)
    assert plain.keys() == again.keys()
    assert not [name for name in plain if not torch.equal(plain[name], again[name])]
    assert (
        plain[
            "net.parts.encoder.norm.num_batches_tracked"
            if build is Wrapper
            else "parts.encoder.norm.num_batches_tracked"
        ]
        == 3
    )
    assert max(kept_less) < min(kept)


def parts_of(model: nn.Module) -> list[nn.Module]:
    return wrap_blocks(model, find_blocks(model), True, 1, (), False, None, Patches())


def test_several_parts_are_recomputed_one_by_one() -> None:
    wrapper = Wrapper()
    assert parts_of(wrapper) == list(wrapper.net.parts.values())


def test_a_flat_model_is_recomputed_whole_and_says_so() -> None:
    model = models.ConvNet()
    with pytest.warns(UserWarning, match="no repeated blocks, so it is recomputed as a whole"):
        assert parts_of(model) == [model]


def test_repeated_blocks_go_first() -> None:
    model = models.Dag(3)
    assert parts_of(model) == list(model.nodes)


def test_without_blocks_nothing_is_compiled() -> None:
    with pytest.raises(ConfigError, match=r"compile = True.*no repeated blocks"):
        wrap_blocks(models.ConvNet(), {}, True, 1, (), True, None, Patches())
