"""The memory that forwards keep for their backward, counted on fake tensors, to say before a run how many
samples a micro-batch may have.

Invariant: no number is read, and no memory taken. Communication: none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme.config.schema import MemorySection
from polyreme.errors import PolyremeError
from polyreme.models import huggingface
from polyreme.models.huggingface import tensors_in
from polyreme.models.wrappers import unwrap
from polyreme.step.memory.recomputation import overloads
from polyreme.step.precision import DTYPES, autocast


@dataclass(frozen=True)
class Kept:
    """The memory for the backward of one micro-batch of an undivided model. bytes: kept by forwards, with one
    recomputed block. largest: the largest tensor, of which the backward makes a gradient."""

    bytes: int
    largest: int


def device_of_ranks() -> torch.device:
    """Return the device that ranks on a machine like this one compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class ForwardSettings:
    """The settings of forwards: their format (`precision.compute`), the activations that they keep
    (`memory`), and the tokens of each sample."""

    compute: str
    memory: MemorySection
    sequence: int


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
    counting = _Counting(settings.memory, list(huggingface.find_blocks(module).values()))

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


class _Counting:
    """Counts the bytes of each storage that a forward keeps: by block for recomputed blocks, and together for
    all others and the blocks' inputs."""

    def __init__(self, memory: MemorySection, blocks: list[nn.Module]) -> None:
        self._again = blocks[:: memory.recompute_every] if memory.activations != "keep" else []
        # otherwise they are in host memory or in files
        self._keeps_inputs = memory.activations == "recompute"
        self._saves = {*overloads(memory.recompute_save)} if self._again else set()
        self._shared: dict[int, int] = {}
        self._of_block: dict[nn.Module, dict[int, int]] = {block: {} for block in self._again}
        self._inside: list[nn.Module] = []
        self._fixed: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage gets the id of a freed one

    @contextmanager
    def forward(self, parameters: Iterator[nn.Parameter]) -> Iterator[None]:
        """Count the storages that the forward inside keeps, but for parameters."""
        self._fixed = {parameter.untyped_storage()._cdata for parameter in parameters}
        handles = [each.register_forward_pre_hook(self._enter, with_kwargs=True) for each in self._again]
        handles += [each.register_forward_hook(self._leave) for each in self._again]
        with _Outputs(self._saves, self._saved), torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
            yield
        for handle in handles:
            handle.remove()

    def found(self) -> Kept:
        """Return the counted bytes."""
        blocks = [{**each} for each in self._of_block.values()]
        for block in blocks:
            for storage in block.keys() & self._shared.keys():
                del block[storage]
        largest = max((size for block in (self._shared, *blocks) for size in block.values()), default=0)
        once = max((sum(block.values()) for block in blocks), default=0)
        return Kept(sum(self._shared.values()) + once, largest)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._count(tensor, self._of_block[self._inside[-1]] if self._inside else self._shared)
        return tensor

    def _saved(self, output: Any) -> None:
        for tensor in tensors_in(output) if self._inside else ():
            self._count(tensor, self._shared)

    def _count(self, tensor: Tensor, into: dict[int, int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._fixed:
            self._alive.append(tensor)
            into[storage._cdata] = storage.nbytes()

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)) if self._keeps_inputs else ():
            self._count(tensor, self._shared)
        self._inside.append(block)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()


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
