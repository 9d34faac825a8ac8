"""Counted operations against closed forms, and that counting leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from polyreme.errors import ModelError
from polyreme.planner import flops as cost
from polyreme.planner.flops import Flops, count_flops, mfu, peak_flops

HIDDEN, INNER, BLOCKS, HEADS, KV_HEADS, VOCABULARY = 32, 80, 3, 4, 2, 96


def llama(**changes: object) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        **changes,  # type: ignore[arg-type]
    )
    return LlamaForCausalLM(config)


def tokens(samples: int, sequence: int) -> dict[str, Tensor]:
    ids = torch.zeros(samples, sequence, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def llama_forward(samples: int, sequence: int) -> int:
    """Per token 2 x the weights of all matrices, and 4 x sequence x hidden per block for attention's two
    products."""
    kv = HIDDEN * KV_HEADS // HEADS
    matrices = BLOCKS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * INNER) + HIDDEN * VOCABULARY
    return samples * sequence * (2 * matrices + BLOCKS * 4 * sequence * HIDDEN)


@pytest.mark.parametrize(("samples", "sequence"), [(1, 16), (3, 24)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_is_6n_plus_12lsh(samples: int, sequence: int, attention: str) -> None:
    flops = count_flops(llama(attn_implementation=attention), tokens(samples, sequence))
    forward = llama_forward(samples, sequence)
    assert flops == Flops(forward, 2 * forward, 0)
    assert flops.hardware == flops.model == flops.forward + flops.backward


def test_padding_mask_does_not_change_the_count() -> None:
    batch = tokens(2, 16)
    masked = count_flops(llama(), {**batch, "attention_mask": torch.ones(2, 16, dtype=torch.long)})
    assert masked == count_flops(llama(), batch)


def test_linear_stack_is_6n_per_token_without_the_input_gradient() -> None:
    sizes = [24, 40, 56, 8]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    weights = sum(a * b for a, b in pairwise(sizes))
    flops = count_flops(model, torch.empty(5, 24))
    assert flops.forward == 2 * 5 * weights
    assert flops.backward == 4 * 5 * weights - 2 * 5 * 24 * 40  # nothing asks for the gradient of the input
    assert flops.model == 6 * 5 * weights - 2 * 5 * 24 * 40


def test_frozen_weights_cost_no_weight_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    assert count_flops(model, torch.empty(3, 8)) == Flops(2 * 3 * (8 * 16 + 16 * 4), 2 * 3 * 16 * 4, 0)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_with_groups(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = kind(8, 12, 3, stride=2, padding=1, groups=groups, bias=False)
    x = torch.empty(5, 8, 10, 14, requires_grad=True)
    positions = 10 * 14 if transposed else 5 * 7
    forward = 2 * 5 * model.weight.numel() * positions
    assert count_flops(model, x) == Flops(forward, 2 * forward, 0)


def test_gpt2_ties_the_head_once() -> None:
    config = GPT2Config(
        n_embd=HIDDEN,
        n_layer=2,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    matrices = 2 * 12 * HIDDEN * HIDDEN + HIDDEN * VOCABULARY
    forward = 2 * 16 * (2 * matrices + 2 * 4 * 16 * HIDDEN)
    assert count_flops(GPT2LMHeadModel(config), tokens(2, 16)) == Flops(forward, 2 * forward, 0)


def test_experts_count_only_the_chosen_ones() -> None:
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    kv = HIDDEN * KV_HEADS // HEADS
    active = (
        2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 4 * HIDDEN + 2 * 3 * HIDDEN * INNER)
        + HIDDEN * VOCABULARY
    )
    forward = 16 * (2 * active + 2 * 4 * 16 * HIDDEN)
    flops = count_flops(MixtralForCausalLM(config), tokens(1, 16), dtype=torch.bfloat16)
    assert flops == Flops(forward, 2 * forward, 0)


def test_lstm() -> None:
    model = nn.LSTM(12, 20, batch_first=True)
    flops = count_flops(model, torch.empty(3, 7, 12), forward=lambda m, x: m(x)[0].sum())
    assert flops.forward == 2 * 3 * 7 * 4 * 20 * (12 + 20)


# --- activation recomputation


def test_recompute_is_counted_apart() -> None:
    model, batch = llama(), tokens(2, 16)
    plain = count_flops(model, batch)
    every = count_flops(model, batch, recompute=[f"model.layers.{i}" for i in range(BLOCKS)])
    one = count_flops(model, batch, recompute=["model.layers.1"])
    assert (every.forward, every.backward) == (plain.forward, plain.backward)
    # Recomputation ends before a block's last product (down_proj), whose output no gradient needs.
    kv = HIDDEN * KV_HEADS // HEADS
    block = 32 * (2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 2 * HIDDEN * INNER) + 4 * 16 * HIDDEN)
    assert one.recompute == block
    assert every.recompute == BLOCKS * block
    assert every.model == plain.model
    assert every.hardware == plain.model + BLOCKS * block


class Checkpointed(nn.Module):
    """Recomputes its first two layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(lambda y: self.second(self.first(y).relu()).relu(), x, use_reentrant=False)
        )


