"""The memory that forwards keep for their backward, counted on fake tensors, to say before a run how many
samples a micro-batch may have.

Invariant: no number is read, and no memory taken. Communication: none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme.config.schema import ContextSection, MemorySection
from polyreme.errors import PolyremeError
from polyreme.models import huggingface
from polyreme.models.huggingface import tensors_in
from polyreme.models.wrappers import unwrap
from polyreme.sequence.loss_chunks import head_of
from polyreme.sequence.mlp_tiles import mlps_of
from polyreme.step.memory.recomputation import overloads
from polyreme.step.precision import DTYPES, autocast


@dataclass(frozen=True)
class Kept:
    """The memory for the backward of one micro-batch of an undivided model. bytes: kept by forwards, with one
    recomputed block. largest: the largest tensor, of which the backward makes a gradient. tile: of what is
    computed over so many tokens at a time, and made again in backward, of any number of samples."""

    bytes: int
    largest: int
    tile: int = 0


def device_of_ranks() -> torch.device:
    """Return the device that ranks on a machine like this one compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class ForwardSettings:
    """The settings of forwards: their format (`precision.compute`), the activations that they keep
    (`memory`), the tokens of each sample, and how many are computed at a time (`context`)."""

    compute: str
    memory: MemorySection
    sequence: int
    context: ContextSection


def kept(
    model: nn.Module, settings: ForwardSettings, samples: int, device: torch.device | None = None
) -> Kept | str:
    """Return the memory that a micro-batch of so many samples keeps of all of `model`, which is on the meta
    device and is changed; or why it is not known."""
    module = unwrap(model).train()
    batch: Any = huggingface.sample_batch(module, 1, settings.sequence)
    if batch is None:
        return "only Hugging Face models of texts or images are known to take what"

    def call(fake: Any) -> Any:
        inputs = {name: fake(value, samples, *value.shape[1:]) for name, value in batch.items()}
        return module(**huggingface.training_arguments(module), **inputs)

    return kept_by(module, settings, device or device_of_ranks(), call)


def kept_by(
    module: nn.Module, settings: ForwardSettings, device: torch.device, call: Callable[[Any], Any]
) -> Kept | str:
    """Return the memory that forwards of `module` keep for their backward; or why that is not known. `call`
    calls the module, with inputs from a function that it is given, which returns a tensor without numbers in
    the place of a real one, with another shape if given."""
    dtype = DTYPES[settings.compute]
    blocks = [*huggingface.find_blocks(module).values()]
    counting = _Counting(settings.memory, blocks, _tiled(module, blocks, settings.context))

    def fake(tensor: Tensor, *shape: int) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape or tensor.shape, dtype=wanted, device=device)

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # the returned reason is enough
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), autocast(settings.compute, device):
            _replace(module, fake)
            with counting.forward(module.parameters()):
                call(fake)
    except PolyremeError:
        raise
    except Exception as error:  # any error of a forward that reads numbers
        return f"{type(module).__name__} cannot be called without numbers ({type(error).__name__})"
    finally:
        log.disabled = before
    return counting.found()


def _replace(module: nn.Module, fake: Any) -> None:
    """Replace parameters and buffers by fake ones; buffers keep their dtype."""
    made: dict[int, Tensor] = {}
    for each in module.modules():
        for name, old in each._parameters.items():
            if old is not None:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(fake(old), old.requires_grad)
                each._parameters[name] = made[id(old)]  # type: ignore[assignment]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = fake(buffer).to(buffer.dtype)


def _tiled(module: nn.Module, blocks: list[nn.Module], context: ContextSection) -> dict[nn.Module, int]:
    """Return what is computed over tiles, with the tokens of each: MLPs, and the head with the loss."""
    found = dict[nn.Module, int]()
    if context.mlp_tile != "none":
        found |= dict.fromkeys((mlp for block in blocks for mlp in mlps_of(block)), context.mlp_tile)
    if context.loss_chunk != "none" and (head := head_of(module)) is not None:
        found[head] = context.loss_chunk
    return found


class _Counting:
    """Counts the bytes of each storage that a forward keeps: by block for recomputed blocks, by module for
    what is computed over tiles, and together for all others and the inputs of both."""

    def __init__(self, memory: MemorySection, blocks: list[nn.Module], tiled: dict[nn.Module, int]) -> None:
        self._tiled, self._parts = tiled, dict[nn.Module, float]()
        self._again = blocks[:: memory.recompute_every] if memory.activations != "keep" else []
        # otherwise they are in host memory or in files
        self._keeps_inputs = memory.activations == "recompute"
        self._saves = {*overloads(memory.recompute_save)} if self._again else set()
        self._shared: dict[int, int] = {}
        self._inside_of: dict[nn.Module, dict[int, int]] = {each: {} for each in (*self._again, *tiled)}
        self._inside: list[nn.Module] = []
        self._fixed: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage gets the id of a freed one

    @contextmanager
    def forward(self, parameters: Iterator[nn.Parameter]) -> Iterator[None]:
        """Count the storages that the forward inside keeps, but for parameters."""
        self._fixed = {parameter.untyped_storage()._cdata for parameter in parameters}
        handles = [each.register_forward_pre_hook(self._enter, with_kwargs=True) for each in self._inside_of]
        handles += [each.register_forward_hook(self._leave) for each in self._inside_of]
        with _Outputs(self._saves, self._saved), torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
            yield
        for handle in handles:
            handle.remove()

    def found(self) -> Kept:
        """Return the counted bytes."""
        known = {**self._shared}
        blocks = [_without(self._inside_of[each], self._shared) for each in self._again]
        for block in blocks:
            known |= block
        largest = max(known.values(), default=0)
        once = max((sum(block.values()) for block in blocks), default=0)
        tiles = [0]
        for module, part in self._parts.items():
            sizes = _without(self._inside_of[module], known).values()
            tiles.append(int(part * (sum(sizes) + 2 * max(sizes, default=0))))
        return Kept(sum(self._shared.values()) + once, largest, max(tiles))

    @property
    def _here(self) -> dict[int, int]:
        return self._inside_of[self._inside[-1]] if self._inside else self._shared

    def _pack(self, tensor: Tensor) -> Tensor:
        self._count(tensor, self._here)
        return tensor

    def _saved(self, output: Any) -> None:
        for tensor in tensors_in(output) if self._inside else ():
            self._count(tensor, self._shared)

    def _count(self, tensor: Tensor, into: dict[int, int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._fixed:
            self._alive.append(tensor)
            into[storage._cdata] = storage.nbytes()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_in((args, kwargs))
        if module in self._tiled:
            self._parts[module] = min(1.0, self._tiled[module] / math.prod(given[0].shape[:-1]))
        for tensor in given if module in self._tiled or self._keeps_inputs else ():
            self._count(tensor, self._here)
        self._inside.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module not in self._tiled or not isinstance(module, nn.Linear):  # after a head comes its loss
            self._inside.pop()


def _without(sizes: dict[int, int], others: Collection[int]) -> dict[int, int]:
    return {storage: size for storage, size in sizes.items() if storage not in others}


class _Outputs(TorchDispatchMode):
    """Gives the outputs of some operators to `then`."""

    def __init__(self, operators: Collection[Any], then: Any) -> None:
        super().__init__()
        self._operators, self._then = operators, then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._then(output)
        return output


def _same(tensor: Tensor) -> Tensor:
    return tensor
