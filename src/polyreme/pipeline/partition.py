"""Cuts a model into pipeline stages, without renaming or rewriting anything in it: chooses the parameters of
each stage, and removes the others.

A stage is a range of the model's blocks. Cuts lie at the first argument of a block: a stage computes
everything from the first argument of its first block to that of the next stage's; so the first stage also has
the layers before the blocks, and the last those after them. `stage` runs one.

Invariant: the module tree and the names in it are those of the whole model. A parameter of another stage is
replaced by a placeholder, a tensor of the same shape whose elements are all one zero in memory. No
communication: every rank cuts the same model in the same way."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models.huggingface import (
    pipeline_list,
    sample_inputs,
    skips_blocks,
    takes_from_all_blocks,
    tensors_in,
    training_arguments,
)
from polyreme.pipeline.intercept import Answer, answer_like, answer_with, argument, intercepted, wrapped
from polyreme.pipeline.placeholders import StandIn, follow, mark, placeholder

# ---- the partition


@dataclass(frozen=True)
class PipelinePartition:
    """The blocks, parameters and buffers of each stage; the same on every rank.

    owner: name of the list of blocks; "" for an nn.Sequential that is the model.
    blocks: names of the blocks, in order; stage i has those from bounds[i] to bounds[i + 1].
    stages_of: the stages that have each parameter and buffer, by all its names. (Buffers outside the blocks
        are on every stage, but used only on these.)
    tied: the stages of parameters that several stages have, by first name. Each stage has a copy, under all
        its names; their gradients are summed. A copy without a gradient counts as zero.
    answer: the form of a block's output, see `Answer`; None where blocks return just their hidden states.
    """

    owner: str
    blocks: tuple[str, ...]
    bounds: tuple[int, ...]
    stages_of: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, tuple[int, ...]]
    answer: Answer | None = None

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def blocks_of(self, model: nn.Module, stages: Iterable[int]) -> dict[str, nn.Module]:
        """The blocks of some stages that have parameters, by name."""
        names = [
            name
            for stage in sorted(stages)
            for name in self.blocks[self.bounds[stage] : self.bounds[stage + 1]]
        ]
        found = {name: model.get_submodule(name) for name in names}
        return {name: block for name, block in found.items() if any(True for _ in block.parameters())}


def partition_model(
    model: nn.Module,
    stages: int,
    *,
    counts: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    memory: bool = False,
) -> PipelinePartition:
    """Plan to cut `model` (real, or on the meta device; it is not changed) into `stages`, each a range of at
    least one block.

    counts: blocks of each stage; by default the most expensive stage is made as cheap as possible.
    costs: of each block, such as `profile.measure` returns; by default the number of parameters that it
    multiplies by.
    memory: use the number of all its parameters as a block's cost instead. A Hugging Face model is called on
    a small input, without memory for its parameters, to see which of them it uses before the blocks and which
    after; in other models the order of registration tells.

    Raises ModelError for a model without blocks or with fewer than stages, that skips blocks, or whose loss
    or output needs values of all blocks; and for `counts` that do not fit."""
    if stages < 1:
        raise ModelError(f"a model cannot be cut into {stages} stages: mesh.pp must be at least 1")
    if stages == 1:
        names = [name for kind in _named(model) for group in kind for name in group[0]]
        return PipelinePartition("", (), (0, 0), dict.fromkeys(names, (0,)), {})
    if setting := takes_from_all_blocks(model):
        raise ModelError(f"with {setting} the model takes something from every "
                         "block, which are on several stages: turn it off in the "
                         "model's config, or set mesh.pp = 1")  # fmt: skip
    if setting := skips_blocks(model):
        raise ModelError(f"with {setting} the model skips blocks at random, which "
                         "a pipeline cannot: set it to 0 in the model's config, or "
                         "set mesh.pp = 1")  # fmt: skip
    owner, found = pipeline_list(model), blocks_in(model)
    seen = _Seen() if owner == "" else _observe(model, owner, found)
    use = _Use(model, found, seen)
    bounds = _bounds(owner, len(found), stages, counts, costs or use.numels(tables=memory))
    stages_of, tied = use.stages_of(bounds)
    return PipelinePartition(owner, tuple(found), bounds, stages_of, tied, seen.answer)


def blocks_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that are divided over stages: the elements of the model's list of blocks by name,
    including those without parameters. Raises ModelError for a block that is there twice."""
    owner = pipeline_list(model)
    prefix = owner + "." if owner else ""
    found = {
        prefix + name: block
        for name, block in model.get_submodule(owner)._modules.items()
        if block is not None
    }
    first: dict[int, str] = {}
    for name, block in found.items():
        if (other := first.setdefault(id(block), name)) != name:
            raise ModelError(
                f"{other} and {name} are one module, which stages cannot "
                "divide: build two modules, and tie their parameters if they "
                "are to share them"
            )
    return found


