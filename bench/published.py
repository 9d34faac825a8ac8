"""Predicts published training jobs from the engine's own step on simulated ranks and the presets of
`planner.hardware`, and writes the predictions beside the published figures.

    python bench/published.py --write docs/plan-published.md
    python bench/published.py --rows 21,23      # some rows, printed

Nothing is fitted to these figures. What a source leaves open (micro-batch, stages of a rank) is scanned, and
the fastest that fits in the device's memory counts; what its system does that ours does not (a fused kernel
between products, tensor-parallel messages hidden behind products) is in the column of what is assumed. Needs
no accelerator; takes a quarter of an hour."""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyreme.config import Config
from polyreme.errors import PolyremeError
from polyreme.pipeline.schedule import build
from polyreme.planner.dry_run import run_kinds
from polyreme.planner.hardware import Cluster
from polyreme.planner.time_model import Timeline, step_time
from polyreme.planner.trace import RankTrace

MG = "NVIDIA/Megatron-LM, images/model_table.png"
MG21 = "NVIDIA/Megatron-LM, images/cases_april2021.png"
AM = "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx"
TT = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TT2 = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"


def gpt(
    layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, attention: str = "sdpa"
) -> nn.Module:
    """Learned positions, biases and an untied head, as the counts of parameters say."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=sequence,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config._attn_implementation = attention
    return transformers.GPT2LMHeadModel(config)


LLAMA: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


def llama(size: str) -> Any:
    """Llama 3."""
    import transformers

    sizes = {**LLAMA[size], "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**sizes)
    config._attn_implementation = "sdpa"
    return transformers.LlamaForCausalLM(config)


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of rank 16 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(size: str) -> nn.Module:
    """A Llama with adapters on all linear layers of its blocks."""
    model = llama(size).requires_grad_(False)
    for block in model.model.layers:
        for name, linear in [*block.named_modules()]:
            if isinstance(linear, nn.Linear):
                owner, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(owner), leaf, Adapted(linear))
    return model


@dataclass(frozen=True)
class Row:
    """A published job. sizes: of the mesh. batch: samples of a step. figure, unit: what was published: model
    TFLOP/s of a GPU ("TF"), those with recomputation ("HTF"), or tokens/s of a GPU ("tok"). micro: what is
    scanned where it is not known. virtual: stages of a pipeline rank, likewise. sections: of the config."""

    number: str
    name: str
    model: Callable[[], nn.Module]
    sizes: dict[str, int]
    batch: int
    sequence: int
    figure: float
    unit: str
    source: str
    cluster: Mapping[str, Any]
    micro: Sequence[int] = (1, 2, 4)
    virtual: Sequence[int] = (1,)
    fused: bool = True
    overlapped: Sequence[str] = ()
    assumed: str = ""
    sections: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())


CUDNN = {"attention": 0.54, "attention_backward": 0.45}
"""cuDNN's fused attention on an H100, causal, heads of 128: 539 TFLOP/s of 989 (arXiv:2407.08608, figure 5),
and about 450 backward (figure 6)."""
H100 = {"base": "h100"}
TE = {"base": "h100", "device": CUDNN}
"""With Transformer Engine, which takes cuDNN's attention."""
GRAND_TETON = {
    "base": "h100",
    # 96 GB of HBM2e at 2.4 TB/s, limited to 500 W: the clock goes with the third root of the power, as the
    # voltage goes with the clock. By a footnote its peak is below the data sheet's, by an unknown amount
    "device": {"memory": "96 GB", "bandwidth": 2.4e12, "sustained": round(0.728 * (500 / 700) ** (1 / 3), 3)},
}
SHAPES = "shape from the count of parameters"
GATHER = f"{SHAPES}; gather of parameters hidden (--overlap-param-gather)"
OVER = f"{GATHER}; tp hidden (--tp-comm-overlap)"
SELECTIVE = {"memory": {"activations": "recompute", "recompute_every": 2}}
"""Half of the products and no attention again, as torchtitan's selective recomputation "op"."""
ZERO1 = {"zero": {"stage": 1}}
TP = {"mesh": {"sequence_parallel": True}}


