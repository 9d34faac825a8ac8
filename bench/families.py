"""Tries tensor parallelism on every family of transformers that declares a plan for it or that our own table
knows: forward and backward of a tiny model on two ranks, beside the undivided model.

    python bench/families.py --out bench/results/NAME.json                   # all that NAME.json does not
    have yet python bench/families.py --out bench/results/NAME.json llama gemma2      # these, again python
    bench/families.py --out bench/results/NAME.json --seconds 120     # a part; the next run goes on

Invariant: "pass" means that the loss and every gradient, joined, are those of the undivided model in float64
to 1e-10, on both ranks, and that some parameter was divided. What raises anything but a PolyremeError once
the undivided model has run is "wrong", not "refused". Exit status: 0, 1 where a family is wrong, 2 for bad
usage."""

from __future__ import annotations

import argparse
import copy
import json
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from polyreme.distributed.mesh import Mesh
from polyreme.errors import PolyremeError
from polyreme.models.huggingface import ForwardSignature, training_arguments
from polyreme.tensor import plan
from polyreme.tensor.families import FAMILIES
from polyreme.tensor.parallelize import parallelize

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH.parent / "tests"), str(BENCH.parent / "tests/ranks")]

from models import VOCABULARY, Wide  # noqa: E402
from pool import Ranks, RanksFailed  # noqa: E402

WAYS = 2
TOLERANCE = 1e-10
LIBRARIES = str(Path(transformers.__file__).parents[1]) + "/"
"""What is left out of messages: where packages are on this machine."""
LARGEST = 4_000_000  # parameters of a model that is computed with; refused ones are only looked at
MODES = ("tp", "sequence")  # without and with sequence parallelism

