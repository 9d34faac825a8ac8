"""Divided over pipeline stages and tensor parallelism, too, a run computes what one process computes:
float64, to 1e-10."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
import polyreme
import threads
from conformance import own_collectives
from cover import cover
from examples import ALL, whole
from polyreme.pipeline.schedule import NAMES, Name, stage_ranks
from pool import Ranks

STEPS = 3 if ALL in os.environ else 2
SAMPLES, CLIP, BLOCKS = 12, 0.05, 5

Record = tuple[float, float]


SMALL = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {
    key: SMALL[key]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}


def causal(kind: str, **values: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: models.llama(num_hidden_layers=BLOCKS),
    "llama tied": lambda: models.llama(num_hidden_layers=BLOCKS, tie_word_embeddings=True),
    "llama of 6 heads": lambda: models.llama(
        num_hidden_layers=BLOCKS, num_attention_heads=6, num_key_value_heads=3, intermediate_size=42
    ),
    "gpt2": lambda: models.gpt2(blocks=BLOCKS),
    "qwen3": lambda: causal("qwen3", **GROUPED, head_dim=8),
    "mistral": lambda: causal("mistral", **GROUPED, sliding_window=5),
    "gemma2": lambda: causal("gemma2", **GROUPED, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "phi3": lambda: causal("phi3", **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "opt": lambda: causal(
        "opt",
        vocab_size=models.VOCABULARY,
        hidden_size=32,
        ffn_dim=40,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
        word_embed_proj_dim=32,
    ),
    "gpt_neox": lambda: causal("gpt_neox", **SMALL),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **STILL)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**IMAGES, **STILL, image_size=8, patch_size=2, num_labels=5)
    ),
}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[family]().double().train()


def masked_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """As `models.causal_loss`, of the tokens themselves."""
    labels = batch["labels"].reshape(-1)
    return F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def image_loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels)


def loss_of(family: str) -> Callable[..., Any]:
    return {"bert": masked_loss, "vit": image_loss}.get(family, models.causal_loss)


def settings(sizes: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "precision": {"compute": "fp64"},
        "batch": {"size": SAMPLES, "micro": 2},
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "clip": CLIP},
    }
    zero = {"min_bucket": 0, **sections.pop("zero", {})}
    return {**defaults, **sections, "zero": zero, "mesh": {**sizes, **sections.get("mesh", {})}}


def batch_of(family: str, step: int) -> Any:
    if family == "vit":
        images, labels = models.images(SAMPLES, seed=step)
        return images.double(), labels
    batch = models.tokens(SAMPLES, seed=step)
    batch["labels"][0, :5] = -100  # so that ranks and micro-batches differ in weight
    return batch


def train(
    rank: int, world: int, family: str, each: list[dict[str, Any]]
) -> list[tuple[list[Record], dict[str, Any], dict[str, Any]]]:
    """Records, evaluation and final weights of a run under each of the settings."""
    results = []
    for config in each:
        engine = polyreme.initialize(model_of(family), config, loss_fn=loss_of(family))
        dp = engine.mesh.dp
        records = []
        with models.Wide():
            for step in range(STEPS):
                result = engine.train_step(models.share(batch_of(family, step), dp.rank, dp.size))
                records.append((result.loss, result.grad_norm))
            evaluated = engine.eval_step(models.share(batch_of(family, STEPS), dp.rank, dp.size))
        results.append(
            (
                [*records, (evaluated.loss, evaluated.weight)],
                engine.state_dict(rank0_only=True),
                engine.traffic(),
            )
        )
    return results


@functools.cache
def expected(family: str) -> tuple[list[Record], dict[str, Any]]:
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    model, loss_fn, batch = model_of(family), loss_of(family), batch_of(family, STEPS)
    with models.Wide():
        records, weights = models.plain_training(
            model, loss_fn, [batch_of(family, step) for step in range(STEPS)], optimizer, CLIP
        )
        model.eval()
        with torch.no_grad():
            if family == "vit":
                return [*records, (float(loss_fn(model(batch[0]), batch[1])), float(SAMPLES))], weights
            loss, weight = loss_fn(model(input_ids=batch["input_ids"]), batch)
    return [*records, ((loss / weight).item(), float(weight))], weights


def compare(results: list[Any], family: str, each: list[dict[str, Any]]) -> None:
    records, weights = expected(family)
    for i, config in enumerate(each):
        at = {key: config[key] for key in ("mesh", "zero", "pipeline", "batch") if key in config}
        for result in results:
            torch.testing.assert_close(
                result[i][0], records, rtol=1e-10, atol=1e-10, msg=lambda m, at=at: f"{family} {at}: {m}"
            )
        assert results[0][i][1].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(results[0][i][1][name], tensor, rtol=1e-10, atol=1e-10,
                                       msg=lambda m, n=name, at=at: f"{family} {n} {at}: {m}")  # fmt: skip


def on(ranks: Ranks) -> Callable[..., list[Any]]:
    """Ranks that are threads, unless all cases are to be run: how a model is divided does not depend on who
    moves its tensors."""
    return ranks if ALL in os.environ else threads.run


def values(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """All that a config says, but for what is the same in all of them."""
    sections = ("mesh", "zero", "pipeline", "memory")
    return [(of, key, str(value)) for of in sections for key, value in config.get(of, {}).items()]


PIPELINES: dict[int, list[dict[str, Any]]] = {
    2: [settings({"pp": 2}, pipeline={"schedule": schedule, "virtual": 2}) for schedule in NAMES],
    4: [
        *(settings({"pp": 2}, zero={"stage": stage}) for stage in (0, 1)),
        *(settings({"pp": 2}, zero={"stage": 2, "reduce_every": each}) for each in ("step", "microbatch")),
        *(
            settings({"pp": 2}, zero={"stage": stage}, pipeline={"schedule": "interleaved"})
            for stage in (1, 3)
        ),
        settings({"pp": 2}, zero={"stage": 3}, memory={"activations": "recompute"}),
        settings({"pp": 4}, pipeline={"blocks": [1, 1, 2, 1]}),
        *(
            settings({"pp": 2}, zero={"stage": stage}, pipeline={"schedule": s})
            for s in ("zb-h1", "zb-v")
            for stage in (0, 1, 3)
        ),
        settings(
            {"pp": 2}, zero={"stage": 3}, pipeline={"schedule": "zb-h1"}, memory={"activations": "recompute"}
        ),
    ],
}


@pytest.mark.parametrize("world", PIPELINES)
def test_pipeline_equals_plain_pytorch(ranks: Ranks, world: int) -> None:
    """By default with few of the configs on four ranks, which have every value of all of them."""
    each = PIPELINES[world] if ALL in os.environ else cover(PIPELINES[world], values)
    compare(on(ranks)(world, train, "llama tied", each), "llama tied", each)


# With recomputation; without it the families below run.
RECOMPUTED: dict[str, Any] = {"batch": {"size": SAMPLES, "micro": 3}, "memory": {"activations": "recompute"}}
TENSORS: dict[int, list[dict[str, Any]]] = {
    2: [settings({"tp": 2}, **RECOMPUTED), settings({"tp": 2, "sequence_parallel": True}, **RECOMPUTED)],
    4: [
        settings({"tp": 2, "sequence_parallel": True}, zero={"stage": 3}, **RECOMPUTED),
        settings({"tp": 2, "pp": 2, "sequence_parallel": True}, pipeline={"schedule": "zb-v"}, **RECOMPUTED),
    ],
}


@pytest.mark.parametrize("world", TENSORS)
def test_tensor_parallelism_equals_plain_pytorch(ranks: Ranks, world: int) -> None:
    """Four are processes always."""
    run = on(ranks) if world == 2 else ranks
    compare(run(world, train, "llama", TENSORS[world]), "llama", TENSORS[world])


@whole
def test_two_of_each_on_eight_ranks(ranks: Ranks) -> None:
    sizes = {"tp": 2, "pp": 2, "sequence_parallel": True}
    each = [
        settings(sizes, zero={"stage": 1}),
        settings(sizes, zero={"stage": 3}, pipeline={"schedule": "interleaved"}),
    ]
    compare(ranks(8, train, "llama", each), "llama", each)


def over_own_collectives(rank: int, world: int, *args: Any) -> Any:
    with own_collectives():
        return train(rank, world, *args)


def test_the_process_groups_own_collectives_equal_plain_pytorch(ranks: Ranks) -> None:
    """The path that GPUs take."""
    sequence = {"tp": 2, "sequence_parallel": True}
    each = {
        2: [settings({"pp": 2}, pipeline={"schedule": s}) for s in ("1f1b", "zb-v")] + [settings(sequence)],
        4: [
            settings({**sequence, "pp": 2}, zero={"stage": 1}),
            settings({"pp": 2}, zero={"stage": 3}, pipeline={"schedule": "interleaved"}),
            settings({"tp": 2}, zero={"stage": 3}, **RECOMPUTED),
        ],
    }
    for world, configs in each.items():
        compare(ranks(world, over_own_collectives, "llama tied", configs), "llama tied", configs)


# ---- every family: each pair of two things that a run may have is in some run


class Case(NamedTuple):
    """A run. None: the mesh has no such axis."""

    family: str
    sizes: tuple[int, int, int]  # dp, tp, pp
    stage: int
    schedule: Name | None
    sequence: bool | None
    microbatches: str  # "one" or "several"

    def pairs(self) -> frozenset[tuple[Any, Any]]:
        """Of what it has, every two, but for family and schedule (which knows no model). The sizes count as
        the axes that the mesh has, the pipeline's length (which knows no family) and the number of ranks."""
        size = {name: size for name, size in zip(("dp", "tp", "pp"), self.sizes, strict=True) if size > 1}
        axes = tuple(size)
        known = {**self._asdict(), "axes": axes, "length": size.get("pp"), "ranks": math.prod(self.sizes)}
        has = [(key, value) for key, value in known.items() if key != "sizes" and value is not None]
        pairs = {tuple(sorted(pair)) for pair in itertools.combinations(has, 2)}
        left_out = {("family", "schedule"), ("family", "length"), ("axes", "length")}
        return frozenset((one, other) for one, other in pairs if (one[0], other[0]) not in left_out)

    def settings(self) -> dict[str, Any]:
        dp, tp, pp = self.sizes
        share = SAMPLES // dp
        micro = share if self.microbatches == "one" else {12: 3, 6: 2, 4: 2, 3: 1}[share]
        more: dict[str, Any] = {"pipeline": {"schedule": self.schedule}} if self.schedule else {}
        return settings(
            {"dp": dp, "tp": tp, "pp": pp},
            mesh={"sequence_parallel": bool(self.sequence)},
            zero={"stage": self.stage},
            batch={"size": SAMPLES, "micro": micro},
            **more,
        )


