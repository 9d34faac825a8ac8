"""Cutting a model into pipeline stages, without renaming or rewriting anything in it.

A stage is a range of the model's blocks. Cuts lie where a block's first argument is: what the model computes from there to the first
argument of another stage's first block belongs to the stage; so the first stage has what comes before the blocks, the last what comes
after. Every stage runs the model's own forward. Until its first block it computes only what does not depend on other stages (masks,
positions, rotary embeddings), then the block is given what the previous stage sent, and at the next stage's first block it ends.

Invariant: the module tree and the names of what is left in it are the whole model's. A parameter of other stages is *hollow*: a plain
tensor of the same shape, all of whose elements are one zero in memory. What is computed from hollow parameters must not take part in what
a stage puts out: a stage's first forward follows its graph to make sure.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.model_map import loss_over_all_blocks, pipeline_list, sample_inputs, tensors_in, training_arguments

# ---- the plan


class Leaf(Enum):
    """Of what a block returns: its new hidden states, another tensor, or anything else, for which None is good enough."""

    HIDDEN = 1
    TENSOR = 2
    NONE = 3


@dataclass(frozen=True)
class Answer:
    """What a block returns, where that is not its new hidden states alone: `leaves` in the structure `spec`."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class Split:
    """Which stage has what; the same on every rank.

    owner: name of the list of blocks; "" for an nn.Sequential that is the model.
    blocks: names of the blocks, in order; stage i has those from bounds[i] to bounds[i + 1].
    stages_of: every name of a parameter or buffer, and the stages that have it. (Buffers outside the blocks are everywhere, but only
        on those stages do they take part.)
    tied: the parameters that several stages have, by first name. Each stage has a copy, under all its names; their gradients are
        to be summed. A copy without a gradient counts as zero.
    answer: see `Answer`; None where blocks return their new hidden states.
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
        names = [name for stage in sorted(stages) for name in self.blocks[self.bounds[stage] : self.bounds[stage + 1]]]
        found = {name: model.get_submodule(name) for name in names}
        return {name: block for name, block in found.items() if any(True for _ in block.parameters())}


def plan(
    model: nn.Module,
    stages: int,
    *,
    counts: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    blocks: str | None = None,
    sample: Any = None,
) -> Split:
    """Cut `model` (real, or on the meta device; it is not changed) into `stages`, each a range of at least one block.

    counts: blocks of each stage; by default the most expensive stage is made as cheap as can be.
    costs: of each block, such as `measure` finds; by default the number of parameters, with what comes before and after the blocks.
    blocks: the name of the list of blocks, for a model that has several.
    sample: what to call the model with (a mapping: by keywords; a tuple: by position) to see, on a few numbers and without memory for
        the parameters, which of them come before the blocks and which after. Hugging Face models need none; for others without one, those
        registered before the blocks come before them.

    Raises ModelError for a model without blocks or with fewer than stages, for `counts` that do not fit it, and for a loss over all blocks.
    """
    if stages < 1:
        raise ModelError(f"a model cannot be cut into {stages} stages: mesh.pp must be at least 1")
    if stages == 1:
        names = [name for kind in _named(model) for group in kind for name in group[0]]
        return Split("", (), (0, 0), dict.fromkeys(names, (0,)), {})
    if setting := loss_over_all_blocks(model):
        raise ModelError(f"with {setting} the loss takes something from every block, which are on several stages: turn it off in the "
                         "model's config, or set mesh.pp = 1")  # fmt: skip
    owner = pipeline_list(model, blocks)
    found = _blocks(model, owner)
    seen = _Seen() if owner == "" else _observe(model, owner, found, sample)
    use = _Use(model, found, seen)
    bounds = _bounds(len(found), stages, counts, costs or use.numels())
    stages_of, tied = use.stages_of(bounds)
    return Split(owner, tuple(found), bounds, stages_of, tied, seen.answer)


def measure(
    model: nn.Module, forward: Callable[[], Any], *, blocks: str | None = None, sample: Any = None, repeats: int = 3
) -> list[float]:
    """Seconds that each block of a whole model takes for forward and backward, the first with what comes before the blocks, the last
    with what comes after. No gradient is left behind.

    forward: calls the model on a batch and returns its output, as in `lambda: model(**batch)`.
    blocks, sample: as for `plan`.
    """
    count = len(_blocks(model, pipeline_list(model, blocks)))
    split = plan(model, count, counts=[1] * count, blocks=blocks, sample=sample)
    parameters = [p for p in model.parameters() if p.requires_grad]
    seconds: list[float] = []
    form, tensors = take_apart(None)
    devices = {p.device for p in parameters if p.is_cuda}

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with torch.random.fork_rng(devices=list(devices)):
        for index in range(count):
            stage, times = Stage(model, split, index), []
            for _ in range(1 + repeats):  # the first warms up
                received = put_together(form, [t.detach().clone() for t in tensors])
                start = now()
                output = stage(forward, received)
                ends = [t for t in tensors_in(output) if t.requires_grad]
                inputs = parameters + [t for t in tensors_in(received) if t.requires_grad]
                if ends and inputs:
                    torch.autograd.grad(ends, inputs, [torch.ones_like(t) for t in ends], allow_unused=True)
                times.append(now() - start)
            seconds.append(min(times[1:]))
            form, tensors = take_apart(output if index < count - 1 else None)
    return seconds


def _blocks(model: nn.Module, owner: str) -> dict[str, nn.Module]:
    """The elements of the list `owner`, those without parameters, too."""
    prefix = owner + "." if owner else ""
    found = {prefix + name: block for name, block in model.get_submodule(owner)._modules.items() if block is not None}
    first: dict[int, str] = {}
    for name, block in found.items():
        if (other := first.setdefault(id(block), name)) != name:
            raise ModelError(
                f"{other} and {name} are one module, which stages cannot divide: build two modules, and tie their parameters if they "
                "are to share them"
            )
    return found


def _bounds(blocks: int, stages: int, counts: Sequence[int] | None, costs: Sequence[float]) -> tuple[int, ...]:
    if stages > blocks:
        raise ModelError(f"the model has {blocks} blocks, too few for {stages} stages of at least one each: lower mesh.pp")
    if counts is None:
        if len(costs) != blocks:
            raise ModelError(f"{len(costs)} costs for {blocks} blocks: give one for each")
        return _balance(costs, stages)
    if len(counts) != stages or sum(counts) != blocks or min(counts) < 1:
        raise ModelError(
            f"the blocks of each stage are given as {list(counts)}, but must be {stages} numbers of at least 1 with the sum {blocks}, "
            "the model's blocks"
        )
    return (0, *accumulate(counts))


def _balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Bounds that make the most expensive of the ranges as cheap as can be, and among those, all of them as even as can be."""
    total = [0.0, *accumulate(costs)]

    def best(price: Callable[[float], float], join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
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


# ---- which parameters come before the blocks, and which after

Phase = Literal["before", "between", "after"]


@dataclass
class _Seen:
    """What a trial forward showed. uses: by `id` of a parameter or buffer outside the blocks."""

    uses: dict[int, set[Phase]] = field(default_factory=lambda: defaultdict(set))
    reached: bool = False  # the first block
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
    """Which parameters belong to which block, or before or after all blocks."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], seen: _Seen) -> None:
        self._parameters, self._buffers = _named(model)
        self._block_of = {f"{name}.{leaf}": i for i, (name, block) in enumerate(blocks.items()) for leaf in _leaves(block)}
        self._count, self._seen = len(blocks), seen
        self._early: set[str] = set()
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name in self._block_of:
                break
            self._early.add(name)
        early = {name.rpartition(".")[0] for name in self._early}
        self._early |= {name for names, _ in self._buffers for name in names if name.rpartition(".")[0] in early}

    def phases(self, names: Sequence[str], tensor: Tensor) -> set[Phase]:
        """When the forward uses a tensor outside the blocks."""
        outside = [name for name in names if name not in self._block_of]
        if not outside:
            return set()
        uses = set(self._seen.uses.get(id(tensor), ()))
        if self._seen.complete:
            return uses or (set() if len(outside) < len(names) else {"after"})
        if self._seen.reached:  # all uses before the blocks are known
            return uses | ({"after"} if not uses or len(outside) > 1 else set())
        return {"before" if name in self._early else "after" for name in outside}

    def numels(self) -> list[int]:
        """Parameters of each block; of the first and the last with those before and after."""
        found = [0] * self._count
        for names, tensor in self._parameters:
            phases = self.phases(names, tensor)
            at = {self._block_of[name] for name in names if name in self._block_of}
            at |= {0} if "before" in phases else set()
            at |= {self._count - 1} if "after" in phases else set()
            for index in at:
                found[index] += tensor.numel()
        return found

    def stages_of(self, bounds: Sequence[int]) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """For `Split`: the stages of every name, and of the parameters that have several."""
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


def _leaves(module: nn.Module) -> list[str]:
    return [name for kind in _named(module) for names, _ in kind for name in names]


def _observe(model: nn.Module, owner: str, blocks: Mapping[str, nn.Module], sample: Any) -> _Seen:
    """Run `model` on hollow parameters, and from the first block on without computing anything at all, as far as it goes; of the blocks
    only the first. A model that does not go through to the end shows less, and a block that does not (it looks at numbers) is taken to
    return its hidden states alone. Raises ModelError where a `sample` does not reach the blocks.
    """
    seen, given = _Seen(), sample is not None
    inputs = sample if given else sample_inputs(model)
    if inputs is None:
        return seen
    inputs = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), inputs)
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    kwargs = {**training_arguments(model), **(inputs if isinstance(inputs, Mapping) else {})}
    first, last = next(iter(blocks)), len(blocks) - 1
    parameters, buffers = _named(model)
    stand_ins: dict[str, Tensor] = {}
    watched: dict[int, int] = {}
    for names, tensor in (*parameters, *buffers):
        if all(name.startswith(owner + ".") and not name.startswith(first + ".") for name in names):
            continue  # only of the blocks that are not run
        if isinstance(tensor, nn.Parameter):
            stand_in = _hollow(tensor, torch.device("cpu"), tensor.dtype)
        else:
            stand_in = tensor.detach().clone() if tensor.device.type == "cpu" else torch.zeros(tensor.shape, dtype=tensor.dtype)
        stand_ins |= dict.fromkeys(names, stand_in)
        if not all(name.startswith(owner + ".") for name in names):
            watched[id(stand_in)] = id(tensor)
    watch, log = _Watch(watched, seen.uses), logging.getLogger("torch._subclasses.fake_tensor")
    with ExitStack() as modes:

        def through(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == 0:
                seen.reached, watch.phase = True, "between"
                modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                with suppress(Exception):
                    seen.answer = _answer_like(block(*args, **kwargs))
            if index == last:
                watch.phase = "after"
            return _answer(seen.answer, _argument(args, kwargs)[1])

        def gated(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _gates(model, owner, through):
                return inner(*args, **kwargs)

        modes.enter_context(torch.no_grad())
        modes.enter_context(torch.random.fork_rng(devices=[]))
        modes.enter_context(_wrapped(model, gated))
        modes.enter_context(watch)
        modes.callback(setattr, log, "disabled", log.disabled)  # it reports what fails here as an error
        log.disabled = True
        try:
            functional_call(model, stand_ins, args, kwargs, tie_weights=False)
            seen.complete = watch.phase == "after"
        except Exception as error:  # whatever a forward raises that meets hollow or fake tensors
            if given and not seen.reached:
                raise ModelError(f"the sample does not lead to the model's blocks: {error}") from error
    return seen


class _Watch(TorchFunctionMode):
    """Notes which tensors are computed with, and when."""

    def __init__(self, watched: Mapping[int, int], uses: dict[int, set[Phase]]) -> None:
        super().__init__()
        self._watched, self._uses = watched, uses
        self.phase: Phase = "before"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if tensors_in(result):  # not a look at a shape or a dtype
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._watched:
                    self._uses[self._watched[id(leaf)]].add(self.phase)
        return result


# ---- leaving a stage's part of a model


def keep(
    model: nn.Module, split: Split, stages: Collection[int], device: torch.device | None = None, dtype: torch.dtype | None = None
) -> set[str]:
    """Take from `model`, real or meta, what none of `stages` has: parameters, and the buffers of other stages' blocks. Returns the names
    of the parameters and buffers that are left.

    device, dtype: where the stage computes, and in what; by default those of the parameters.
    """
    mine = set(stages)
    absent = tuple(name + "." for s in range(split.stages) if s not in mine for name in split.blocks[split.bounds[s] : split.bounds[s + 1]])
    parameters, buffers = _named(model)
    left: set[str] = set()
    for names, tensor in (*parameters, *buffers):
        is_buffer = not isinstance(tensor, nn.Parameter)
        if mine & set(split.stages_of[names[0]]) or (is_buffer and not all(name.startswith(absent) for name in names)):
            left.update(names)
            continue
        on = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        hollow = _hollow(tensor, on, (dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype)
        _mark(hollow, f"{names[0]}, which stage {split.stages_of[names[0]][0]} has")
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            if attribute in module._parameters or attribute in module._buffers:  # a module under two names has it no more
                delattr(module, attribute)
                setattr(module, attribute, hollow)  # recurrent modules follow assignments
    return left


def _hollow(like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `like` that takes the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(like.shape)


def _mark(tensor: Tensor, what: str) -> None:
    """Make `tensor` one that `_foreign` finds in what is computed from it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_()
        tensor._of_another_stage = what  # type: ignore[attr-defined]


def _foreign(outputs: Iterable[Tensor]) -> str | None:
    """What of another stage `outputs` were computed from."""
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        if (what := getattr(getattr(node, "variable", None), "_of_another_stage", None)) is not None:
            return what
        fresh = {function for function, _ in node.next_functions if function is not None} - known
        known |= fresh
        todo += fresh
    return None


# ---- running a stage


class Stage:
    """Stage `index` of `split`: calls `model`, which may be whole or what `keep` left, as that stage.

    Several stages of one rank (interleaved schedules) are several `Stage`s on one model.
    """

    def __init__(self, model: nn.Module, split: Split, index: int) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == split.stages - 1
        self._model, self._split = model, split
        self._first, self._stop = split.bounds[index : index + 2]
        self._received: Any = None
        self._next = 0  # the block to be called next
        self._checked = self.is_first and self.is_last

    def __call__(self, forward: Callable[[], Any], received: Any = None) -> Any:
        """Call `forward`, in which the model is to be called once, with the whole micro-batch, on every stage alike.

        On the last stage the model returns what it always returns; on others, what the next stage is to receive: the first argument of
        its first block, a tensor or whatever else the model hands from block to block. Its hooks see that as its output.

        received: what the stage before returned; nothing on the first. For the backward through a cut see `Form.value`.

        Raises ModelError for a model whose blocks are not called once each, in order (layer drop), or in which something else than the
        first argument reaches over a cut (skip connections, position biases that only the first block makes).
        """
        self._received, self._next = received, 0
        try:
            with _wrapped(self._model, self._forward):
                return forward()
        finally:
            self._received = None

    def _forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward as this stage."""
        names = self._split.blocks
        with _gates(self._model, self._split.owner, self._through) if names else nullcontext():
            try:
                output = inner(*args, **kwargs)
            except _Cut as cut:
                output = cut.value
        if self._next != self._stop + (not self.is_last):
            raise ModelError(
                f"stage {self.index}: the model's forward did not call {names[self._next]}; a pipeline needs every block to be called "
                "once, in order (turn layer drop off)"
            )
        if not self._checked and torch.is_grad_enabled():
            if (what := _foreign(tensors_in(output))) is not None:
                raise ModelError(
                    f"stage {self.index} computes with {what}: only the blocks' first argument is sent from stage to stage. Cut the model "
                    "elsewhere, or pass everything in that argument"
                )
            self._checked = True
        return output

    def _through(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of block `index` by the model."""
        names = self._split.blocks
        if index != self._next:
            due = names[self._next] if self._next < len(names) else "no block"
            raise ModelError(
                f"stage {self.index}: the model's forward calls {names[index]} when {due} is due; a pipeline needs every block to be "
                "called once, in order (turn layer drop off)"
            )
        self._next += 1
        key, value = _argument(args, kwargs)
        if index < self._first:
            return _answer(self._split.answer, pytree.tree_map_only(Tensor, partial(_other, names[index]), value))
        if index == self._stop:
            raise _Cut(value)
        if index == self._first and not self.is_first:
            received = pytree.tree_map_only(Tensor, _Alias.apply, self._received)
            if isinstance(key, int):
                args = (*args[:key], received, *args[key + 1 :])
            else:
                kwargs = {**kwargs, key: received}
        return block(*args, **kwargs)


class _Cut(Exception):
    """Ends a stage's forward where the next stage begins."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Alias(torch.autograd.Function):
    """The same numbers in a tensor that is neither a leaf nor a view, so that a model may write to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Gate(nn.Module):
    """Stands in a block's place during a stage's forward, so that a block of another stage is not called and its hooks do not run."""

    def __init__(self, block: nn.Module, through: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.training = block.training
        self.__dict__ |= {"_block": block, "_through": through}  # not as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


@contextmanager
def _wrapped(model: nn.Module, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile, the model's forward is `wrapper(its forward, ...)`, inside its hooks."""
    own = vars(model).get("forward")
    model.forward = partial(wrapper, model.forward)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


@contextmanager
def _gates(model: nn.Module, owner: str, through: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Meanwhile, a call of the n-th block goes to `through(n, block, args, kwargs)`."""
    modules = model.get_submodule(owner)._modules
    blocks = {name: block for name, block in modules.items() if block is not None}
    try:
        for index, (name, block) in enumerate(blocks.items()):
            modules[name] = _Gate(block, partial(through, index))
        yield
    finally:
        modules.update(blocks)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Any]:
    """Of a block's arguments the one that goes from block to block: the first that holds a floating-point tensor, or else the first."""
    found: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if not found:
        raise ModelError("a block is called without arguments: a pipeline cannot send it anything")
    return next(((key, value) for key, value in found if any(t.is_floating_point() for t in tensors_in(value))), found[0])


def _other(name: str, tensor: Tensor) -> Tensor:
    """In place of an output of `name`, which this stage does not run."""
    tensor = tensor.detach()
    _mark(tensor, f"an output of {name}, which another stage runs")
    return _Alias.apply(tensor)


def _answer_like(output: Any) -> Answer | None:
    leaves, spec = pytree.tree_flatten(output)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors or isinstance(output, Tensor):
        return None
    kinds = (Leaf.HIDDEN if i == tensors[0] else Leaf.TENSOR if i in tensors else Leaf.NONE for i in range(len(leaves)))
    return Answer(spec, tuple(kinds))


def _answer(answer: Answer | None, value: Any) -> Any:
    """`value` in the structure in which blocks return it. Nothing else that they return is known."""
    if answer is None:
        return value
    unknown = {Leaf.TENSOR: _other("a block beside its hidden states", torch.zeros(())), Leaf.NONE: None}
    return pytree.tree_unflatten([value if leaf is Leaf.HIDDEN else unknown[leaf] for leaf in answer.leaves], answer.spec)


# ---- what crosses a cut


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """What a stage sends: its form, which JSON can hold, and its tensors.

    The form is of use to agree on once: it has the structure (tensors and constants in tuples, lists and dictionaries), and each tensor's
    dtype, shape and whether it requires grad. Raises ModelError for anything else.
    """
    tensors: list[Tensor] = []

    def form_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {"dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape), "grad": part.requires_grad}
        if isinstance(part, dict):
            return {"dict": {key: form_of(each) for key, each in part.items()}}
        if type(part) in (tuple, list):
            return {type(part).__name__: [form_of(each) for each in part]}
        if part is None or isinstance(part, bool | int | float | str):
            return part
        raise ModelError(
            f"the model hands a {type(part).__name__} from block to block, which cannot be sent to another stage: use tensors, alone or in "
            "tuples, lists and dictionaries"
        )

    return form_of(value), tensors


def put_together(form: Any, tensors: Iterable[Tensor]) -> Any:
    """The value that was taken apart, of tensors as they were received. Those that the backward goes through require grad, and their
    `.grad` is what to send back; the model may write to them all."""
    todo = iter(tensors)

    def value_of(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "shape" in part:
            return next(todo).detach().requires_grad_(part["grad"])
        if "dict" in part:
            return {key: value_of(each) for key, each in part["dict"].items()}
        return tuple(map(value_of, part["tuple"])) if "tuple" in part else [value_of(each) for each in part["list"]]

    return value_of(form)


def buffers(form: Any, device: torch.device) -> list[Tensor]:
    """Empty tensors to receive what was taken apart into."""
    if not isinstance(form, dict):
        return []
    if "shape" in form:
        return [torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=device)]
    (parts,) = form.values()
    return [tensor for part in (parts.values() if isinstance(parts, dict) else parts) for tensor in buffers(part, device)]


# ---- models given as lists


def layers(items: Sequence[nn.Module | Callable[[], nn.Module]]) -> nn.Sequential | Callable[[], nn.Sequential]:
    """A model that is a list of layers, each called with what the one before returned: an nn.Sequential of them, or, if some are functions
    without arguments that build a layer, a function that builds it. `zero.deferred.record` calls that without memory for the parameters,
    of which a stage then makes those that it has."""
    if all(isinstance(item, nn.Module) for item in items):
        return nn.Sequential(*items)  # type: ignore[arg-type]

    def build() -> nn.Sequential:
        built = [item if isinstance(item, nn.Module) else item() for item in items]
        for index, layer in enumerate(built):
            if not isinstance(layer, nn.Module):
                raise ModelError(f"layer {index} of the list builds a {type(layer).__name__}, not a torch.nn.Module")
        return nn.Sequential(*built)

    return build