def _bounds(
    owner: str, blocks: int, stages: int, counts: Sequence[int] | None, costs: Sequence[float]
) -> tuple[int, ...]:
    if stages > blocks:
        raise ModelError(
            f"the model has {blocks} block{'s' * (blocks != 1)}{owner and f' ({owner})'}, too few for "
            f"{stages} stages of at least one each: lower mesh.pp, or have fewer stages on each rank "
            "(pipeline.schedule, pipeline.virtual), or give the model more blocks"
        )
    if counts is None:
        if len(costs) != blocks:
            raise ModelError(f"{len(costs)} costs for {blocks} blocks: give one for each")
        return _balance(costs, stages)
    if len(counts) != stages or sum(counts) != blocks or min(counts) < 1:
        raise ModelError(
            f"the blocks of each stage are given as {list(counts)}, but "
            f"must be {stages} numbers of at least 1 with the sum {blocks}, "
            "the model's blocks: change pipeline.blocks"
        )
    return (0, *accumulate(counts))


def _balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The bounds for which the most expensive range is as cheap as possible, and then all are as even as
    possible."""
    total = [0.0, *accumulate(costs)]

    def best(
        price: Callable[[float], float], join: Callable[[float, float], float]
    ) -> tuple[float, tuple[int, ...]]:
        rows: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
        for stage in range(1, stages + 1):
            rows = {
                end: min(
                    (join(worth, price(total[end] - total[start])), (*bounds, end))
                    for start, (worth, bounds) in rows.items()
                    if start < end
                )
                for end in range(stage, len(costs) - (stages - stage) + 1)
            }
        return rows[len(costs)]

    limit, _ = best(lambda cost: cost, max)
    _, bounds = best(lambda cost: cost * cost if cost <= limit * (1 + 1e-9) else float("inf"), float.__add__)
    return bounds


# ---- which parameters are used before the blocks, and which after

Phase = Literal["before", "between", "after"]


@dataclass
class _Seen:
    """The findings of a trial forward. uses: when each parameter or buffer outside the blocks is used, by
    `id`.
    reached: it came to the first block. complete: it came to its end."""

    uses: dict[int, set[Phase]] = field(default_factory=lambda: defaultdict(set))
    reached: bool = False
    complete: bool = False
    answer: Answer | None = None


def _named(model: nn.Module) -> tuple[list[tuple[list[str], Tensor]], list[tuple[list[str], Tensor]]]:
    """All parameters, and all buffers, each with all its names."""
    found: list[list[tuple[list[str], Tensor]]] = []
    for named in (model.named_parameters, model.named_buffers):
        by_id: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in named(remove_duplicate=False):
            by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
        found.append(list(by_id.values()))
    return found[0], found[1]


class _Use:
    """The place of each parameter and buffer: in blocks, or before, between or after them."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], seen: _Seen) -> None:
        self._parameters, self._buffers = _named(model)
        self._block_of = {
            f"{name}.{leaf}": i
            for i, (name, block) in enumerate(blocks.items())
            for kind in _named(block)
            for leaves, _ in kind
            for leaf in leaves
        }
        self._count, self._seen = len(blocks), seen
        self._tables = {
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)
        }
        self._early: set[str] = set()
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name in self._block_of:
                break
            self._early.add(name)
        early = {name.rpartition(".")[0] for name in self._early}
        self._early |= {
            name for names, _ in self._buffers for name in names if name.rpartition(".")[0] in early
        }

    def phases(self, names: Sequence[str], tensor: Tensor) -> set[Phase]:
        """The phases of a forward in which a tensor is used outside the blocks."""
        outside = [name for name in names if name not in self._block_of]
        if not outside:
            return set()
        uses = set(self._seen.uses.get(id(tensor), ()))
        if self._seen.complete:
            if uses or len(outside) < len(names):
                return uses
            # such as an image tower, which a sample of texts does not use: before its language model
            return {"after"} if self._early.isdisjoint(outside) else {"before"}
        if self._seen.reached:  # all uses before the blocks are known
            return uses | ({"after"} if not uses or len(outside) > 1 else set())
        return {"before" if name in self._early else "after" for name in outside}

    def numels(self, tables: bool) -> list[int]:
        """The number of parameters of each block, with those before the blocks for the first, and those after
        for the last. Without `tables`, embeddings before the blocks are left out, as they are only looked
        up."""
        found = [0] * self._count
        for names, tensor in self._parameters:
            phases = self.phases(names, tensor)
            at = {self._block_of[name] for name in names if name in self._block_of}
            at |= {0} if "before" in phases and (tables or self._tables.isdisjoint(names)) else set()
            at |= {self._count - 1} if "after" in phases else set()
            for index in at:
                found[index] += tensor.numel()
        return found

    def stages_of(
        self, bounds: Sequence[int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """`PipelinePartition.stages_of` and `.tied` for these bounds."""
        stages = len(bounds) - 1
        stage_of = [stage for stage, (start, stop) in enumerate(pairwise(bounds)) for _ in range(start, stop)]
        where: dict[Phase, set[int]] = {"before": {0}, "between": set(range(stages)), "after": {stages - 1}}
        found: dict[str, tuple[int, ...]] = {}
        tied: dict[str, tuple[int, ...]] = {}
        for kind in (self._parameters, self._buffers):
            for names, tensor in kind:
                at = {stage_of[self._block_of[name]] for name in names if name in self._block_of}
                at = at.union(*(where[phase] for phase in self.phases(names, tensor)))
                found |= dict.fromkeys(names, tuple(sorted(at)))
                if kind is self._parameters and len(at) > 1:
                    tied[names[0]] = tuple(sorted(at))
        return found, tied


def _stand_ins(model: nn.Module, owner: str, first: str) -> tuple[dict[str, Tensor], dict[int, int]]:
    """Placeholders for the model's tensors, by name, but for those of blocks in `owner` other than `first`;
    and, for those outside of the blocks, the id of the tensor by the id of its placeholder."""
    parameters, buffers = _named(model)
    stand_ins: dict[str, Tensor] = {}
    watched: dict[int, int] = {}
    for names, tensor in (*parameters, *buffers):
        if all(name.startswith(owner + ".") and not name.startswith(first + ".") for name in names):
            continue  # used only in blocks that are not run
        if isinstance(tensor, nn.Parameter):
            stand_in = placeholder(tensor, torch.device("cpu"), tensor.dtype)
        elif tensor.device.type == "cpu":
            stand_in = tensor.detach().clone()
        else:
            stand_in = torch.zeros(tensor.shape, dtype=tensor.dtype)
        stand_ins |= dict.fromkeys(names, stand_in)
        if not all(name.startswith(owner + ".") for name in names):
            watched[id(stand_in)] = id(tensor)
    return stand_ins, watched


def _observe(model: nn.Module, owner: str, blocks: Mapping[str, nn.Module]) -> _Seen:
    """Run `model` on placeholder parameters, from the first block on with fake tensors; only the first block
    is called. A forward that fails on the way shows less, and a block that fails (as it reads numbers) is
    taken to return just its hidden states."""
    seen = _Seen()
    if (inputs := sample_inputs(model)) is None:
        return seen
    kwargs = {**training_arguments(model), **inputs}
    stand_ins, watched = _stand_ins(model, owner, next(iter(blocks)))
    last = len(blocks) - 1
    watch, log = _Watch(watched, seen.uses), logging.getLogger("torch._subclasses.fake_tensor")
    with ExitStack() as modes:

        def through(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == 0:
                seen.reached, watch.phase = True, "between"
                modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                with suppress(Exception):
                    seen.answer = answer_like(block(*args, **kwargs))
            if index == last:
                watch.phase = "after"
            return answer_with(seen.answer, argument(args, kwargs)[1])

        def gated(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with intercepted(model, owner, through):
                return inner(*args, **kwargs)

        modes.enter_context(torch.no_grad())
        modes.enter_context(torch.random.fork_rng(devices=[]))
        modes.enter_context(wrapped(model, gated))
        modes.enter_context(watch)
        modes.callback(setattr, log, "disabled", log.disabled)  # it reports what fails here as an error
        log.disabled = True
        # a forward may raise anything where it meets placeholders or fake tensors
        with suppress(Exception):
            functional_call(model, stand_ins, (), kwargs, tie_weights=False)
            seen.complete = watch.phase == "after"
    return seen


class _Watch(TorchFunctionMode):
    """Records which tensors are used in which phase. watched: the id of each tensor, by the id of its
    placeholder."""

    def __init__(self, watched: Mapping[int, int], uses: dict[int, set[Phase]]) -> None:
        super().__init__()
        self._watched, self._uses = watched, uses
        self.phase: Phase = "before"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if tensors_in(result):  # reading a shape or dtype returns none
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._watched:
                    self._uses[self._watched[id(leaf)]].add(self.phase)
        return result


# ---- removing other stages' parameters


def keep_stages(
    model: nn.Module,
    partition: PipelinePartition,
    stages: Collection[int],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> set[str]:
    """Replace by placeholders, in `model`, real or meta, the parameters that none of `stages` has, and the
    buffers of other stages' blocks. Returns the names of the parameters and buffers that stay.

    device, dtype: those in which the stage computes; by default those of the parameters.
    """
    own = set(stages)
    absent = tuple(
        name + "."
        for s in range(partition.stages)
        if s not in own
        for name in partition.blocks[partition.bounds[s] : partition.bounds[s + 1]]
    )
    parameters, buffers = _named(model)
    left: set[str] = set()
    for names, tensor in (*parameters, *buffers):
        is_buffer = not isinstance(tensor, nn.Parameter)
        if own & set(partition.stages_of[names[0]]) or (
            is_buffer and not all(name.startswith(absent) for name in names)
        ):
            left.update(names)
            continue
        on = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        stand_in = StandIn.make(tensor, names[0], all(name.startswith(absent) for name in names), on, dtype)
        what = f"{names[0]}, which stage {partition.stages_of[names[0]][0]} has"
        mark(stand_in, what)
        if not is_buffer:
            follow(tensor, names[0], forbidden=True)  # a user may hold it
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            # a module under two names has it no more
            if attribute in module._parameters or attribute in module._buffers:
                delattr(module, attribute)
                setattr(module, attribute, stand_in)  # recurrent modules follow assignments
    return left


# ---- models given as lists


def layers(
    items: Sequence[nn.Module | Callable[[], nn.Module]],
) -> nn.Sequential | Callable[[], nn.Sequential]:
    """Make a model of a list of layers, each called with the output of the one before: an nn.Sequential; or,
    if some items are functions without arguments that build a layer, a function that builds the
    nn.Sequential. `initialize` calls such a function without memory for parameters, and each stage then makes
    its own. Raises ModelError for an item that is neither."""
    for index, item in enumerate(items):
        if not callable(item):
            raise ModelError(
                f"layer {index} of the list is a {type(item).__name__}: give "
                "a torch.nn.Module, or a function without arguments that "
                "builds one"
            )
    if all(isinstance(item, nn.Module) for item in items):
        return nn.Sequential(*items)  # type: ignore[arg-type]

    def build() -> nn.Sequential:
        built = [item if isinstance(item, nn.Module) else item() for item in items]
        for index, layer in enumerate(built):
            if not isinstance(layer, nn.Module):
                raise ModelError(
                    f"layer {index} of the list builds a {type(layer).__name__}, not a torch.nn.Module"
                )
        return nn.Sequential(*built)

    return build
