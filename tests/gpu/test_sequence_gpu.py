"""Fused kernels of divided sequences on a GPU, beside tiles of scores there; every test has its twin on the
CPU, which has a kernel of its own."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import models
import polyreme
from polyreme.sequence import fused
from polyreme.sequence.block import Incoming, Merged, attend, differentiate
from polyreme.sequence.parts import Balance, Work, cut
from polyreme.sequence.visible import Rule, Tokens

LENGTH = 256


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where attention is computed, and the engine lives."""
    if request.param == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device(request.param)


def tokens_of(lengths: list[int], balance: Balance) -> list[Tokens]:
    """Of two ranks, for two samples of documents of these lengths."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, LENGTH)
    parts = cut(documents, 2, balance, Work())
    return [
        Tokens(parts.order[:, at], parts.mine(documents, at), parts.mine(documents, at), 32)
        for at in range(2)
    ]


def computed(blocks: list[Tokens], rule: Rule, inputs: list[Tensor]) -> list[Tensor]:
    """Output, log-sum-exps and gradients of the second rank's queries over both blocks."""
    query, grad, *keys = inputs
    merged = Merged.empty(query, grad.shape[-1])
    for at, block in enumerate(blocks):
        attend(merged, query, *keys[2 * at : 2 * at + 2], blocks[1], block, rule)
    incoming = Incoming.of(query, grad, merged.output.to(query.dtype), merged.lse)
    found = [
        differentiate(incoming, *keys[2 * at : 2 * at + 2], blocks[1], block, rule)
        for at, block in enumerate(blocks)
    ]
    return [merged.output, merged.lse, incoming.query_grad, *(each for both in found for each in both)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "balance", "rule", "heads", "widths"),
    [
        ([LENGTH], "zigzag", Rule(0.125), (4, 2), (64, 64)),
        ([LENGTH], "contiguous", Rule(0.125, causal=False), (4, 4), (64, 64)),
        ([100, 3, 53, 100], "documents", Rule(0.125), (4, 1), (64, 64)),
        ([LENGTH], "zigzag", Rule(0.125, window=50), (4, 2), (128, 128)),
        ([LENGTH], "zigzag", Rule(0.125), (4, 2), (208, 208)),
        ([156, 100], "zigzag", Rule(0.125), (4, 4), (192, 128)),
    ],
)
def test_kernels_are_as_precise_as_tiles(
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    balance: Balance,
    rule: Rule,
    heads: tuple[int, int],
    widths: tuple[int, int],
) -> None:
    blocks, generator = tokens_of(lengths, balance), torch.Generator().manual_seed(0)
    (of_queries, of_keys), (width, of_values) = heads, widths
    shapes = [(of_queries, width), (of_queries, of_values), *[(of_keys, width), (of_keys, of_values)] * 2]
    inputs = [
        torch.randn(2, LENGTH // 2, *shape, generator=generator).transpose(1, 2).to(device, dtype)
        for shape in shapes
    ]
    taken = fused.takes(inputs[0], inputs[2], inputs[3], rule)
    assert taken == (device.type == "cuda" or width == of_values)
    kernel = computed(blocks, rule, inputs)
    with patch.object(fused, "takes", return_value=False):
        tiles = computed(blocks, rule, inputs)
        exact = computed(blocks, rule, [each.double() for each in inputs])
    for mine, theirs, each in zip(kernel, tiles, exact, strict=True):
        assert (mine - each).norm() <= 3 * (theirs - each).norm() + 1e-6 * each.norm()


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_a_step_of_packed_documents_is_that_of_tiles(
    device: torch.device, compute: str, tolerance: float
) -> None:
    def trained() -> list[float]:
        torch.manual_seed(0)
        config = {
            "batch": {"size": 2, "micro": 1},
            "precision": {"compute": compute},
            "context": {"method": "ring"},
            "memory": {"activations": "recompute"},
        }
        model = models.llama(num_hidden_layers=2, hidden_size=64)
        found: list[float] = []
        with polyreme.initialize(model, config) as engine:
            for step in range(2):
                batch = models.tokens(2, 48, step)
                batch["document_ids"] = (torch.arange(48) // 20).expand(2, 48)
                result = engine.train_step(batch)
                found += [result.loss, result.grad_norm]
        return found

    kernel = trained()
    with patch.object(fused, "takes", return_value=False):
        assert kernel == pytest.approx(trained(), rel=tolerance)
