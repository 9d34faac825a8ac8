"""The methods that scripts expect of a wrapped model, as DistributedDataParallel wraps one, and the
attributes that they set on it.

Invariant: a call that has one meaning for an engine does that; any other, and one that would have no effect,
raises an error that names the way.
Communication: that of `load_state_dict`, on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from polyreme.distributed.mesh import Mesh
from polyreme.distributed.watch import collective
from polyreme.errors import ModelError, OrderError, warn
from polyreme.layout.mesh_axes import AXES
from polyreme.step.memory.out_of_memory import Advise
from polyreme.step.state import whole_tensors
from polyreme.step.training import Training
from polyreme.step.user.grad_mode import with_gradients

CLIP = "set optimizer.clip in the config, or call engine.gradients().clip_(max_norm) before engine.step()"
SETTABLE = {"module", "on_gradients", "advise"}
DEVICE = "the engine has put the model on engine.mesh.device, and moves it itself: leave it out"
DTYPE = 'say it in the config: precision.compute = "bf16", "fp16" or "fp32"; batches are cast by the engine'
WAYS = {
    "no_sync": "the engine reduces gradients once a step by itself, after the last of its micro-batches "
    "(batch.size, batch.micro): leave it out; engine.set_boundary(is_last) says where a step of another "
    "length ends",
    **dict.fromkeys(("to", "cuda", "cpu", "to_empty"), DEVICE),
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type"), DTYPE),
    "apply": "change weights inside of `with engine.full_parameters(write=True) as whole: whole.apply(...)`",
    "requires_grad_": "freeze engine.module's parameters, then call engine.refresh()",
    "forward": "call engine(...), or engine.train_step(batch)",
    "join": "engine.step(last=True) makes the step of the micro-batches that there are; all ranks call alike",
    "share_memory": "an engine is spread over its ranks: engine.state_dict() has its weights",
    "compile": "compile = true in the config compiles the model's blocks",
}
WAYS |= {
    "register_comm_hook": "the engine communicates by its config (zero, precision.reduce): leave it out",
    "model": "the model is engine.module",
    "device": "it is engine.mesh.device",
    "dtype": "engine.config.precision.compute names it",
    **dict.fromkeys(("summon_full_params", "unshard"), "enter `with engine.full_parameters() as whole:`"),
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_value_"), CLIP),
    **dict.fromkeys(
        ("save_checkpoint", "save_pretrained"), "engine.save(path) writes a Hugging Face directory"
    ),
    "load_checkpoint": "engine.load(path) goes on from a checkpoint",
}
"""Advice for attributes that a module or a wrapper has, and an engine has not."""
ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""The attribute that torch's DistributedDataParallel reads first of a module."""
INSTEAD = {
    "lr": 'set it on each group, `for group in engine.optimizer.param_groups: group["lr"] = ...`, or give '
    "[lr_schedule] in the config or initialize(lr_scheduler=...)",
    "loss_fn": "give it to initialize(loss_fn=...)",
    "optimizer": "give it to initialize(optimizer=...); its options are engine.optimizer.param_groups",
    **dict.fromkeys(("lr_scheduler", "scheduler"), "give it to initialize(lr_scheduler=...)"),
    **dict.fromkeys(("clip", "max_grad_norm"), CLIP),
    "model": "set engine.module",
    "config": "give initialize() another config",
    "training": "call engine.train() or engine.eval()",
}
"""Advice for attributes that cannot be set."""


class NoAttributeError(ModelError, AttributeError):
    """An attribute that an engine does not have. `hasattr` returns False for it."""


