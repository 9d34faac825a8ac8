"""Writes the error for a model that cannot be divided: every problem, and a plan that has none.

Invariant: the plan in a message was tried by `plan` itself, without a problem. Where a module is not known,
the smallest modules around it that get and return whole activations are placed whole on every rank, which is
right whatever they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from polyreme.errors import VERIFY
from polyreme.models.peft import plain_names
from polyreme.tensor.layers import Column, EmbeddingColumns, Replicate, Row, Style

ROUNDS = 12
"""How many times a plan is corrected before it is given up: one problem may hide another."""


@dataclass
class Problem:
    """The reason why a module, or a line of the user's plan, cannot be used. line: the line to write, such as
    `mesh.tp = 1 or 3`, or `= "rowwise"` for the module's path. wanted: styles that solve it, by path; empty
    if `Tree` has to find them."""

    path: str
    reason: str
    line: str = ""
    wanted: dict[str, str] = field(default_factory=dict)


@dataclass
class Attempt:
    """The result of trying a plan: styles of modules and head sizes of attentions, by name, and the
    problems."""

    styles: Mapping[str, Style]
    heads: Mapping[str, int]
    problems: list[Problem]


Try = Callable[[Mapping[str, str], bool], Attempt]
"""Tries a plan with these styles by path, with or without the sequence split."""


@dataclass
class Advice:
    """A plan with which the model can be divided. styles: by path. sequence: the sequence is split as asked
    for.
    share: of the parameters that are divided, 0 to 1. blocks: more than the vocabulary is divided."""

    styles: dict[str, str]
    sequence: bool
    share: float
    blocks: bool


def advise(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    user: Mapping[str, str],
    sequence: bool,
    attempt: Try,
    known: Mapping[str, str],
) -> Advice | None:
    """Find a plan for `model` without problems, as close to the user's as possible; None where none is
    found."""
    styles, tried, asked = dict(user), attempt(user, sequence), sequence
    tree = Tree(dict(model.named_modules()), plain_names(model), blocks, known, tried)
    for _ in range(ROUNDS):
        if not tried.problems:
            break
        before = (dict(styles), sequence)
        sequence &= not any("sequence_parallel" in problem.line for problem in tried.problems)
        tree.last = tried
        styles = _mended(styles, tried.problems, tree)
        if (styles, sequence) == before:
            return None
        tried = attempt(styles, sequence)
    if tried.problems:
        return None
    tree.last = tried
    lifted = tree.lifted(styles)
    if not (again := attempt(lifted, sequence)).problems:
        styles, tried = lifted, again
    return Advice(styles, sequence == asked, *_share(model, tried.styles))


def _mended(styles: Mapping[str, str], problems: Iterable[Problem], tree: Tree) -> dict[str, str]:
    """Return `styles` with those that solve the problems, without the lines that these override, or that name
    no module."""
    wanted = {path: style for problem in problems for path, style in problem.wanted.items()}
    wanted |= tree.remedies(problem.path for problem in problems if not problem.wanted)
    kept = {path: style for path, style in styles.items() if tree.matching(path)}
    return without_overruled({**{p: s for p, s in kept.items() if p not in wanted}, **wanted})


def without_overruled(styles: Mapping[str, str]) -> dict[str, str]:
    """Return `styles` without lines for modules inside of replicated ones."""
    whole = [f"{path}." for path, style in styles.items() if style == "replicate"]
    return {path: style for path, style in styles.items() if not path.startswith(tuple(whole))}


@dataclass
class Tree:
    """The modules of a model, in which styles are found that solve problems.

    modules: by name. plain: their names without PEFT's wrappers. blocks: by name. known: styles of recognised
    layers. last: the result of the last plan. proposed: modules whose recognised layers were tried."""

    modules: Mapping[str, nn.Module]
    plain: Mapping[str, str]
    blocks: Mapping[str, nn.Module]
    known: Mapping[str, str]
    last: Attempt
    proposed: set[str] = field(default_factory=set)

    @property
    def styles(self) -> Mapping[str, Style]:
        """The styles in the last plan, by module."""
        return self.last.styles

    def matching(self, path: str) -> list[str]:
        """The modules whose names match `path`, in which `*` stands for one component."""
        matched = re.compile(pattern(path))
        return [
            name
            for name in self.modules
            if matched.fullmatch(name) or matched.fullmatch(self.plain.get(name, ""))
        ]

    def remedies(self, paths: Iterable[str]) -> dict[str, str]:
        """Styles that solve the problems of `paths`, each of a module, several, or a parameter: those
        recognised, a summed gradient, or else "replicate" for the smallest modules around it that can be
        whole."""
        found: dict[str, str] = {}
        units: dict[str, None] = {}
        for path in dict.fromkeys(paths):
            hits = self.matching(path) or self.matching(path.rpartition(".")[0])
            hits = [hit for hit in hits if hit and hit not in self.blocks]
            if hits and all(self._by_itself(hit) for hit in hits):
                found |= dict.fromkeys(hits, "replicated_with_grad_allreduce")
                continue
            for hit in hits:
                if styles := self._recognised(hit, hits):
                    found |= styles
                else:
                    units |= dict.fromkeys(self._unit(hit))
        self.proposed |= {name.rpartition(".")[0] for name in found}
        kinds = dict.fromkeys([*found.values(), "replicate"])
        named = {kind: [name for name, style in found.items() if style == kind] for kind in kinds}
        named["replicate"] += units
        return {path: kind for kind in kinds for path in self._paths(named[kind], named)}

    def _recognised(self, hit: str, hits: list[str]) -> dict[str, str]:
        """Recognised styles for all layers of the module that calls `hit`; none where it is not recognised,
        or the last plan has other styles for layers beside `hits`."""
        parent = hit.rpartition(".")[0]
        if parent in self.proposed:
            return {}
        styles = {name: style for name, style in self.known.items() if name.rpartition(".")[0] == parent}
        others = [name for name in styles if name in self.styles and name not in hits]
        return (
            styles if hit in styles and all(_same(self.styles[name], styles[name]) for name in others) else {}
        )

    def lifted(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Return `styles` with one line for each module that is whole, in place of the lines inside of it."""
        lifted = {self._lift(path) if style == "replicate" else path: style for path, style in styles.items()}
        return without_overruled(lifted)

    def _lift(self, path: str) -> str:
        while (parent := path.rpartition(".")[0]) and not any(
            self._divided(name) for name in self.matching(parent)
        ):
            path = parent
        return path

    def _by_itself(self, name: str) -> bool:
        """Whether its parameters are scalars, or have a number for each place in a head, and its input is
        divided."""
        parent = name.rpartition(".")[0]
        shapes = {tuple(p.shape) for p in self.modules[name].parameters()}
        alone = all(shape in ((), (1,), (self.last.heads.get(parent),)) for shape in shapes)
        return alone and any(_is_divided(self.styles.get(each)) for each in self._children(parent))

    def _unit(self, name: str) -> list[str]:
        """The smallest modules around `name` that get and return whole activations once they are replicated:
        in the others a division that begins also ends."""
        while name not in self.blocks:
            parent = name.rpartition(".")[0]
            open_ones = [each for each in self._children(parent) if each != name and self._is_open(each)]
            ends = self._ends(name)
            if ends == {"begins", "ends"} or not open_ones or not parent:
                break
            if parent in self.blocks:
                leaf = not any(True for _ in self.modules[name].children())
                return [name, *open_ones] if leaf or ends else [name]
            name = parent
        return [name]

    def _children(self, parent: str) -> Iterator[str]:
        inside = self.modules[parent].named_children() if parent in self.modules else ()
        return (f"{parent}.{child}".removeprefix(".") for child, _ in inside)

    def _ends(self, name: str) -> set[str]:
        """Whether activations begin, and whether they cease, to be divided inside of a module."""
        found = set()
        for other, style in self.styles.items():
            if f"{other}.".startswith(f"{name}."):
                if isinstance(style, EmbeddingColumns) or (isinstance(style, Column) and not style.gathered):
                    found.add("begins")
                if isinstance(style, Row) and not style.split_input:
                    found.add("ends")
        return found

    def _is_open(self, name: str) -> bool:
        return len(self._ends(name)) == 1

    def _divided(self, name: str) -> bool:
        return name == "" or any(
            style != Replicate() and f"{other}.".startswith(f"{name}.")
            for other, style in self.styles.items()
        )

    def _paths(self, names: Collection[str], named: Mapping[str, Collection[str]]) -> Iterator[str]:
        """Paths that match all of `names`, or else these names: no path may match a module that is divided or
        `named` with another style."""
        listed = {name for each in named.values() for name in each}
        for path in dict.fromkeys(map(starred, names)):
            others = [name for name in self.matching(path) if name not in names]
            if any(name in listed or self._divided(name) for name in others):
                yield from (name for name in names if starred(name) == path)
            else:
                yield path