def test_recompute_of_the_model_itself_is_seen() -> None:
    forward = 2 * 5 * (8 * 16 + 16 * 32 + 32 * 4)
    flops = count_flops(Checkpointed(), torch.empty(5, 8))
    assert flops == Flops(forward, 2 * forward - 2 * 5 * 8 * 16, 2 * 5 * (8 * 16 + 16 * 32))


def test_selective_recompute_saves_what_it_keeps() -> None:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    blocks = [f"model.layers.{i}" for i in range(BLOCKS)]
    selective = count_flops(
        llama(use_cache=False),
        tokens(2, 16),
        recompute=blocks,
        recompute_context=lambda: create_selective_checkpoint_contexts(policy),
    )
    attention = BLOCKS * 32 * 4 * 16 * HIDDEN
    # the products of attention only: every linear layer's output was kept
    assert selective.recompute == attention


# --- no trace


class Mixed(nn.Module):
    """Has all that counting could disturb: batch statistics, dropout, a plain tensor attribute, hooks,
    gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)
        self.scale = torch.full((16,), 2.0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(self.dropout(self.norm(x)) * self.scale) + torch.randn(16)
        return x @ torch.full((16, 16), 0.5)


class BytesAllocated(TorchDispatchMode):
    """Bytes of real tensors that any operator returned."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and type(out) is Tensor and out.device.type != "meta":
            self.total += out.untyped_storage().nbytes()
        return out


def test_nothing_is_touched() -> None:
    torch.manual_seed(7)
    model = Mixed()
    fired: list[str] = []
    model.register_forward_hook(lambda *_: fired.append("forward"))
    model.linear.register_full_backward_pre_hook(lambda *_: fired.append("backward"))
    model.linear.weight.register_hook(lambda grad: fired.append("tensor"))
    model.linear.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulate"))
    model.linear.weight.grad = torch.ones(16, 16)
    x = torch.randn(4, 16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()

    flops = count_flops(model, (x,), recompute=["linear"])

    assert flops.forward == 2 * 2 * 4 * 16 * 16
    assert torch.equal(rng, torch.get_rng_state())
    assert not fired
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert torch.equal(model.linear.weight.grad, torch.ones(16, 16))
    assert model.linear.bias.grad is None
    assert type(model.linear.weight) is nn.Parameter
    assert "forward" not in vars(model.linear)


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_no_real_memory(built_on: str) -> None:
    with torch.device(built_on):
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    x = torch.empty(64, 256, device="meta")
    with BytesAllocated() as allocated:
        flops = count_flops(model, x)
    assert flops.forward == 2 * 64 * 2 * 256 * 1024
    assert allocated.total < 1024


def test_a_model_larger_than_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)  # 4 TiB of weights
    assert count_flops(model, torch.empty(1, 1 << 20, device="meta")).forward == 2 << 40


def test_released_storage_is_no_obstacle() -> None:
    model = nn.Linear(16, 16)
    model.weight.untyped_storage().resize_(0)
    assert count_flops(model, torch.empty(2, 16)).forward == 2 * 2 * 16 * 16


# --- what cannot be counted


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_value_dependent_model_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"Branches cannot be counted.*tensor values"):
        count_flops(Branches(), torch.ones(2, 4))
    with pytest.raises(ModelError, match="Linear cannot be counted"):
        count_flops(nn.Linear(3, 3), torch.empty(2, 5))
    assert capfd.readouterr().err == ""


def test_nothing_to_differentiate() -> None:
    with pytest.raises(ModelError, match="unfreeze a parameter or return the loss"):
        count_flops(nn.Linear(3, 3).requires_grad_(False), torch.empty(2, 3))


# --- peak and utilisation


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200", torch.float32, 66.9),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float64, 19.5),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
    ],
)
def test_known_accelerators(name: str, dtype: torch.dtype, tera: float) -> None:
    peak = cost._known_peak(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tera * 1e12)
    assert "data sheet" in peak.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("NVIDIA L40", torch.bfloat16),
        ("NVIDIA L4", torch.float64),
        ("Tesla T4", torch.float16),
    ],
)
def test_unknown_accelerators_are_left_to_measurement(name: str, dtype: torch.dtype) -> None:
    assert cost._known_peak(name, dtype) is None


def test_tf32_counts_where_it_is_allowed(matmul_precision: None) -> None:
    torch.set_float32_matmul_precision("high")
    peak = cost._known_peak("NVIDIA A100-SXM4-40GB", torch.float32)
    assert peak is not None and peak.flops == pytest.approx(156e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_peak_is_measured_and_says_so(dtype: torch.dtype) -> None:
    rng = torch.get_rng_state()
    peak = peak_flops("cpu", dtype)
    assert 1e8 < peak.flops < 1e15
    assert peak.source.startswith("measured") and str(dtype).removeprefix("torch.") in peak.source
    assert torch.equal(rng, torch.get_rng_state())


def test_mfu() -> None:
    assert mfu(6e9, 10_000, 312e12) == pytest.approx(6e13 / 312e12)
    with pytest.raises(ModelError, match="peak = 0"):
        mfu(6e9, 10_000, 0)