def megatron(
    number: str, size: str, shape: tuple[int, int, int], sizes: dict[str, int], batch: int, figure: float,
    **given: Any,
) -> Row:  # fmt: skip
    """A row of 2024's table: 4,096 tokens, a vocabulary of 131,072, ZeRO-1 in bf16."""
    tp = sizes.get("tp", 1) > 1
    return Row(
        number, f"GPT {size}", partial(gpt, *shape, 4096, 131072), sizes, batch, 4096, figure, "TF", MG, TE,
        overlapped=(*(("tp",) if tp else ()), "dp all_gather"), assumed=OVER if tp else GATHER,
        sections=ZERO1 | (TP if tp else {}), **given,
    )  # fmt: skip


def selene(
    number: str, size: str, shape: tuple[int, int, int], sizes: dict[str, int], batch: int, figure: float,
    **given: Any,
) -> Row:  # fmt: skip
    """A row of 2021's table: 2,048 tokens, a vocabulary of 51,200, all blocks recomputed, plain attention."""
    return Row(
        number, f"GPT {size}", partial(gpt, *shape, 2048, 51200, "eager"), sizes, batch, 2048, figure, "HTF",
        MG21, {"base": "a100"}, assumed="all recomputed, and counted", **given,
        sections={"zero": {"stage": 0}, "memory": {"activations": "recompute"}},
    )  # fmt: skip


LLAMA_8B = (("21", 8, 5762, 6667), ("22", 128, 5605, 6514))
ASYNC_TP = (("23a", "Llama 3 70B, compiled", (), 597), ("23b", "Llama 3 70B, async tp", ("tp",), 652))
ROWS: list[Row] = [
    megatron("1", "1.7B", (24, 2048, 16), {"dp": 48}, 192, 408.8),
    megatron("2", "7.1B", (30, 4096, 32), {"dp": 48, "tp": 2}, 192, 465.9, micro=(1, 2)),
    megatron("3", "16B", (32, 6144, 48), {"dp": 48, "tp": 4}, 192, 489.1, micro=(1, 2)),
    megatron("4", "32B", (48, 7168, 56), {"dp": 48, "tp": 8}, 192, 459.6, micro=(1, 2)),
    megatron("5", "70B", (84, 8192, 64), {"dp": 48, "tp": 8, "pp": 2}, 384, 419.7, micro=(1,),
        virtual=(1, 6),
    ),
    megatron("6", "177B", (96, 12288, 96), {"dp": 48, "tp": 8, "pp": 6}, 1152, 432.8, micro=(1,),
        virtual=(1, 4),
    ),
    megatron("7", "462B", (112, 18432, 144), {"dp": 48, "tp": 8, "pp": 16}, 3072, 459.9, micro=(1,),
        virtual=(1, 7),
    ),
    selene("8", "7.5B", (36, 4096, 32), {"dp": 32, "tp": 4}, 512, 142),
    selene(
        "9", "145.6B", (80, 12288, 96), {"dp": 24, "tp": 8, "pp": 8}, 2304, 148, micro=(1, 2), virtual=(1, 5)
    ),
    selene(
        "10", "1,008B", (128, 25600, 160), {"dp": 6, "tp": 8, "pp": 64}, 3072, 163, micro=(1,), virtual=(1, 2)
    ),
    Row(
        "11", "Llama 3 70B", partial(llama, "70B"), {"dp": 32, "cp": 2}, 128, 8192, 867, "tok", AM, H100,
        micro=(1,), fused=False, assumed="all recomputed; FlashAttention-2, as torch has it",
        sections={"zero": {"stage": 3}, "memory": {"activations": "recompute"}},
    ),
    Row(
        "15", "Llama 3 8B, LoRA", partial(lora, "8B"), {}, 32, 4096, 12473, "tok", AM, H100, micro=(2,),
        fused=False,
        assumed="no dropout of the adapters", sections={"zero": {"stage": 0}},
    ),
    *(
        Row(
            f"{number}{'ab'[fused]}", "Llama 3.1 8B" + ", compiled" * fused, partial(llama, "8B"),
            {"dp": ranks},
            2 * ranks, 8192, figures[fused], "tok", TT, GRAND_TETON, micro=(2,), fused=fused,
            assumed="500 W; every second block recomputed", sections={"zero": {"stage": 3}, **SELECTIVE},
        )
        for number, ranks, *figures in LLAMA_8B
        for fused in (False, True)
    ),
    *(
        Row(
            number, name, partial(llama, "70B"), {"dp": 32, "tp": 8}, 512, 8192, figure, "tok", TT2,
            GRAND_TETON, micro=(16,), overlapped=overlapped, assumed="500 W; all recomputed",
            sections={"zero": {"stage": 3}, "memory": {"activations": "recompute"}, **TP},
        )
        for number, name, overlapped, figure in ASYNC_TP
    ),
]  # fmt: skip
LOOKED = (
    "What was changed after these rows had been compared once: a block of a product pays for its first load "
    "and its store (`fill`, which lowered every row by 2 to 5%); the gather of parameters of rows 1 to 7 is "
    "hidden, as their source's options say; row 15 is not compiled (compiled it was 12% too fast); the "
    "engine of row 11 has flash attention (in tiles of scores it was 50% too slow). So the median is no "
    "blind test."
)
LATER = (
    "25 (cp over tp and pp), 12 to 14 (ep), 16 to 20 and 24 (FP8, with cp and ep). 26 and 27 are recalled "
    "figures of layouts that were not published in full."
)