SIZES: dict[str, int] = {
    name: size
    for size, names in {
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        64: "intermediate_size n_inner ffn_dim d_ff shared_intermediate_size "
            "shared_expert_intermediate_size encoder_ffn_dim "
            "decoder_ffn_dim max_position_embeddings n_positions mlp_dim",
        32: "hidden_size n_embd d_model embed_dim text_hidden_size "
            "out_hidden_size projection_dim word_embed_proj_dim "
            "expert_ffn_hidden_size dense_intermediate_size original_max_position_embeddings",
        16: "moe_intermediate_size q_lora_rank kv_lora_rank",
        8: "head_dim swa_head_dim global_head_dim qk_nope_head_dim "
           "qk_rope_head_dim v_head_dim index_head_dim query_pre_attn_scalar "
           "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim "
           "linear_head_dim d_kv image_size attention_chunk_size",
        5: "sliding_window window_size sliding_window_size",
        4: "num_attention_heads n_head num_heads encoder_attention_heads "
           "decoder_attention_heads swa_num_attention_heads rotary_dim "
           "linear_num_value_heads linear_num_heads index_n_heads "
           "index_topk num_experts n_routed_experts num_local_experts "
           "moe_num_experts",
        2: "num_key_value_heads num_kv_heads swa_num_key_value_heads "
           "global_num_key_value_heads linear_num_key_heads num_experts_per_tok "
           "moe_topk moe_k top_k_experts patch_size num_experts_per_token",
        1: "n_group topk_group n_shared_experts num_shared_experts "
           "first_k_dense_replace max_window_layers bos_token_id",
        0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers num_mtp_layers",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Of a tiny model, by the names that configs have for them."""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
    "n_layers",
)

OWN: dict[str, dict[str, Any]] = {
    **{
        f"{kind}_text": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
        for kind in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_image", "glm_ocr", "cosmos3_edge")
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "gemma4_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "ministral": {"head_dim": 8},
    "phi": {"qk_layernorm": True},
}
"""By model_type, what a family needs besides."""

UNPADDED = ("bloom",)  # counts positions from the mask

AUTOS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "MultimodalLM", "ImageClassification", "")
"""Which of a family's architectures is tried: the first of these that it has; "" is the one without a
head."""


# ---- which families, and how they are built


def declared() -> list[str]:
    """Every model_type whose config, or a part of it, declares a plan, and those of our own table."""
    found = []
    for kind in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[kind]
        if kind in FAMILIES or any(each.base_model_tp_plan for each in (config, *_parts(config).values())):
            found.append(kind)
    return sorted(found)


def _parts(config: type) -> dict[str, type]:
    """The classes of a composite config's parts, as far as transformers registers them."""
    found = {}
    for key, spec in config.sub_configs_defaults.items():  # type: ignore[attr-defined]
        if issubclass(spec.config_class, transformers.PreTrainedConfig):
            found[key] = spec.config_class
        elif spec.model_type in transformers.CONFIG_MAPPING:
            found[key] = transformers.CONFIG_MAPPING[spec.model_type]
    return found


def tiny(config: type, **values: Any) -> Any:
    """A small config of a class: sizes by their names, two layers or one of each kind, no dropout; its parts
    likewise."""
    default = vars(config())
    names = {field.name for field in fields(config)}
    given = {field.name for field in fields(config) if field.default is not None}
    values |= {key: tiny(part) for key, part in _parts(config).items() if default.get(key) is not None}
    depth = next((default[name] for name in LAYERS if isinstance(default.get(name), int)), None)
    by_layer = {
        name: value
        for name, value in default.items()
        if name in names and isinstance(value, list) and len(value) == depth
    }
    layers = max(
        [2, *(len(set(map(repr, value))) for value in by_layer.values() if isinstance(value[0], str))]
    )
    for name, value in by_layer.items():
        kinds = list({repr(each): each for each in value}.values())
        values.setdefault(name, [SIZES[name]] * layers if name in SIZES else (kinds * layers)[:layers])
    for name in names - by_layer.keys():
        if name in LAYERS:
            values.setdefault(name, layers)
        elif (
            name in SIZES
            and (name in given or name == "num_key_value_heads")
            and isinstance(default.get(name), int | float | None)
        ):
            values.setdefault(name, SIZES[name])
        elif "drop" in name and isinstance(default.get(name), float):
            values.setdefault(name, 0.0)
    return config(**OWN.get(config.model_type, {}) | values)  # type: ignore[attr-defined]


def architecture(config: Any) -> Callable[[Any], nn.Module]:
    """How to make a model of `config`, newly initialised."""
    for name in AUTOS:
        auto = getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise LookupError("no Auto class builds it by itself")


def skeleton(config: Any) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return architecture(config)(config)


def build(config: Any) -> nn.Module:
    torch.manual_seed(3)
    model = architecture(config)(config).double().train()
    with torch.no_grad():  # biases of zero and norms of one would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_for(model: nn.Module, kind: str) -> dict[str, Any]:
    takes = ForwardSignature.of(model).names
    generator = torch.Generator().manual_seed(5)
    if "input_ids" not in takes:
        if model.main_input_name != "pixel_values":
            raise LookupError(f"takes {model.main_input_name}, neither texts nor images")
        images = torch.randn(3, 3, model.config.image_size, model.config.image_size, generator=generator)
        return {"pixel_values": images.double(), "labels": torch.tensor([0, 1, 1])}
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, 2:4] = -100
    mask[1, -2:] = 0 if kind not in UNPADDED else 1
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_input_ids": ids.flip(0)}
    return {name: tensor for name, tensor in given.items() if name in takes} | training_arguments(model)


# ---- one family on one rank

Outcome = tuple[str, str]
"""pass, refused, wrong or "not built"; and why."""


