"""Chooses a style for each module: from the user's mapping, else the model's own plan and the table of
families, else raises an error that says what to add. Pure: reads a model, real or on the meta device, and
changes nothing.

Plans map paths, in which `*` stands for one component, to style names, as transformers' tensor-parallel plans
do. Added to their names are "fused_qkv" (query, key and value heads in this order in one linear layer) and
"vocabulary" for an embedding or a head."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from polyreme.errors import ModelError
from polyreme.models.huggingface import find_blocks, skips_blocks
from polyreme.models.peft import Adapted, adapted_layers, learns_keys, plain_names
from polyreme.tensor.advice import Attempt, Problem, advise, message, pattern, starred
from polyreme.tensor.families import BY_HEAD, FAMILIES, HEAD_COUNTS, HEAD_SIZES, SHARED_HEAD_COUNTS, WIDTHS
from polyreme.tensor.layers import (
    Column,
    EmbeddingColumns,
    Replicate,
    Row,
    Style,
    Vocabulary,
    has_own_forward,
    is_linear,
    linear_sizes,
)
from polyreme.tensor.recognise import recognise

STYLES: dict[str, Style] = {
    "colwise": Column(),
    "colwise_gather_output": Column(gathered=True),
    "colwise_rep": Column(gathered=True),
    "rowwise": Row(),
    "rowwise_split_input": Row(split_input=True),
    "rowwise_rep": Row(split_input=True),
    "packed_colwise": Column(),
    "interleaved_colwise": Column(),
    "fused_qkv": Column(),
    "vocabulary": Vocabulary(),
    "embedding_rowwise": Vocabulary(),
    "embedding_colwise": EmbeddingColumns(),
    "replicated_with_grad_allreduce": Replicate(summed=True),
    "replicate": Replicate(),
}
"""Styles by their names in a plan. "packed_colwise", "interleaved_colwise" and "fused_qkv" get their sections
from the module."""


@dataclass
class Heads:
    """The heads of one attention module over all ranks: `query` query heads and `shared` key-value heads, of
    `size` numbers each."""

    query: int
    shared: int
    size: int

    def changes(self, module: object, ways: int) -> dict[str, int]:
        """The attributes of the module (or its config) that count heads or their widths, with their values
        for one rank."""
        query, shared = self.query // ways, max(self.shared // ways, 1)
        wanted = [
            *((name, self.query, query) for name in HEAD_COUNTS),
            *((name, self.shared, shared) for name in SHARED_HEAD_COUNTS),
            ("num_key_value_groups", self.query // self.shared, query // shared),
        ]
        if isinstance(module, nn.Module):
            wanted += [(name, self.query * self.size, query * self.size) for name in WIDTHS]
        return {name: new for name, old, new in wanted if _integer(module, name) == old and new != old}


@dataclass
class TensorPlan:
    """The way to divide a model over `ways` ranks.

    styles: by module name. siblings: column layers that share their input, by their parent's name. heads:
    attentions whose heads are divided, by name. by_head: arguments of these that have numbers for each head.
    whole_attentions: those that are whole on every rank. adapted: layers that PEFT wrapped, by name.
    dropouts: those before the low rank of adapters of divided layers, by name; True where their input is
    divided."""

    ways: int
    styles: dict[str, Style] = field(default_factory=dict)
    siblings: dict[str, list[str]] = field(default_factory=dict)
    heads: dict[str, Heads] = field(default_factory=dict)
    by_head: tuple[str, ...] = ()
    whole_attentions: list[str] = field(default_factory=list)
    adapted: dict[str, Adapted] = field(default_factory=dict)
    dropouts: dict[str, bool] = field(default_factory=dict)


def plan(
    model: nn.Module, ways: int, user: Mapping[str, str] | None = None, sequence_parallel: bool = False
) -> TensorPlan:
    """Plan how to divide `model` over `ways` ranks.

    user: styles by path ("model.layers.*.mlp.gate" = "replicate"), which override those of the model's own
    plan and of the table.

    Raises ModelError that lists all modules without a style, or that `ways` does not divide, each with the
    line to add or to change."""
    found, problems = _attempt(model, ways, user or {}, sequence_parallel)
    if not problems:
        return found

    known, elsewhere = _recognised(model)

    def attempt(styles: Mapping[str, str], sequence: bool) -> Attempt:
        tried, left = _attempt(model, ways, styles, sequence)
        left += _read_elsewhere(tried, elsewhere)
        return Attempt(tried.styles, {name: heads.size for name, heads in tried.heads.items()}, left)

    problems += _read_elsewhere(found, elsewhere)
    advice = advise(model, find_blocks(model), user or {}, sequence_parallel, attempt, known)
    raise ModelError(message(model, ways, problems, advice))


def _read_elsewhere(plan: TensorPlan, names: Iterable[str]) -> Iterator[Problem]:
    """Report the layers of `names` that would be divided, though the model reads their weights outside of
    their forward."""
    for name, style in plan.styles.items():
        if name in names and not isinstance(style, Replicate):
            reason = "the model reads its weight itself, of which each rank would have a part"
            yield Problem(name, reason, '= "replicate"', {name: "replicate"})


def _recognised(model: nn.Module) -> tuple[dict[str, str], set[str]]:
    """Recognise attentions and MLPs by one forward. Returns styles of their layers by name, and the modules
    with a parameter that is used outside of them."""
    heads: dict[str, tuple[int, int]] = {}
    names = []
    for name, module in model.named_modules():
        layers = [linear_sizes(layer) for layer in module.children() if is_linear(layer)]
        if len(layers) > 1:
            names.append(name)
            if (
                found := _heads(module, layers[-1][0], [outputs for _, outputs in layers], False)
            ) is not None:
                heads[name] = found.query, found.size
    return recognise(model, names, heads)


def _attempt(
    model: nn.Module, ways: int, user: Mapping[str, str], sequence_parallel: bool
) -> tuple[TensorPlan, list[Problem]]:
    """Make a plan. Returns it with the problems that keep it from being carried out."""
    modules = dict(model.named_modules())
    blocks = find_blocks(model)
    style_names, problems = _style_names(model, modules, blocks, user)
    found = TensorPlan(
        ways,
        {name: STYLES[style_name] for name, style_name in style_names.items()},
        adapted=adapted_layers(model),
    )
    problems += [
        Problem(name, reason)
        for name, style in found.styles.items()
        if (reason := _indivisible(modules[name], style))
    ]
    failed = {problem.path for problem in problems}
    for parent, names in _by_parent(
        name for name, style in found.styles.items() if isinstance(style, Column) and name not in failed
    ).items():
        problems += _columns(found, style_names, modules, parent, names)
    failed |= {problem.path for problem in problems}
    for name, style in found.styles.items():
        if name in failed or _parent(name) in failed:
            continue
        try:
            style.cuts(modules[name], ways)
        except (ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            problems.append(Problem(name, f"cannot be divided as {style_names[name]!r}: {error}"))
    problems += _adapters(found, sequence_parallel)
    problems += _unplaced(found, modules, blocks)
    if learns_keys(model):
        problems.append(
            Problem(
                "",
                "PEFT gives its attentions keys and values of all "
                "heads (prefix tuning): learn prompts or LoRA instead",
            )
        )
    if ways > 1 and not problems and all(isinstance(style, Replicate) for style in found.styles.values()):
        problems.append(
            Problem("", "nothing of it would be divided, so that every rank would compute the same")
        )
    if sequence_parallel:
        problems += _not_by_position(model, found, modules, blocks)
    found.by_head = BY_HEAD.get(_model_type(model), ())
    return found, problems


def _indivisible(module: nn.Module, style: Style) -> str:
    """Say why a module cannot be divided, whatever its sizes; "" if it can."""
    if isinstance(style, Replicate) or not isinstance(module, nn.Linear):
        return ""
    kind = type(module).__name__
    if not module.weight.is_floating_point():
        return (
            f"{kind} packs its numbers into {module.weight.dtype}, as quantized layers do: it has no rows or "
            "columns to divide"
        )
    return f"{kind} has a forward of its own, which a divided layer does not call" * has_own_forward(module)


def _style_names(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    user: Mapping[str, str],
) -> tuple[dict[str, str], list[Problem]]:
    """The style name of each module that has one: of the model's plan, overridden by the table, then by the
    user. For a layer that PEFT wrapped it is the name of the layer inside."""
    found, problems = _model_styles(model, modules)
    plain, adapted = plain_names(model), adapted_layers(model)
    inside = [name for name in modules if any(name.startswith(block + ".") for block in blocks)]
    for end, style in FAMILIES.get(_model_type(model), {}).items():
        found = _given(found, [name for name in inside if plain.get(name, "").endswith("." + end)], style)
    _add_vocabulary(model, modules, found)
    for path, style_name in user.items():
        hits = [
            name
            for name in modules
            if re.fullmatch(pattern(path), plain.get(name, name)) or re.fullmatch(pattern(path), name)
        ]
        hits = [adapted[name].base if name in adapted else name for name in hits]
        if style_name == "replicate":
            hits += _tied(modules, hits)
        problems = [problem for problem in problems if not f"{problem.path}.".startswith(f"{path}.")]
        style = difflib.get_close_matches(style_name, STYLES, n=1, cutoff=0)[0]
        if not hits:
            near = difflib.get_close_matches(path, dict.fromkeys(starred(name) for name in modules), n=1)
            problems.append(
                Problem(
                    path,
                    "mesh.tp_plan names it, but the model has no such module",
                    f'mesh.tp_plan."{near[0]}" = "{style}"' if near else "",
                    dict.fromkeys(near, style),
                )
            )
        elif style_name != style:
            problems.append(
                Problem(
                    path,
                    f"there is no style {style_name!r}; there are {', '.join(STYLES)}",
                    f'= "{style}"',
                    {path: style},
                )
            )
        else:
            problems += _packed(model, modules, [hit for hit in hits if found.get(hit) != style_name], style)
            found = _given(found, hits, style_name)
    return found, problems


def _tied(modules: Mapping[str, nn.Module], names: Iterable[str]) -> list[str]:
    """The other modules that share a parameter with the modules `names`."""
    whole = {id(parameter) for name in names for parameter in modules[name].parameters()}
    inside = tuple(f"{name}." for name in names)
    return [
        name
        for name, module in modules.items()
        if not whole.isdisjoint(map(id, module.parameters(recurse=False)))
        and not f"{name}.".startswith(inside)
    ]


def _packed(
    model: nn.Module, modules: Mapping[str, nn.Module], names: Iterable[str], style: str
) -> Iterator[Problem]:
    """Report layers with the style "colwise" whose sizes show that several layers are packed into them."""
    for name in names if style == "colwise" else ():
        if not is_linear(modules[name]):
            continue
        inputs, outputs = linear_sizes(modules[name])
        parent = modules.get(_parent(name), model)
        sizes = [
            linear_sizes(each) for each in parent.children() if is_linear(each) and each is not modules[name]
        ]
        ends = [inside for inside, outside in sizes if outside == inputs and inside < outputs]
        alone = all(outside == inputs for _, outside in sizes)  # no query, key or value beside it
        heads = _heads(parent, ends[0], [outputs], True) if ends else None
        if heads is not None and alone and outputs == (heads.query + 2 * heads.shared) * heads.size:
            what, right = "query, key and value", "fused_qkv"
        elif outputs in [2 * inside for inside in ends]:
            what, right = "two layers", "packed_colwise"
        elif alone and outputs in [3 * inside for inside in ends]:
            what, right = "query, key and value", "fused_qkv"
        else:
            continue
        reason = (
            f"has {what} in its {outputs} outputs, of which plain 'colwise' gives a rank the wrong ones: "
            f'"{right}" if they lie one behind the other, "interleaved_colwise" if in turns'
        )
        yield Problem(name, reason, f'= "{right}" or "interleaved_colwise"')


def _given(styles: Mapping[str, str], names: Iterable[str], style: str) -> dict[str, str]:
    """Return `styles` with `style` for `names`, and without those of modules inside of them."""
    inside = tuple(f"{name}." for name in names)
    return {name: other for name, other in styles.items() if not name.startswith(inside)} | dict.fromkeys(
        names, style
    )


def _model_styles(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[dict[str, str], list[Problem]]:
    """The style names in the model's own plan, with the problems of that plan."""
    found: dict[str, str] = {}
    problems: list[Problem] = []
    plain, parameters = plain_names(model), [name for name, _ in model.named_parameters()]
    for path, style_name in (getattr(model, "_tp_plan", None) or {}).items():
        matched = re.compile(pattern(path))
        hits = [name for name in modules if matched.fullmatch(plain.get(name, ""))]
        used = hits or [name for name in parameters if matched.fullmatch(name)]
        if used and (style_name not in STYLES or not hits):
            what = "" if hits else "for a parameter by itself "
            problems.append(
                Problem(
                    path,
                    f"the model's own plan asks {what}for the style "
                    f"{style_name!r}, which this version does not have",
                )
            )
        found |= dict.fromkeys(hits, style_name) if style_name in STYLES else {}
    return found, problems


