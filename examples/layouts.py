"""One Hugging Face model directory, three ways to divide it over four ranks, one curve: nothing changes but
the config.

Run it with: polyreme launch -n 4 examples/layouts.py
"""

import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme
from polyreme.distributed.mesh import Mesh

LAYOUTS = {
    "dp = 4": {"dp": 4},
    "dp = 2, tp = 2": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "tp = 2, pp = 2": {"tp": 2, "pp": 2},
}
STEPS, folder = 24, Path("run/layouts")

ranks = Mesh.open({"dp": 4}).dp
if ranks.rank == 0:  # any model that save_pretrained wrote will do; this one is small and new
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder / "model")
ranks.barrier()

text = "\n".join(topics.values()).encode()  # Python's own manual, byte by byte
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: STEPS * 16 * 64].long().view(-1, 64)
dataset = [{"input_ids": window, "labels": window} for window in windows]

losses: dict[str, list[float]] = {}
for layout, mesh in LAYOUTS.items():
    config = {"mesh": mesh, "batch": {"size": 16}, "optimizer": {"lr": 4e-3}}
    engine = polyreme.initialize(folder / "model", config)
    losses[layout] = [engine.train_step(batch).loss for batch in engine.loader(dataset, epochs=1)]
    if ranks.rank == 0:
        kib = 1024
        sent = {
            axis: sum(size for _, size in each.values()) / STEPS / kib
            for axis, each in engine.traffic().items()
        }
        print(f"{layout}: loss {losses[layout][0]:.4f} to {losses[layout][-1]:.4f}; rank 0 has", end=" ")
        print(f"{engine.memory()['parameters'] / kib:.0f} KiB of parameters and sends in a step", end=" ")
        print(", ".join(f"{size:.0f} KiB over {axis}" for axis, size in sent.items() if size >= 1))

if ranks.rank == 0:
    from matplotlib.figure import Figure

    apart = max(max(each) - min(each) for each in zip(*losses.values(), strict=True))
    print(f"in no step are the losses further apart than {apart:.1e}")
    (folder / "losses.json").write_text(json.dumps(losses))
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (layout, curve), style in zip(
        losses.items(), ({"linewidth": 7, "alpha": 0.3}, {"linewidth": 3}, {"linestyle": "--"}), strict=True
    ):
        axes.plot(range(1, STEPS + 1), curve, label=layout, **style)
    axes.set(xlabel="step", ylabel="loss", title="one model, three layouts of four ranks")
    axes.legend()
    figure.savefig(folder / "losses.png", dpi=120)
    print(f"wrote {folder / 'losses.json'} and {folder / 'losses.png'}")
