"""What is said where a model cannot be divided: every problem, and a plan that has none of them.

Invariant: the plan that a message gives was made by `plan` itself, without a problem. Where nothing is known
of a module, the smallest part of the model that gets and returns whole activations is placed whole on every
rank, which is right whatever it computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from polyreme.models.peft import plain_names
from polyreme.tensor.layers import Column, EmbeddingColumns, Replicate, Row, Style

ROUNDS = 12
"""How often a plan is mended before it is given up: one problem may hide another."""


@dataclass
class Problem:
    """Why a module, or a line of the user's, has no place. line: what to write, such as `mesh.tp = 1 or 3`,
    or `= "rowwise"` for the module's own line. wanted: styles that mend it, by path; none: to be found."""

    path: str
    reason: str
    line: str = ""
    wanted: dict[str, str] = field(default_factory=dict)


@dataclass
class Attempt:
    """What comes of a plan: the styles of modules, and the sizes of heads of attentions, by name; and what is
    wrong with it."""

    styles: Mapping[str, Style]
    heads: Mapping[str, int]
    problems: list[Problem]


Try = Callable[[Mapping[str, str], bool], Attempt]
"""Plans with the user's styles by path, and with or without the sequence split."""


@dataclass
class Advice:
    """Styles by path with which the model can be divided; whether the sequence can be split as asked for; and
    which share of the parameters is divided then, and whether any beside the vocabulary is."""

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
    """A plan for `model` that has no problem, as near to the user's as can be; None where there is none."""
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
    """`styles` with what mends the problems, and without what that overrules, or what names no module."""
    wanted = {path: style for problem in problems for path, style in problem.wanted.items()}
    wanted |= tree.remedies(problem.path for problem in problems if not problem.wanted)
    kept = {path: style for path, style in styles.items() if tree.matching(path)}
    return without_overruled({**{p: s for p, s in kept.items() if p not in wanted}, **wanted})


def without_overruled(styles: Mapping[str, str]) -> dict[str, str]:
    """Without lines for modules inside of those that are placed whole."""
    whole = [f"{path}." for path, style in styles.items() if style == "replicate"]
    return {path: style for path, style in styles.items() if not path.startswith(tuple(whole))}


@dataclass
class Tree:
    """The modules by name, what PEFT's are called without it, the blocks, styles of layers that are
    recognised, what came of the last plan, and the modules of which what is recognised was proposed."""

    modules: Mapping[str, nn.Module]
    plain: Mapping[str, str]
    blocks: Mapping[str, nn.Module]
    known: Mapping[str, str]
    last: Attempt
    proposed: set[str] = field(default_factory=set)

    @property
    def styles(self) -> Mapping[str, Style]:
        """Those that modules have by the last plan."""
        return self.last.styles

    def matching(self, path: str) -> list[str]:
        """The modules that `path`, in which `*` stands for a component, is about."""
        matched = re.compile(pattern(path))
        return [
            name
            for name in self.modules
            if matched.fullmatch(name) or matched.fullmatch(self.plain.get(name, ""))
        ]

    def remedies(self, paths: Iterable[str]) -> dict[str, str]:
        """Styles for what `paths` are about, a module, several, or a parameter: the smallest parts of the
        model around each that can be whole, or its own gradient summed."""
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
        """Styles for the layers of the module that calls `hit`, where it is known and nothing but `hits` is
        said otherwise."""
        parent = hit.rpartition(".")[0]
        if parent in self.proposed:
            return {}
        styles = {name: style for name, style in self.known.items() if name.rpartition(".")[0] == parent}
        others = [name for name in styles if name in self.styles and name not in hits]
        return (
            styles if hit in styles and all(_same(self.styles[name], styles[name]) for name in others) else {}
        )

    def lifted(self, styles: Mapping[str, str]) -> dict[str, str]:
        """`styles` with one line for a module in which everything is whole, in place of one for each of its
        parts."""
        lifted = {self._lift(path) if style == "replicate" else path: style for path, style in styles.items()}
        return without_overruled(lifted)

    def _lift(self, path: str) -> str:
        while (parent := path.rpartition(".")[0]) and not any(
            self._divided(name) for name in self.matching(parent)
        ):
            path = parent
        return path

    def _by_itself(self, name: str) -> bool:
        """Whether it has a number for all of its input, as an activation, or for each place in a head, and
        its input is divided."""
        parent = name.rpartition(".")[0]
        shapes = {tuple(p.shape) for p in self.modules[name].parameters()}
        alone = all(shape in ((), (1,), (self.last.heads.get(parent),)) for shape in shapes)
        return alone and any(_is_divided(self.styles.get(each)) for each in self._children(parent))

    def _unit(self, name: str) -> list[str]:
        """The smallest modules around `name` that get and return whole activations if they are whole on every
        rank: whatever begins to be divided in the others ends there, too."""
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
        """Whether activations begin to be divided inside of it, and whether they end to be."""
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
        """Paths of `names` that are of no other module which is divided or `named` otherwise."""
        told = {name for each in named.values() for name in each}
        for path in dict.fromkeys(map(starred, names)):
            others = [name for name in self.matching(path) if name not in names]
            if any(name in told or self._divided(name) for name in others):
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
    """Which share of the parameters is divided, and whether any beside the vocabulary is."""
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
    """One line for each problem, repeated blocks in one; then the plan, and what there is beside it."""
    kind = type(model).__name__
    lines = dict.fromkeys(
        f"  - {path}: {problem.reason}" + (f"\n    fix: {_fix(path, problem.line)}" if problem.line else "")
        for problem in problems
        for path in [starred(problem.path) or kind]
    )
    said = [f"{kind} cannot be divided over mesh.tp = {ways} ranks:", *lines]
    alone = "or set mesh.tp = 1: zero.stage = 3 shards all parameters over dp, whatever the model"
    if advice is None:
        return "\n".join([*said, f"  {STYLES_ARE}", f"  {alone}"])
    if not advice.blocks:
        said.append(
            "  mesh.tp cannot divide its blocks. Set mesh.tp = 1: zero.stage = 3 shards all parameters, "
            "and mesh.pp may cut the model between its blocks"
        )
        alone = ""
    if advice.styles or not advice.sequence:
        what = f"{advice.share:.0%} of its parameters" if advice.blocks else "the vocabulary alone"
        said += [f"  this in the config divides {what}:", *(f"    {line}" for line in _toml(advice))]
    return "\n".join(said + [f"  {alone}"] * bool(alone))


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
    """A regular expression for the names that `path` is about."""
    return re.escape(path).replace(r"\*", r"[^.]+")


def starred(name: str) -> str:
    """The path that repeated blocks share."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