def _add_vocabulary(model: nn.Module, modules: Mapping[str, nn.Module], found: dict[str, str]) -> None:
    """Add the style names of embeddings and heads to `found`."""
    adapted = adapted_layers(model)
    outermost = [_call(model, method) for method in ("get_input_embeddings", "get_output_embeddings")]
    tied = {id(module.weight) for module in outermost if isinstance(module, nn.Embedding | nn.Linear)}
    tables = [base for name, layer in adapted.items() for base in [model.get_submodule(layer.base)]
              if isinstance(base, nn.Embedding) or modules[name] in outermost]  # fmt: skip
    # PEFT looks up rows, and adds to all outputs; others do more than look rows up, or multiply
    tables += [m for m in modules.values() if isinstance(m, nn.Embedding | nn.Linear) and id(m.weight) in tied
               and (len(list(m.parameters())) > 1 + hasattr(m, "bias") or has_own_forward(m))]  # fmt: skip
    whole = {id(weight) for base in tables for weight in base.parameters(recurse=False)}
    for name, module in modules.items():  # also those of an encoder and a decoder that share one vocabulary
        if whole and not whole.isdisjoint(map(id, module.parameters(recurse=False))):
            found.pop(name, None)
        elif isinstance(module, nn.Embedding | nn.Linear) and id(module.weight) in tied:
            found[name] = "vocabulary"


