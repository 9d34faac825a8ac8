"""From the layers that a script lists to one sequence, in which each rank has the numbers of its own stage.

Invariant: layers that are specifications get the numbers that one process would give them that builds them
all in order, whichever stage has them; of other stages' layers only their shapes are in memory. No
communication."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.runtime.utils import call_to_str
from polyreme.compat.deepspeed.utils.logging import logger
from polyreme.deferred_init.replay import Recording, record
from polyreme.errors import ModelError


class LayerSpec:
    """A layer to be built where its stage is: a class of modules and its arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (inspect.isclass(typename) and issubclass(typename, nn.Module)):
            raise SpecError(
                f"LayerSpec({typename!r}) is of no class of modules: give a subclass of torch.nn.Module"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log: bool = False) -> nn.Module:
        """Return the layer."""
        if log:
            logger.info(f"rank {self.global_rank} builds {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A use of the one module that all specifications with this `key` share: `forward_fn(module, input)`, or
    the module's own forward. Every parameter of it is shared, and not only `tied_weight_attr`."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


class SpecError(ArgumentError, RuntimeError):
    """A layer's specification, or a number of stages, that cannot be."""


class Shared(nn.Module):
    """One of several uses of `module`: its forward, or `function(module, input)`."""

    def __init__(self, module: nn.Module, function: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, given: Any) -> Any:
        return self.module(given) if self.function is None else self.function(self.module, given)


class Function(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Any) -> Any:
        return self.function(given)


def name_of(layer: Any) -> str | None:
    """Return the class, or the function's name, of a layer of a list; None where it has none."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", None)


class Modules:
    """The module of each layer of a list by its place, functions left out; layers that share one have it
    under the place of the first. They are built without memory where that can be."""

    def __init__(
        self, layers: Sequence[Any], again: bool, seed: Callable[[int], object] | None = None
    ) -> None:
        """again: build all specifications once before, as to count what they have, for the random numbers
        that this takes. seed: called with each layer's place before it is built."""
        self.layers = layers
        first: dict[Any, int] = {}
        self.place = [first.setdefault(_key(layer, index), index) for index, layer in enumerate(layers)]
        self._again, self._seed = again, seed
        self._recording: Recording | None = None
        self._of = {index: layer for index, layer in enumerate(layers) if isinstance(layer, nn.Module)}
        if any(isinstance(layer, LayerSpec) for layer in layers):
            self._of |= {int(name): module for name, module in self._built().named_children()}

    def __getitem__(self, index: int) -> nn.Module | None:
        return self._of.get(self.place[index])

    def numels(self) -> list[int]:
        """Return the number of trained parameters of each layer."""
        found = [self[index] for index in range(len(self.layers))]
        return [sum(p.numel() for p in module.parameters() if p.requires_grad) if module else 0
                for module in found]  # fmt: skip

    def sequence(self, mine: range) -> nn.Sequential:
        """Return all layers, of which those of the places in `mine` get their numbers, and no others."""
        own = {self.place[index] for index in mine}
        if self._recording is not None:
            _make(self._recording, {str(place) for place in own})
        tensors = [t for place in sorted(own & self._of.keys()) for t in _tensors(self._of[place])]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        for place in sorted(self._of.keys() - own):
            self._of[place] = _skeleton(self._of[place], memo)
        return nn.Sequential(*(self._layer(index) for index in range(len(self.layers))))

    def _layer(self, index: int) -> nn.Module:
        layer, module = self.layers[index], self[index]
        if module is None:
            return Function(layer)
        if isinstance(layer, TiedLayerSpec):
            return Shared(module, layer.forward_fn)
        return Shared(module) if Counter(self.place)[self.place[index]] > 1 else module

    def _built(self) -> nn.ModuleDict:
        """Return the modules of all specifications."""
        state = torch.get_rng_state()

        def build() -> nn.ModuleDict:
            torch.set_rng_state(state)
            specs = {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, LayerSpec)}
            for spec in specs.values() if self._again else ():
                spec.build()
            made: dict[str, nn.Module] = {}
            for index in range(len(self.layers)):
                if self._seed is not None:
                    self._seed(index)
                if index in specs and self.place[index] == index:
                    made[str(index)] = specs[index].build()
            return nn.ModuleDict(made)

        try:
            self._recording = record(build, torch.initial_seed())
        except ModelError as error:
            logger.warning(f"each rank builds all layers whole, and keeps its stage's: {error}")
            return build()
        module = self._recording.module
        assert isinstance(module, nn.ModuleDict)
        return module


def _key(layer: Any, index: int) -> Any:
    """Return a key that is equal for layers that share a module."""
    if isinstance(layer, TiedLayerSpec):
        return "tied", layer.key
    return id(layer) if isinstance(layer, nn.Module) else ("place", index)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _make(recording: Recording, own: Collection[str]) -> None:
    """Give the numbers that were recorded to the modules of these names."""
    tensors: Mapping[str, Tensor] = {**recording.parameters, **recording.buffers}
    made: dict[str, Tensor] = {}
    wanted = {name for name in tensors if name.partition(".")[0] in own}
    recording.replay(lambda name, tensor: made.update({name: tensor.clone()}), wanted)
    for name, tensor in made.items():
        meta = tensors[name]
        new = nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor
        new.__dict__.update(vars(meta))
        for each in (name, *recording.aliases.get(name, ())):
            path, _, attribute = each.rpartition(".")
            setattr(recording.module.get_submodule(path), attribute, new)


def _skeleton(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module with tensors on the meta device, but for those that `memo` has others for."""
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            meta = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, tensor.requires_grad)
            meta.__dict__.update(vars(tensor))
            memo[id(tensor)] = meta
    return copy.deepcopy(module, memo)


# ---- what is done around a layer's forward


@dataclass
class Settings:
    """interval: 0, or recompute layers. recompute: what does it, `recompute(function, *inputs)`; names: the
    classes to recompute, None for all that have parameters. seed: seeds the generators before each forward of
    a layer, by `base`, the micro-batch and the layer."""

    interval: int = 0
    recompute: Callable[..., Any] | None = None
    names: list[str] | None = None
    seed: Callable[[int], object] | None = None
    base: int = 1234


class Forward:
    """The forward of the layer `index` as `settings` say."""

    def __init__(self, layer: nn.Module, index: int, settings: Settings) -> None:
        self._forward, self._index, self._settings = layer.forward, index, settings
        inner = layer.module if isinstance(layer, Shared) else layer
        name = type(inner).__name__
        self._recomputed = (
            name in settings.names if settings.names is not None else any(True for _ in inner.parameters())
        )
        self._calls = 0

    def __call__(self, given: Any) -> Any:
        self._calls += 1
        settings, seed, single = self._settings, self._settings.seed, not isinstance(given, tuple)
        number = settings.base * (self._calls + 1) + self._index

        def run(*inputs: Any) -> Any:
            if seed is not None:
                seed(number)
            return self._forward(inputs[0] if single else inputs)

        inputs = (given,) if single else given
        if settings.interval and self._recomputed and settings.recompute is not None:
            return settings.recompute(run, *inputs)
        return run(*inputs)
