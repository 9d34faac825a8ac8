"""Documents packed into long sequences, which are divided over one, two and four ranks: the losses are the
same, and a rank keeps fewer activations.

Run it with: polyreme launch -n 4 examples/long_context.py
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyreme
from polyreme.distributed.mesh import Mesh

STEPS, LENGTH, folder = 6, 1024, Path("run/long_context")

ranks = Mesh.open({"dp": 4}).dp
if ranks.rank == 0:  # any model that save_pretrained wrote will do; this one is small and new
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder / "model")
ranks.barrier()

# Python's own manual, byte by byte: a document for each topic, packed one after the other
documents = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in topics.values()]
count = STEPS * 4 * LENGTH
tokens = torch.cat(documents)[:count].view(-1, LENGTH)
positions = torch.cat([torch.arange(len(each)) for each in documents])[:count].view(-1, LENGTH)
labels = tokens.masked_fill(positions == 0, -100)  # the first token of a document follows none of its own
dataset = [
    {"input_ids": row, "labels": predicted, "position_ids": places}
    for row, predicted, places in zip(tokens, labels, positions, strict=True)
]

curves = []
for cp in (1, 2, 4):
    config = {"mesh": {"cp": cp}, "batch": {"size": 4, "micro": 1}, "optimizer": {"lr": 4e-3}}
    engine = polyreme.initialize(folder / "model", config)
    curves.append([engine.train_step(batch).loss for batch in engine.loader(dataset, epochs=1)])
    if ranks.rank == 0:
        kept = engine.memory()["activations"] / 2**20
        print(f"cp = {cp}: loss {curves[-1][0]:.4f} to {curves[-1][-1]:.4f};", end=" ")
        print(f"rank 0 keeps {kept:.1f} MiB of activations for a micro-batch")
if ranks.rank == 0:
    apart = max(max(each) - min(each) for each in zip(*curves, strict=True))
    print(f"in no step are the losses further apart than {apart:.1e}")
