"""Whatever is given as the model, and however its numbers lie in memory: a divided run is plain PyTorch's, on
rank 0's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
import polyreme
import training
from polyreme.errors import ModelError
from pool import Ranks

WIDTH, STEPS, SEED = 9, 2, 7
FP64: dict[str, Any] = {"dtype": torch.float64}


class Block(nn.Module):
    """A weight that lies transposed in memory, a buffer of one number expanded, and one that all blocks
    share."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12, **FP64), nn.Linear(12, WIDTH, **FP64)
        self.up.weight = nn.Parameter(torch.randn(WIDTH, 12, **FP64).t())
        self.register_buffer("scale", torch.rand(1, **FP64).expand(WIDTH))
        self.register_buffer("shared", shared)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale))) * self.shared


class Scattered(nn.Module):
    """Blocks between layers whose parameters and buffers are anything but contiguous."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH, **FP64)
        self.first.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, **FP64)[:, ::2])
        self.register_buffer("mask", (torch.rand(2, WIDTH) > 0.3)[0])
        shared = torch.rand(WIDTH, 2, **FP64)[:, 0]
        self.blocks = nn.ModuleList(Block(shared) for _ in range(4))
        self.last = nn.Linear(WIDTH, 5, **FP64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.mask
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x, y = models.vectors(training.SAMPLES, seed=step)
    return x.double(), y[:, :5].double()


def config(dp: int, mesh: dict[str, Any], **sections: Any) -> dict[str, Any]:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if mesh.get("tp", 1) > 1 else {}
    return {
        **training.config(dp, 2, precision={"compute": "fp64"}, mesh={**mesh, "tp_plan": plan}, **sections),
        "seed": SEED,
    }


class Trained(NamedTuple):
    """A run, names and bytes of the parameters of this rank, and its buffers."""

    run: training.Run
    names: set[str]
    bytes: int
    buffers: dict[str, Tensor]


def trained(model: Any, world: int, mesh: dict[str, int], **sections: Any) -> Trained:
    dp = world // mesh.get("tp", 1) // mesh.get("pp", 1)
    engine = polyreme.initialize(model, config(dp, mesh, **sections), loss_fn=F.mse_loss)
    assert all(buffer.is_contiguous() for buffer in engine.module.buffers())
    size = engine.memory()["parameters"]
    records = []
    for step in range(STEPS):
        result = engine.train_step(models.share(batch_of(step), engine.mesh.dp.rank, dp))
        records.append((result.loss, result.grad_norm))
    names = {name for name, _ in engine.module.named_parameters()}
    return Trained(
        (records, engine.state_dict()), names, size, dict(engine.module.named_buffers(remove_duplicate=False))
    )


def plain(model: nn.Module) -> training.Run:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    return models.plain_training(model, F.mse_loss, [batch_of(step) for step in range(STEPS)], optimizer, 1.0)


def assert_equals(found: Trained, expected: training.Run, what: object) -> None:
    torch.testing.assert_close(
        found.run[0], expected[0], rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}"
    )
    for name, tensor in expected[1].items():
        torch.testing.assert_close(
            found.run[1][name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{what}, {n}: {m}"
        )


# ---- numbers anywhere in memory, other ones on each rank


def scattered(rank: int, world: int, layouts: list[dict[str, int]], built: bool) -> list[Trained]:
    found = []
    for mesh in layouts:
        model = Scattered(seed=rank) if built else lambda: Scattered(seed=0)
        found.append(trained(model, world, mesh, zero={"stage": 3}))
    return found


@pytest.mark.parametrize("built", [True, False], ids=["module", "function"])
@pytest.mark.parametrize(("world", "layouts"), [
    (1, [{}]),
    (2, [{"tp": 2}, {"pp": 2}]),
    (4, [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]),
])  # fmt: skip
def test_rank_0s_numbers_count(ranks: Ranks, world: int, layouts: list[dict[str, int]], built: bool) -> None:
    reference = Scattered(seed=0)
    weights = {name: p for name, p in reference.named_parameters() if not p.is_contiguous()}
    buffers = dict(reference.named_buffers(remove_duplicate=False))
    assert len(weights) == 5 and sum(buffer.stride() != (1,) for buffer in buffers.values()) == 8
    expected = plain(reference)
    for rank, each in enumerate(ranks(world, scattered, layouts, built)):
        for mesh, found in zip(layouts, each, strict=True):
            assert_equals(found, expected, (rank, mesh))
            assert found.buffers and found.buffers.keys() <= buffers.keys()
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in found.buffers.items()), (
                rank,
                mesh,
            )
            assert (
                len({buffer.data_ptr() for name, buffer in found.buffers.items() if name.endswith("shared")})
                == 1
            )


def without_numbers(rank: int, world: int) -> None:
    with (
        torch.device("meta"),
        pytest.raises(ModelError, match=r"weight is on the meta device.* the function that builds the model"),
    ):
        polyreme.initialize(nn.Linear(2, 2), config(world, {}))


def test_a_module_without_numbers_is_refused(ranks: Ranks) -> None:
    ranks(1, without_numbers)


# ---- lists of layers


BUILDERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, 16, **FP64),
    nn.Tanh,
    lambda: nn.Linear(16, 16, **FP64),
    nn.Tanh,
    lambda: nn.Linear(16, 16, **FP64),
    nn.Tanh,
    lambda: nn.Linear(16, 5, **FP64),
]
BUILT: dict[str, set[int]] = {"builders": set(), "layers": set(range(len(BUILDERS))), "mixed": {1, 2, 5}}
"""Which of the layers are given as modules."""


def items(kind: str, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return [build() if index in BUILT[kind] else build for index, build in enumerate(BUILDERS)]


def sequential(kind: str) -> nn.Sequential:
    given = items(kind, 0)
    torch.manual_seed(SEED)
    return nn.Sequential(*(item if isinstance(item, nn.Module) else item() for item in given))


def listed(rank: int, world: int, layouts: list[dict[str, int]]) -> list[Trained]:
    return [trained(items(kind, rank), world, mesh) for kind in BUILT for mesh in layouts]


def test_lists_of_layers(ranks: Ranks) -> None:
    layouts = [{"pp": 2}, {"pp": 1}]
    results = ranks(2, listed, layouts)
    for kind in BUILT:
        model = sequential(kind)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        expected = plain(model)
        for mesh in layouts:
            first, last = (result.pop(0) for result in results)
            for found in (first, last):
                assert_equals(found, expected, (kind, mesh))
                # slots begin at multiples of 64
                assert found.bytes <= sum(8 * (sizes[name] + 64) for name in found.names)
            if mesh["pp"] == 2:
                assert not first.names & last.names and first.names | last.names == sizes.keys()


# ---- a Hugging Face directory

DIRECTORIES = {
    "llama": lambda: models.llama(tie_word_embeddings=False),
    # of the same config, whose names have no prefix
    "gpt2 without its head": lambda: models.gpt2().transformer,
    # its experts are saved one by one, and fused by transformers
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    ),
}


def opened(
    rank: int, world: int, folder: str, meshes: list[dict[str, int]]
) -> list[tuple[bool, dict[str, Tensor]]]:
    found = []
    for mesh in meshes:
        engine = polyreme.initialize(folder, {"batch": {"size": 4}, "zero": {"stage": 3}, "mesh": mesh})
        found.append((all(module.training for module in engine.module.modules()), engine.state_dict()))
    return found


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_has_the_weights_that_transformers_reads(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """In training mode, in every layout."""
    torch.manual_seed(1)
    saved = DIRECTORIES[kind]()
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    written = tmp_path / "config.json"
    written.write_text(written.read_text().replace("GPT2Model", "GPT2LMHeadModel"))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    meshes = [{"dp": 2}] if kind == "mixtral" else [{"dp": 2}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}]
    for is_training, weights in ranks(2, opened, str(tmp_path), meshes)[0]:
        assert is_training
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