EACH = ("llama", "gpt2", "qwen3", "mistral", "gemma2", "phi3", "opt", "gpt_neox", "bert", "vit")
ALIKE = () if ALL in os.environ else ("mistral", "phi3", "opt", "gpt_neox")
"""Families that are divided much as others are, of which test_tensor_models has two ranks; here with
--all-cases."""
LONG = "gemma2", "bert", "qwen3"
"""Families that four ranks train with --all-cases."""
WORLDS = {**{each: (2, 4) for each in EACH if each not in ALIKE}, "llama of 6 heads": (3,)}


@functools.cache
def matrix() -> list[Case]:
    """Few runs that have every pair which any run can have; `bench/matrix.py` runs them all."""
    cases = [case for family, sizes in WORLDS.items() for size in sizes for case in cases_of(family, size)]
    random.Random(0).shuffle(cases)
    cases.sort(key=lambda case: math.prod(case.sizes))  # of two that would do, the cheaper
    return cover(cases, Case.pairs)


def cases_of(family: str, world_size: int) -> list[Case]:
    return [
        Case(family, sizes, stage, schedule, sequence, count)
        for sizes in itertools.product((1, 2, 3, 4), repeat=3)
        if math.prod(sizes) == world_size
        for stage, count in itertools.product(range(4), ("several", "one"))
        for schedule in (NAMES if sizes[2] > 1 else (None,))
        for sequence in ((False, True) if sizes[1] > 1 else (None,))
        if schedule is None or len(stage_ranks(schedule, sizes[2])) <= BLOCKS
        if not (family == "vit" and sequence)  # its 17 positions cannot be divided
    ]


@pytest.mark.parametrize(
    ("family", "world"),
    [
        pytest.param(family, world, marks=[whole] if world == 4 and family in LONG else [])
        for family, sizes in WORLDS.items()
        for world in sizes
    ],
)
def test_every_family_equals_plain_pytorch(ranks: Ranks, family: str, world: int) -> None:
    each = [case.settings() for case in matrix() if case.family == family and math.prod(case.sizes) == world]
    assert each
    compare(on(ranks)(world, train, family, each), family, each)