@dataclass(frozen=True)
class Prediction:
    """What a row is predicted to reach, and with which of the scanned values."""

    row: Row
    timeline: Timeline
    micro: int
    virtual: int
    peak: int
    seconds: float

    @property
    def value(self) -> float:
        if self.row.unit == "tok":
            return self.timeline.tokens_per_second / self.row.ranks
        if self.row.unit == "HTF":
            return self.timeline.tflops * self.timeline.hfu / self.timeline.mfu
        return self.timeline.tflops

    @property
    def error(self) -> float:
        return self.value / self.row.figure - 1

    @property
    def fits(self) -> bool:
        return self.peak < 0.94 * Cluster.load(self.row.cluster).device.memory


ONLY_KEPT = False
"""Whether dry runs that are not kept are left out, as their seconds are many."""


def traced(row: Row, config: Config, virtual: int, keep: Path | None) -> list[RankTrace]:
    """Return the dry runs of a row; those kept from an earlier call, where there are any."""
    # rows "21a" and "21b" differ only in how their time is counted
    file = (keep or Path()) / f"{row.number.rstrip('ab')}-{config.batch.micro}-{virtual}.pickle"
    if keep is not None and file.exists():
        return pickle.loads(file.read_bytes())
    if ONLY_KEPT:
        raise PolyremeError("its dry run is not kept")
    traces = [*run_kinds(row.model, config, device="cuda").values()]
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(traces))
    return traces


