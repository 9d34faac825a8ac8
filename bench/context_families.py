"""Tries context parallelism on every family of transformers that has a causal model or declares a plan for
tensor parallelism: what `bench/families.py --cp` does of each.

Invariant: "pass" means that a step over two ranks gives the loss and every weight of the plain model that
gets each document by itself, in float64 to 1e-10, by plain gradient descent with a rate of 1: so every
gradient is compared."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

import polyreme
import threads
from models import VOCABULARY, Wide
from polyreme.errors import PolyremeError
from polyreme.models.huggingface import ForwardSignature, shifts_labels, training_arguments
from pool import RanksFailed
from tiny_families import LARGEST, build, declared, tiny

WAYS = 2
TOLERANCE = 1e-10
MODES = ("padded", "packed")
KINDS = ("pass", "refused", "wrong", "not built")
DOCUMENTS: dict[str, list[tuple[int, ...]]] = {"padded": [(9,), (13,)], "packed": [(5, 3, 5), (1, 12)]}
"""The lengths of the documents of each sample."""
IGNORED = -100

Document = tuple[Tensor, Tensor]
"""Tokens and labels."""


class Wider(Wide):
    """Also where a cast names its type by `Tensor.type`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.type and args[1:] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def families() -> list[str]:
    """Every model_type that is tried."""
    mapping = transformers.AutoModelForCausalLM._model_mapping
    causal = [kind for kind, config in transformers.CONFIG_MAPPING.items() if config in mapping]
    return sorted({*declared(), *causal})


def documents(mode: str) -> list[list[Document]]:
    """The documents of each sample."""
    generator = torch.Generator().manual_seed(5)
    found = [
        [(ids, ids.clone()) for n in row for ids in [torch.randint(3, VOCABULARY, (n,), generator=generator)]]
        for row in DOCUMENTS[mode]
    ]
    found[0][0][1][2:4] = IGNORED
    return found


def batch_of(mode: str) -> dict[str, Tensor]:
    """The documents, put together."""
    rows = [[torch.cat(each) for each in zip(*row, strict=True)] for row in documents(mode)]
    longest = max(len(ids) for ids, _ in rows)
    batch = {
        name: torch.stack([pad(row[at], (0, longest - len(row[at])), value=fill) for row in rows])
        for at, (name, fill) in enumerate([("input_ids", 1), ("labels", IGNORED)])
    }
    if mode == "packed":
        places = [torch.cat([torch.arange(len(ids)) for ids, _ in row]) for row in documents(mode)]
        return {**batch, "position_ids": torch.stack(places)}
    mask = [pad(torch.ones_like(ids), (0, longest - len(ids))) for ids, _ in rows]
    return {**batch, "attention_mask": torch.stack(mask)}


def expected(model: nn.Module, mode: str) -> tuple[float, dict[str, Tensor]]:
    """The loss of the plain model over each document by itself, and the weights after the step."""
    total, count, shifts = torch.zeros(()).double(), 0, shifts_labels(model)
    for ids, labels in itertools.chain(*documents(mode)):
        weight = int((labels[int(shifts) :] != IGNORED).sum())
        if weight:
            given = {"input_ids": ids[None], "labels": labels[None], **training_arguments(model)}
            total = total + model(**given).loss * weight
            count += weight
    loss = total / count
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    return loss.item(), {name: each.detach() for name, each in model.named_parameters()}


def step(rank: int, world: int, model: nn.Module, mode: str) -> tuple[float, dict[str, Tensor]]:
    """The same of a step whose sequences `world` ranks divide."""
    config = {
        "precision": {"compute": "fp64"},
        "batch": {"size": 2},
        "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
        "mesh": {"cp": world},
        "zero": {"stage": 0},
    }
    with polyreme.initialize(copy.deepcopy(model), config) as engine, Wider():
        return engine.train_step(batch_of(mode)).loss, engine.state_dict()