def _columns(
    plan: TensorPlan,
    style_names: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    parent: str,
    names: list[str],
) -> Iterator[Problem]:
    """Enter the column layers `names` of one parent into the plan, with the sections that hold whole heads.
    Yields their problems."""
    wrong = [name for name in names if not is_linear(modules[name])]
    if wrong:
        yield from (Problem(name, f"is {type(modules[name]).__name__}, no linear layer") for name in wrong)
        return
    inputs = {linear_sizes(modules[name])[0] for name in names}
    plan.siblings[parent] = names
    if len(inputs) > 1:
        yield Problem(parent, f"its column layers have inputs of different sizes: {sorted(inputs)}")
        return
    rows = [
        name
        for name in modules
        if _parent(name) == parent and isinstance(plan.styles.get(name), Row) and is_linear(modules[name])
    ]
    row_width = linear_sizes(modules[rows[0]])[0] if rows else None
    fused = [name for name in names if style_names[name] == "fused_qkv"]
    heads = _heads(
        modules[parent], row_width, [linear_sizes(modules[name])[1] for name in names], bool(fused)
    )
    if all(plan.styles[name].gathered for name in names):  # type: ignore[attr-defined]
        plan.whole_attentions += [parent] if heads is not None else []
        return
    if heads is None:
        for name in names:
            outputs = linear_sizes(modules[name])[1]
            if style_names[name] == "packed_colwise":
                plan.styles[name] = Column(((outputs // 2, plan.ways),) * 2)
            elif style_names[name] == "interleaved_colwise":
                plan.styles[name] = Column(((outputs, plan.ways),))
            packed = style_names[name] in ("packed_colwise", "interleaved_colwise")
            if outputs % (plan.ways * (1 + packed)):
                yield Problem(name, f"its {outputs} outputs cannot be divided evenly over {plan.ways} ranks")
        return
    if heads.query % plan.ways:
        yield Problem(
            parent,
            f"its {heads.query} attention heads cannot be divided over {plan.ways} ranks",
            _sizes(heads.query),
        )
        return
    if heads.shared % plan.ways and plan.ways % heads.shared:
        yield Problem(parent, f"its {heads.shared} key-value heads can neither be "
                               f"divided over {plan.ways} ranks, nor replicated evenly",
                       _sizes(heads.query, heads.shared))  # fmt: skip
        return
    plan.heads[parent] = heads
    for name in names:
        yield from _heads_column(plan, style_names[name], parent, name, linear_sizes(modules[name])[1], heads)


def _heads_column(
    plan: TensorPlan, style_name: str, parent: str, name: str, outputs: int, heads: Heads
) -> Iterator[Problem]:
    """Enter one column layer of an attention, with `outputs` outputs, into the plan. Yields its problem."""
    all_queries, all_shared = heads.query * heads.size, heads.shared * heads.size
    if style_name == "fused_qkv":
        plan.styles[name] = Column(
            ((all_queries, heads.query), (all_shared, heads.shared), (all_shared, heads.shared))
        )
    elif style_name == "packed_colwise":
        plan.styles[name] = Column(((outputs // 2, outputs // 2 // heads.size),) * 2)
    elif outputs == all_shared:
        plan.styles[name] = Column(((outputs, heads.shared),))
    elif outputs > all_queries and heads.shared % plan.ways:
        yield Problem(parent, f"its {heads.shared} key-value heads are packed "
                               "with the others, and cannot be divided over "
                       f"{plan.ways} ranks", _sizes(heads.shared))  # fmt: skip
    elif outputs % heads.query and outputs % heads.shared:
        yield Problem(
            name,
            f"its {outputs} outputs belong neither to {heads.query} "
            f"query nor to {heads.shared} key-value heads",
        )
    else:  # whole heads, of whichever kind, as both are divided; or a number for each query head
        plan.styles[name] = Column(((outputs, heads.query if outputs % heads.query == 0 else heads.shared),))


def _heads(module: nn.Module, row_width: int | None, outputs: list[int], fused: bool) -> Heads | None:
    """The heads of an attention module, from its attributes and its layers' sizes; None for any other
    module."""
    count = next((n for name in HEAD_COUNTS if (n := _integer(module, name))), None)
    size = next((n for name in HEAD_SIZES if (n := _integer(module, name))), None)
    if count is None and size and row_width:
        count = row_width // size
    if not count:
        return None
    size = size or (row_width or max(outputs)) // count
    shared = next((n for name in SHARED_HEAD_COUNTS if (n := _integer(module, name))), None)
    if shared is None and fused:
        shared = (outputs[0] // size - count) // 2
    if shared is None and (groups := _integer(module, "num_key_value_groups")):
        shared = count // groups
    if shared is None:
        shared = min(
            (width // size for width in outputs if width >= size and width % size == 0), default=count
        )
    return Heads(count, min(shared, count), size)


def _adapters(plan: TensorPlan, sequence: bool) -> Iterator[Problem]:
    """Enter the adapters of divided layers into the plan. Of a column layer the low rank is whole, and the
    outputs are divided like the layer's. Of a row layer the low rank is summed over the ranks, and the
    outputs are whole, for each rank's slice of the sequence. Yields problems."""
    for name, layer in plan.adapted.items():
        style = plan.styles.get(layer.base)
        if style is None:
            continue
        if isinstance(style, Replicate):
            plan.styles[name] = style
        elif layer.kind != "LoRA" or not isinstance(style, Column | Row):
            yield Problem(
                layer.base,
                f"{layer.kind} adapters of a layer that is divided: "
                "only plain LoRA of linear layers is, with them",
            )
        elif isinstance(style, Column):
            plan.styles |= {**dict.fromkeys(layer.down, Replicate()), **dict.fromkeys(layer.up, style)}
            plan.siblings |= {up: [up] for up in layer.up}
            if sequence and layer.dropouts:
                yield Problem(
                    layer.base,
                    "lora_dropout would drop other inputs on each rank",
                    "mesh.sequence_parallel = false",
                )
        else:
            plan.styles |= {
                **dict.fromkeys(layer.down, style),
                **dict.fromkeys(layer.up, Replicate(summed=sequence)),
            }
        plan.dropouts |= dict.fromkeys(layer.dropouts, isinstance(style, Row))


def _unplaced(
    plan: TensorPlan, modules: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]
) -> Iterator[Problem]:
    """Report modules without a style that need one: linear layers and embeddings in blocks, and all modules
    with parameters between divided layers."""
    split = [
        parent
        for parent, names in plan.siblings.items()
        if parent and parent not in blocks and not all(plan.styles[name].gathered for name in names)  # type: ignore[attr-defined]
    ]
    for name, module in modules.items():
        inside = not blocks or any(name == block or name.startswith(block + ".") for block in blocks)
        styled = any(
            name == other or (name.startswith(other + ".") and isinstance(style, Replicate))
            for other, style in plan.styles.items()
        )
        if styled or not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(
            name.startswith(f"{outer}.") and not f"{name}.".startswith(f"{layer.base}.")
            for outer, layer in plan.adapted.items()
        ):
            continue  # adapters are whole where their layer has no style
        between = any(name == parent or name.startswith(parent + ".") for parent in split)
        if (inside or between) and (is_linear(module) or isinstance(module, nn.Embedding)):
            yield Problem(name, f"{type(module).__name__} without a style")
        elif between:
            yield Problem(name, f"{type(module).__name__} between layers that are divided, without a style")


def _not_by_position(
    model: nn.Module, plan: TensorPlan, modules: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]
) -> Iterator[Problem]:
    """Report modules that may mix positions, of which each rank would have only a slice: all but norms and
    modules that get the whole sequence."""
    fix = "mesh.sequence_parallel = false"
    if setting := skips_blocks(model):
        yield Problem("", f"skips whole blocks at random ({setting})", fix)
    if not blocks:
        yield Problem("", "has no repeated blocks to split the sequence between", fix)
    for block in blocks:
        whole = [parent for parent in plan.siblings if parent.startswith(block + ".")]
        if not any(parent in plan.heads or parent in plan.whole_attentions for parent in whole):
            yield Problem(
                block, "has no attention in a module of its own, which could be given the whole sequence", fix
            )
        for name, module in modules.items():
            style = plan.styles.get(name)
            if (
                not f"{name}.".startswith(f"{block}.")
                or any(name.startswith(parent + ".") for parent in whole)
                or is_norm(module)
            ):
                continue
            if any(name.startswith(f"{outer}.") for outer in plan.adapted):
                continue
            if style == Replicate():
                yield Problem(
                    name, "is placed whole on every rank, and may not work on each position by itself", fix
                )
            elif style is None and any(True for _ in module.parameters(recurse=False)):
                yield Problem(name, f"{type(module).__name__} may not work on each position by itself", fix)


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises each position by itself."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(
        ("LayerNorm", "RMSNorm")
    )


def _sizes(*counts: int) -> str:
    """The line with the sizes of tp that divide the first of `counts`, and divide or are divided by the
    rest."""
    fits = [
        n
        for n in range(1, counts[0] + 1)
        if all(c % n == 0 or (c is not counts[0] and n % c == 0) for c in counts)
    ]
    return f"mesh.tp = {' or '.join(str(n) for n in fits)}"


def _by_parent(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[_parent(name)].append(name)
    return found


def _parent(name: str) -> str:
    """The name of the module that calls this one; for a layer in PEFT's wrapper, that calls the wrapper."""
    return name.removesuffix(".base_layer").rpartition(".")[0]


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _call(model: nn.Module, method: str) -> object:
    """Call the model's `method`; None where it has none, or has not implemented it."""
    function: Callable[[], object] | None = getattr(model, method, None)
    if not callable(function):
        return None
    try:
        return function()
    except NotImplementedError:
        return None


def _integer(module: object, name: str) -> int | None:
    try:
        value = getattr(module, name, None)
    except RuntimeError:  # a config whose layers have several
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
