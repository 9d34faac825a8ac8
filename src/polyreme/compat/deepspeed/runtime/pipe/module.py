"""A model as a list of layers, of which each rank has those of its stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

from torch import nn

from polyreme.compat.deepspeed import comm as dist
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, refused
from polyreme.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from polyreme.compat.deepspeed.runtime.pipe.layers import (
    Forward,
    LayerSpec,
    Modules,
    Settings,
    SpecError,
    TiedLayerSpec,
    name_of,
)
from polyreme.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from polyreme.compat.deepspeed.runtime.utils import partition_balanced, partition_uniform, set_random_seed
from polyreme.compat.deepspeed.utils.logging import log_dist
from polyreme.errors import PolyremeError

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]


class PipelineError(PolyremeError, RuntimeError):
    """A call that a pipeline does not have."""


class PipelineModule(nn.Module):
    """Layers to be called one after the other, each with what the one before returned, divided into
    `num_stages` ranges over ranks. Its parameters are those of this rank's stage, under DeepSpeed's names.

    layers: LayerSpecs, TiedLayerSpecs, modules and functions. topology: where ranks are, in place of
    `num_stages` with data parallelism over the rest. loss_fn: of output and labels; None: the output is the
    loss. seed_layers: seed before each layer is built, and before each of its forwards, by `seed_fn` or the
    generators of Python, numpy and torch. partition_method: "parameters" (trained ones), "uniform", or
    "type:REGEX" of class names. activation_checkpoint_interval: other than 0, layers are recomputed, each by
    itself. dynamic_shape: shapes may change, as they may without it.

    Raises ArgumentError for fewer layers than stages, and for a topology that divides layers; SpecError
    where ranks are no multiple of the stages."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(topology=self._topo)
        self.num_stages, self.stage_id = self._topo.get_dim("pipe"), self._grid.stage_id
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise refused("a loss_fn with parameters", "no layer has them", "make it the last layer")
        self._layer_specs = list(layers)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        seed = (seed_fn or set_random_seed) if seed_layers else None
        method = partition_method.lower()
        modules = Modules(
            self._layer_specs,
            again=method == "parameters",
            seed=None if seed is None else lambda index: seed(base_seed + index),
        )
        self.parts = self._partition(method, modules)
        self._local_start, self._local_stop = self.parts[self.stage_id : self.stage_id + 2]
        mine = range(self._local_start, self._local_stop)
        self._sequence = (modules.sequence(mine),)  # in a tuple: its modules are not children
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, Any] = {}
        self.tied_comms: dict[str, Any] = {}
        self.forward_funcs = [self._register(index, modules[index]) for index in mine]
        self.to(get_accelerator().current_device_name())
        names = checkpointable_layers
        self._settings = Settings(0, activation_checkpoint_func, names, seed, base_seed)
        self._arranged = False
        self.set_checkpoint_interval(activation_checkpoint_interval)

    def _partition(self, method: str, modules: Modules) -> list[int]:
        """Return where each stage begins, and where the last ends."""
        layers = self._layer_specs
        if method == "uniform":
            parts = list(map(int, partition_uniform(len(layers), self.num_stages)))
        elif method == "parameters":
            parts = partition_balanced(modules.numels(), self.num_stages)
        elif method.startswith("type:"):
            named = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            names = [name_of(layer) or "" for layer in layers]
            weights = [int(bool(named.search(name))) if name else 0 for name in names]
            if not any(weights):
                raise SpecError(
                    f"partition_method={method!r} names no layer: write a pattern of {sorted(set(names))}"
                )
            parts = partition_balanced(weights, self.num_stages)
        else:
            raise refused(f"partition_method={method!r}", "there is no such one",
                          'write "parameters", "uniform", or "type:REGEX"')  # fmt: skip
        sizes = [stop - start for start, stop in pairwise(parts)]
        if 0 in sizes:
            raise ArgumentError(
                f"{len(layers)} layers make stages of {sizes} layers, but each must have one: lower "
                "num_stages, or choose another partition_method"
            )
        log_dist(f"pipeline stages by {method}: layers {parts}", ranks=[0])
        return parts

    def _register(self, index: int, module: nn.Module | None) -> Any:
        """Make a layer of this stage a child, under DeepSpeed's name; return what calls it."""
        spec = self._layer_specs[index]
        if module is None:
            return spec
        if not isinstance(spec, TiedLayerSpec):
            self.add_module(str(index), module)
            return module
        self.tied_modules[spec.key] = module
        self.tied_weight_attrs[spec.key] = spec.tied_weight_attr
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    @property
    def sequence(self) -> nn.Sequential:
        """All layers, of which those of other stages have no numbers."""
        return self._sequence[0]

    def forward(self, forward_input: Any) -> Any:
        """Return what this stage's layers make of an input."""
        for index in range(self._local_start, self._local_stop):
            forward_input = self.sequence[index](forward_input)
        return forward_input

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute layers in backward, each by itself, unless `interval` is 0."""
        if interval < 0:
            raise ArgumentError(f"activation_checkpoint_interval is {interval}: write 0, or more")
        self.activation_checkpoint_interval = self._settings.interval = interval
        if self._arranged or not (interval or self._settings.seed):
            return
        self._arranged = True
        for index in range(self._local_start, self._local_stop):
            layer: Any = self.sequence[index]
            layer.forward = Forward(layer, index, self._settings)

    # ---- where layers are

    def partitions(self) -> Sequence[int]:
        """Return where each stage begins, and where the last ends."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer."""
        if not 0 <= layer_idx < len(self._layer_specs):
            raise ArgumentError(f"there is no layer {layer_idx}: there are {len(self._layer_specs)}")
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def topology(self) -> ProcessTopology:
        """Return which rank has which place on each axis."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's place on each axis, and its process groups."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return how many stages there are."""
        return self.num_stages

    # ---- what the engine does by itself, or DeepSpeed alone

    def get_additional_losses(self) -> None:
        """Return the losses to be logged beside the one that is trained: none."""

    def save_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedError."""
        raise refused(
            "PipelineModule's own file of each layer",
            "a checkpoint has layers by name, not a pickle for each",
            "call engine.save_checkpoint and engine.load_checkpoint",
        )

    load_state_dir = save_state_dict


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is None:
        if num_stages is None:
            raise SpecError("a pipeline of how many stages is not said: give num_stages or topology")
        ranks = dist.get_world_size()
        if num_stages < 1 or ranks % num_stages:
            raise SpecError(
                f"num_stages={num_stages} stages cannot share {ranks} ranks evenly: choose a divisor"
            )
        return PipeDataParallelTopology(num_stages, ranks // num_stages)
    for axis in topology.get_axis_names():
        if axis not in ("pipe", "data") and topology.get_dim(axis) > 1:
            raise refused(
                f"a pipeline whose topology has {topology.get_dim(axis)} ranks along {axis!r}",
                "layers that a script divides itself are not added up",
                "use the axes pipe and data alone",
            )
    return topology
