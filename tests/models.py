"""Small models and batches that the tests share, and plain single-process PyTorch training to compare
with. Ranks that use none of transformers do not import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 97


class Wide(TorchFunctionMode):
    """Keeps float64 where transformers goes to float32, which would hide what float64 is to show."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and args[1:2] == (torch.float32,)):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)

    def _backward(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """What torch does, which leaves a mode before it runs a backward: what is recomputed there would have
        none."""
        tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
        grads = [None] * len(tensors) if given is None else [*given]
        grads = [
            torch.ones_like(t) if g is None and t.requires_grad else g
            for t, g in zip(tensors, grads, strict=True)
        ]
        with self:
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                tensors, tuple(grads), bool(retain_graph or create_graph), create_graph, tuple(inputs or ()),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip


def llama(**changes: Any) -> nn.Module:
    """Grouped-query attention, untied head, odd vocabulary."""
    import transformers

    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config)
    # transformers' norm rounds to float32 inside, which would hide what float64 is to show
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(child.weight.numel(), eps=config.rms_norm_eps))
    return model


def gpt2(blocks: int = 3) -> nn.Module:
    """Conv1D layers and a head tied to the embedding; no dropout, so that every rank computes alike."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=24,
        n_layer=blocks,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


class ConvNet(nn.Module):
    """Convolutions and group norms, no ModuleList, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 7, 3, padding=1)
        self.norm = nn.GroupNorm(7, 7)
        self.second = nn.Conv2d(7, 11, 3, stride=2, bias=False)
        self.head = nn.Linear(11, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.second(F.gelu(self.norm(self.first(image))))
        return self.head(hidden.mean(dim=(2, 3)))


class Dag(nn.Module):
    """A random directed graph of modules, by `seed`: each node sums some of the earlier ones' outputs. Some
    modules are called twice, one parameter is shared between modules, one is frozen, one is of size zero, and
    one is never used."""

    def __init__(self, seed: int, width: int = 9, nodes: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.nodes = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width + i), nn.Tanh(), nn.Linear(width + i, width)
            )
            for i in range(nodes)
        )
        # earlier outputs; 0 is the input
        self.inputs = [
            sorted(set(torch.randint(0, i + 1, (2,), generator=generator).tolist())) for i in range(nodes)
        ]
        self.twice = [i for i in range(nodes) if torch.rand((), generator=generator) < 0.4]
        self.nodes[0][3].weight = self.nodes[0][1].weight
        self.nodes[2][1].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5))
        self.nodes[1][0].weight = self.nodes[nodes - 1][0].weight
        self.register_buffer("offset", torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x + self.offset.to(x.dtype)]  # buffers keep their dtype whatever the compute dtype is
        for i, node in enumerate(self.nodes):
            total = sum((outputs[j] for j in self.inputs[i]), torch.zeros_like(x))
            result = node(total)
            outputs.append(node(result) + total if i in self.twice else result + total)
        return outputs[-1] * self.scale + self.nothing.sum()


def tokens(samples: int, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(
        0, 5, (samples,), generator=generator
    )


def vectors(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 9, generator=generator), torch.randn(samples, 9, generator=generator)


def causal_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the next-token losses in the logits' own dtype (transformers' is in float32), and their
    number."""
    labels = batch["labels"][:, 1:].reshape(-1)
    logits = output.logits[:, :-1].reshape(labels.numel(), -1)
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "llama": (llama, tokens, causal_loss),
    "gpt2": (gpt2, tokens, causal_loss),
    "convnet": (ConvNet, images, F.cross_entropy),
    "dag": (lambda: Dag(3), vectors, F.mse_loss),
}
"""By name: how to build the model, a batch, and its loss function."""


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = CASES[name][0]().to(dtype)
    return model.train()


def batch_of(name: str, samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    batch = CASES[name][1](samples, seed=seed)
    if isinstance(batch, dict):
        return batch
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


def share(batch: Any, rank: int, world: int) -> Any:
    """Rank's contiguous share of a global batch."""
    if isinstance(batch, dict):
        return {key: value.chunk(world)[rank] for key, value in batch.items()}
    return tuple(value.chunk(world)[rank] for value in batch)


def plain_training(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batches: Sequence[Any],
    optimizer: Callable[..., Any],
    clip: float | None,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """What the tests compare with: ordinary PyTorch on whole batches. (loss, gradient norm) of each step, and
    the final weights."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2]},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    made = optimizer(groups)
    records = []
    for batch in batches:
        made.zero_grad()
        if isinstance(batch, dict):
            loss, weight = loss_fn(model(input_ids=batch["input_ids"]), batch)
            loss = loss / weight
        else:
            loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, clip or float("inf"))
        made.step()
        records.append((loss.item(), norm.item()))
    return records, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def read_back(path: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What transformers reads of a checkpoint of `llama`, in the dtype that it was saved in, and what it says
    of it."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype="auto"
    )
    return model.state_dict(), info