def _same(style: Style, name: str) -> bool:
    return isinstance(style, Column) == name.endswith("colwise") and isinstance(style, Row) == (
        name == "rowwise"
    )


def _is_divided(style: Style | None) -> bool:
    return isinstance(style, EmbeddingColumns | Row) or (isinstance(style, Column) and not style.gathered)


def _share(model: nn.Module, styles: Mapping[str, Style]) -> tuple[float, bool]:
    """The share of the parameters that is divided, and whether any is beside the vocabulary."""
    total = sum(p.numel() for p in model.parameters())
    divided = {
        id(p): p.numel()
        for name, style in styles.items()
        if not isinstance(style, Replicate)
        for p in model.get_submodule(name).parameters()
        if p.dim() > 1
    }
    return sum(divided.values()) / max(total, 1), any(map(_is_divided, styles.values()))


STYLES_ARE = (
    'give layers styles by path in mesh.tp_plan ("blocks.*.up" = "colwise"): "colwise" and the "rowwise" '
    'behind it, "packed_colwise" or "interleaved_colwise" for two layers in one, "fused_qkv" or '
    '"interleaved_colwise" for query, key and value in one, "replicate" for all else'
)


def message(model: nn.Module, ways: int, problems: Iterable[Problem], advice: Advice | None) -> str:
    """Write the error: a line for each problem, one for all repeated blocks; then the plan, and other
    ways."""
    kind = type(model).__name__
    lines = dict.fromkeys(
        f"  - {path}: {problem.reason}" + (f"\n    fix: {_fix(path, problem.line)}" if problem.line else "")
        for problem in problems
        for path in [starred(problem.path) or kind]
    )
    text = [f"{kind} cannot be divided over mesh.tp = {ways} ranks:", *lines]
    alone = "or set mesh.tp = 1: zero.stage = 3 shards all parameters over dp, whatever the model"
    if advice is None:
        return "\n".join([*text, f"  {STYLES_ARE}", f"  {VERIFY}", f"  {alone}"])
    if not advice.blocks:
        text.append(
            "  mesh.tp cannot divide its blocks. Set mesh.tp = 1: zero.stage = 3 shards all parameters, "
            "and mesh.pp may cut the model between its blocks"
        )
        alone = ""
    if advice.styles or not advice.sequence:
        what = f"{int(100 * advice.share)}% of its parameters" if advice.blocks else "the vocabulary alone"
        text += [f"  this in the config divides {what}:", *(f"    {line}" for line in _toml(advice))]
        text.append(f"  {VERIFY}")
    return "\n".join(text + [f"  {alone}"] * bool(alone))


def _toml(advice: Advice) -> Iterator[str]:
    if not advice.sequence:
        yield from ("[mesh]", "sequence_parallel = false")
    if advice.styles:
        yield "[mesh.tp_plan]"
    for path, style in advice.styles.items():
        yield f'"{path}" = "{style}"'


def _fix(path: str, line: str) -> str:
    return f'mesh.tp_plan."{path}" {line}' if line.startswith("=") else line


def pattern(path: str) -> str:
    """Return a regular expression for the names that match `path`."""
    return re.escape(path).replace(r"\*", r"[^.]+")


def starred(name: str) -> str:
    """Return the path that the same modules of repeated blocks share, with `*` for their numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