def predictions(row: Row, keep: Path | None) -> Iterator[Prediction]:
    """Predict the row with each of its scanned values."""
    cluster = Cluster.load(row.cluster)
    share = row.batch // row.sizes.get("dp", 1)
    for micro in row.micro:
        for virtual in row.virtual:
            start = time.perf_counter()
            config = config_of(row, micro, virtual)
            pp = row.sizes.get("pp", 1)
            schedule = build(config.schedule if pp > 1 else "1f1b", pp, share // micro, max(virtual, 2))
            traces = traced(row, config, virtual, keep)
            timeline = step_time(traces, schedule, cluster, fused=row.fused, overlapped=row.overlapped)
            peak = max(trace.memory.peak for trace in traces)
            yield Prediction(row, timeline, micro, virtual, peak, time.perf_counter() - start)


def config_of(row: Row, micro: int, virtual: int) -> Config:
    sections = {name: dict(given) for name, given in row.sections.items()}
    tree: dict[str, Any] = {
        "batch": {"size": row.batch, "micro": micro},
        "precision": {"compute": "bf16"},
        "data": {"sequence": row.sequence},
        **sections,
        "mesh": {"dp": 1, **row.sizes, **sections.get("mesh", {})},
    }
    if row.sizes.get("pp", 1) > 1:
        tree["pipeline"] = {"schedule": "1f1b"}
        if virtual > 1:
            tree["pipeline"] = {"schedule": "interleaved", "virtual": virtual}
    return Config.load(tree).resolve(row.ranks)


def best(row: Row, keep: Path | None) -> Prediction | None:
    """Return the fastest prediction that fits in 94% of the memory, or else the smallest; None if the engine
    refuses all, with the reason printed."""
    found: list[Prediction] = []
    for micro, virtual in product(row.micro, row.virtual):
        try:
            found += predictions(replace(row, micro=(micro,), virtual=(virtual,)), keep)
        except PolyremeError as error:
            print(f"{row.number} micro {micro}, virtual {virtual}: {error}", flush=True)
    fitting = [each for each in found if each.fits]
    for each in found:
        print(line(each), f"{each.seconds:.0f} s", flush=True)
    if fitting:
        return max(fitting, key=lambda each: each.value)
    return min(found, key=lambda each: each.peak, default=None)


COLUMNS = (
    *("row", "model", "GPUs", "layout", "micro, virtual", "memory", "published", "predicted", "error"),
    *("most of the step", "assumed"),
)
INTRODUCTION = (
    "What `polyreme.planner` predicts, from a dry run of the engine and the presets of `planner.hardware`, "
    "beside published figures. No preset was fitted to them: they come from data sheets and public "
    "measurements of single products, kernels and links. The memory is what the dry run counts of a rank at "
    "its peak. tok: tokens a second of a GPU; TF: model TFLOP/s of "
    "a GPU; HTF: with recomputation. Where a source leaves the micro-batch open (and `virtual`, the stages "
    "of a pipeline rank), the fastest that fits in memory counts. Kernels between products are taken to be "
    "fused, but for rows 11, 15, 21a and 22a, whose systems do not compile."
)


def line(each: Prediction) -> str:
    row = each.row
    layout = " ".join(f"{name} {size}" for name, size in row.sizes.items()) or "alone"
    memory = f"{each.peak / 1e9:.0f} GB" + " (too much)" * (not each.fits)
    cells = [
        row.number,
        row.name,
        f"{row.ranks:,}",
        layout,
        f"{each.micro}, {each.virtual}",
        memory,
        f"{row.figure:,g} {row.unit}",
        f"{each.value:,.4g}",
        f"{each.error:+.1%}",
        each.timeline.limit,
        row.assumed,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="numbers of rows, such as 21,23; all by default")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--keep", type=Path, help="a folder for dry runs, which are not run again")
    parser.add_argument("--kept", action="store_true", help="leave out what is not in that folder")
    options = parser.parse_args()
    global ONLY_KEPT
    ONLY_KEPT = options.kept
    warnings.simplefilter("ignore")
    wanted = options.rows.split(",") if options.rows else None
    rows = [row for row in ROWS if wanted is None or {row.number, row.number.rstrip("ab")} & {*wanted}]
    found = [each for row in rows if (each := best(row, options.keep)) is not None]
    missing = ", ".join(row.number for row in rows if row.number not in [each.row.number for each in found])
    errors = [abs(each.error) for each in found]
    middle, most = statistics.median(errors), max(errors)
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(line, found)]
    parts = (
        "<!-- Written by bench/published.py. -->\n# Predicted and published training speed",
        INTRODUCTION,
        "\n".join(table),
        f"**{len(found)} rows, median error {middle:.1%}**, largest {most:.1%}.",
        LOOKED,
        *([f"Not run dry yet, with this version of the engine: rows {missing}."] if missing else []),
        f"Rows that wait for parts of the engine: {LATER}",
        "Sources:",
        "\n".join(f"- {each}" for each in sorted({row.source for row in rows})),
    )
    page = "\n\n".join(parts) + "\n"
    if options.write:
        options.write.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
