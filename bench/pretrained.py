"""Trains the last blocks of a real pretrained model in several layouts, and saves it: equal losses, and every
frozen tensor as it was.

    python bench/pretrained.py DIR --out bench/results/NAME.json        # DIR: any Hugging Face directory of a
    causal language model

The text is Python's own manual. Each layout reads the weights of DIR by ranges, trains 20 steps in float32,
saves a checkpoint and loads it. Invariant: losses agree to 1e-4 (relative), and what transformers opens from
the checkpoint has, bit by bit, the frozen tensors of DIR. Exit status: 0, 1 where something differs, 2 for
bad usage."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch import nn

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH.parent / "tests"), str(BENCH)]

import polyreme  # noqa: E402
from polyreme.models.huggingface import find_blocks  # noqa: E402
from pool import Ranks  # noqa: E402
from step import environment  # noqa: E402

LAYOUTS: list[tuple[int, dict[str, int], int]] = [
    (1, {}, 0),
    (2, {"dp": 2}, 3),
    (2, {"pp": 2}, 1),
    (3, {"tp": 3}, 1),
]
"""World size, mesh and ZeRO stage; tp = 3 divides 9 heads and 3 key-value heads."""
SEQUENCE, BATCH = 64, 4
TOLERANCE = 1e-4


def partly_frozen(folder: str, trained: int) -> nn.Module:
    """The architecture of the directory, of which only the last blocks are trained."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder)
    )
    model.requires_grad_(False)
    for block in list(find_blocks(model).values())[-trained:]:
        block.requires_grad_(True)
    return model


def train(
    rank: int,
    world: int,
    folder: str,
    mesh: Mapping[str, int],
    stage: int,
    steps: int,
    trained: int,
    out: str,
) -> list[float]:
    """One rank: the losses, and after a checkpoint was saved and loaded the loss of one more batch, twice."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(
        "\n".join(topics.values())[: (steps + 1) * BATCH * SEQUENCE * 8], return_tensors="pt"
    ).input_ids[0]
    windows = ids[: (steps + 1) * BATCH * SEQUENCE].view(steps + 1, BATCH, SEQUENCE)
    config = {
        "mesh": {"dp": 1, **mesh},
        "zero": {"stage": stage},
        "batch": {"size": BATCH, "micro": 2},
        "optimizer": {"lr": 1e-4},
    }
    engine = polyreme.initialize(lambda: partly_frozen(folder, trained), config)
    engine.load(folder, weights_only=True)
    own = slice(
        engine.mesh.dp.rank * BATCH // engine.mesh.dp.size,
        (engine.mesh.dp.rank + 1) * BATCH // engine.mesh.dp.size,
    )
    batches = [{"input_ids": window[own], "labels": window[own]} for window in windows]
    losses = [engine.train_step(batch).loss for batch in batches[:-1]]
    engine.save(out, tokenizer)
    losses.append(engine.eval_step(batches[-1]).loss)
    engine.train_step(batches[-1])
    engine.load(out)
    return [*losses, engine.eval_step(batches[-1]).loss]


def changed(folder: str, out: str, trained: int) -> tuple[list[str], int]:
    """Frozen tensors that are not in the checkpoint as they are in the directory, and how many are."""
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, out)
    )
    blocks = list(find_blocks(before))[-trained:]
    there = dict(after.named_parameters())
    frozen = {
        name: p
        for name, p in before.named_parameters()
        if not any(name.startswith(f"{block}.") for block in blocks)
    }
    return [name for name, p in frozen.items() if not torch.equal(p, there[name])], len(frozen)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trained", type=int, default=4, help="blocks, the last ones, that are trained")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    import pretrained  # under the name by which ranks find it

    for world, mesh, stage in LAYOUTS:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            out, ranks = f"{scratch}/saved", Ranks()
            try:
                losses = ranks(
                    world,
                    pretrained.train,
                    str(args.model),
                    mesh,
                    stage,
                    args.steps,
                    args.trained,
                    out,
                    timeout=900,
                )[0]
            finally:
                ranks.close()
            wrong, same = changed(str(args.model), out, args.trained)
        rows.append(
            {"ranks": world, "mesh": mesh, "stage": stage, "losses": losses, "changed": wrong, "frozen": same}
        )
        print(
            f"{mesh or 'one process'}: loss {losses[0]:.4f} to {losses[-3]:.4f}; "
            f"{same - len(wrong)} of {same} frozen tensors as they were"
        )
    apart = max(
        max(abs(a - b) / a for a, b in zip(row["losses"], rows[0]["losses"], strict=True)) for row in rows
    )
    reloaded = max(abs(row["losses"][-1] - row["losses"][-2]) for row in rows)
    print(
        f"losses at most {apart:.1e} apart; {reloaded:.1e} between "
        "the loss before a checkpoint and after it was loaded"
    )
    result = {"environment": environment() | {"command": "python bench/pretrained.py "
                                                         f"{args.model.name} --out {args.out}"},
              "model": args.model.name, "apart": apart, "reloaded": reloaded, "layouts": rows}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(apart > TOLERANCE or reloaded > 0 or any(row["changed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