class ModuleFace:
    """The methods by which an engine acts as a module. `module` is the user's model, which lists this rank's
    parameters and buffers: at stage 3 parameters are released between uses (see `full_parameters`)."""

    module: nn.Module
    mesh: Mesh
    advise: Advise | None = None
    _training: Training
    config: Any
    state: Any
    _parameter_count: int
    _take_in_writes: Callable[[], None]

    def __repr__(self) -> str:
        words = [type(self.module).__name__, f"{self._parameter_count:,} parameters"]
        words += [f"mesh.{axis}={size}" for axis in AXES if (size := getattr(self.mesh, axis).size) > 1]
        words += [f"zero.stage={self.config.zero.stage}", f"step={self.state.step}"]
        return f"{type(self).__name__}({', '.join(words)})"

    @property
    def parameter_count(self) -> int:
        """The number of elements of all distinct parameters of the whole model."""
        return self._parameter_count

    def train(self, mode: bool = True) -> Self:
        """Put the module into training mode, or with False into evaluation mode. `train_step` and
        `engine(...)` leave the mode as it is."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the module into evaluation mode, until `train`. `eval_step` does so by itself."""
        return self.train(False)

    def _check_mode(self) -> None:
        """Warn, once, of a step in evaluation mode."""
        if not self.module.training and not vars(self).get("_warned_of_mode"):
            self._warned_of_mode = True
            warn(
                "train_step of a model in evaluation mode, in which dropout does nothing and BatchNorm "
                "learns no statistics: call engine.train() after engine.eval()"
            )

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the module's parameters. Their gradients are in `gradients()`. Raises ModelError for a torch
        optimizer made of them, as the engine has its own."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.optim"):
            raise ModelError(_OTHER_OPTIMIZER)
        yield from self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters, by their names in `state_dict`."""
        return self.module.named_parameters(*args, **options)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the module's buffers."""
        return self.module.buffers(recurse)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the module's buffers, by name."""
        return self.module.named_buffers(*args, **options)

    def modules(self) -> Iterator[nn.Module]:
        """Return the module and all its submodules."""
        return self.module.modules()

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the module and all its submodules, by name."""
        return self.module.named_modules(*args, **options)

    def children(self) -> Iterator[nn.Module]:
        """Return the module's children."""
        return self.module.children()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step. Not needed after `step`, which does so."""
        self._training.step.clear()

    @collective
    @with_gradients
    def state_dict(self, rank0_only: bool = False, master: bool = False) -> dict[str, Tensor]:
        """Return whole tensors under the model's own names, tied ones under each of theirs; buffers too.
        Every rank must call.

        In the compute dtype, or with `master` the optimizer's full-precision copy. With `rank0_only` other
        ranks get {}."""
        self._take_in_writes()
        return whole_tensors.state_dict(self._training.engine_state, rank0_only, master)

    @collective
    @with_gradients
    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> whole_tensors.Keys:
        """Set weights and buffers to whole tensors under the model's own names, as `state_dict` returns them,
        for any layout. Every rank must call; rank 0's tensors count, and others may give {}. Of tied names
        one is enough. Optimizer states stay. Returns the missing names, and those that the model does not
        have.

        Raises ModelError on every rank for a different shape, and with `strict` for any such name; nothing
        has changed then."""
        self._refuse_within_step("load_state_dict")
        self._training.snapshot.check(self.module)
        self._training.sleep.refuse()
        self._take_in_writes()
        self._training.saver.wait_until_copied()
        found = whole_tensors.load_state_dict(self._training.engine_state, state_dict, strict)
        self._training.note()
        return found

    def traffic(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return (calls, bytes sent by this rank) since the start, by mesh axis and operation."""
        return self.mesh.traffic()

    def _refuse_within_step(self, call: str) -> None:
        if self._training.step.order.microbatches:
            raise OrderError(
                f"{call} in the middle of a step: call step() after the backward() calls before it, or "
                "zero_grad() to drop their gradients"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(_SPREAD)

    def __getattr__(self, name: str) -> NoReturn:
        if name == ASKED_BY_DDP:
            raise ModelError(_WRAPPED)
        if name in WAYS:
            raise NoAttributeError(
                f"engine.{name}: an engine has no such thing: {WAYS[name]}", name=name, obj=self
            )
        module = vars(self).get("module")
        if not name.startswith("_") and module is not None and hasattr(module, name):
            said = f"engine.{name}: that is the {type(module).__name__}'s: write engine.module.{name}"
            raise NoAttributeError(said, name=name, obj=self)
        raise NoAttributeError(f"an engine has no attribute {name!r}: docs/engine.md lists what it has",
                               name=name, obj=self)  # fmt: skip

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name not in SETTABLE:
            way = "what is your own, keep in a variable"
            if hasattr(type(self), name):
                way = "the engine's own methods and properties cannot be replaced"
            elif hasattr(self.module, name):
                way = f"write engine.module.{name} = ..."
            raise NoAttributeError(
                f"engine.{name} = ... would have no effect: {INSTEAD.get(name, way)}",
                name=name, obj=self,
            )  # fmt: skip
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if not name.startswith("_"):
            raise NoAttributeError(f"del engine.{name} would have no effect", name=name, obj=self)
        super().__delattr__(name)


_SPREAD = (
    "an engine is spread over its ranks, and cannot be pickled or copied: engine.save(path) keeps all of it, "
    "engine.state_dict() has its weights, and copy.deepcopy(engine.module) inside of "
    "`with engine.full_parameters():` is a plain model"
)
_WRAPPED = (
    "DistributedDataParallel(engine) would reduce gradients that the engine reduces itself: leave the "
    "wrapper out, and call the engine"
)
_OTHER_OPTIMIZER = (
    "an optimizer made of engine.parameters() would find no gradients, and update nothing: make it of the "
    "model's parameters and give it to initialize(optimizer=...), or a function that makes one, and call "
    "engine.step(); engine.optimizer is the one that updates"
)
