"""A model that no rank ever holds whole: built tensor by tensor, trained at stage 3.

Run it with: polyreme launch -n 2 examples/big_model.py
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme


def build() -> nn.Module:
    """Called once on each rank, on tensors without memory; what it draws is the same as if it had been built
    whole."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes))


config = {
    "zero": {"stage": 3, "release": "always"},
    "memory": {"activations": "recompute"},
    "precision": {"compute": "bf16"},
    "batch": {"size": 8},
}
engine = polyreme.initialize(build, config)  # the function itself, not its result
samples = torch.randint(1024, (32, 32), generator=torch.Generator().manual_seed(0))
dataset = [{"input_ids": ids, "labels": ids} for ids in samples]

mebi = 2**20
held = engine.memory()
if engine.mesh.rank == 0:
    count = engine.parameter_count
    print(f"{count / 1e6:.1f}M parameters, {2 * count / mebi:.1f} MiB in bf16;", end=" ")
    print(
        f"of the parameters each of {engine.mesh.dp.size} ranks "
        f"holds {held['parameters'] / mebi:.1f} MiB between steps"
    )
for batch in engine.loader(dataset, epochs=1):
    result = engine.train_step(batch)
    if engine.mesh.rank == 0 and result.step % 4 == 0:
        print(f"step {result.step}: loss {result.loss:.3f}")

held = engine.memory()
if engine.mesh.rank == 0:
    print(", ".join(f"{category} {size / mebi:.1f} MiB" for category, size in held.items()))
    for operation, (calls, sent) in engine.traffic().get("dp", {}).items():
        print(f"{operation}: {calls} calls, {sent / mebi:.1f} MiB sent")