def outcome(model: nn.Module, mode: str) -> tuple[str, str]:
    """What comes of a mode: pass, refused or wrong; and why."""
    plain = copy.deepcopy(model)
    with Wider():
        loss, weights = expected(plain, mode)
    try:
        answers = threads.run(WAYS, step, model, mode, timeout=120)
    except RanksFailed as failed:
        errors = [*failed.exceptions.values()]
        for error in errors:
            if not isinstance(error, PolyremeError):
                return "wrong", f"{type(error).__name__}: {_line(error)}"
        chosen = next((each for each in errors if not isinstance(each, polyreme.TransportError)), None)
        return ("refused", _problems(chosen)) if chosen else ("wrong", str(failed)[:300])
    wrong = []
    for one, found in answers:
        wrong += [] if abs(one - loss) <= TOLERANCE else [f"the loss by {one - loss:.2g}"]
        for name, weight in weights.items():
            apart = float((found[name] - weight).abs().max()) if weight.numel() else 0.0
            if not apart <= TOLERANCE * max(1.0, float(weight.abs().max()) if weight.numel() else 0.0):
                wrong.append(f"gradient of {name} by {apart:.2g}")
    return ("wrong", "; ".join(wrong[:3])) if wrong else ("pass", "")


def attempt(kind: str) -> dict[str, Any]:
    """What comes of a family: its model, and an outcome for each mode."""
    transformers.utils.logging.set_verbosity_error()
    try:
        model = build(tiny(transformers.CONFIG_MAPPING[kind], experts_implementation="eager"))
        if (numel := sum(p.numel() for p in model.parameters())) > LARGEST:
            raise LookupError(f"has {numel:,} parameters at its smallest")
        if not {"input_ids", "labels"} <= ForwardSignature.of(model).names:
            raise LookupError("no model with texts and a loss of its own")
        with Wider():
            expected(copy.deepcopy(model), MODES[0])
    except Exception as error:
        return {"model": "", "outcomes": dict.fromkeys(MODES, ("not built", _line(error)))}
    found = {mode: outcome(model, mode) for mode in MODES}
    return {"model": type(model).__name__, "outcomes": found}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _problems(error: BaseException) -> str:
    """The first of a refusal's problems, and how many more there are."""
    lines = [" ".join(line.split())[2:] for line in str(error).splitlines() if line.startswith("  - ")]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return (lines[0] if lines else _line(error)) + more


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    env, rows = result["environment"], dict(sorted(result["families"].items()))
    worst = {name: _worst(row) for name, row in rows.items()}
    counts = Counter(kind for kind, _ in worst.values())
    lines = [
        "# Families of transformers under context parallelism", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, torch {env['versions']['torch']}, "
        f"transformers {env['versions']['transformers']}.", "", f"    {env['command']}", "",
        "Every family that has a causal model or declares a tensor-parallel plan, tiny, in float64, over "
        f"{WAYS} ranks, padded and packed: loss and every gradient against plain transformers, which gets "
        f"each document by itself, to {TOLERANCE:g}. Families of images or sounds and texts get texts only.",
        "", "| " + " | ".join(KINDS) + " |", "|" + "--:|" * len(KINDS),
        "| " + " | ".join(str(counts[kind]) for kind in KINDS) + " |",
    ]  # fmt: skip
    for kind, title in zip(KINDS[::-1], ("Not built", "Wrong", "Refused", "Pass"), strict=True):
        chosen = [name for name in rows if worst[name][0] == kind]
        if kind == "pass":
            lines += ["", f"## {title}", "", ", ".join(chosen)]
        elif chosen:
            lines += ["", f"## {title}", "", "| family | model | why |", "|---|---|---|"]
            lines += [
                "| " + " | ".join([name, rows[name]["model"], cell(worst[name][1])]) + " |" for name in chosen
            ]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    """Return the text as a table of Markdown has it."""
    return re.sub(r"([|*<>\[\]])", r"\\\1", text)


def _worst(row: Mapping[str, Any]) -> tuple[str, str]:
    """The worse of a family's outcomes."""
    ranked = {"wrong": 0, "refused": 1, "not built": 2, "pass": 3}
    kind, why = min(row["outcomes"].values(), key=lambda each: ranked[each[0]])
    return kind, why
