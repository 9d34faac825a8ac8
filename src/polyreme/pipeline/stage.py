"""Runs one stage of a cut model: the model's own forward, from the end of the previous stage to the beginning
of the next one.

Until its first block a stage computes only values that do not depend on other stages (masks, positions,
rotary embeddings). Its first block gets the value that the previous stage sent, and the forward ends at the
next stage's first block.

Invariant: a stage's output is computed from the value that it received and from its own parameters. The first
forward with a new set of arguments follows the graph to make sure. No communication: values are passed in and
returned (`pipeline.executor` sends them).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.models.huggingface import tensors_in
from polyreme.pipeline.intercept import ENTERS, Intercepts, answer_with, argument, intercepted, wrapped
from polyreme.pipeline.partition import PipelinePartition
from polyreme.pipeline.placeholders import (
    COMPUTES,
    RUNNING,
    Alias,
    StandIn,
    absent,
    follow,
    foreign,
    is_marked,
    output_of,
    shown,
)


class Stage:
    """Calls `model` as stage `index` of `partition`. The model may be whole, or reduced by `keep_stages`.

    Several stages of one rank (interleaved schedules) are several `Stage`s on one model.
    """

    def __init__(self, model: nn.Module, partition: PipelinePartition, index: int) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == partition.stages - 1
        self._model, self._partition = model, partition
        self._first, self._stop = partition.bounds[index : index + 2]
        self._received: Any = None
        self.running = False
        self._next = 0  # the block to be called next
        self._absent = absent(model)
        self._buffers = [
            (module._buffers, name, f"{path}.{name}".lstrip("."))
            for path, module in model.named_modules()
            for name in module._buffers
        ]
        self._checked: dict[Hashable, dict[int, str]] = {}  # by the arguments that are not None
        self._intercepts: Intercepts = {}

    def __call__(self, forward: Callable[[], Any], received: Any = None) -> Any:
        """Call `forward`, which must call the model once, with the whole micro-batch, on every stage alike.

        On the last stage the model returns its usual output; on others the value for the next stage: the
        first argument of its first block, a tensor or whatever the model hands from block to block. The
        model's hooks see that as its output.

        received: the value of the previous stage; None on the first. For the backward through a cut see
        `activation_spec.unflatten`.

        Raises ModelError for a model whose blocks are not called once each, in order (layer drop), or in
        which anything but the first argument reaches over a cut (skip connections, position biases that only
        the first block makes)."""
        self._received, self._next, self.running = received, 0, True
        RUNNING.stages += 1
        try:
            with shown(self._absent), wrapped(self._model, self._forward):
                return forward()
        finally:
            self._received, self.running = None, False
            RUNNING.stages -= 1
            RUNNING.counts = False

    def expected(self, forward: Callable[[], Any]) -> Any:
        """Compute with stand-ins the value that the previous stage would hand on in this `forward`: its
        structure, shapes and dtypes are right, its numbers are not. Floating-point tensors require grad if
        gradients are on and an earlier stage trains any parameter. Blocks of earlier stages of this rank are
        taken to return their input, or what they make of it before anything else (`intercept.ENTERS`)."""
        names, stages_of = self._partition.blocks, self._partition.stages_of
        before = [each for _, _, each in self._absent if stages_of[each.of][0] < self.index]
        graph = torch.is_grad_enabled() and any(each.trained for each in before)

        def through(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key, value = argument(args, kwargs)
            if index == self._first:
                raise _Cut(value)
            if next(block.parameters(), None) is not None:
                if (enter := getattr(block, ENTERS, None)) is not None:
                    value = pytree.tree_map_only(Tensor, enter, value)
                return answer_with(self._partition.answer, value)
            if graph and index == self._first - 1:
                with torch.enable_grad():
                    value = pytree.tree_map_only(Tensor, partial(output_of, names[index]), value)
                    return _called(block, args, kwargs, key, value)
            return block(*args, **kwargs)

        def inside(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with intercepted(self._model, self._partition.owner, through):
                try:
                    return inner(*args, **kwargs)
                except _Cut as cut:
                    return cut.value

        self.running = True
        with torch.no_grad(), torch.random.fork_rng([]), torch._C.DisableTorchFunctionSubclass():
            try:
                with wrapped(self._model, inside):
                    return forward()
            finally:
                self.running = False

    def _forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward as this stage."""
        names = self._partition.blocks
        with (
            intercepted(
                self._model,
                self._partition.owner,
                self._through,
                self._intercepts,
                range(self._first, self._stop),
            )
            if names
            else nullcontext()
        ):
            try:
                output = inner(*args, **kwargs)
            except _Cut as cut:
                output = cut.value
        if self._next != self._stop + (not self.is_last):
            raise ModelError(
                f"stage {self.index}: the model's forward did not call "
                f"{names[self._next]}; a pipeline needs every block to be called "
                "once, in order (turn layer drop off, or set mesh.pp = 1)"
            )
        given = (*(each is None for each in args), *sorted(k for k in kwargs if kwargs[k] is not None))
        tensors = tensors_in(output)
        if given not in self._checked and torch.is_grad_enabled():
            found = [foreign([tensor]) for tensor in tensors]
            if what := next(filter(None, found[:1] if self.is_last else found), None):
                raise ModelError(f"stage {self.index} {COMPUTES.format(what)}")
            self._checked[given] = {i: what for i, what in enumerate(found) if what}
        for i, what in self._checked.get(given, {}).items():  # beside the loss, such as a tower's output
            follow(tensors[i], what)
        for buffers, key, name in self._buffers:
            if not isinstance(buffer := buffers[key], StandIn):
                continue
            if self.index in self._partition.stages_of[name]:
                raise ModelError(
                    f"stage {self.index} has the buffer {name}, but computes it with {buffer.of}, which "
                    "another stage has: register it in the module whose output it is computed from, or set "
                    "mesh.pp = 1"
                )
            buffer.__class__ = Tensor  # type: ignore[assignment]  # another stage's counts
        return output

    def _through(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the model's call of block `index`."""
        names = self._partition.blocks
        if index != self._next:
            due = names[self._next] if self._next < len(names) else "no block"
            raise ModelError(
                f"stage {self.index}: the model's forward calls {names[index]} "
                f"when {due} is due; a pipeline needs every block to be "
                "called once, in order (turn layer drop off, or set mesh.pp = 1)"
            )
        self._next += 1
        RUNNING.counts = index >= self._first
        if self._first < index < self._stop or (index == self._first and self.is_first):
            return block(*args, **kwargs)
        key, value = argument(args, kwargs)
        if index < self._first:
            return answer_with(
                self._partition.answer, pytree.tree_map_only(Tensor, partial(output_of, names[index]), value)
            )
        if index == self._stop:
            raise _Cut(value)
        received = pytree.tree_map_only(Tensor, Alias.apply, self._received)
        return _called(block, args, kwargs, key, received)


def _called(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any
) -> Any:
    """Call the block with `value` for the argument `key`."""
    if isinstance(key, int):
        return block(*args[:key], value, *args[key + 1 :], **kwargs)
    return block(*args, **{**kwargs, key: value})


def refuse_calls(model: nn.Module, partition: PipelinePartition, stages: Collection[Stage]) -> None:
    """Make calls outside of a stage raise ModelError, for `model`, modules around its blocks, and modules of
    other stages; also `state_dict()`, pickling and copying, which would have this stage's tensors only."""
    refusal = _Refusal(stages)
    for name, module in model.named_modules():
        if (
            not name
            or f"{partition.owner}.".startswith(f"{name}.")
            or any(is_marked(value) for value in vars(module).values())
        ):
            module.register_forward_pre_hook(refusal, prepend=True)
            module.register_state_dict_pre_hook(refusal.state_dict)


class _Refusal:
    """Hooks of a module of which this rank has only its stage."""

    def __init__(self, stages: Collection[Stage]) -> None:
        self._stages = stages

    def __call__(self, module: nn.Module, args: object) -> None:
        if not any(stage.running for stage in self._stages):
            raise ModelError(
                f"{type(module).__name__} was called, of which this rank has "
                "only its pipeline stage (mesh.pp > 1): use engine.train_step "
                "or engine.eval_step; to call the whole model, or to generate, "
                "engine.save it and open the checkpoint with mesh.pp = 1 or "
                "with from_pretrained"
            )

    def state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if torch._C._is_torch_function_enabled():  # else the engine itself reads the names
            self._refuse(f"state_dict() of {type(module).__name__}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickling (torch.save, copy.deepcopy) of a module")

    def _refuse(self, what: str) -> NoReturn:
        raise ModelError(
            f"{what}, of which this rank has only its pipeline stage (mesh.pp "
            "> 1): engine.state_dict() gives every rank whole copies of "
            "all, and engine.save writes them"
        )


class _Cut(Exception):
    """Ends a stage's forward where the next stage begins."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