def job(rank: int, world: int, kind: str) -> dict[str, Any]:
    """What comes of a family: its model, how much of it was divided, and an outcome for each mode."""
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning)
    config = transformers.CONFIG_MAPPING[kind]
    whole: nn.Module | None = None
    try:
        small = tiny(config, experts_implementation="eager")
        try:
            model = skeleton(small)
        except Exception:  # its building reads numbers
            model = build(small)
    except Exception as error:  # even so, a plan may say that it would be refused
        small, why = None, _one_line(error)
        try:
            model = skeleton(config())
        except Exception:
            return {"model": "", "outcomes": dict.fromkeys(MODES, ("not built", why))}
    found: dict[str, Any] = {"model": type(model).__name__, "outcomes": {}}
    for mode in MODES:
        try:
            plan.plan(model, world, sequence_parallel=mode == "sequence")
        except PolyremeError as error:
            found["outcomes"][mode] = ("refused", _problems(error))
    waiting = [mode for mode in MODES if mode not in found["outcomes"]]
    if not waiting:
        return found
    try:
        if small is None:
            raise LookupError(why)
        if (numel := sum(p.numel() for p in model.parameters())) > LARGEST:
            raise LookupError(f"has {numel:,} parameters at its smallest")
        whole = build(small)
        divided = {mode: copy.deepcopy(whole) for mode in waiting}
        batch = batch_for(whole, kind)
        with Wide():
            expected = loss_of(whole, batch)
            expected.backward()
    except Exception as error:
        return found | {
            "outcomes": found["outcomes"] | dict.fromkeys(waiting, ("not built", _one_line(error)))
        }
    axis = Mesh.open({"tp": world}).tp
    for mode, model in divided.items():
        try:
            cuts = parallelize(
                model, axis, plan.plan(model, world, sequence_parallel=mode == "sequence"), mode == "sequence"
            )
            with Wide():
                loss = loss_of(model, batch)
                loss.backward()
        except PolyremeError as error:
            found["outcomes"][mode] = ("refused", _one_line(error))
            continue
        total = sum(p.numel() for p in whole.parameters())
        found["divided"] = (
            sum(p.numel() for name, p in whole.named_parameters() if not cuts[name].is_whole) / total
        )
        wrong = _differences(rank, whole, model, cuts, float(loss.detach() - expected.detach()))
        wrong += [] if found["divided"] else ["nothing was divided"]
        found["outcomes"][mode] = ("wrong", "; ".join(wrong[:4])) if wrong else ("pass", "")
    return found


def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The model's own loss; of one without a head, a weighted sum of what it returns."""
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    hidden = output[0]
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)).sum()


def _differences(
    rank: int, whole: nn.Module, divided: nn.Module, cuts: Mapping[str, Any], loss: float
) -> list[str]:
    """What `rank` has otherwise than the undivided model."""
    wrong = [] if abs(loss) <= TOLERANCE else [f"the loss by {loss:g}"]
    for (name, mine), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            wrong.append(f"{name} {'has no' if mine.grad is None else 'has a'} gradient")
        elif mine.grad is not None and theirs.grad is not None:
            size = float(theirs.grad.abs().max())
            apart = float((cuts[name].put(mine.grad, rank, theirs.grad.clone()) - theirs.grad).abs().max())
            if not apart <= TOLERANCE * max(size, 1):
                wrong.append(f"gradient of {name} by {apart:.2g}, of {size:.2g}")
    if not any(p.grad is not None and p.grad.any() for p in whole.parameters()):
        wrong.append("no gradient to compare")
    return wrong


def _one_line(error: BaseException) -> str:
    kind = (
        ""
        if isinstance(error, PolyremeError | LookupError) and not isinstance(error, KeyError)
        else f"{type(error).__name__}: "
    )
    return kind + " ".join(str(error).replace(LIBRARIES, "").split())[:300]


def _problems(error: PolyremeError) -> str:
    """The first of a refusal's problems, and how many more there are."""
    lines = [" ".join(line.split())[2:] for line in str(error).splitlines() if line.startswith("  - ")]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return (lines[0] if lines else _one_line(error)) + more


# ---- all of them


