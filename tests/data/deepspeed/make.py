"""Makes the checkpoints of this folder with a real DeepSpeed, two ranks, on the CPU: `python
tests/data/deepspeed/make.py` (it needs what requirements-bench.lock has). NAME.safetensors beside each is
what DeepSpeed itself says of the live model: `kind/name`, whole tensors."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
RANKS, WIDTH, WORDS, STEPS = 2, 6, 13, 3
CASES: dict[str, dict[str, Any]] = {
    "stage1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage1-fp32-aligned": {"zero_optimization": {"stage": 1, "parameter_alignment": True}},
    # DeepSpeed's other optimizer for bf16, which keeps the padding in its partitions
    "stage1-bf16-optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage2-bf16-round-robin": {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "bf16": {"enabled": True},
    },
    "stage2-fp32-elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage3-bf16": {"zero_optimization": {"stage": 3, "sub_group_size": 40}, "bf16": {"enabled": True}},
    "stage3-fp32": {"zero_optimization": {"stage": 3}},
}


class Tiny(nn.Module):
    """Two layers, a head tied to the embedding, a frozen parameter, two buffers of which one is saved; sizes
    that no two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH, bias=False)) for _ in range(2)
        )
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("unsaved", torch.tensor([0.25]), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words[:, :-1]) * self.scale + self.frozen.mean() * self.unsaved
        for layer in self.layers:
            hidden = hidden + layer(hidden.to(self.embed.weight.dtype))
        return F.cross_entropy(
            self.head(self.norm(hidden.to(self.embed.weight.dtype))).flatten(0, 1).float(),
            words[:, 1:].flatten(),
        )


def main() -> None:
    for name in sys.argv[1:] or CASES:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        mp.spawn(work, (name,), RANKS)


def work(rank: int, name: str) -> None:
    """One rank trains a few steps and saves."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * RANKS,
        "zero_allow_untested_optimizer": True,
        **CASES[name],
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        loss = engine(torch.randint(WORDS, (2, 5)))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(HERE / name), client_state={"note": "ours"})
    whole = expected(engine)
    if rank == 0:
        save_file(whole, HERE / f"{name}.safetensors")
        for script in (HERE / name).glob("*.py"):
            script.unlink()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def expected(engine: Any) -> dict[str, Tensor]:
    """What the live model and optimizer hold, whole; called by every rank."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {
        f"model/{name}": buffer.clone() for name, buffer in engine.module.named_buffers() if name != "unsaved"
    }
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"model/{name}"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        for kind in ("exp_avg", "exp_avg_sq"):
            if hasattr(engine.optimizer, "round_robin_bit16_offsets"):
                found[f"{kind}/{name}"] = of_flat(engine.optimizer, parameter, kind)
            else:
                found[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind).detach().clone()
        if hasattr(engine.optimizer, "round_robin_bit16_offsets"):
            found[f"master/{name}"] = of_flat(engine.optimizer, parameter, "master")
        else:
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter).detach().clone()
    return found


def of_flat(optimizer: Any, parameter: nn.Parameter, kind: str) -> Tensor:
    """At stages 1 and 2, from all ranks' flat partitions: `safe_get_full_*` forgets groups but the first, and
    the order of round robin."""
    for group, members in enumerate(optimizer.round_robin_bit16_groups):
        for member, offset in zip(members, optimizer.round_robin_bit16_offsets[group], strict=True):
            if member is parameter:
                own = optimizer.single_partition_of_fp32_groups[group].detach()
                own = (
                    own
                    if kind == "master"
                    else optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[group]][kind]
                )
                parts = [torch.empty_like(own) for _ in range(RANKS)]
                torch.distributed.all_gather(parts, own)
                return torch.cat(parts)[offset : offset + parameter.numel()].view(parameter.shape).clone()
    raise KeyError(kind)


if __name__ == "__main__":
    main()