def attempt(ranks: Ranks, kind: str) -> dict[str, Any]:
    """One family on all ranks: wrong where any rank is."""
    try:
        answers = ranks(WAYS, job, kind, timeout=40, deprecations="default")
    except RanksFailed as failed:
        lines = [line for line in str(failed).strip().splitlines() if line.strip()]
        error = next(iter(failed.exceptions.values()), None)
        return {
            "model": "",
            "outcomes": dict.fromkeys(MODES, ("wrong", _one_line(error) if error else lines[-1][:300])),
        }
    found = answers[0]
    for mode in MODES:
        outcomes = [tuple(answer["outcomes"][mode]) for answer in answers]
        found["outcomes"][mode] = next(
            (outcome for outcome in outcomes if outcome[0] == "wrong"), outcomes[0]
        )
        if len({outcome[0] for outcome in outcomes}) > 1 and found["outcomes"][mode][0] != "wrong":
            found["outcomes"][mode] = ("wrong", f"ranks disagree: {outcomes}")
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    env, rows = result["environment"], dict(sorted(result["families"].items()))
    counts = {mode: Counter(row["outcomes"][mode][0] for row in rows.values()) for mode in MODES}
    kinds = ("pass", "refused", "wrong", "not built")
    lines = [
        "# Families of transformers under tensor parallelism", "",
        f"{env['date']}, commit {env['commit']}; Python {env['python']}, "
        f"torch {env['versions']['torch']}, transformers "
        f"{env['versions']['transformers']}.", "", f"    {env['command']}", "",
        "Every family that declares a tensor-parallel plan (itself or "
        "in a part of its config) or that is in our own table, tiny, in "
        f"float64, over {WAYS} ranks: loss and every gradient against "
        f"the undivided model's, to {TOLERANCE:g}. Families of images "
        "or sounds and texts get texts only.", "",
        "| | " + " | ".join(kinds) + " |", "|---|" + "--:|" * len(kinds),
        *(f"| {name} | " + " | ".join(str(counts[mode][kind]) for kind in kinds) + " |"
          for mode, name in zip(MODES, ("tp = 2", "tp = 2, sequence_parallel"), strict=True)),
    ]  # fmt: skip
    first = {name: row["outcomes"][MODES[0]][0] for name, row in rows.items()}
    if wrong := [
        (name, mode, row)
        for name, row in rows.items()
        for mode in MODES
        if row["outcomes"][mode][0] == "wrong"
    ]:
        lines += [
            "",
            "## Wrong",
            "",
            *(f"- **{name}** ({mode}): {row['outcomes'][mode][1]}" for name, mode, row in wrong),
        ]
    lines += ["", "## Pass", "", "| family | model | divided | sequence_parallel |", "|---|---|--:|---|"]
    for name, row in rows.items():
        if first[name] == "pass":
            outcome, why = row["outcomes"]["sequence"]
            lines.append(
                f"| {name} | {row['model']} | {row['divided']:.0%} "
                f"| {outcome}{': ' + _cell(why) if why else ''} |"
            )
    for kind, title in (("refused", "Refused"), ("not built", "Not built")):
        lines += ["", f"## {title}", "", "| family | model | why |", "|---|---|---|"]
        chosen = {name: row for name, row in rows.items() if first[name] == kind}
        lines += [
            f"| {name} | {row['model']} | {_cell(row['outcomes'][MODES[0]][1])} |"
            for name, row in chosen.items()
        ]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return re.sub(r"([|*<>])", r"\\\1", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "families", nargs="*", metavar="MODEL_TYPE", help="which; all that --out does not have yet"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the page goes beside it as .md")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other family after so long"
    )
    args = parser.parse_args(argv)
    known = declared()
    if unknown := set(args.families) - set(transformers.CONFIG_MAPPING):
        parser.error(f"transformers has no model_type {', '.join(sorted(unknown))}")
    from step import environment

    result = json.loads(args.out.read_text()) if args.out.exists() else {"families": {}}
    result["environment"] = environment() | {
        "command": shlex.join(["python", "bench/families.py", "--out", str(args.out)])
    }
    todo = args.families or [kind for kind in known if kind not in result["families"]]
    began, ranks = time.monotonic(), Ranks()
    try:
        for kind in todo:
            if time.monotonic() - began > args.seconds:
                break
            result["families"][kind] = row = attempt(ranks, kind)
            print(
                kind,
                *(": ".join(filter(None, row["outcomes"][mode]))[:150] for mode in MODES),
                sep=" | ",
                flush=True,
            )
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        ranks.close()
    args.out.with_suffix(".md").write_text(markdown(result))
    left = [kind for kind in known if kind not in result["families"]]
    print(f"{len(result['families'])} families, {len(left)} not tried yet")
    return int(
        any(row["outcomes"][mode][0] == "wrong" for row in result["families"].values() for mode in MODES)
    )


if __name__ == "__main__":
    sys.exit(main())
